"""Parameters and FLOPs of a model and its run in closed form, from the settings. Torch-free.

Nothing is built: plans ask for thousands of shapes, and torch takes seconds to import. Tests
compare every variant exactly with the built model and with PyTorch's own counter.

Each kind of layer declares what it has and computes in `pretrain/mixers/NAME/facts.py`. A multiply
and an add are two FLOPs; norms, rotations, softmax, dropout and short convolutions do not count.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from foundation.errors import ConfigError
from pretrain.config.mixer import SegmentSize, mixer_facts
from pretrain.config.model import FEED_FORWARDS, POSITIONS, T5_BUCKETS, ModelConfig, OptimizerName
from pretrain.config.phases import spans_of_phases
from pretrain.config.run import OptimConfig, RunConfig, accumulation_steps, lanes_of_rank
from pretrain.terminal.text import counted, si

NEWTON_SCHULZ_STEPS = 5
# Parts of Parameters besides the kinds of layers. biases: attention's u and v or T5's table, sinks,
# length scales. head: the output layer, without what it shares with the embedding.
PARTS = ("feed_forward", "norms", "biases", "compression", "embedding", "head")
MOMENT_BYTES = 4  # float32; AdamW has two moments
OPTIMIZERS: Mapping[OptimizerName, str] = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon"}


class WeightShape(NamedTuple):
    """A learned tensor, which each of `copies` layers has."""

    part: str  # where Parameters counts it
    rows: int
    columns: int = 1
    copies: int = 1
    matrices: int = 0  # Muon divides the rows into these and makes each orthogonal; 0: it does not

    @property
    def elements(self) -> int:
        return self.rows * self.columns


def weight_shapes(model: ModelConfig) -> Iterator[WeightShape]:
    """Yield the shapes of everything learned; ConfigError if the vocabulary is unknown."""
    if facts := model.facts:
        for weight in facts.weights:
            matrices = int(weight.role == "matrix")
            yield WeightShape(weight.part, weight.rows, weight.columns, weight.copies, matrices)
        return
    for kind, layers in Counter(model.kinds).items():
        for weight in mixer_facts(kind).weights(model).values():
            rows, *columns = weight.shape
            matrices = weight.stacked if weight.role == "matrix" else 0
            yield WeightShape(weight.part or kind, rows, math.prod(columns), layers, matrices)
    yield from _shared_weights(model)
    d, f, layers = model.d_model, model.inner_width, model.num_layers
    gated = FEED_FORWARDS[model.feed_forward].is_gated
    yield WeightShape("feed_forward", f, d, layers * (2 if gated else 1), matrices=1)
    yield WeightShape("feed_forward", d, f, layers, matrices=1)
    if not gated:
        yield WeightShape("feed_forward", f + d, copies=layers)  # biases
    norms = 2 * layers + (model.memory_tokens > 0 and model.norm_position == "pre")
    yield WeightShape("norms", 2 * d if model.norm == "layernorm" else d, copies=norms)
    yield WeightShape("embedding", model.memory_tokens, d)
    yield from _vocabulary_weights(model)


def _shared_weights(model: ModelConfig) -> Iterator[WeightShape]:
    """Yield the position weights that attention layers share, and weights that compress rows."""
    if not (layers := model.num_layers_with_rows):
        return
    positions, d = POSITIONS[model.positions], model.d_model
    if positions.projects_encodings and not model.untie_biases:
        yield WeightShape("biases", 2 * model.num_heads * model.head_width)  # u and v
    if positions.learns_bias:
        yield WeightShape("biases", T5_BUCKETS, model.num_heads)
    if model.compressed_length:
        yield WeightShape("compression", d, model.compression_rate * d, layers, matrices=1)
        yield WeightShape("compression", d, copies=layers)


def _vocabulary_weights(model: ModelConfig) -> Iterator[WeightShape]:
    bins, d = vocabulary_bins(model), model.d_model
    yield WeightShape("head", model.vocab_size)  # biases
    yield WeightShape("head", len(bins) - 1, bins[0][1] + 1)  # scores of the clusters
    if model.div_val == 1 and _is_projected(model):
        yield WeightShape("embedding", model.embedding_width, d)
    for index, (size, width) in enumerate(bins):
        yield WeightShape("embedding", size, width)
        if model.div_val > 1:
            yield WeightShape("embedding", width, d)
        if not model.tie_embeddings:
            yield WeightShape("head", size, width)
        if _is_projected(model) and not model.ties_projection(index):
            yield WeightShape("head", width, d)


@dataclass(frozen=True)
class Parameters:
    """The number of learned parameters, by part: kinds of layers, norms and so on."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def body(self) -> int:
        """The number without the embedding and the output layer."""
        return self.total - self.parts["embedding"] - self.parts["head"]


