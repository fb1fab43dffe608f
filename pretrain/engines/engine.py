"""What the loop needs from whatever trains the model, and a plain-torch engine that shows what it must compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from data_pipeline.lanes.lane_stream import SegmentBatch
from pretrain.config.run import OptimConfig, RunConfig
from pretrain.distributed.world import World, sum_over_ranks
from pretrain.engines.precision import DTYPES
from pretrain.model.dropout import DropoutStream
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.fragments import Fragment, FragmentIndex, create_moments, fragment_of
from pretrain.optim.groups import build_optimizer, is_harmful
from pretrain.optim.layer_norms import LayerMeter, LayerSquares
from pretrain.optim.loss_scale import LossScaler

Memory = tuple[Tensor, ...]  # per layer hidden states [B, M, D], then the rows' documents [B, M]


@dataclass(frozen=True)
class StepResult:
    """What an update did. `grad_norm` is the global norm before clipping.

    `skipped`: the gradients were non-finite or their norm above `recovery.skip_grad_norm`; every weight, moment and
    counter is bitwise what it was before. All ranks agree, since the norm is global.
    `layers` is there where it was asked for and the step was not skipped.
    `overflowed`: it was skipped for no other reason than too large a loss scale, which is smaller from now on.
    """

    grad_norm: Tensor | float | None
    skipped: bool
    layers: LayerSquares | None = None
    overflowed: bool = False
    loss_scale: float | None = None  # that of this step, in fp16


class Engine(Protocol):
    """A model, its optimizer, and how both are spread over the ranks."""

    world: World
    module: nn.Module
    loss_scaler: LossScaler | None  # in fp16; part of a checkpoint

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        """Add the gradient of the slot's mean loss; returns that loss, detached, and the next segment's memory."""
        ...

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        """Average the gradients over slots and ranks, clip, update unless they would do harm, and clear them."""
        ...

    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int
    ) -> tuple[Tensor, Memory]:
        """Negative log-likelihood per token [B, L] in fp32 without gradient or dropout, and the next memory."""
        ...

    def fragments(self) -> Iterator[Fragment]:
        """This rank's part of weights and moments; together the ranks hold every element."""
        ...

    def optimizer_step_count(self) -> int:
        """Updates applied so far, as Adam's bias correction counts them."""
        ...

    def after_load(self, step_count: int) -> None:
        """Make everything derived from the fragments agree with them after they were written to."""
        ...


def batch_tensors(slot: SegmentBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and document starts of a slot on the device."""

    def moved(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return moved(slot.tokens_BL), moved(slot.targets_BL), moved(slot.starts_BL)


def dropout_stream(run: RunConfig, slot: SegmentBatch, step: int) -> DropoutStream | None:
    """The masks of this step for these lanes, or None when the model drops nothing."""
    if run.model.dropout == 0.0 and run.model.attention_dropout == 0.0:
        return None
    return DropoutStream(seed=run.seed, step=step, lanes=list(slot.lanes))


def evaluate_module(
    module: nn.Module,
    batch: SegmentBatch,
    memory: Memory | None,
    memory_length: int,
    device: torch.device,
) -> tuple[Tensor, Memory]:
    """One segment forward in evaluation mode; the module is left in the mode it was in."""
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
    """A new loss scaler where the run's precision needs one."""
    if run.engine.precision != "fp16":
        return None
    return LossScaler(run.engine.initial_loss_scale, run.engine.loss_scale_window)


def step_result(
    grad_norm: Tensor | float, skipped: bool, layers: LayerSquares | None, scaler: LossScaler | None
) -> StepResult:
    """What the update did, with the scaler set for the next one; all ranks call it together."""
    if scaler is None:
        return StepResult(grad_norm, skipped, layers)
    loss_scale = scaler.scale
    overflowed = scaler.adapt(grad_norm, applied=not skipped)
    return StepResult(grad_norm, skipped, layers, overflowed, loss_scale)


class TorchEngine:
    """Plain torch: whole model and optimizer on every rank, gradients averaged by one all-reduce per parameter.

    It is the yardstick for the other engine and runs without DeepSpeed. In bf16 and fp16 the master weights, the
    moments and the accumulated gradients are fp32, as they are there.
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
        if run.engine.precision != "fp32":
            self.module = copy.deepcopy(self._master).to(DTYPES[run.engine.precision])
        self._optimizer = build_optimizer(self._master, run.optim)
        self._create_moments()
        names = [name for name, _ in self._master.named_parameters()]
        self._optimizer.placement = FragmentIndex(self.fragments(), names, is_sharded=False)
        self._meter = self._optimizer.meter = LayerMeter(names)

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        tokens_BL, targets_BL, starts_BL = batch_tensors(slot, self.world.device)
        dropout = dropout_stream(self._run, slot, step)
        nll_BL, memory = self.module(tokens_BL, targets_BL, memory, starts_BL, dropout=dropout)
        loss = nll_BL.mean()
        scale = 1.0
        if self.loss_scaler is not None:
            self.loss_scaler.observe(loss)
            scale = self.loss_scaler.scale
        (loss * scale / self._accumulation_steps).backward()
        if self.module is not self._master:
            self._move_gradients_to_master()
        assert memory is not None
        return loss.detach(), memory

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        self._average_gradients()
        grad_norm = clip_gradients(self._master, self._run.optim)
        skipped = is_harmful(grad_norm, self._run.recovery.skip_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._meter.begin(measure_layers)
        if not skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.module is not self._master:
            self._copy_master_to_module()
        layers = self._meter.take() if measure_layers and not skipped else None
        return step_result(grad_norm, skipped, layers, self.loss_scaler)

    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int
    ) -> tuple[Tensor, Memory]:
        return evaluate_module(self.module, batch, memory, memory_length, self.world.device)

    def fragments(self) -> Iterator[Fragment]:
        for name, parameter in self._master.named_parameters():
            yield replicated_fragment(name, parameter, self._optimizer.state[parameter], self.world)

    def optimizer_step_count(self) -> int:
        return int(next(iter(self._optimizer.state.values()))["step"])

    def after_load(self, step_count: int) -> None:
        for state in self._optimizer.state.values():
            state["step"].fill_(step_count)
        if self.module is not self._master:
            self._copy_master_to_module()

    def _average_gradients(self) -> None:
        divisor = self.world.world_size * (
            self.loss_scaler.scale if self.loss_scaler is not None else 1.0
        )
        for parameter in self._master.parameters():
            if parameter.grad is not None and divisor != 1.0:
                parameter.grad = sum_over_ranks(parameter.grad) / divisor

    def _create_moments(self) -> None:
        for parameter in self._master.parameters():
            create_moments(self._optimizer.state[parameter], parameter)

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
    """A parameter that every rank holds whole; the ranks take turns in writing them, by name."""
    owned = sum(name.encode()) % world.world_size == world.rank
    return fragment_of(name, 0, master, state, 0, master.numel(), owned)


def clip_gradients(module: nn.Module, optim: OptimConfig) -> Tensor:
    """Scale the gradients down to `clip_norm` if they are longer; returns the norm before."""
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    limit = optim.clip_norm or float("inf")
    return nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
