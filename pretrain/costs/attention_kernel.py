"""Which attention a run gets on a GPU, as far as its settings decide it. Torch-free.

`pretrain.kernels.triton.settings` decides when the run is there; a test compares both.
"""

from __future__ import annotations

from pretrain.config.choices import kernel_traits, precision_traits
from pretrain.config.run import RunConfig

LARGEST_FUSED_HEAD = 128


def plain_attention_reason(run: RunConfig) -> str:
    """Return why attention runs in plain operations on a GPU; empty if the fused kernel fits."""
    engine, head_width = run.engine, run.model.head_width
    if not kernel_traits(engine.attention_kernel).is_fused:
        return f"engine.attention_kernel={engine.attention_kernel}"
    if head_width > LARGEST_FUSED_HEAD:
        return f"heads are {head_width} wide, the fused kernel takes at most {LARGEST_FUSED_HEAD}"
    if not precision_traits(engine.number_format).is_half:
        return f"engine.precision={engine.number_format}, the fused kernel takes bf16 and fp16"
    return ""


def unordered_reason(run: RunConfig) -> str:
    """Return why a resume on a GPU is not bitwise; empty if it is."""
    kernel = run.engine.attention_kernel
    if kernel_traits(kernel).is_bitwise or plain_attention_reason(run):
        return ""
    return f"engine.attention_kernel={kernel} sums in no fixed order"