def parameter_counts(model: ModelConfig) -> Parameters:
    """Return the exact number of parameters; ConfigError if the vocabulary is unknown."""
    own = ["layers"] if model.adopted else dict.fromkeys(model.kinds)
    parts = dict.fromkeys([*own, *PARTS], 0)
    for weight in weight_shapes(model):
        parts[weight.part] += weight.copies * weight.elements
    return Parameters(parts)


def model_in_words(run: RunConfig) -> str:
    """Return what a run trains, and how: `Transformer-XL, 4 layers, 397k parameters, AdamW`.

    A hybrid is called by its layers: `3:1 TITLE and attention`.
    """
    words = [kinds_in_words(run.model), counted(run.model.num_layers, "layer")]
    if run.model.vocab_size:  # else not known before the run starts
        words.append(f"{si(parameter_counts(run.model).total).replace(' ', '')} parameters")
    return ", ".join([*words, OPTIMIZERS[run.optim.name]])


def kinds_in_words(model: ModelConfig) -> str:
    """Return the kinds of layers, those with memory rows last; attention alone: Transformer-XL."""
    if model.facts:
        return model.facts.family
    mixers = sorted(model.mixers_used, key=lambda mixer: mixer.has_rows)
    if len(mixers) == 1:
        return "Transformer-XL" if mixers[0].has_rows else mixers[0].title
    counts = [model.kinds.count(mixer.kind) for mixer in mixers]
    ratio = ":".join(str(count // math.gcd(*counts)) for count in counts)
    *titles, last = (mixer.title for mixer in mixers)
    return f"{ratio} {', '.join(titles)} and {last}"


def orthogonalizing_flops(model: ModelConfig, optim: OptimConfig) -> float:
    """Return the FLOPs of making all matrices orthogonal in one update, over all ranks."""
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
    """Return the bytes of all moments: a parameter has two, a matrix of Muon one."""
    is_muon = optim.name == "muon"
    return float(MOMENT_BYTES) * sum(
        weight.copies * weight.elements * (1 if is_muon and weight.matrices else 2)
        for weight in weight_shapes(model)
    )


@dataclass(frozen=True)
class Flops:
    """FLOPs per token. A backward pass costs 2 x forward - without_gradient."""

    parts: Mapping[str, float]  # of a forward pass
    without_gradient: float  # products whose input needs no gradient: nothing learned precedes it
    repeated: float  # of the forward pass, computed again by selective checkpointing

    @property
    def forward(self) -> float:
        return sum(self.parts.values())

    @property
    def training(self) -> float:
        return 3 * self.forward - self.without_gradient


def token_flops(
    model: ModelConfig, segment_length: int, lanes: int, gradient_segments: int = 1
) -> Flops:
    """Return the FLOPs per token of training, with `lanes` per forward pass and full memories."""
    if facts := model.facts:
        keys = segment_length + (model.longest_memory if facts.has_rows else 0)
        of_layers = facts.flops_per_token + facts.flops_per_pair * keys
        return Flops({"layers": of_layers, "head": _output_flops(model)}, 0.0, 0.0)
    tokens = model.read_tokens(segment_length)  # layers read memory tokens, too
    parts, saved, repeated = defaultdict[str, float](float), 0.0, 0.0
    for (kind, memory), layers in Counter(kinds_and_rows(model)).items():
        segment = SegmentSize(
            lanes=lanes, tokens=tokens, memory=memory, gradient_segments=gradient_segments
        )
        flops = mixer_facts(kind).flops(model, segment)
        for part, count in flops.forward.items():
            parts[part] += layers * count / segment_length
        saved += layers * flops.saved / segment_length
        repeated += layers * flops.repeated / segment_length
    products = 3 if FEED_FORWARDS[model.feed_forward].is_gated else 2
    of_token = 2 * products * model.d_model * model.inner_width
    parts["feed_forward"] = model.num_layers * of_token * tokens / segment_length
    bins = vocabulary_bins(model)
    widths = [width for _, width in bins] if model.div_val > 1 else [bins[0][1]]
    # Every token is projected; with div_val > 1, through every bin's projection.
    embedding = 2.0 * model.d_model * sum(widths) if _is_projected(model) else 0.0
    parts["head"] = embedding + _output_flops(model)
    return Flops(dict(parts), saved, repeated)


def kinds_and_rows(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield the kind of each layer, and its rows of memory with compressed ones; 0: it has none."""
    for kind, length in zip(model.kinds, model.memory_lengths(), strict=True):
        yield kind, (length + model.compressed_length) * mixer_facts(kind).has_rows


def _output_flops(model: ModelConfig) -> float:
    bins, total = vocabulary_bins(model), 0.0
    shares = [1.0, *tail_shares(model)[1:]]  # every token needs the shortlist's logits
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


def _is_projected(model: ModelConfig) -> bool:
    return model.div_val > 1 or model.embedding_width != model.d_model


def mean_memory(model: ModelConfig) -> float:
    """Return M, the mean rows of memory of layers with attention, compressed rows included."""
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
    step_range = range(run.optim.steps if steps is None else steps)
    spans = [
        (phase.tokens_per_step * count, flops_per_token(phase))
        for phase, count in spans_of_phases(run, step_range)
    ]
    return RunCost(
        parameters=parameters.total,
        body_parameters=parameters.body,
        flops_per_token=flops_per_token(run),
        tokens_per_step=run.tokens_per_step,
        steps=len(step_range),
        tokens=sum(tokens for tokens, _ in spans),
        flops=sum(tokens * flops_per_token for tokens, flops_per_token in spans),
    )


def flops_per_token(run: RunConfig) -> float:
    """Return the training FLOPs per token of the phase that `run` describes.

    Plans, reports and MFU count these: as if one rank read all lanes in one pass.
    """
    return _run_flops(run, run.data.lanes).training


def _run_flops(run: RunConfig, lanes: int) -> Flops:
    return token_flops(run.model, run.data.segment_length, lanes, run.optim.gradient_segments)


def computed_step_flops(run: RunConfig, world_size: int) -> float:
    """Return the FLOPs of all ranks in one step: of all forward and backward passes (each projects
    the position encodings), of Muon, and of what checkpointing and chunked logits repeat."""
    model, engine, segment = run.model, run.engine, run.data.segment_length
    factor = model.read_tokens(segment) / segment
    flops = _run_flops(run, pass_lanes(run, world_size))
    repeated = 0.0
    if engine.activation_checkpointing == "full":
        repeated = flops.forward - flops.parts["head"]
        if model.norm_position == "pre":  # no norm needs a layer's last product: not repeated
            repeated -= model.num_layers * 2 * model.d_model * model.inner_width * factor
    elif engine.activation_checkpointing == "segments":
        repeated = flops.forward - _output_flops(model)
        if model.norm_position == "pre":
            repeated -= 2 * model.d_model * model.inner_width * factor
    elif engine.activation_checkpointing == "selective":
        repeated = flops.repeated
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
