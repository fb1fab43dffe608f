"""Which attention a model gets, and what excludes it from the faster ones. Torch-free.

Plain operations express everything, with every score in memory. docs/model.md has the same table,
and a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from data_pipeline.errors import ConfigError
from data_pipeline.setting_fields import assert_never
from pretrain.config.choices import AttentionKernel, position_traits, precision_traits
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig


class Attention(Enum):
    """How attention is computed."""

    TILES = "cache-sized tiles on the CPU"
    SDPA = "torch's scaled_dot_product_attention"
    FUSED = "the fused kernel"
    PLAIN = "plain operations, slower and with every score in memory"


@dataclass(frozen=True)
class Limit:
    """What excludes a model from some kinds of attention."""

    option: str
    applies: Callable[[ModelConfig, bool], bool]  # to a model, in half precision or not
    sdpa: bool = False  # `scaled_dot_product_attention` cannot express it
    flash: bool = False  # on a GPU it would not use FlashAttention for it
    fused: bool = False  # the fused kernel does not support it


LIMITS = (
    Limit(
        "model.positions other than rope",
        lambda model, _: not position_traits(model.positions).rotates,
        sdpa=True,
    ),
    Limit("model.attention_sinks", lambda model, _: model.attention_sinks, sdpa=True),
    Limit("model.same_length", lambda model, _: model.same_length, sdpa=True),
    Limit("model.isolate_documents", lambda model, _: model.isolate_documents, sdpa=True),
    # Its masks are a function of seed, step, layer and lane; torch's are not.
    Limit("model.attention_dropout", lambda model, _: model.attention_dropout > 0, sdpa=True),
    Limit("heads wider than 128", lambda model, _: model.head_width > 128, fused=True),
    Limit("heads wider than 256", lambda model, _: model.head_width > 256, flash=True, fused=True),
    Limit("activations in float32", lambda _, is_half: not is_half, flash=True, fused=True),
)


def attention_of(
    kernel: AttentionKernel, model: ModelConfig, *, on_gpu: bool, is_half: bool
) -> tuple[Attention, str]:
    """Return how a model attends with this `engine.attention_kernel`, and why not faster."""
    match kernel:
        case "plain":
            return Attention.PLAIN, "engine.attention_kernel=plain"
        case "sdpa":
            return Attention.SDPA, "engine.attention_kernel=sdpa"
        case "auto" | "atomic":
            pass
        case _:
            assert_never(kernel)
    if not on_gpu:
        return Attention.TILES, ""
    found = [limit for limit in LIMITS if limit.applies(model, is_half)]
    for_sdpa = [limit.option for limit in found if limit.sdpa or limit.flash]
    if not for_sdpa:
        return Attention.SDPA, ""
    reason = f"not sdpa: {', '.join(for_sdpa)}"
    for_fused = [limit.option for limit in found if limit.fused]
    if not for_fused:
        return Attention.FUSED, reason
    return Attention.PLAIN, f"{reason}; not the fused kernel: {', '.join(for_fused)}"


def attention_in(
    engine: EngineConfig, model: ModelConfig, *, on_gpu: bool
) -> tuple[Attention, str]:
    """Return `attention_of` a run."""
    is_half = precision_traits(engine.number_format).is_half
    return attention_of(engine.attention_kernel, model, on_gpu=on_gpu, is_half=is_half)


def check_attention(engine: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if `scaled_dot_product_attention` is set and cannot express the model."""
    kind, setting = attention_in(engine, model, on_gpu=False)
    found = [limit.option for limit in LIMITS if limit.sdpa and limit.applies(model, True)]
    if kind is Attention.SDPA and found:
        raise ConfigError(f"{setting} cannot express {', '.join(found)}; use auto")


def described(kind: Attention, reason: str) -> str:
    """Return in one line how a model attends on a GPU, and why."""
    return f"attention: {kind.value}" + (f" ({reason})" if reason else "")
