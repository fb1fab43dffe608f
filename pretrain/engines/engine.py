"""The Engine protocol, which the loop trains with, and TorchEngine, the reference.

An engine may keep an exponential moving average (EMA) of the weights (Polyak and Juditsky 1992),
and lane memories of inactive slots in host memory (`engine.offload_memories`): with gradient
accumulation each slot has the memories of its own lanes, and one slot is active at a time. Its
memory comes to the device for its forward pass. The new memory returns to pinned host memory on a
separate stream, while the next slot runs. Every copy is a new tensor: a checkpoint may still be
reading an older one.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from data_pipeline.lanes.segment_batch import SegmentBatch
from foundation.errors import ConfigError
from pretrain.config.model import Precision
from pretrain.config.run import RunConfig
from pretrain.distributed.collectives import sum_over_ranks
from pretrain.distributed.world import World
from pretrain.model.dropout import DropoutStream
from pretrain.model.lane_state import Memory
from pretrain.model.parameters import dtype_of
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.optimizers import (
    INITIAL_SCALE,
    WINDOW,
    LossScaler,
    build_optimizer,
    clip_gradients,
    must_skip,
)
from pretrain.optim.parameter_groups import (
    Fragment,
    FragmentIndex,
    LayerMeter,
    LayerSquares,
    create_state,
    fragment_of,
    set_learning_rate,
    state_of_parameters,
)


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


class TorchEngine:
    """Plain torch: whole model and optimizer on every rank, one all-reduce per parameter and step.

    The reference that DeepSpeedEngine is tested against, and enough for one device. In bf16 and
    fp16 the master weights, the moments and the accumulated gradients are fp32, as they are there:
    `_master` is the fp32 model that the optimizer updates, `module` the rounded copy that runs. In
    fp32 they are the same object.
    """

    def __init__(
        self, run: RunConfig, module: TransformerXL, world: World, accumulation_steps: int
    ) -> None:
        self.world = world
        self._run = run
        self._accumulation_steps = accumulation_steps
        self._master = module.to(world.device)
        self._master.train()
        self.module: nn.Module = self._master
        self.loss_scaler = loss_scaler_of(run)
        if run.engine.number_format != "fp32":
            self.module = copy.deepcopy(self._master).to(dtype_of(run.engine.number_format))
        self._optimizer = build_optimizer(self._master, run.optim, run.engine.number_format)
        kinds = state_of_parameters(self._optimizer.param_groups)
        for name, parameter in self._master.named_parameters():
            create_state(self._optimizer.state[parameter], parameter, kinds[name])
        names = [name for name, _ in self._master.named_parameters()]
        masters: dict[Tensor, list[str]] = {
            parameter: [name] for name, parameter in self._master.named_parameters()
        }
        self._optimizer.index = FragmentIndex(
            self.fragments(), masters, is_sharded=False, world=world
        )
        self._meter = self._optimizer.meter = LayerMeter(names)

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        nll_BL, memory = read_slot(self.module, self._run, slot, memory, step, self.world)
        loss = nll_BL.mean()
        scale = 1.0
        if self.loss_scaler is not None:
            self.loss_scaler.observe(loss)
            scale = self.loss_scaler.scale
        (loss * scale / self._accumulation_steps).backward()
        if self.module is not self._master:
            self._move_gradients_to_master()
        return loss.detach(), memory

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        scale = self.loss_scaler.scale if self.loss_scaler is not None else 1.0
        divisor = self.world.world_size * scale
        for parameter in self._master.parameters():
            if parameter.grad is not None and divisor != 1.0:
                parameter.grad = sum_over_ranks(parameter.grad) / divisor
        grad_norm = float(clip_gradients(self._master, self._run.optim))  # the host waits once
        skipped = must_skip(grad_norm, self._run.recovery.skip_grad_norm)
        set_learning_rate(self._optimizer.param_groups, learning_rate)
        self._meter.start_step(measure_layers)
        if not skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.module is not self._master:
            self._copy_master_to_module()
        layers = self._meter.squares() if measure_layers and not skipped else None
        return step_result(grad_norm, skipped, layers, self.loss_scaler)

    def evaluate(
        self,
        batch: SegmentBatch,
        memory: Memory | None,
        memory_length: int,
        num_tokens: int | None = None,
    ) -> tuple[Tensor, Memory]:
        return evaluate_module(self.module, batch, memory, memory_length, self.world.device)

    def fragments(self) -> Iterator[Fragment]:
        for name, parameter in self._master.named_parameters():
            yield replicated_fragment(name, parameter, self._optimizer.state[parameter], self.world)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_parameters()

    def optimizer_step_count(self) -> int:
        return int(next(iter(self._optimizer.state.values()))["step"])

    def after_load(self, step_count: int) -> None:
        for state in self._optimizer.state.values():
            state["step"].fill_(step_count)
        if self.module is not self._master:
            self._copy_master_to_module()

    def close(self) -> None:
        pass

    def _copy_master_to_module(self) -> None:
        with torch.no_grad():
            for low, high in zip(self.module.parameters(), self._master.parameters(), strict=True):
                low.copy_(high)

    def _move_gradients_to_master(self) -> None:
        for low, high in zip(self.module.parameters(), self._master.parameters(), strict=True):
            if low.grad is not None:
                gradient = low.grad.float()
                high.grad = gradient if high.grad is None else high.grad + gradient
                low.grad = None


def replicated_fragment(
    name: str, master: Tensor, state: dict[str, Tensor], world: World
) -> Fragment:
    """Return the fragment of a parameter that every rank holds whole."""
    # Each is saved by one rank, picked by its name, so that all ranks write about as much.
    owned = sum(name.encode()) % world.world_size == world.rank
    return fragment_of(name, 0, master, state, 0, master.numel(), owned, replicated=True)


class MemoryOffload:
    """Moves memories between device and host; without `is_on` they stay on the device."""

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self._device = device
        self._is_on = is_on
        self._stream = torch.cuda.Stream(device) if is_on and device.type == "cuda" else None
        # By slot: when the copy of its last memory to the host has ended.
        self._stored: dict[int, torch.cuda.Event] = {}
        self._leaving: tuple[Memory, torch.cuda.Event] | None = None

    def fetch(self, slot: int, memory: Memory | None) -> Memory | None:
        """Return the slot's memory on the device, for its forward pass."""
        if memory is None or not self._is_on:
            return memory
        if slot in self._stored:
            torch.cuda.current_stream(self._device).wait_event(self._stored[slot])
        return tuple(part.to(self._device, non_blocking=True) for part in memory)

    def store(self, slot: int, memory: Memory) -> Memory:
        """Return the memory to keep until the slot's next pass; `wait` before the host reads it."""
        if not self._is_on:
            return memory
        if self._stream is None:
            return tuple(part.clone() for part in memory)
        current = torch.cuda.current_stream(self._device)
        if self._leaving is not None:
            # `_leaving` keeps the device memory of the slot before alive until its copy has ended;
            # that copy ran while this slot computed. With this wait the allocator can reuse it as
            # soon as it is freed in stream order, so that at most three slots' memories are on the
            # device, however far the loop runs ahead of it.
            current.wait_event(self._leaving[1])
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            copies = tuple(_pinned_copy(part) for part in memory)
        copied = self._stored[slot] = torch.cuda.Event()
        copied.record(self._stream)
        self._leaving = memory, copied
        return copies

    def wait(self) -> None:
        """Return when everything that was stored can be read."""
        if self._stream is not None:
            self._stream.synchronize()


