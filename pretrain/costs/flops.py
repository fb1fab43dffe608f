"""Parameters and FLOPs of a model and its run in closed form, from the settings. Torch-free.

Nothing is built: plans ask for thousands of shapes, and torch takes seconds to import. Tests
compare every variant exactly with the built model and with PyTorch's own counter.

T segment length, G gradient segments, M memory length with its compressed rows (the mean of the
layers), K = T + M keys, B lanes of one forward pass, d d_model, n heads, w and k the widths of all
queries and of all keys, v of all values of a deltanet, f inner width, c compression rate. One
multiplication and addition are two FLOPs; norms, rotations, softmax, dropout and short convolutions
are not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from foundation.errors import ConfigError
from pretrain.config.model import (
    CONVOLUTION_WIDTH,
    DELTANET_CHUNK,
    FEED_FORWARDS,
    POSITIONS,
    T5_BUCKETS,
    ModelConfig,
    OptimizerName,
)
from pretrain.config.phases import spans_of_phases
from pretrain.config.run import OptimConfig, RunConfig, accumulation_steps, lanes_of_rank
from pretrain.terminal.text import counted, si

NEWTON_SCHULZ_STEPS = 5
MOMENT_BYTES = 4  # float32; AdamW has two moments
OPTIMIZERS: Mapping[OptimizerName, str] = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon"}


class Weight(NamedTuple):
    """A learned tensor, of `copies` layers or alone."""

    part: str  # a field of Parameters
    rows: int
    columns: int = 1
    copies: int = 1
    matrices: int = 0  # into which Muon divides its rows to make each orthogonal; 0: it does not

    @property
    def elements(self) -> int:
        return self.rows * self.columns


def weight_shapes(model: ModelConfig) -> Iterator[Weight]:
    """Yield the shapes of everything learned; ConfigError if the vocabulary is unknown."""
    yield from _mixer_weights(model)
    d, f, layers = model.d_model, model.inner_width, model.num_layers
    gated = FEED_FORWARDS[model.feed_forward].is_gated
    yield Weight("feed_forward", f, d, layers * (2 if gated else 1), matrices=1)
    yield Weight("feed_forward", d, f, layers, matrices=1)
    if not gated:
        yield Weight("feed_forward", f + d, copies=layers)  # biases
    norms = 2 * layers + (model.memory_tokens > 0 and model.norm_position == "pre")
    yield Weight("norms", 2 * d if model.norm == "layernorm" else d, copies=norms)
    if model.query_key_norm:
        yield Weight("norms", 2 * model.head_width, copies=model.num_attention_layers)
    yield Weight("embedding", model.memory_tokens, d)
    yield from _vocabulary_weights(model)


def _mixer_weights(model: ModelConfig) -> Iterator[Weight]:
    """Yield what layers learn in attention, with its positions and compression, and deltanets."""
    d, n, layers = model.d_model, model.num_heads, model.num_attention_layers
    positions = POSITIONS[model.positions]
    w, k, v = _widths(model)
    yield Weight("attention", w, d, layers, matrices=1)
    yield Weight("attention", 2 * k, d, layers, matrices=2)  # keys and values
    yield Weight("attention", d, w, layers, matrices=1)
    if positions.projects_encodings:
        yield Weight("attention", w, d, layers, matrices=1)
        shared = min(layers, 1)
        yield Weight("biases", 2 * w, copies=layers if model.untie_biases else shared)  # u and v
    if positions.learns_bias and layers:
        yield Weight("biases", T5_BUCKETS, n)
    yield Weight("biases", n, copies=layers * model.attention_sinks)
    yield Weight("biases", n, copies=layers * (model.softmax_scaling == "log_length"))
    if model.compressed_length:
        yield Weight("compression", d, model.compression_rate * d, layers, matrices=1)
        yield Weight("compression", d, copies=layers)
    if layers := model.num_deltanet_layers:
        yield Weight("deltanet", w, d, 2 * layers, matrices=1)  # queries, keys
        yield Weight("deltanet", v, d, 2 * layers, matrices=1)  # values, output gates
        yield Weight("deltanet", n, d, 2 * layers, matrices=1)  # decay, rate
        yield Weight("deltanet", d, v, layers, matrices=1)
        yield Weight("deltanet", 2 * w + v, CONVOLUTION_WIDTH, layers)
        yield Weight("deltanet", 2 * n + model.deltanet_value_width, copies=layers)


def _vocabulary_weights(model: ModelConfig) -> Iterator[Weight]:
    bins, d = vocabulary_bins(model), model.d_model
    yield Weight("head", model.vocab_size)  # biases
    yield Weight("head", len(bins) - 1, bins[0][1] + 1)  # scores of the clusters
    if model.div_val == 1 and _is_projected(model):
        yield Weight("embedding", model.embedding_width, d)
    for index, (size, width) in enumerate(bins):
        yield Weight("embedding", size, width)
        if model.div_val > 1:
            yield Weight("embedding", width, d)
        if not model.tie_embeddings:
            yield Weight("head", size, width)
        if _is_projected(model) and not model.ties_projection(index):
            yield Weight("head", width, d)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The number of learned parameters, by part."""

    attention: int = 0
    deltanet: int = 0
    feed_forward: int = 0
    norms: int = 0
    biases: int = 0  # u and v, or T5's table; sinks and scales of heads
    compression: int = 0  # the convolutions of a compressed memory
    embedding: int = 0  # input vectors and their projections
    head: int = 0  # output layer, without what it shares with the embedding

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def body(self) -> int:
        """Without the embedding and output matrices."""
        return self.total - self.embedding - self.head


