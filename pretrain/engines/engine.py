"""The interface of engines, which run and update the model, and what all engines share."""

import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

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

# Only torch's own GPU allocator raises OutOfMemoryError. This matches the RuntimeErrors of its CPU
# allocator, the CUDA driver, cuBLAS, cuDNN, Triton and NCCL (2 is cudaErrorMemoryAllocation).
_NO_MEMORY = re.compile(
    r"out.of.memory|can(no|')t allocate memory|std::bad_alloc|_ALLOC(ATION)?_FAILED"
    r"|Cuda failure 2\b|cudaErrorMemoryAllocation|failed to CUDA [mc]alloc",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class StepResult:
    """The outcome of an update. `grad_norm` is the global norm before clipping.

    `skipped`: the gradients were non-finite or their norm was above `recovery.skip_grad_norm`; all
    weights, moments and counters are bitwise unchanged. All ranks agree, since the norm is global.
    `overflowed`: the update was skipped only because the loss scale was too large; the scale has
    been halved. `layers`: the per-layer norms, if requested and the update was not skipped.
    """

    grad_norm: float | None
    skipped: bool
    layers: LayerSquares | None = None
    overflowed: bool = False
    loss_scale: float | None = None  # of this step, in fp16


class Scorer(ABC):
    """The interface for evaluation; an engine has it, or a model without an optimizer."""

    world: World

    @abstractmethod
    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int, num_tokens: int = 0
    ) -> tuple[Tensor, Memory]:
        """Return the loss of each token [B, L] in fp32, without dropout, and the next memory.

        `num_tokens` is the length of a lane's whole stream (0: unknown). A scorer may need less
        space for a short one.
        """


class Engine(Scorer):
    """A model and its optimizer, replicated or sharded over the ranks."""

    module: nn.Module
    loss_scaler: LossScaler | None  # in fp16; part of a checkpoint

    @abstractmethod
    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        """Accumulate the gradient of a slot's mean loss; return the detached loss and memory."""

    @abstractmethod
    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        """Average gradients over slots and ranks, clip them, update or skip, and clear them."""

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """Yield this rank's fragments of fp32 weights and moments; all ranks' make up the whole."""

    @abstractmethod
    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that the model computes with, if every rank holds them whole."""

    @abstractmethod
    def optimizer_step_count(self) -> int:
        """Return the number of updates applied, as Adam's bias correction counts them."""

    @abstractmethod
    def after_load(self, step_count: int) -> None:
        """Set the step count, and round the loaded fragments into the model's weights."""

    @abstractmethod
    def close(self) -> None:
        """Drop references that would keep the model in memory; the engine cannot be used again."""


class ModelEngine(Engine):
    """What engines that run a model share."""

    def __init__(self, run: RunConfig, world: World, accumulation_steps: int) -> None:
        self.world = world
        self._run = run
        self._accumulation_steps = accumulation_steps
        is_scaled = run.engine.number_format == "fp16"
        self.loss_scaler = LossScaler(INITIAL_SCALE, WINDOW) if is_scaled else None

    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int, num_tokens: int = 0
    ) -> tuple[Tensor, Memory]:
        tokens_BL, targets_BL, starts_BL = batch_tensors(batch, self.world.device)
        was_training = self.module.training
        self.module.eval()
        with torch.no_grad():
            nll_BL, memory = self.module(
                tokens_BL, targets_BL, memory, starts_BL, memory_length=memory_length
            )
        self.module.train(was_training)
        assert memory is not None
        return nll_BL, memory

    def _read(
        self, module: nn.Module, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        """Run a slot's forward pass; return the losses of its tokens [B, L] and the next memory."""
        tokens_BL, targets_BL, starts_BL = batch_tensors(slot, self.world.device)
        run = self._run
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

    def _result(self, grad_norm: float, skipped: bool, layers: LayerSquares | None) -> StepResult:
        """Return the outcome of this update and set the next one's loss scale. A collective."""
        if self.loss_scaler is None:
            return StepResult(grad_norm, skipped, layers)
        loss_scale = self.loss_scaler.scale
        overflowed = self.loss_scaler.update(grad_norm, applied=not skipped)
        return StepResult(grad_norm, skipped, layers, overflowed, loss_scale)


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise ConfigError if the device cannot compute in this precision (fp16 on some CPUs)."""
    is_fp16 = dtype_of(precision) is torch.float16
    if is_fp16 and device.type == "cpu" and not cpu_has_fp16():
        raise ConfigError(
            f"engine.precision=fp16: found a CPU without half-precision arithmetic "
            f"({torch.backends.cpu.get_cpu_capability()}), expected one with AVX512-FP16 or a GPU; "
            "use engine.precision=bf16"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether any library reported that device or host memory ran out."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = f"{error} {error.__cause__ or ''}"
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(text) is not None


def cpu_has_fp16() -> bool:
    """Return whether torch's CPU library computes in fp16; DeepSpeed asks the same function."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def batch_tensors(slot: SegmentBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and document starts of a slot on the device."""

    def on_device(array: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        # A copy from pageable memory would wait until the device has done all queued work.
        host = host.pin_memory() if device.type == "cuda" else host
        return host.to(device, non_blocking=True)

    return on_device(slot.tokens_BL), on_device(slot.targets_BL), on_device(slot.starts_BL)
