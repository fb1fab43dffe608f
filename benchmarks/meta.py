"""Training on torch's `meta` device as on a GPU: shapes and operations, no numbers, no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.model.dropout import DropoutStream
from pretrain.model.transformer_xl import TransformerXL


class FusedNorm(torch.autograd.Function):
    """An rms_norm that keeps what a GPU's does: its input and a number per row, and no more."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gain: Tensor | None) -> Tensor:  # type: ignore[override]
        per_row = values.new_empty(values.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(values, per_row, gain)
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        values, _, gain = ctx.saved_tensors
        return torch.empty_like(values), None if gain is None else torch.empty_like(gain)


@contextmanager
def meta_as_gpu() -> Iterator[Counter[str]]:
    """In the block, tensors on `meta` take the code of a GPU; our kernels only count launches."""
    from torch.fx.experimental import _config as shapes
    from torch.nn.attention import bias

    from pretrain.kernels.triton import attention
    from pretrain.kernels.triton import dropout as dropout_kernels
    from pretrain.model import attention_backends, dropout

    launches: Counter[str] = Counter()

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: launches.update(["launches"])

    def flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]

    def rms_norm(values: Tensor, _: Any, gain: Tensor | None = None, eps: float = 0.0) -> Tensor:
        return FusedNorm.apply(values, gain)

    with ExitStack() as stack:
        for module in (attention, dropout_kernels):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(patch.object(module, name, Kernel()))
        for module, name, replacement in (
            (attention_backends, "unsupported_reason", lambda _: None),
            (attention_backends, "scaled_dot_product_attention", flash),
            (bias, "causal_lower_right", lambda *_: None),
            (torch.nn.functional, "rms_norm", rms_norm),
            (dropout, "missing_for_compiling", lambda: None),
            # Each bin of an adaptive softmax then gets every token.
            (shapes, "meta_nonzero_assume_all_nonzero", True),
        ):
            stack.enter_context(patch.object(module, name, replacement))
        yield launches


def model_on_meta(config: ModelConfig, **options: Any) -> TransformerXL:
    """Return the model in bf16; the options are those of an engine."""
    with torch.device("meta"):
        return TransformerXL(config, **options).to(torch.bfloat16)


def trained_on_meta(module: TransformerXL, segment_length: int, lanes: int) -> Iterator[str]:
    """Train the model on a segment with a full memory; yields after each pass."""
    with torch.device("meta"):
        tokens_BL = torch.zeros(lanes, segment_length, dtype=torch.long)
    starts_BL = tokens_BL > 0
    with torch.no_grad():
        _, memory = module(tokens_BL, tokens_BL, None, starts_BL)
    yield "memory"
    dropout = DropoutStream(seed=1, step=1, lanes=range(lanes))
    nll_BL, memory = module(tokens_BL, tokens_BL, memory, starts_BL, dropout)
    yield "forward"
    nll_BL.mean().backward()
    yield "backward"
