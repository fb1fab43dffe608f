"""Parameters and training FLOPs of a run, exactly, from its settings. Torch-free.

T segment length, G gradient segments, M memory length with its compressed rows (the mean of the
layers), K = T + M keys, B lanes of one forward pass, d d_model, w heads times head width, k key
heads times head width, f inner width, c compression rate, V vocabulary. One multiplication and
addition are two FLOPs; norms, rotations, softmax and dropout are not counted.

What Muon computes and keeps, which AdamW does not.

What a Gated DeltaNet takes: parameters, FLOPs, and what it keeps for its backward pass.

T tokens of a segment, in Z chunks of Y; d d_model; n heads; w and v the widths of all their keys
and of all their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from foundation.errors import ConfigError
from pretrain.config.choices import FEED_FORWARDS, POSITIONS
from pretrain.config.model import CONVOLUTION_WIDTH, DELTANET_CHUNK, T5_BUCKETS, ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.phases import spans_of_phases
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank

NEWTON_SCHULZ_STEPS = 5
MOMENT_BYTES = 4  # float32; AdamW has two moments


def orthogonalizing_flops(model: ModelConfig, optim: OptimConfig) -> float:
    """Return the FLOPs of one update in making matrices orthogonal, of all ranks together."""
    if optim.name != "muon":
        return 0.0
    return sum(newton_schulz_flops(*shape) for shape in _matrices(model))


def moment_bytes(model: ModelConfig, optim: OptimConfig, parameters: int) -> float:
    """Return the bytes of the moments of all `parameters`: two each, of Muon's matrices one."""
    total = 2.0 * MOMENT_BYTES * parameters
    if optim.name != "muon":
        return total
    return total - MOMENT_BYTES * sum(rows * width for rows, width in _matrices(model))


def newton_schulz_flops(rows: int, width: int) -> float:
    """Return the FLOPs of making a matrix orthogonal.

    Each step takes X X^T, its square, and the product of a polynomial of both with X, where X is
    the matrix or its transpose, whichever has fewer rows.
    """
    rows, width = min(rows, width), max(rows, width)
    return float(NEWTON_SCHULZ_STEPS * (4 * rows * rows * width + 2 * rows**3))


