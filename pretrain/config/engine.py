"""How a run is computed: engine, sharding, precision, recomputation, offloading and attention.

`LIMITS` says which models faster kinds of attention cannot compute. Plain operations compute every
model, with every score in memory. docs/model.md has the same table; a test compares them.
Torch-free.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from data_pipeline.config import MOST_LANES
from foundation.errors import ConfigError
from foundation.settings import MOST, Range, assert_never, check_ranges, setting
from pretrain.config.model import (
    POSITIONS,
    ActivationCheckpointing,
    AttentionKernel,
    CompileSetting,
    EngineKind,
    ModelConfig,
    Precision,
    PrecisionSetting,
)

# Logits whose losses are computed together, in float32; a CPU's fit into the cache.
BLOCK_LOGITS, BLOCK_LOGITS_OF_GPU = 1 << 18, 1 << 24


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the model is sharded over the ranks and computed. Changes results by rounding at most."""

    kind: EngineKind = "deepspeed"
    """What runs the updates; torch: with the whole model and optimizer on every rank."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """Shard optimizer state (1), also gradients (2), also weights (3); 0 or torch: nothing."""
    precision: PrecisionSetting = "auto"
    """Weights and activations; auto: bf16 on GPUs that have it, else fp32, chosen at the start."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward pass recomputes; selective: scores, the delta rule; segments: all."""
    offload_optimizer: bool = False
    """Keep master weights and moments, and run the update, on the CPU; needs ZeRO 1 or more."""
    offload_memories: bool = False
    """Keep memories of inactive slots in host memory."""
    attention_kernel: AttentionKernel = "auto"
    """auto: fastest with sums in fixed order; atomic: any order; sdpa: torch's; plain: textbook."""
    compile: CompileSetting = "auto"
    """In training, compile all between attentions, which rounds differently; auto: if a GPU can."""
    logits_chunk_tokens: int = setting(0, Range(0, MOST), unit="tokens")
    """Tokens per pass through the output layer, which the backward pass repeats; 0: all."""
    micro_batch_lanes: int = setting(0, Range(0, MOST_LANES), unit="lanes")
    """Most lanes per rank and forward pass; accumulation steps follow from it; 0: all lanes."""
    watchdog_timeout_seconds: float = setting(1800.0, Range(0.001, 1e7, zero=True), unit="seconds")
    """Longest step, evaluation or save; then a rank writes its stacks and exits; 0: no limit."""
    deepspeed_extra: dict[str, Any] = field(default_factory=dict)
    """Merged into DeepSpeed's settings last; may not contradict a derived key."""

    @property
    def sharding(self) -> str:
        return f"ZeRO-{self.zero_stage}" if self.kind == "deepspeed" else "plain torch"

    def __post_init__(self) -> None:
        check_ranges("engine.", self)
        if self.kind != "deepspeed" and self.zero_stage > 2:  # 2 may be the default
            raise ConfigError(
                f"engine.zero_stage={self.zero_stage} needs engine.kind=deepspeed, found "
                f"{self.kind}, which shards nothing; remove one of them"
            )
        if self.activation_checkpointing == "segments" and self.zero_stage > 2:
            raise ConfigError(
                "engine.activation_checkpointing=segments needs engine.zero_stage of 2 or less, "
                "found 3; use full"
            )
        if self.offload_optimizer and (self.kind != "deepspeed" or not self.zero_stage):
            raise ConfigError(
                "engine.offload_optimizer needs engine.kind=deepspeed and engine.zero_stage of 1 "
                f"or more, found {self.kind} and {self.zero_stage}"
            )

    @property
    def number_format(self) -> Precision:
        """The precision; fp32, a CPU's, while no device has decided about `auto`."""
        return "fp32" if self.precision == "auto" else self.precision

    @property
    def compiles(self) -> bool:
        """Whether training runs compiled; not while no device has decided about `auto`."""
        return self.compile is True


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
    applies: Callable[[ModelConfig, bool], bool]  # (model, is_half) -> whether it is excluded
    sdpa: bool = False  # it is excluded from `scaled_dot_product_attention`
    flash: bool = False  # it is excluded from FlashAttention, which torch uses on a GPU
    fused: bool = False  # it is excluded from the fused kernel


LIMITS = (
    Limit(
        "model.positions other than rope",
        lambda model, _: not POSITIONS[model.positions].rotates,
        sdpa=True,
    ),
    Limit("model.attention_sinks", lambda model, _: model.attention_sinks, sdpa=True),
    Limit("model.same_length", lambda model, _: model.same_length, sdpa=True),
    Limit("model.isolate_documents", lambda model, _: model.isolate_documents, sdpa=True),
    # Our dropout masks are a function of seed, step, layer and lane; torch's masks are not.
    Limit("model.attention_dropout", lambda model, _: model.attention_dropout > 0, sdpa=True),
    Limit("heads wider than 128", lambda model, _: model.head_width > 128, fused=True),
    Limit("heads wider than 256", lambda model, _: model.head_width > 256, flash=True, fused=True),
    Limit("activations in float32", lambda _, is_half: not is_half, flash=True, fused=True),
)


def chosen_attention(
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
    limits = [limit for limit in LIMITS if limit.applies(model, is_half)]
    for_sdpa = [limit.option for limit in limits if limit.sdpa or limit.flash]
    if not for_sdpa:
        return Attention.SDPA, ""
    reason = f"not sdpa: {', '.join(for_sdpa)}"
    for_fused = [limit.option for limit in limits if limit.fused]
    if not for_fused:
        return Attention.FUSED, reason
    return Attention.PLAIN, f"{reason}; not the fused kernel: {', '.join(for_fused)}"


def attention_in(
    engine: EngineConfig, model: ModelConfig, *, on_gpu: bool
) -> tuple[Attention, str]:
    """Return `chosen_attention` for a run's settings."""
    is_half = engine.number_format != "fp32"
    return chosen_attention(engine.attention_kernel, model, on_gpu=on_gpu, is_half=is_half)


def check_attention(engine: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if `scaled_dot_product_attention` is set and cannot express the model."""
    kind, setting = attention_in(engine, model, on_gpu=False)
    limits = [limit.option for limit in LIMITS if limit.sdpa and limit.applies(model, True)]
    if kind is Attention.SDPA and limits:
        raise ConfigError(f"{setting} cannot express {', '.join(limits)}; use auto")


def described(kind: Attention, reason: str) -> str:
    """Return in one line how a model attends on a GPU, and why."""
    return f"attention: {kind.value}" + (f" ({reason})" if reason else "")