def parameter_counts(model: ModelConfig) -> Parameters:
    """Return the exact number of parameters; ConfigError if the vocabulary is unknown."""
    parts = Counter[str]()
    for weight in weight_shapes(model):
        parts[weight.part] += weight.copies * weight.elements
    return Parameters(**parts)


def model_in_words(run: RunConfig) -> str:
    """Return what a run trains, and how: `Transformer-XL, 4 layers, 397k parameters, AdamW`.

    A hybrid is called by its layers: `3:1 Gated DeltaNet and attention`.
    """
    deltanets, attending = run.model.num_deltanet_layers, run.model.num_attention_layers
    common, kind = math.gcd(deltanets, attending), "Gated DeltaNet"
    if deltanets and attending:
        kind = f"{deltanets // common}:{attending // common} {kind} and attention"
    words = [kind if deltanets else "Transformer-XL", counted(run.model.num_layers, "layer")]
    if run.model.vocab_size:  # else not known before the run starts
        words.append(f"{si(parameter_counts(run.model).total).replace(' ', '')} parameters")
    return ", ".join([*words, OPTIMIZERS[run.optim.name]])


def orthogonalizing_flops(model: ModelConfig, optim: OptimConfig) -> float:
    """Return the FLOPs of one update in making matrices orthogonal, of all ranks together."""
    if optim.name != "muon":
        return 0.0
    return sum(
        shape.copies
        * shape.matrices
        * newton_schulz_flops(shape.rows // shape.matrices, shape.columns)
        for shape in weight_shapes(model)
        if shape.matrices
    )


def newton_schulz_flops(rows: int, width: int) -> float:
    """Return the FLOPs of making a matrix orthogonal.

    Each step takes X X^T, its square, and the product of a polynomial of both with X, where X is
    the matrix or its transpose, whichever has fewer rows.
    """
    rows, width = min(rows, width), max(rows, width)
    return float(NEWTON_SCHULZ_STEPS * (4 * rows * rows * width + 2 * rows**3))


def moment_bytes(model: ModelConfig, optim: OptimConfig) -> float:
    """Return the bytes of the moments of all parameters: two each, of Muon's matrices one."""
    is_muon = optim.name == "muon"
    return float(MOMENT_BYTES) * sum(
        weight.copies * weight.elements * (1 if is_muon and weight.matrices else 2)
        for weight in weight_shapes(model)
    )


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token, by part. Backward costs twice as much, less what needs no gradient."""

    # Queries, keys, values, output; memory's keys and values again in every segment.
    projections: float
    positions: float  # W_R R, once per segment for all lanes of a forward pass
    attention: float  # content scores, position scores, weighted values
    deltanet: float  # projections and the delta rule
    feed_forward: float
    # Of the rows that leave the memory, and of what attention would have read from them.
    compression: float
    head: float
    without_gradient: float  # products whose input does not depend on a parameter

    @property
    def forward(self) -> float:
        return sum(vars(self).values()) - self.without_gradient

    @property
    def training(self) -> float:
        return 3 * self.forward - self.without_gradient


def token_flops(
    model: ModelConfig, segment_length: int, lanes: int, gradient_segments: int = 1
) -> Flops:
    """Return the FLOPs per token of training, with `lanes` per forward pass and full memories."""
    d, n, layers = model.d_model, model.num_heads, model.num_attention_layers
    w, k, v = _widths(model)
    # Layers read memory tokens, too: what they cost per token they read is per token of the text
    # more by this factor.
    tokens = model.read_tokens(segment_length)
    factor = tokens / segment_length
    projects = POSITIONS[model.positions].projects_encodings
    memory = mean_memory(model)
    keys, remembered = tokens + memory, memory / segment_length
    positions = layers * 2 * d * w * keys / (segment_length * lanes) if projects else 0.0
    compression, still = _compression_flops(model, segment_length)
    rule, deltanets = delta_rule_flops(model, tokens), model.num_deltanet_layers
    products = 3 if FEED_FORWARDS[model.feed_forward].is_gated else 2
    bins = vocabulary_bins(model)
    widths = [width for _, width in bins] if model.div_val > 1 else [bins[0][1]]
    # Every token is projected; with div_val > 1, through every bin's projection.
    embedding = 2.0 * d * sum(widths) if _is_projected(model) else 0.0
    # What the first of G segments remembers has no gradient.
    first = layers * 4 * d * k * remembered
    # The state that a backward pass's first segment reads has no gradient, and nothing of the loss
    # reads the one that its last segment leaves.
    states = 4 * rule.last_state / gradient_segments + rule.decay
    return Flops(
        projections=layers * 4 * d * ((w + k) * factor + k * remembered),
        positions=positions,
        attention=layers * (6 if projects else 4) * w * keys * factor,
        deltanet=deltanets * (2.0 * d * (2 * w + 3 * v + 2 * n) + rule.forward) * factor,
        feed_forward=model.num_layers * 2 * products * d * model.inner_width * factor,
        compression=layers * compression,
        head=embedding + _output_flops(model),
        without_gradient=positions
        + first / gradient_segments
        + layers * still
        + deltanets * states * factor,
    )


@dataclass(frozen=True)
class DeltaRuleFlops:
    """FLOPs per token of a layer's gated delta rule, without its projections."""

    forward: float
    decay: float  # sums of logarithms, a product with a mask, which has no gradient
    last_state: float  # what the segment's last state adds


def delta_rule_chunks(tokens: int) -> tuple[int, int]:
    """Return into how many chunks the delta rule divides a segment, and the tokens of each."""
    number = -(-tokens // DELTANET_CHUNK)
    return number, -(-tokens // number)


def delta_rule_flops(model: ModelConfig, tokens: int) -> DeltaRuleFlops:
    """Return products of a chunk's tokens and of the state, and the solve (as a product)."""
    w, _, v = _widths(model)
    number, size = delta_rule_chunks(tokens)
    padding = number * size / tokens
    decay = 2.0 * padding * size * model.num_heads
    products = size * (6 * w + 4 * v) + 6 * v * model.head_width
    last_state = 2.0 * v * model.head_width * size / tokens
    return DeltaRuleFlops(padding * products + decay, decay, last_state)


def _compression_flops(model: ModelConfig, segment_length: int) -> tuple[float, float]:
    """Return a layer's forward FLOPs, and those without gradient (see `model/memory.py`)."""
    if not model.compressed_length:
        return 0.0, 0.0
    d, c, T = model.d_model, model.compression_rate, segment_length
    w, k, _ = _widths(model)
    convolution, queries, leaving, compressed = 2 * d * d, 2 * d * w, 4 * d * k, 4 * d * k / c
    expected, actual = 4 * w * T, 4 * w * T / c
    forward = convolution + queries + leaving + compressed + expected + actual
    return forward, convolution + 2 * (queries + leaving + expected) + compressed + actual / 2


def _output_flops(model: ModelConfig) -> float:
    bins, total = vocabulary_bins(model), 0.0
    shares = [1.0, *tail_shares(model)[1:]]  # every token reads the shortlist
    for index, ((size, width), share) in enumerate(zip(bins, shares, strict=True)):
        columns = size + (0 if index else len(bins) - 1)
        total += share * 2 * width * (columns + (model.d_model if _is_projected(model) else 0))
    return total


def vocabulary_bins(model: ModelConfig) -> list[tuple[int, int]]:
    """Return (tokens, width) of the shortlist and of each tail cluster; one bin without cutoffs."""
    if not model.vocab_size:
        raise ConfigError(
            "model.vocab_size is not set; set it, or build the corpus to read it from"
        )
    sizes = [last - first for first, last in pairwise((0, *model.cutoffs, model.vocab_size))]
    return [
        (size, model.embedding_width // model.div_val**index) for index, size in enumerate(sizes)
    ]


def tail_shares(model: ModelConfig) -> list[float]:
    """Return each bin's fraction of tokens by Zipf's law, the vocabulary sorted by frequency."""
    bounds = [_harmonic(count) for count in (0, *model.cutoffs, model.vocab_size)]
    return [(last - first) / bounds[-1] for first, last in pairwise(bounds)]


def _harmonic(count: int) -> float:
    """Return 1 + 1/2 + ... + 1/count, to a relative error of 1e-4."""
    return math.log(count) + 0.5772156649 + 0.5 / count if count else 0.0


def _widths(model: ModelConfig) -> tuple[int, int, int]:
    """Return the width of all queries, of all keys, and of all values of a deltanet."""
    n = model.num_heads
    return n * model.head_width, model.key_heads * model.head_width, n * model.deltanet_value_width


def _is_projected(model: ModelConfig) -> bool:
    return model.div_val > 1 or model.embedding_width != model.d_model


def mean_memory(model: ModelConfig) -> float:
    """Return M, the mean of the layers with attention: rows of memory, and compressed ones."""
    lengths = model.attended_lengths
    return sum(lengths) / len(lengths) + model.compressed_length


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Parameters; tokens and FLOPs of a run's first phase, and of all its steps."""

    parameters: int
    body_parameters: int  # without the embedding and output matrices
    flops_per_token: float
    tokens_per_step: int
    steps: int
    tokens: int  # of all steps, each phase with its own lanes and segments
    flops: float


def run_cost(run: RunConfig, steps: int | None = None) -> RunCost:
    """Return the cost of a run, or of its first `steps`, on one rank without accumulation.

    Raises ConfigError if the vocabulary is unknown.
    """
    parameters = parameter_counts(run.model)
    counted = range(run.optim.steps if steps is None else steps)
    spans = [
        (phase.tokens_per_step * count, flops_per_token(phase))
        for phase, count in spans_of_phases(run, counted)
    ]
    return RunCost(
        parameters=parameters.total,
        body_parameters=parameters.body,
        flops_per_token=flops_per_token(run),
        tokens_per_step=run.tokens_per_step,
        steps=len(counted),
        tokens=sum(tokens for tokens, _ in spans),
        flops=sum(tokens * flops_per_token for tokens, flops_per_token in spans),
    )


def flops_per_token(run: RunConfig) -> float:
    """Return the training FLOPs per token of the phase that `run` describes.

    Plans, reports and MFU count these, whatever ranks and micro-batches compute a second time.
    """
    return _run_flops(run, run.data.lanes).training


def _run_flops(run: RunConfig, lanes: int) -> Flops:
    return token_flops(run.model, run.data.segment_length, lanes, run.optim.gradient_segments)


def computed_step_flops(run: RunConfig, world_size: int) -> float:
    """Return the FLOPs of all ranks in one step: those of the passes, with the encodings that each
    projects again, Muon's, and what checkpointing and chunks of logits repeat."""
    model, engine, tokens = run.model, run.engine, run.model.read_tokens(run.data.segment_length)
    factor = tokens / run.data.segment_length
    flops = _run_flops(run, pass_lanes(run, world_size))
    repeated = 0.0
    if engine.activation_checkpointing == "full":
        repeated = flops.forward - flops.head
        if model.norm_position == "pre":  # only a norm after it needs a layer's last product
            repeated -= model.num_layers * 2 * model.d_model * model.inner_width * factor
    elif engine.activation_checkpointing == "selective":
        # The scores, not what they weight; the delta rule, except for its last state.
        weighted = 2 * _widths(model)[0] * (tokens + mean_memory(model))
        rule = delta_rule_flops(model, tokens)
        repeated = flops.attention - model.num_attention_layers * weighted * factor
        repeated += model.num_deltanet_layers * (rule.forward - rule.last_state) * factor
    if 0 < engine.logits_chunk_tokens < pass_tokens(run, world_size):
        repeated += _output_flops(model)
    update = orthogonalizing_flops(model, run.optim)
    return run.tokens_per_step * (flops.training + repeated) + update


def pass_lanes(run: RunConfig, world_size: int) -> int:
    """Return the lanes of one forward pass on a rank."""
    return len(lanes_of_rank(run, 0, world_size)) // accumulation_steps(run, world_size)


def pass_tokens(run: RunConfig, world_size: int) -> int:
    """Return the tokens of one forward pass on a rank."""
    return pass_lanes(run, world_size) * run.lane_tokens_per_step
