"""The engine in plain torch: for one device, and the reference that DeepSpeed is tested against."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.config.run import RunConfig
from pretrain.distributed.collectives import sum_over_ranks
from pretrain.distributed.world import World
from pretrain.engines.engine import ModelEngine, StepResult
from pretrain.model.adopted import LanguageModel
from pretrain.model.memory import Memory
from pretrain.model.parameters import dtype_of
from pretrain.optim.optimizers import build_optimizer, clip_gradients, must_skip
from pretrain.optim.parameter_groups import (
    Fragment,
    FragmentIndex,
    LayerMeter,
    create_state,
    new_fragment,
    set_learning_rate,
    state_of_parameters,
)


class TorchEngine(ModelEngine):
    """Plain torch: whole model and optimizer on every rank, one all-reduce per parameter and step.

    As under DeepSpeed, master weights, moments and accumulated gradients are fp32 in every
    precision: `_master` is the fp32 model that the optimizer updates, `module` the rounded copy
    that runs. In fp32 they are the same object.
    """

    def __init__(
        self, run: RunConfig, module: LanguageModel, world: World, accumulation_steps: int
    ) -> None:
        super().__init__(run, world, accumulation_steps)
        self._master = module.to(world.device)
        self._master.train()
        self.module: nn.Module = self._master
        if run.engine.number_format != "fp32":
            self.module = copy.deepcopy(self._master).to(dtype_of(run.engine.number_format))
        self._optimizer = build_optimizer(self._master, run.optim, run.engine.number_format)
        kinds = state_of_parameters(self._optimizer.param_groups)
        names: dict[Tensor, list[str]] = {}  # each master holds one parameter
        for name, parameter in self._master.named_parameters():
            create_state(self._optimizer.state[parameter], parameter, kinds[name])
            names[parameter] = [name]
        self._optimizer.index = FragmentIndex(
            self.fragments(), names, is_sharded=False, world=world
        )
        self._meter = self._optimizer.meter = LayerMeter([name for [name] in names.values()])

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        nll_BL, memory = self._read(self.module, slot, memory, step)
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
        # Reading the norm is the one time per step that the host waits for the device.
        grad_norm = float(clip_gradients(self._master, self._run.optim))
        skipped = must_skip(grad_norm, self._run.recovery.skip_grad_norm)
        set_learning_rate(self._optimizer.param_groups, learning_rate)
        self._meter.start_step(measure_layers)
        if not skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.module is not self._master:
            self._copy_master_to_module()
        layers = self._meter.squares() if measure_layers and not skipped else None
        return self._result(grad_norm, skipped, layers)

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
    # One rank saves it. The name picks the rank, so all ranks write about equally much.
    owned = sum(name.encode()) % world.world_size == world.rank
    return new_fragment(name, 0, master, state, 0, master.numel(), owned, replicated=True)
