"""The settings that are one of several names, and what each name costs and needs. Torch-free.

A name that is added to a type alone fails `make check`: every `match` over it ends in
`assert_never`, and pyright shows each one that does not handle it. `tests/unit/test_choices.py`
keeps it so. CONTRIBUTING.md walks through adding one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foundation.settings import assert_never

LayerKind = Literal["attention", "deltanet"]
FeedForwardKind = Literal["relu", "relu2", "gelu", "swiglu"]
Positions = Literal["relative", "rope", "alibi", "t5"]
RopeExtension = Literal["none", "ntk", "yarn"]
SoftmaxScaling = Literal["none", "log_length"]
CompressionKind = Literal["conv", "mean", "max"]
NormKind = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["post", "pre"]
ScheduleShape = Literal["constant", "linear", "cosine", "cosine_from_start", "inverse_sqrt", "wsd"]
OptimizerName = Literal["adamw", "lamb", "muon"]
EngineKind = Literal["deepspeed", "torch"]
Precision = Literal["fp32", "bf16", "fp16"]
PrecisionSetting = Literal["auto", Precision]
ActivationCheckpointing = Literal["none", "full", "selective"]
AttentionKernel = Literal["auto", "sdpa", "atomic", "plain"]
ExportFormat = Literal["own", "huggingface"]
ReductionPrecision = Literal["fp32", "bf16"]
# DeepSpeed's classes around our optimizer; empty: none.
ZeroOptimizer = Literal[
    "",
    "FP16_UnfusedOptimizer",
    "BF16_Optimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
]


def attends(kind: LayerKind) -> bool:
    """Whether a layer attends to rows of memory; else it carries a state of fixed size."""
    match kind:
        case "attention":
            return True
        case "deltanet":
            return False
        case _:
            assert_never(kind)


@dataclass(frozen=True, kw_only=True)
class FeedForwardTraits:
    """What a feed-forward layer has, and what it keeps for its backward pass."""

    is_gated: bool = False  # a third matrix, of the gate, and no biases
    inner_tensors: int  # of the inner width that are kept


def feed_forward_traits(kind: FeedForwardKind) -> FeedForwardTraits:
    """Return what costs follow from; `pretrain.model.layer.FeedForward` computes it."""
    match kind:
        case "relu":
            return FeedForwardTraits(inner_tensors=1)  # its output
        case "relu2":
            return FeedForwardTraits(inner_tensors=2)  # relu's output, and its square
        case "gelu":
            return FeedForwardTraits(inner_tensors=2)  # its input, too
        case "swiglu":
            # both factors, the gate before its activation, the product
            return FeedForwardTraits(is_gated=True, inner_tensors=4)
        case _:
            assert_never(kind)


@dataclass(frozen=True, kw_only=True)
class PositionTraits:
    """How attention sees distances."""

    projects_encodings: bool = False  # W_R, u and v: a third product of each query and key
    rotates: bool = False  # queries and keys
    adds_bias: bool = False  # to the scores, per distance and head
    learns_bias: bool = False  # in buckets of distances


def position_traits(positions: Positions) -> PositionTraits:
    """Return what costs and attention follow from; `pretrain.model.positions` computes it."""
    match positions:
        case "relative":
            return PositionTraits(projects_encodings=True)
        case "rope":
            return PositionTraits(rotates=True)
        case "alibi":
            return PositionTraits(adds_bias=True)
        case "t5":
            return PositionTraits(adds_bias=True, learns_bias=True)
        case _:
            assert_never(positions)


def scales_with_length(scaling: SoftmaxScaling) -> bool:
    """Whether queries are multiplied by a learned factor of the number of keys they see."""
    match scaling:
        case "log_length":
            return True
        case "none":
            return False
        case _:
            assert_never(scaling)


def learns_to_compress(compression: CompressionKind) -> bool:
    """Whether the compression has parameters, learned by attention reconstruction."""
    match compression:
        case "conv":
            return True
        case "mean" | "max":
            return False
        case _:
            assert_never(compression)


@dataclass(frozen=True, kw_only=True)
class NormTraits:
    vectors: int  # parameters per channel
    kept: int  # rows kept for the backward pass beside the output


def norm_traits(norm: NormKind) -> NormTraits:
    """Return what costs follow from; `pretrain.model.parameters.norm_of` builds it."""
    match norm:
        case "layernorm":
            return NormTraits(vectors=2, kept=0)
        case "rmsnorm":
            return NormTraits(vectors=1, kept=1)  # once more before the gain
        case _:
            assert_never(norm)


def norms_inputs(position: NormPosition) -> bool:
    """Whether attention and feed-forward read normed rows, those of the memory among them."""
    match position:
        case "pre":
            return True
        case "post":
            return False
        case _:
            assert_never(position)


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    decays: bool = True  # to `final_fraction` of the peak at the last step
    decays_last: bool = False  # in `decay_steps` after a constant stretch


def schedule_traits(shape: ScheduleShape) -> ScheduleTraits:
    """Return how a shape ends; `pretrain.optim.learning_rate` computes it."""
    match shape:
        case "linear" | "cosine" | "cosine_from_start":
            return ScheduleTraits()
        case "wsd":
            return ScheduleTraits(decays_last=True)
        case "constant" | "inverse_sqrt":
            return ScheduleTraits(decays=False)
        case _:
            assert_never(shape)


def orthogonalizes(name: OptimizerName) -> bool:
    """Whether updates of matrices are orthogonal; these have one moment instead of two."""
    match name:
        case "adamw" | "lamb":
            return False
        case "muon":
            return True
        case _:
            assert_never(name)


def shards(kind: EngineKind) -> bool:
    """Whether the engine can shard optimizer, gradients and weights over the ranks (ZeRO)."""
    match kind:
        case "deepspeed":
            return True
        case "torch":
            return False
        case _:
            assert_never(kind)


@dataclass(frozen=True, kw_only=True)
class PrecisionTraits:
    bytes: int  # of a weight or an activation
    scales_loss: bool = False  # so that small gradients do not become zero

    @property
    def is_half(self) -> bool:
        """Whether weights are rounded copies of float32 masters."""
        return self.bytes < 4


def precision_traits(precision: Precision) -> PrecisionTraits:
    """Return what costs and engines follow from."""
    match precision:
        case "fp32":
            return PrecisionTraits(bytes=4)
        case "bf16":
            return PrecisionTraits(bytes=2)
        case "fp16":
            return PrecisionTraits(bytes=2, scales_loss=True)
        case _:
            assert_never(precision)


def resolved_precision(setting: PrecisionSetting, best: Precision) -> Precision:
    """Return the precision that is set; of `auto`, the `best` one of the device."""
    match setting:
        case "auto":
            return best
        case "fp32" | "bf16" | "fp16":
            return setting
        case _:
            assert_never(setting)


def reduction_bytes(precision: ReductionPrecision) -> int:
    """Return the bytes of an element of a gradient on its way between ranks."""
    match precision:
        case "fp32":
            return 4
        case "bf16":
            return 2
        case _:
            assert_never(precision)


@dataclass(frozen=True, kw_only=True)
class RecomputationTraits:
    """What the backward pass computes again instead of keeping it."""

    layers: bool = False
    scores: bool = False  # attention's scores and weights


def recomputation_traits(kind: ActivationCheckpointing) -> RecomputationTraits:
    """Return what a kind of activation checkpointing repeats."""
    match kind:
        case "none":
            return RecomputationTraits()
        case "full":
            return RecomputationTraits(layers=True)
        case "selective":
            return RecomputationTraits(scores=True)
        case _:
            assert_never(kind)


def sums_in_order(kernel: AttentionKernel) -> bool:
    """Whether the same inputs give the same bits on the same device."""
    match kernel:
        case "auto" | "sdpa" | "plain":
            return True
        case "atomic":
            return False
        case _:
            assert_never(kernel)