def _matrices(model: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yield the shapes of the layers' matrices."""
    d, f, n = model.d_model, model.inner_width, model.num_heads
    queries, keys = (heads * model.head_width for heads in (n, model.key_heads))
    of_attention = [(queries, d), (keys, d), (keys, d), (d, queries)]
    if POSITIONS[model.positions].projects_encodings:
        of_attention.append((queries, d))
    if model.compressed_length and model.compression == "conv":
        of_attention.append((d, model.compression_rate * d))
    for _ in range(model.num_attention_layers):
        yield from of_attention
    for _ in range(model.num_deltanet_layers):
        values = n * model.deltanet_value_width
        yield from ((queries, d), (queries, d), (values, d), (values, d), (n, d), (n, d))
        yield d, values
    gated = FEED_FORWARDS[model.feed_forward].is_gated
    for _ in range(model.num_layers):
        yield from ((f, d), (d, f), *(((f, d),) if gated else ()))


EXACT_BYTES = 4  # the delta rule computes in float32


@dataclass(frozen=True)
class DeltaNetCosts:
    """One deltanet in place of a layer's attention, for one lane; feed-forward and norms aside."""

    model: ModelConfig
    tokens: int  # of a segment

    @property
    def parameters(self) -> int:
        w, v, n, d = self._w, self._v, self.model.num_heads, self.model.d_model
        convolution = CONVOLUTION_WIDTH * (2 * w + v)
        return d * (2 * w + 3 * v + 2 * n) + convolution + 2 * n + self.model.deltanet_value_width

    @property
    def projection_flops(self) -> float:
        """Per token: queries, keys, values, gates and output. The convolution is not counted."""
        w, v, n, d = self._w, self._v, self.model.num_heads, self.model.d_model
        return 2.0 * d * (2 * w + 3 * v + 2 * n)

    @property
    def rule_flops(self) -> float:
        """Per token: products of a chunk's tokens, the solve (as a product), and of the state."""
        w, v, size = self._w, self._v, self._chunk_tokens
        products = size * (6 * w + 4 * v) + 6 * v * self.model.head_width
        return self._padding * products + self._decay_flops

    def flops_without_gradient(self, gradient_segments: int) -> float:
        """Per token: the state that a backward pass's first segment reads has no gradient, and
        nothing of the loss reads the one that its last segment leaves."""
        return 4 * self._last_state_flops / gradient_segments + self._decay_flops

    @property
    def recomputed_flops(self) -> float:
        """Per token: what selective checkpointing repeats, all but the final state."""
        return self.rule_flops - self._last_state_flops

    @property
    def kept_elements(self) -> int:
        """What is kept for the backward pass, outside the delta rule, in activations.

        The convolution's input, its taps where documents hide some, and its result; what the heads
        read, normed; the gate before and after its activation; the product.
        """
        taps = CONVOLUTION_WIDTH - 1 if self.model.isolate_documents else 0
        return self.tokens * ((2 + taps) * (2 * self._w + self._v) + 4 * self._v)

    @property
    def joined_elements(self) -> int:
        """The copy of the weights of queries, keys, values and gates, for one product of all.

        It is kept for the backward pass, once for all lanes.
        """
        return self.model.d_model * (2 * self._w + self._v + 2 * self.model.num_heads)

    def kept_by_rule(self, width: int) -> float:
        """Return the bytes kept of the delta rule, in float32 or with `width` if that is wider.

        Tensors of rows, five matrices [Y, Y] per chunk and head, and the state before each chunk.
        """
        rows = self.tokens * (9 * self._w + 5 * self._v)
        pairs = 5 * self.model.num_heads * self._padding * self.tokens * self._chunk_tokens
        states = self._num_chunks * self._v * self.model.head_width
        return max(width, EXACT_BYTES) * (rows + pairs + states)

    @property
    def _last_state_flops(self) -> float:
        return 2.0 * self._v * self.model.head_width * self._chunk_tokens / self.tokens

    @property
    def _decay_flops(self) -> float:
        """Of the sums of logarithms, a product with a mask, which has no gradient."""
        return 2.0 * self._padding * self._chunk_tokens * self.model.num_heads

    @property
    def _w(self) -> int:
        return self.model.num_heads * self.model.head_width

    @property
    def _v(self) -> int:
        return self.model.num_heads * self.model.deltanet_value_width

    @property
    def _num_chunks(self) -> int:
        return -(-self.tokens // DELTANET_CHUNK)

    @property
    def _chunk_tokens(self) -> int:
        return -(-self.tokens // self._num_chunks)

    @property
    def _padding(self) -> float:
        """Tokens of all chunks over those of the segment."""
        return self._num_chunks * self._chunk_tokens / self.tokens


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The number of learned parameters, by part."""

    embedding: int  # input vectors and their projections
    head: int  # output layer, without what it shares with the embedding
    attention: int
    deltanet: int
    feed_forward: int
    norms: int
    biases: int  # u and v, or T5's table; sinks and scales of heads
    compression: int  # the convolutions of a compressed memory

    @property
    def body(self) -> int:
        """Without the embedding and output matrices."""
        mixing = self.attention + self.deltanet + self.biases + self.compression
        return mixing + self.feed_forward + self.norms

    @property
    def total(self) -> int:
        return self.body + self.embedding + self.head


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token, by part. Backward costs twice as much, less what needs no gradient."""

    # Queries, keys, values, output; memory's keys and values again in every segment.
    projections: float
    positions: float  # W_R R, once per segment for all lanes of a forward pass
    attention: float  # content scores, position scores, weighted values
    deltanet: float  # projections and the delta rule
    feed_forward: float
    head: float
    # Of the rows that leave the memory, and of what attention would have read from them.
    compression: float
    without_gradient: float  # products whose input does not depend on a parameter

    @property
    def forward(self) -> float:
        parts = (
            self.projections,
            self.positions,
            self.attention,
            self.deltanet,
            self.feed_forward,
            self.head,
            self.compression,
        )
        return sum(parts)

    @property
    def training(self) -> float:
        return 3 * self.forward - self.without_gradient


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


def cost_of(run: RunConfig, steps: int | None = None) -> RunCost:
    """Return the cost of a run, or of its first `steps`, on one rank without accumulation.

    Raises ConfigError if the vocabulary is unknown.
    """
    parameters = parameters_of(run.model)
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
    return _training_flops(run, run.data.lanes).training


def _training_flops(run: RunConfig, lanes: int) -> Flops:
    return flops_of(run.model, run.data.segment_length, lanes, run.optim.gradient_segments)


def computed_flops_of_step(run: RunConfig, world_size: int) -> float:
    """Return the FLOPs of all ranks in one step: those of the passes, with the encodings that each
    projects again, Muon's, and what checkpointing and chunks of logits repeat."""
    model, engine, tokens = run.model, run.engine, run.model.read_tokens(run.data.segment_length)
    factor, lanes = tokens / run.data.segment_length, lanes_of_pass(run, world_size)
    flops, w = _training_flops(run, lanes), _attention_widths(model)[0]
    of_layers = 0.0
    repeated = engine.activation_checkpointing
    if repeated == "full":
        of_layers = flops.forward - flops.head
        if model.norm_position == "pre":  # only a norm after it needs a layer's last product
            of_layers -= model.num_layers * 2 * model.d_model * model.inner_width * factor
    elif repeated == "selective":  # the scores, not what they weight; the delta rule
        keys = tokens + mean_memory(model)
        of_layers = flops.attention - model.num_attention_layers * 2 * w * keys * factor
        repeated_rule = DeltaNetCosts(model, tokens).recomputed_flops
        of_layers += model.num_deltanet_layers * repeated_rule * factor
    checkpointed = -(-model.num_layers // engine.checkpoint_every_n_layers) / model.num_layers
    in_chunks = 0 < engine.logits_chunk_tokens < tokens_of_pass(run, world_size)
    per_token = of_layers * checkpointed + (_output_flops(model) if in_chunks else 0.0)
    update = orthogonalizing_flops(model, run.optim)
    return run.tokens_per_step * (flops.training + per_token) + update


def mean_memory(model: ModelConfig) -> float:
    """Return M, the mean of the layers with attention: rows of memory, and compressed ones."""
    lengths = model.attended_lengths
    return sum(lengths) / len(lengths) + model.compressed_length


def lanes_of_pass(run: RunConfig, world_size: int) -> int:
    """Return the lanes of one forward pass on a rank."""
    return len(lanes_of_rank(run, 0, world_size)) // accumulation_steps(run, world_size)


def tokens_of_pass(run: RunConfig, world_size: int) -> int:
    """Return the tokens of one forward pass on a rank."""
    return lanes_of_pass(run, world_size) * run.lane_tokens_per_step


def parameters_of(model: ModelConfig) -> Parameters:
    """Return the exact number of parameters; ConfigError if the vocabulary is unknown."""
    _need_vocabulary(model)
    d, layers, attending = model.d_model, model.num_layers, model.num_attention_layers
    w, k = _attention_widths(model)
    embedding, head = _vocabulary_parameters(model)
    position = d * w if POSITIONS[model.positions].projects_encodings else 0
    per_norm = (2 if model.norm == "layernorm" else 1) * d
    norms = 2 * layers + (model.memory_tokens > 0 and model.norm_position == "pre")
    return Parameters(
        embedding=embedding + model.memory_tokens * d,
        head=head,
        attention=attending * (2 * d * w + 2 * d * k + position),
        deltanet=model.num_deltanet_layers * DeltaNetCosts(model, 1).parameters,
        feed_forward=layers * _feed_forward_parameters(model),
        norms=norms * per_norm + (attending * 2 * model.head_width if model.query_key_norm else 0),
        biases=_position_biases(model)
        + attending * model.num_heads * (model.attention_sinks + _scales(model)),
        compression=attending * (model.compression_rate * d * d + d)
        if _learns_to_compress(model)
        else 0,
    )


def flops_of(
    model: ModelConfig, segment_length: int, lanes: int, gradient_segments: int = 1
) -> Flops:
    """Return the FLOPs per token of training, with `lanes` per forward pass and full memories."""
    _need_vocabulary(model)
    d, layers = model.d_model, model.num_attention_layers
    w, k = _attention_widths(model)
    # Layers read memory tokens, too: what they cost per token they read is per token of the text
    # more by this factor.
    tokens = model.read_tokens(segment_length)
    factor = tokens / segment_length
    deltanet, deltanets = DeltaNetCosts(model, tokens), model.num_deltanet_layers
    projects = POSITIONS[model.positions].projects_encodings
    memory = mean_memory(model)
    keys, remembered = tokens + memory, memory / segment_length
    positions = layers * 2 * d * w * keys / (segment_length * lanes) if projects else 0.0
    compression, still = _compression_flops(model, segment_length)
    is_gated = FEED_FORWARDS[model.feed_forward].is_gated
    return Flops(
        projections=layers * 4 * d * ((w + k) * factor + k * remembered),
        positions=positions,
        attention=layers * (6 if projects else 4) * w * keys * factor,
        deltanet=deltanets * (deltanet.projection_flops + deltanet.rule_flops) * factor,
        feed_forward=model.num_layers * (6 if is_gated else 4) * d * model.inner_width * factor,
        head=_embedding_flops(model) + _output_flops(model),
        compression=layers * compression,
        # What the first of G segments remembers has no gradient. With pre-norm, the parameters of
        # its norm have.
        without_gradient=positions
        + (0.0 if model.norm_position == "pre" else layers * 4 * d * k * remembered)
        / gradient_segments
        + layers * still
        + deltanets * deltanet.flops_without_gradient(gradient_segments) * factor,
    )


def _attention_widths(model: ModelConfig) -> tuple[int, int]:
    """Return the width of queries, and of keys or values."""
    return model.num_heads * model.head_width, model.key_heads * model.head_width


def _feed_forward_parameters(model: ModelConfig) -> int:
    d, f = model.d_model, model.inner_width
    is_gated = FEED_FORWARDS[model.feed_forward].is_gated
    return 3 * d * f if is_gated else 2 * d * f + f + d


def _position_biases(model: ModelConfig) -> int:
    traits = POSITIONS[model.positions]
    if not model.num_attention_layers:
        return 0
    if traits.learns_bias:
        return T5_BUCKETS * model.num_heads
    if traits.projects_encodings:
        return (
            2
            * model.num_heads
            * model.head_width
            * (model.num_attention_layers if model.untie_biases else 1)
        )
    return 0


def _scales(model: ModelConfig) -> bool:
    return model.softmax_scaling == "log_length"


def _learns_to_compress(model: ModelConfig) -> bool:
    return bool(model.compressed_length) and model.compression == "conv"


def _compression_flops(model: ModelConfig, segment_length: int) -> tuple[float, float]:
    """Return a layer's forward FLOPs, and those without gradient (see `model/memory.py`)."""
    if not _learns_to_compress(model):
        return 0.0, 0.0
    d, c, T = model.d_model, model.compression_rate, segment_length
    w, k = _attention_widths(model)
    convolution, queries, leaving, compressed = 2 * d * d, 2 * d * w, 4 * d * k, 4 * d * k / c
    expected, found = 4 * w * T, 4 * w * T / c
    forward = convolution + queries + leaving + compressed + expected + found
    return forward, convolution + 2 * (queries + leaving + expected) + compressed + found / 2


def bins_of(model: ModelConfig) -> list[tuple[int, int]]:
    """Return (tokens, width) of the shortlist and of each tail cluster; one bin without cutoffs."""
    sizes = [last - first for first, last in pairwise((0, *model.cutoffs, model.vocab_size))]
    return [
        (size, model.embedding_width // model.div_val**index) for index, size in enumerate(sizes)
    ]


def tail_shares(model: ModelConfig) -> list[float]:
    """Return each bin's fraction of tokens by Zipf's law, the vocabulary sorted by frequency."""
    bounds = (0, *model.cutoffs, model.vocab_size)
    return [
        (_harmonic(last) - _harmonic(first)) / _harmonic(model.vocab_size)
        for first, last in pairwise(bounds)
    ]


def _vocabulary_parameters(model: ModelConfig) -> tuple[int, int]:
    bins, d = bins_of(model), model.d_model
    shared_projection = model.div_val == 1 and model.embedding_width != d
    projected = shared_projection or model.div_val > 1
    embedding = sum(size * width + (width * d if model.div_val > 1 else 0) for size, width in bins)
    embedding += model.embedding_width * d if shared_projection else 0
    head = sum(size for size, _ in bins) + (len(bins) - 1) * (bins[0][1] + 1)
    for index, (size, width) in enumerate(bins):
        head += 0 if model.tie_embeddings else size * width
        head += width * d if projected and not model.ties_projection(index) else 0
    return embedding, head


def _is_projected(model: ModelConfig) -> bool:
    return model.div_val > 1 or model.embedding_width != model.d_model


def _embedding_flops(model: ModelConfig) -> float:
    """Every token is projected; with div_val > 1, through every bin's projection."""
    if not _is_projected(model):
        return 0.0
    bins = bins_of(model)
    widths = [width for _, width in bins] if model.div_val > 1 else [bins[0][1]]
    return 2.0 * model.d_model * sum(widths)


def _output_flops(model: ModelConfig) -> float:
    bins, d, projected = bins_of(model), model.d_model, _is_projected(model)
    total = 0.0
    shares = [1.0, *tail_shares(model)[1:]]  # every token reads the shortlist
    for index, ((size, width), share) in enumerate(zip(bins, shares, strict=True)):
        columns = size + (0 if index else len(bins) - 1)
        total += share * (2 * width * columns + (2 * width * d if projected else 0))
    return total


def _need_vocabulary(model: ModelConfig) -> None:
    if not model.vocab_size:
        raise ConfigError(
            "model.vocab_size is not set; set it, or build the corpus to read it from"
        )


def _harmonic(count: int) -> float:
    """Return 1 + 1/2 + ... + 1/count, to a relative error of 1e-4."""
    return math.log(count) + 0.5772156649 + 0.5 / count if count else 0.0
