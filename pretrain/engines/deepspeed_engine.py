"""DeepSpeed ZeRO 0 to 3 as an Engine; the only module that imports deepspeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World
from pretrain.engines.deepspeed_settings import check_settings, deepspeed_settings, is_unwrapped
from pretrain.engines.engine import (
    Memory,
    StepResult,
    clip_gradients,
    dtype_of,
    evaluate_module,
    loss_scaler_of,
    read_slot,
    step_result,
)
from pretrain.engines.zero3_init import InitialWeights, build_replicated, build_sharded
from pretrain.engines.zero_fragments import ZeroFragments
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.fragments import Fragment, FragmentIndex
from pretrain.optim.layer_norms import LayerMeter
from pretrain.optim.optimizers import build_optimizer, must_skip
from pretrain.optim.parameter_groups import set_learning_rate
from pretrain.terminal.log import adopt_logger


class DeepSpeedEngine:
    """ZeRO (Rajbhandari et al. 2020): stage 1 shards moments, 2 also gradients, 3 also weights."""

    def __init__(
        self,
        run: RunConfig,
        build: Callable[[], TransformerXL],
        world: World,
        accumulation_steps: int,
    ) -> None:
        """`build` makes the model; under stage 3 its parameters are sharded while it does."""
        deepspeed = _import_deepspeed(world.device)
        on_gpu = world.device.type == "cuda"
        settings = deepspeed_settings(run, world.world_size, accumulation_steps, on_gpu)
        check_settings(deepspeed, settings)
        self.world = world
        self._run = run
        self._stage = run.engine.zero_stage
        self._accumulation_steps = accumulation_steps
        self._slots_done = 0
        self.loss_scaler = loss_scaler_of(run)
        dtype = dtype_of(run.engine.number_format)
        if self._stage == 3:
            # Without the group of a start before in this process, it fails to make it again.
            sharers = deepspeed.utils.groups._get_zero_param_intra_parallel_group()
            zero = deepspeed.zero.Init(
                config_dict_or_path=settings,
                zero_param_parallel_group=sharers if run.engine.secondary_shard_ranks > 1 else None,
            )
            module, initial = build_sharded(
                build, lambda parameter: zero._convert_to_zero_parameters([parameter]), dtype, world
            )
            for layer in module.layers if run.engine.compile else ():
                # Gathered whole: compiled code has no place for hooks.
                deepspeed.utils.set_z3_leaf_module(layer, True)
        else:
            module, initial = build_replicated(build, dtype)
        optimizer = build_optimizer(module, run.optim)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings
        )
        self.module: nn.Module = self._engine.module
        self.module.train()
        self._fragments = ZeroFragments(self.module, self._optimizer, self._stage, world)
        self._set_initial_state(initial)
        self._norm: float | None = None  # of the current step, once it is read
        names = [name for name, _ in self.module.named_parameters()]
        optimizer.skips = self._must_skip
        optimizer.index = FragmentIndex(
            self.fragments(),
            self._fragments.names_in_masters(),
            is_sharded=self._stage > 0,
            world=world,
        )
        self._meter = optimizer.meter = LayerMeter(names)

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        nll_BL, memory = read_slot(self._engine, self._run, slot, memory, step, self.world)
        loss = nll_BL.mean()
        self._backward(loss)
        self._slots_done += 1
        if self._slots_done < self._accumulation_steps:
            self._engine.step()  # only counts the micro-batch: nothing is updated yet
        return loss.detach(), memory

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        assert self._slots_done == self._accumulation_steps, "step() before every slot has run"
        self._slots_done, self._norm = 0, None
        set_learning_rate(self._fragments.base_optimizer.param_groups, learning_rate)
        if is_unwrapped(self._run):
            self._norm = float(clip_gradients(self.module, self._run.optim))
        self._meter.start_step(measure_layers)
        # DeepSpeed itself skips a step whose norm is not finite, and reports inf as that norm.
        self._engine.step()
        skipped = self._must_skip()
        if skipped:
            self._drop_gradients()
        layers = self._meter.squares() if measure_layers and not skipped else None
        return step_result(self._grad_norm(), skipped, layers, self.loss_scaler)

    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int
    ) -> tuple[Tensor, Memory]:
        return evaluate_module(self.module, batch, memory, memory_length, self.world.device)

    def fragments(self) -> Iterator[Fragment]:
        return iter(self._fragments)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(()) if self._stage == 3 else self.module.named_parameters()

    def optimizer_step_count(self) -> int:
        return int(next(iter(self._fragments.base_optimizer.state.values()))["step"])

    def after_load(self, step_count: int) -> None:
        for state in self._fragments.base_optimizer.state.values():
            state["step"].fill_(step_count)
        self._fragments.write_weights()

    def close(self) -> None:
        # The hooks on parameters' gradients refer to the engine where no collector looks.
        self._engine.destroy()
        if self._stage == 3:  # a list and a cache of DeepSpeed's own refer to the modules
            from deepspeed.runtime.zero import parameter_offload

            parameter_offload.FWD_MODULE_STACK.clear()
            coordinator = parameter_offload.PartitionedParameterCoordinator
            release = vars(coordinator)["_PartitionedParameterCoordinator__params_to_release"]
            release.__closure__[0].cell_contents.cache_clear()

    def _backward(self, loss: Tensor) -> None:
        if self.loss_scaler is not None:
            # The wrappers are configured with a constant scale of 1 and read this attribute at
            # every use. Stages 1 to 3 multiply the loss by it and divide the gradients; stage 0
            # only divides.
            self.loss_scaler.observe(loss)
            self._optimizer.loss_scale = self.loss_scaler.scale
            if self._stage == 0:
                loss = loss * self.loss_scaler.scale
        self._engine.backward(loss)

    def _grad_norm(self) -> float:
        """Return the norm, for which the host waits once, however many parameter groups ask."""
        if self._norm is None:
            # The public get_global_grad_norm() is that of the step before while the optimizer runs.
            self._norm = float(self._optimizer._global_grad_norm)
            if self.loss_scaler is not None and self._stage == 0:
                self._norm /= self._optimizer.loss_scale
        return self._norm

    def _must_skip(self) -> bool:
        return must_skip(self._grad_norm(), self._run.recovery.skip_grad_norm)

    def _drop_gradients(self) -> None:
        """Drop what stages 1 and 2, with an offloaded optimizer, would add to the next step."""
        if getattr(self._optimizer, "cpu_offload", False):
            for group in self._optimizer.averaged_gradients:
                self._optimizer.averaged_gradients[group] = None

    def _set_initial_state(self, initial: InitialWeights) -> None:
        """Give the masters the unrounded initial weights, and undo the phantom step.

        DeepSpeed makes masters from weights that it has already rounded to bf16 or fp16. And its
        stage 0 in half precision takes an optimizer step on zero gradients while it initializes: at
        a learning rate of 0 that leaves the weights alone, but it counts as an update.
        """
        for fragment in self.fragments():
            if fragment.name in initial:
                # Under stage 3 `initial` has this rank's slice only, which starts where the
                # fragment does.
                start = 0 if self._stage == 3 else fragment.start
                weight = fragment.values["weight"]
                weight.copy_(initial[fragment.name].view(-1)[start : start + weight.numel()])
            for kind in fragment.values.keys() - {"weight"}:
                fragment.values[kind].zero_()
        self.after_load(step_count=0)


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed quietly, and join its process group to ours."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import deepspeed
    import deepspeed.ops

    # Only inference uses this operator, and compiling it would take a minute at every first start.
    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    # Our tests run both optimizers under every ZeRO stage.
    adopt_logger("DeepSpeed", ignored="untested optimizer")
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False
    )
    return deepspeed
