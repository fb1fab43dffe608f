"""Which attention a run gets on a GPU, as far as its settings decide it. Torch-free.

`pretrain.kernels.triton.settings` decides when the run is there; a test compares both.
"""

from __future__ import annotations

from pretrain.config.choices import allows_fused, precision_traits
from pretrain.config.run import RunConfig

LARGEST_FUSED_HEAD = 128


def plain_attention_reason(run: RunConfig) -> str:
    """Return why attention runs in plain operations on a GPU; empty if the fused kernel fits."""
    engine, head_width = run.engine, run.model.head_width
    if not allows_fused(engine.attention_kernel):
        return f"engine.attention_kernel={engine.attention_kernel}"
    if head_width > LARGEST_FUSED_HEAD:
        return f"heads are {head_width} wide, the fused kernel takes at most {LARGEST_FUSED_HEAD}"
    if not precision_traits(engine.number_format).is_half:
        return f"engine.precision={engine.number_format}, the fused kernel takes bf16 and fp16"
    return ""
