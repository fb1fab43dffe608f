"""Every setting of a model, and which combinations are errors. Torch-free.

The settings of all sections that are one of several names come first. Between two names the code
compares. For more, a `match` ends in `assert_never`, so that pyright reports a new name that is not
handled, or a table has an entry for each name. CONTRIBUTING.md walks through adding a name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal

from data_pipeline.config import LARGEST_VOCABULARY, MOST_ROWS
from foundation.errors import ConfigError, shown
from foundation.settings import Range, check_ranges, setting
from pretrain.config.adopted import AdoptedFacts, adopted_facts
from pretrain.config.mixer import Mixer, mixer_facts

FeedForwardKind = Literal["relu", "relu2", "gelu", "swiglu"]
Positions = Literal["relative", "rope", "alibi", "t5"]
RopeExtension = Literal["none", "ntk", "yarn"]
SoftmaxScaling = Literal["none", "log_length"]
NormKind = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["post", "pre"]
ScheduleShape = Literal["constant", "linear", "cosine", "cosine_from_start", "inverse_sqrt", "wsd"]
OptimizerName = Literal["adamw", "lamb", "muon"]
EngineKind = Literal["deepspeed", "torch"]
Precision = Literal["fp32", "bf16", "fp16"]
PrecisionSetting = Literal["auto", Precision]
CompileSetting = Literal["auto", True, False]
ActivationCheckpointing = Literal["none", "full", "selective", "segments"]
AttentionKernel = Literal["auto", "sdpa", "atomic", "plain"]
ExportFormat = Literal["own", "huggingface"]
ProbeName = Literal["needle", "copy", "position", "attention"]
# Settings that an adopted model has; its config.json decides all others.
_OF_ADOPTED = ("vocab_size", "num_layers", "d_model", "memory_length", "adopted")
# Settings that only training uses, and settings of the memory, for which evaluation has its own.
_TRAINING_OR_MEMORY = (
    "dropout", "attention_dropout", "z_loss", "init_std", "memory_length", "rope_extension",
)  # fmt: skip
T5_BUCKETS, T5_MAX_DISTANCE = 32, 128  # Raffel et al. 2020
PROJECTION_INIT_STD = 0.01  # the paper's code
DEFAULT_KIND = "attention"  # kind of all layers without `layer_kinds`
GATED_MULTIPLE = 64  # the derived width of a gated layer is rounded up to this
MOST_LAYERS = MOST_HEADS = 4096
LARGEST_WIDTH = 1 << 16


@dataclass(frozen=True, kw_only=True)
class FeedForwardTraits:
    """What a feed-forward layer has, and what it keeps for its backward pass."""

    is_gated: bool = False  # it has a third matrix, for the gate, and no biases
    drops_first: bool = False  # dropout comes before the activation: same result, one tensor less
    inner_tensors: int  # tensors of the inner width that are kept


# Costs follow from these facts; `pretrain.model.feed_forward` computes the layers.
FEED_FORWARDS: Mapping[FeedForwardKind, FeedForwardTraits] = {
    "relu": FeedForwardTraits(inner_tensors=1, drops_first=True),  # its output
    "relu2": FeedForwardTraits(inner_tensors=2),  # relu's output, and its square
    "gelu": FeedForwardTraits(inner_tensors=2),  # its input and its output
    # both factors, the gate before its activation, the product
    "swiglu": FeedForwardTraits(is_gated=True, inner_tensors=4),
}


@dataclass(frozen=True, kw_only=True)
class PositionTraits:
    """How attention encodes distances."""

    projects_encodings: bool = False  # has W_R, u and v: a third product for each query and key
    rotates: bool = False  # rotates queries and keys
    adds_bias: bool = False  # adds a number per distance and head to the scores
    learns_bias: bool = False  # learns this number, for buckets of distances


# Costs and attention follow from these facts; `pretrain.model.positions` computes the encodings.
POSITIONS: Mapping[Positions, PositionTraits] = {
    "relative": PositionTraits(projects_encodings=True),
    "rope": PositionTraits(rotates=True),
    "alibi": PositionTraits(adds_bias=True),
    "t5": PositionTraits(adds_bias=True, learns_bias=True),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The Transformer-XL of Dai et al. 2019; docs/settings.md has its code's names.

    The defaults are the paper's. `docs/model.md` gives the formula and source of every variant.
    """

    vocab_size: int = setting(0, Range(0, LARGEST_VOCABULARY), unit="tokens")
    """Size of the vocabulary while there is no corpus, which decides it later; 0: not known."""
    num_layers: int = setting(4, Range(1, MOST_LAYERS), unit="layers")
    """Transformer layers."""
    layer_kinds: tuple[str, ...] = ()
    """Kinds of the layers, repeated over `num_layers`; several: a hybrid; []: attention in all."""
    mixers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of kinds of layers, by kind; docs/model.md explains them."""
    d_model: int = setting(128, Range(2, LARGEST_WIDTH), unit="channels")
    """Width of the hidden states that layers pass on and memory keeps."""
    num_heads: int = setting(4, Range(1, MOST_HEADS), unit="heads")
    """Attention heads of each layer."""
    num_key_heads: int = setting(0, Range(0, MOST_HEADS), unit="heads")
    """Heads of keys and values, for grouped-query attention; 0: `num_heads`."""
    d_head: int = setting(0, Range(0, LARGEST_WIDTH), unit="channels")
    """Width of a head; 0: `d_model` divided by `num_heads`."""
    d_inner: int = setting(0, Range(0, 16 * LARGEST_WIDTH), unit="channels")
    """Width of the feed-forward layer; 0: 4 `d_model`, or 8/3 for swiglu, which has 3 matrices."""
    d_embed: int = setting(0, Range(0, LARGEST_WIDTH), unit="channels")
    """Width of the embedding, which a projection maps to `d_model`; 0: `d_model`, no projection."""
    memory_length: int | tuple[int, ...] = setting(128, Range(0, MOST_ROWS), unit="tokens")
    """Earlier hidden states that each layer attends to in training; 0: none; a list is repeated."""
    compressed_length: int = setting(0, Range(0, MOST_ROWS), unit="rows")
    """Rows of compressed memory, which holds what has left the memory; 0: none."""
    compression_rate: int = setting(3, Range(1, MOST_ROWS), unit="rows")
    """How many states that leave the memory become one row of compressed memory (c)."""
    memory_tokens: int = setting(0, Range(0, MOST_ROWS), unit="tokens")
    """Memory tokens: each segment reads the previous one's and writes its own; 0: none."""
    positions: Positions = "relative"
    """How attention encodes distances; relative is the paper's."""
    rope_extension: RopeExtension = "none"
    """How `positions: rope` changes its angles where evaluation has more keys than training."""
    query_key_norm: bool = False
    """Normalize queries and keys within each head."""
    softmax_scaling: SoftmaxScaling = "none"
    """Factor of queries; log_length: a learned number per head times the log of keys seen."""
    attention_sinks: bool = False
    """Learn a score per head, at first 0, that takes attention from the keys and reads nothing."""
    feed_forward: FeedForwardKind = "relu"
    """Activation of the feed-forward layer."""
    norm: NormKind = "layernorm"
    """Kind of normalization."""
    norm_position: NormPosition = "post"
    """Whether layers normalize their sum (post, the paper's) or their input (pre)."""
    untie_biases: bool = False
    """Learn the biases u and v per layer instead of sharing them."""
    same_length: bool = False
    """Let every query attend to the same number of keys, its layer's `memory_length`."""
    clamp_length: int = setting(0, Range(0, MOST_ROWS), unit="tokens")
    """Largest distance with its own encoding, which larger ones share; 0: no limit."""
    isolate_documents: bool = False
    """Attend to nothing before the document's start, in the segment or in memory."""
    dropout: float = setting(0.0, Range(0, 1, below=True))
    """Part of the hidden channels that training drops."""
    attention_dropout: float = setting(0.0, Range(0, 1, below=True))
    """Part of the attention weights that training drops."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer's weights."""
    cutoffs: tuple[int, ...] = setting((), Range(1, LARGEST_VOCABULARY), unit="tokens")
    """First token of each tail cluster of an adaptive softmax; []: a full softmax."""
    div_val: int = setting(1, Range(1, LARGEST_WIDTH), unit="times")
    """How many times narrower each cluster of an adaptive embedding is than the previous one."""
    tie_projections: tuple[bool, ...] = ()
    """Whether output clusters use the embedding's projections, shortlist first; []: none does."""
    z_loss: float = setting(0.0, Range(0, 1))
    """Weight of log(sum of exp(logits)) squared in the gradient; reported losses are without it."""
    init_std: float = setting(0.02, Range(1e-6, 10))
    """Standard deviation of initial weights."""
    base_width: int = setting(0, Range(0, LARGEST_WIDTH), unit="channels")
    """Narrower `d_model` for which rate, decay and `init_std` were chosen (muP); 0: this one."""
    adopted: dict[str, Any] = field(default_factory=dict)
    """Facts of a model of Hugging Face, by `pretrain adopt`; {}: a model of this family."""

    def __post_init__(self) -> None:
        check_ranges("model.", self)
        if self.adopted:
            self._check_adopted()
            return
        if POSITIONS[self.positions].projects_encodings and self.d_model % 2:
            raise ConfigError(
                f"model.d_model={self.d_model} is odd; sine and cosine halves need an even number"
            )
        if not self.d_head and self.d_model % self.num_heads:
            raise ConfigError(
                f"model.d_model={self.d_model} does not divide into num_heads={self.num_heads}; "
                "set model.d_head or change one of them"
            )
        kinds = self.layer_kinds or (DEFAULT_KIND,)
        for name, pattern in (("layer_kinds", kinds), ("memory_length", self._memory_pattern)):
            if not pattern or self.num_layers % len(pattern):
                raise ConfigError(
                    f"model.{name}={list(pattern)} has {len(pattern)} entries, which do not repeat "
                    f"over num_layers={self.num_layers}; use a list of a length that divides the "
                    "layers"
                )
        self._check_kinds()
        self._check_memory()
        if self.num_heads % self.key_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} does not divide into "
                f"num_key_heads={self.num_key_heads} groups; use a divisor, or 0 for a key head "
                "per head"
            )
        self._check_positions()
        self._check_compression()
        self._check_adaptive()

    def _check_adopted(self) -> None:
        family = self.facts.family if self.facts else ""
        for name, default in vars(ModelConfig()).items():
            if name not in _OF_ADOPTED and getattr(self, name) != default:
                raise ConfigError(
                    f"model.{name} is of this project's own family; leave it out, because "
                    f"config.json decides what {family} is"
                )
        if not isinstance(self.memory_length, int):
            raise ConfigError(f"model.memory_length of {family} is one number for all layers")

    @property
    def facts(self) -> AdoptedFacts | None:
        """The facts of an adopted model."""
        return adopted_facts(self.adopted) if self.adopted else None

    def _check_kinds(self) -> None:
        if unused := sorted(self.mixers.keys() - self.kinds):
            raise ConfigError(
                f"model.mixers.{unused[0]}: no layer is of this kind; found {', '.join(self.kinds)}"
            )
        for mixer in self.mixers_used:
            self.mixer_settings(mixer.kind)
            mixer.check(self)

    def _check_memory(self) -> None:
        if self.same_length and self.memory_tokens:
            raise ConfigError(
                f"model.memory_tokens={self.memory_tokens} are out of sight of most queries with "
                "model.same_length, which shows each only memory_length keys; remove one of them"
            )
        if self.same_length and not min(self.attended_lengths):
            raise ConfigError(
                "model.same_length needs model.memory_length > 0, the number of keys of each query"
            )

    def _check_positions(self) -> None:
        traits = POSITIONS[self.positions]
        if traits.rotates and self.head_width % 2:
            raise ConfigError(
                f"model.positions={self.positions} rotates pairs of a head's channels, but a head "
                f"has {self.head_width}; set an even model.d_head"
            )
        if not traits.projects_encodings:
            for name in ("clamp_length", "untie_biases"):
                if getattr(self, name):
                    raise ConfigError(
                        f"model.{name} belongs to positions=relative and has no effect with "
                        f"positions={self.positions}; remove one of them"
                    )

    def _check_compression(self) -> None:
        if not self.compressed_length:
            return
        if min(self.attended_lengths) != self.longest_memory:
            raise ConfigError(
                "model.compressed_length needs the same model.memory_length in all layers, whose "
                f"rows leave together; found {list(self._memory_pattern)}"
            )
        if not self.longest_memory:
            raise ConfigError(
                "model.compressed_length needs model.memory_length > 0: it compresses what leaves "
                "the memory"
            )
        if self.compression_rate > self.longest_memory:
            raise ConfigError(
                f"model.compression_rate={self.compression_rate} is above "
                f"model.memory_length={self.longest_memory}: more rows would become one than the "
                "memory has; use a lower rate"
            )
        if self.same_length:
            raise ConfigError(
                "model.same_length shows each query memory_length keys and so never the older "
                "compressed rows; remove it or model.compressed_length"
            )

    def _check_adaptive(self) -> None:
        bounds = (0, *self.cutoffs, *((self.vocab_size,) if self.vocab_size else ()))
        if any(first >= last for first, last in pairwise(bounds)):
            raise ConfigError(
                f"model.cutoffs={list(self.cutoffs)} must increase from above 0 to below the "
                f"vocabulary's {self.vocab_size or 'number of'} tokens; remove or lower some"
            )
        narrowest = self.embedding_width // self.div_val ** len(self.cutoffs)
        if narrowest < 1:
            raise ConfigError(
                f"model.div_val={self.div_val} with {len(self.cutoffs)} cutoffs divides the "
                f"embedding width {self.embedding_width} to below 1; use a smaller div_val or "
                "fewer cutoffs"
            )
        if self.tie_projections and len(self.tie_projections) != len(self.cutoffs) + 1:
            raise ConfigError(
                f"model.tie_projections has {len(self.tie_projections)} entries; expected "
                f"{len(self.cutoffs) + 1}, one for the shortlist and one per cutoff"
            )

    def function_settings(self) -> dict[str, Any]:
        """Return the settings that decide what given weights compute, with derived widths.

        Settings that only training uses and lengths of the memory are not among them.
        """
        settings = {
            name: value for name, value in vars(self).items() if name not in _TRAINING_OR_MEMORY
        }
        settings |= {"num_key_heads": self.key_heads, "d_head": self.head_width}
        is_default = set(self.kinds) == {DEFAULT_KIND}
        settings["layer_kinds"] = () if is_default else self.kinds
        settings |= {"d_inner": self.inner_width, "d_embed": self.embedding_width}
        settings |= {"base_width": self.base_width or self.d_model}
        settings["tie_projections"] = tuple(
            self.ties_projection(index) for index in range(len(self.cutoffs) + 1)
        )
        if not self.compressed_length:
            del settings["compression_rate"]
        if not self.mixers:
            del settings["mixers"]
        return settings

    def memory_lengths(self, longest: int | None = None) -> tuple[int, ...]:
        """Return the memory length of each layer, lowest first.

        `longest` replaces the length of the layers that remember the most; others keep theirs, but
        at most `longest`. The length of a layer without rows means nothing.
        """
        most = self.longest_memory
        longest = most if longest is None else longest
        lengths = self._memory_pattern * (self.num_layers // len(self._memory_pattern))
        return tuple(longest if length >= most else min(length, longest) for length in lengths)

    def most_keys(self, longest_memory: int, segment_length: int) -> int:
        """Return how many keys the queries of a segment see when the memory is full."""
        return longest_memory + self.compressed_length + self.read_tokens(segment_length)

    def read_tokens(self, segment_length: int) -> int:
        """Return how many tokens layers read with a segment: its own and both memory tokens."""
        return segment_length + 2 * self.memory_tokens

    @property
    def longest_memory(self) -> int:
        """The memory length of the layers that remember the most."""
        return max(self.attended_lengths)

    @property
    def _memory_pattern(self) -> tuple[int, ...]:
        length = self.memory_length
        return (length,) if isinstance(length, int) else tuple(length)

    @property
    def attended_lengths(self) -> tuple[int, ...]:
        """The memory lengths of layers that read remembered rows; of all layers if none does."""
        lengths = self._memory_pattern * (self.num_layers // len(self._memory_pattern))
        attended = (length for i, length in enumerate(lengths) if self.mixer(i).has_rows)
        return tuple(attended) or lengths

    def with_memory(self, longest: int) -> ModelConfig:
        """Return the model with another longest memory, see `memory_lengths`."""
        lengths = self.memory_lengths(longest)
        if isinstance(self.memory_length, int):
            return replace(self, memory_length=longest)
        return replace(self, memory_length=lengths[: len(self.memory_length)])

    def ties_projection(self, index: int) -> bool:
        """Return whether bin `index` of the output layer uses the embedding's projection."""
        return bool(self.tie_projections) and self.tie_projections[index]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        pattern = self.layer_kinds or (DEFAULT_KIND,)
        return pattern * (self.num_layers // len(pattern))

    def mixer(self, layer: int) -> Mixer:
        """Return the facts of a layer's mixer; layers are counted from 0."""
        kinds = self.layer_kinds or (DEFAULT_KIND,)
        return mixer_facts(kinds[layer % len(kinds)])

    @property
    def mixers_used(self) -> list[Mixer]:
        """The facts of each kind that is used, in the order of the layers."""
        return [mixer_facts(kind) for kind in dict.fromkeys(self.kinds)]

    def mixer_settings(self, kind: str) -> Any:
        """Return a kind's settings in `mixers`, as its `Mixer.settings`; None if that is None."""
        schema, given = mixer_facts(kind).settings, self.mixers.get(kind, {})
        defaults = {entry.name: entry.default for entry in fields(schema)} if schema else {}
        for name, value in given.items():
            default = defaults.get(name)
            types = (int, float) if isinstance(default, float) else type(default)
            is_same = isinstance(value, types) and isinstance(value, bool) == (types is bool)
            if name not in defaults or not is_same:
                raise ConfigError(
                    f"model.mixers.{kind}.{name}={shown(value)}: expected one as in {defaults}"
                )
        if schema is None:
            return None
        settings = schema(**given)
        check_ranges(f"model.mixers.{kind}.", settings)
        return settings

    @property
    def period(self) -> int:
        """After how many layers kinds and memory lengths are the same again."""
        return math.lcm(len(self.layer_kinds) or 1, len(self._memory_pattern))

    @property
    def num_layers_with_rows(self) -> int:
        """Layers of this family that read remembered rows: those with attention."""
        if self.adopted:
            return 0
        return sum(self.mixer(layer).has_rows for layer in range(self.num_layers))

    @property
    def head_width(self) -> int:
        return self.d_head or self.d_model // self.num_heads

    @property
    def key_heads(self) -> int:
        return self.num_key_heads or self.num_heads

    @property
    def inner_width(self) -> int:
        if self.d_inner or not FEED_FORWARDS[self.feed_forward].is_gated:
            return self.d_inner or 4 * self.d_model
        return -(-8 * self.d_model // (3 * GATED_MULTIPLE)) * GATED_MULTIPLE

    @property
    def embedding_width(self) -> int:
        return self.d_embed or self.d_model

    @property
    def width_multiplier(self) -> float:
        """How much wider than the base of muP the model is (m); 1 without a base.

        All widths of the base are smaller by this factor, except the width of a head (a wider model
        has more heads) and a `d_embed` that is set.
        """
        return self.d_model / self.base_width if self.base_width else 1.0

    @property
    def embedding_grows(self) -> bool:
        """Whether a wider model has a wider embedding."""
        return not self.d_embed

    @property
    def matrix_init_std(self) -> float:
        """Initial std of a matrix from hidden to hidden channels; falls with the fan-in's root."""
        return self.init_std / math.sqrt(self.width_multiplier)

    @property
    def projection_std(self) -> float:
        """Initial std of the projections of embedding and softmax."""
        growth = self.width_multiplier if self.embedding_grows else 1.0
        return PROJECTION_INIT_STD / math.sqrt(growth)

    @property
    def embedding_scale(self) -> float:
        """What embedded tokens are multiplied by."""
        return math.sqrt(self.base_width or self.d_model)

    @property
    def output_scale(self) -> float:
        """What hidden states are multiplied by before the output layer."""
        return 1.0 / self.width_multiplier
