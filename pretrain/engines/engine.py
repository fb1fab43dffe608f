"""The Engine protocol, which the loop trains with, and what engines share."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from data_pipeline.lanes.segment_batch import SegmentBatch
from foundation.errors import ConfigError
from pretrain.config.model import Precision
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World
from pretrain.model.dropout import DropoutStream
from pretrain.model.memory import Memory
from pretrain.model.parameters import dtype_of
from pretrain.optim.loss_scale import INITIAL_SCALE, WINDOW, LossScaler
from pretrain.optim.parameter_groups import Fragment, LayerSquares


@dataclass(frozen=True)
class StepResult:
    """The outcome of an update. `grad_norm` is the global norm before clipping.

    `skipped`: the gradients were non-finite or their norm was above `recovery.skip_grad_norm`; all
    weights, moments and counters are bitwise unchanged. All ranks agree, since the norm is global.
    `overflowed`: it was skipped only because the loss scale was too large; the scale has been
    halved. `layers`: the per-layer norms, if they were requested and the step was not skipped.
    """

    grad_norm: float | None
    skipped: bool
    layers: LayerSquares | None = None
    overflowed: bool = False
    loss_scale: float | None = None  # that of this step, in fp16


class Engine(Protocol):
    """A model and its optimizer, replicated or sharded over the ranks."""

    world: World
    module: nn.Module
    loss_scaler: LossScaler | None  # in fp16; part of a checkpoint

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        """Add the gradient of the slot's mean loss; returns that loss, detached, and its memory."""
        ...

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        """Average gradients over slots and ranks, clip, update (or skip) and clear them."""
        ...

    def evaluate(
        self,
        batch: SegmentBatch,
        memory: Memory | None,
        memory_length: int,
        num_tokens: int | None = None,
    ) -> tuple[Tensor, Memory]:
        """Return the loss of each token [B, L] in fp32, without dropout, and the next memory."""
        ...

    def fragments(self) -> Iterator[Fragment]:
        """Yield this rank's part of weights and moments; together the ranks hold every element."""
        ...

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that the model computes with, if every rank holds them whole."""
        ...

    def optimizer_step_count(self) -> int:
        """Return the number of updates applied, as Adam's bias correction counts them."""
        ...

    def after_load(self, step_count: int) -> None:
        """Update everything that is derived from the fragments after they were written to."""
        ...

    def close(self) -> None:
        """Drop what would keep the model alive; the engine is not used any more."""
        ...


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise ConfigError if the device cannot compute in this precision (fp16 on some CPUs)."""
    is_fp16 = dtype_of(precision) is torch.float16
    if is_fp16 and device.type == "cpu" and not cpu_has_fp16():
        raise ConfigError(
            f"engine.precision=fp16: found a CPU without half-precision arithmetic "
            f"({torch.backends.cpu.get_cpu_capability()}), expected one with AVX512-FP16 or a GPU; "
            "use engine.precision=bf16"
        )


# In RuntimeErrors of the CPU allocator of torch, and of what allocates past it: the CUDA driver,
# cuBLAS, cuDNN, Triton, NCCL (2 is cudaErrorMemoryAllocation).
_NO_MEMORY = re.compile(
    r"out.of.memory|can(no|')t allocate memory|std::bad_alloc|_ALLOC(ATION)?_FAILED"
    r"|Cuda failure 2\b|cudaErrorMemoryAllocation|failed to CUDA [mc]alloc",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left, whoever asked for it."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = f"{error} {error.__cause__ or ''}"
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(text) is not None


def cpu_has_fp16() -> bool:
    """Whether torch's CPU library computes in fp16; DeepSpeed asks the same function."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def batch_tensors(slot: SegmentBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and document starts of a slot on the device."""

    def on_device(array: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        # From other memory the copy would wait for what the device has yet to compute.
        host = host.pin_memory() if device.type == "cuda" else host
        return host.to(device, non_blocking=True)

    return on_device(slot.tokens_BL), on_device(slot.targets_BL), on_device(slot.starts_BL)


def read_slot(
    module: nn.Module,
    run: RunConfig,
    slot: SegmentBatch,
    memory: Memory | None,
    step: int,
    world: World,
) -> tuple[Tensor, Memory]:
    """Run a slot's forward pass of this step; returns the losses of its tokens, and memory."""
    tokens_BL, targets_BL, starts_BL = batch_tensors(slot, world.device)
    drops = run.model.dropout or run.model.attention_dropout
    nll_BL, memory = module(
        tokens_BL,
        targets_BL,
        memory,
        starts_BL,
        dropout=DropoutStream(run.seed, step, list(slot.lanes)) if drops else None,
        num_segments=run.optim.gradient_segments,
    )
    assert memory is not None
    return nll_BL, memory


def evaluate_module(
    module: nn.Module,
    batch: SegmentBatch,
    memory: Memory | None,
    memory_length: int,
    device: torch.device,
) -> tuple[Tensor, Memory]:
    """Run one segment forward in evaluation mode; the module keeps the mode it was in."""
    tokens_BL, targets_BL, starts_BL = batch_tensors(batch, device)
    was_training = module.training
    module.eval()
    with torch.no_grad():
        nll_BL, memory = module(
            tokens_BL, targets_BL, memory, starts_BL, memory_length=memory_length
        )
    module.train(was_training)
    assert memory is not None
    return nll_BL, memory


def loss_scaler_of(run: RunConfig) -> LossScaler | None:
    """Return a new loss scaler in fp16, else None."""
    if run.engine.number_format != "fp16":
        return None
    return LossScaler(INITIAL_SCALE, WINDOW)


def step_result(
    grad_norm: float, skipped: bool, layers: LayerSquares | None, scaler: LossScaler | None
) -> StepResult:
    """Return the outcome of the update and set the scaler for the next one. A collective."""
    if scaler is None:
        return StepResult(grad_norm, skipped, layers)
    loss_scale = scaler.scale
    overflowed = scaler.update(grad_norm, applied=not skipped)
    return StepResult(grad_norm, skipped, layers, overflowed, loss_scale)