def _pinned_copy(part: Tensor) -> Tensor:
    # Torch's pinned-memory allocator reuses blocks, but never one that a copy in progress still
    # needs.
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)


EMA = "ema"  # a kind of values, as `weight`, `exp_avg` and `exp_avg_sq`


class EmaEngine:
    """An engine around another one that keeps an EMA of its weights.

    After every update that was applied, ema = decay * ema + (1 - decay) * weight.

    The EMA is fp32 and sharded as the weights' fragments are. It is one more value of those
    fragments, so checkpoints contain it and it can be resumed at any world size and ZeRO stage.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        self._ema: dict[tuple[str, int], Tensor] = {}
        self._copy_weights()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        result = self._engine.step(learning_rate, measure_layers)
        if not result.skipped:
            with torch.no_grad():
                for each in self._engine.fragments():
                    ema = self._ema[each.name, each.start]
                    ema.lerp_(each.values["weight"], 1.0 - self._decay)
        return result

    def fragments(self) -> Iterator[Fragment]:
        for each in self._engine.fragments():
            values = {**each.values, EMA: self._ema[each.name, each.start]}
            yield dataclasses.replace(each, values=values)

    def after_load(self, step_count: int) -> None:
        self._engine.after_load(step_count)
        if step_count == 0:  # initial weights were loaded, not a checkpoint
            self._copy_weights()

    def _copy_weights(self) -> None:
        """Start from the weights themselves: an average of zeros would need a bias correction."""
        for each in self._engine.fragments():
            self._ema[each.name, each.start] = each.values["weight"].detach().clone()
