"""The settings that are one of several names. Torch-free.

Between two names the code compares. Among more, a `match` ends in `assert_never`, so that pyright
shows each one that does not handle a new name, or a table below has an entry for each name.
CONTRIBUTING.md walks through adding one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["attention", "deltanet"]
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
ActivationCheckpointing = Literal["none", "full", "selective"]
AttentionKernel = Literal["auto", "sdpa", "atomic", "plain"]
ExportFormat = Literal["own", "huggingface"]
ProbeName = Literal["needle", "copy", "position", "attention"]


@dataclass(frozen=True, kw_only=True)
class FeedForwardTraits:
    """What a feed-forward layer has, and what it keeps for its backward pass."""

    is_gated: bool = False  # a third matrix, of the gate, and no biases
    drops_first: bool = False  # dropout commutes with it, and keeps no tensor more before it
    inner_tensors: int  # of the inner width that are kept


# What costs follow from; `pretrain.model.layer.FeedForward` computes it.
FEED_FORWARDS: Mapping[FeedForwardKind, FeedForwardTraits] = {
    "relu": FeedForwardTraits(inner_tensors=1, drops_first=True),  # its output
    "relu2": FeedForwardTraits(inner_tensors=2),  # relu's output, and its square
    "gelu": FeedForwardTraits(inner_tensors=2),  # its input, too
    # both factors, the gate before its activation, the product
    "swiglu": FeedForwardTraits(is_gated=True, inner_tensors=4),
}


@dataclass(frozen=True, kw_only=True)
class PositionTraits:
    """How attention sees distances."""

    projects_encodings: bool = False  # W_R, u and v: a third product of each query and key
    rotates: bool = False  # queries and keys
    adds_bias: bool = False  # to the scores, per distance and head
    learns_bias: bool = False  # in buckets of distances


# What costs and attention follow from; `pretrain.model.positions` computes it.
POSITIONS: Mapping[Positions, PositionTraits] = {
    "relative": PositionTraits(projects_encodings=True),
    "rope": PositionTraits(rotates=True),
    "alibi": PositionTraits(adds_bias=True),
    "t5": PositionTraits(adds_bias=True, learns_bias=True),
}
