"""DeepSpeed ZeRO 0 to 3 behind the Engine protocol; the only module that imports deepspeed.

It reads internals of DeepSpeed 0.19.8 (`fragments`): the version is pinned, and tests check every stage against plain
torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.lanes.lane_stream import SegmentBatch
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World
from pretrain.engines.deepspeed_settings import checked, deepspeed_config, is_plain
from pretrain.engines.engine import (
    Memory,
    StepResult,
    batch_tensors,
    clip_gradients,
    dropout_stream,
    evaluate_module,
    loss_scaler_of,
    replicated_fragment,
    step_result,
)
from pretrain.engines.precision import DTYPES
from pretrain.engines.zero3_init import build_sharded
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.fragments import Fragment, FragmentIndex, create_moments, fragment_of
from pretrain.optim.groups import build_optimizer, is_harmful
from pretrain.optim.layer_norms import LayerMeter


class DeepSpeedEngine:
    """The model under ZeRO (Rajbhandari et al. 2020): stage 1 shards the moments, 2 also gradients, 3 also weights."""

    def __init__(
        self,
        run: RunConfig,
        build: Callable[[], TransformerXL],
        world: World,
        accumulation_steps: int,
    ) -> None:
        """`build` makes the model; under stage 3 its parameters are spread over the ranks while it does."""
        deepspeed = _import_deepspeed(world.device)
        config = checked(deepspeed, deepspeed_config(run, world.world_size, accumulation_steps))
        self.world = world
        self._run = run
        self._accumulation_steps = accumulation_steps
        self._slots_done = 0
        self.loss_scaler = loss_scaler_of(run)
        module, initial = _built(build, run, world, deepspeed, config)
        optimizer = build_optimizer(module, run.optim)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config
        )
        self.module: nn.Module = self._engine.module
        self.module.train()
        self._names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._start_from(initial)
        self._plain_norm: Tensor | None = (
            None  # of the step in hand, where DeepSpeed does not compute it
        )
        optimizer.refuses = self._gradients_are_harmful
        names = list(self._names.values())
        optimizer.placement = FragmentIndex(
            self.fragments(), names, is_sharded=run.engine.zero_stage > 0
        )
        self._meter = optimizer.meter = LayerMeter(names)

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        tokens_BL, targets_BL, starts_BL = batch_tensors(slot, self.world.device)
        dropout = dropout_stream(self._run, slot, step)
        nll_BL, memory = self._engine(tokens_BL, targets_BL, memory, starts_BL, dropout=dropout)
        loss = nll_BL.mean()
        self._backward(loss)
        self._slots_done += 1
        if self._slots_done < self._accumulation_steps:
            self._engine.step()  # counts the micro-batch; updates nothing before the boundary
        assert memory is not None
        return loss.detach(), memory

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        assert self._slots_done == self._accumulation_steps, "step() before every slot has run"
        self._slots_done = 0
        for group in self._base_optimizer.param_groups:
            group["lr"] = learning_rate
        self._plain_norm = (
            clip_gradients(self.module, self._run.optim) if is_plain(self._run) else None
        )
        self._meter.begin(measure_layers)
        self._engine.step()
        # DeepSpeed itself leaves a step out whose norm is no number, and calls that norm infinite.
        skipped = self._gradients_are_harmful()
        if skipped:
            self._forget_gradients()
        layers = self._meter.take() if measure_layers and not skipped else None
        return step_result(self._grad_norm(), skipped, layers, self.loss_scaler)

    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int
    ) -> tuple[Tensor, Memory]:
        return evaluate_module(self.module, batch, memory, memory_length, self.world.device)

    def optimizer_step_count(self) -> int:
        return int(next(iter(self._base_optimizer.state.values()))["step"])

    def fragments(self) -> Iterator[Fragment]:
        stage = self._run.engine.zero_stage
        if stage == 3:
            return self._fragments_of_stage_3()
        if stage > 0:
            return self._fragments_of_stages_1_and_2()
        return self._fragments_of_stage_0()

    def after_load(self, step_count: int) -> None:
        for state in self._base_optimizer.state.values():
            state["step"].fill_(step_count)
        self._write_weights_from_masters()

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self._optimizer, "optimizer", self._optimizer)

    def _backward(self, loss: Tensor) -> None:
        if self.loss_scaler is not None:
            self.loss_scaler.observe(loss)
            self._optimizer.loss_scale = self.loss_scaler.scale
            if self._run.engine.zero_stage == 0:  # there DeepSpeed only divides by the scale
                loss = loss * self.loss_scaler.scale
        self._engine.backward(loss)

    def _grad_norm(self) -> Tensor | float:
        if self._plain_norm is not None:
            return self._plain_norm
        norm = self._optimizer._global_grad_norm
        scaled = self.loss_scaler is not None and self._run.engine.zero_stage == 0
        return norm / self._optimizer.loss_scale if scaled else norm

    def _forget_gradients(self) -> None:
        """With the optimizer on the CPU, stages 1 and 2 would add those of a step left out to the next step's."""
        if getattr(self._optimizer, "cpu_offload", False):
            for group in self._optimizer.averaged_gradients:
                self._optimizer.averaged_gradients[group] = None

    def _gradients_are_harmful(self) -> bool:
        return is_harmful(self._grad_norm(), self._run.recovery.skip_grad_norm)

    def _start_from(self, initial: Mapping[str, Tensor]) -> None:
        """Give the fp32 masters the initial weights unrounded, and undo the step some stages take while they set up.

        That step, at a learning rate of 0, leaves weights as they are.
        """
        for fragment in self.fragments():
            if fragment.name in initial:
                drawn, count = initial[fragment.name].view(-1), fragment.values["weight"].numel()
                start = (
                    0 if self._run.engine.zero_stage == 3 else fragment.start
                )  # there it is this rank's part alone
                fragment.values["weight"].copy_(drawn[start : start + count])
            fragment.values["exp_avg"].zero_()
            fragment.values["exp_avg_sq"].zero_()
        self.after_load(step_count=0)

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._base_optimizer.state[master]
        create_moments(state, master.data)
        return state

    def _fragments_of_stage_0(self) -> Iterator[Fragment]:
        for weight, master in self._weights_and_masters():
            yield replicated_fragment(
                self._names[id(weight)], master, self._moments(master), self.world
            )

    def _weights_and_masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Stage 0: in fp32 a parameter is its own master; otherwise DeepSpeed keeps fp32 copies in the same order."""
        if is_plain(self._run):
            for parameter in self.module.parameters():
                yield parameter, parameter
        else:
            for weights, masters in zip(
                self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True
            ):
                yield from zip(weights, masters, strict=True)

    def _fragments_of_stages_1_and_2(self) -> Iterator[Fragment]:
        """Each rank holds a slice of every group's flat vector; `_hp_mapping` says what of a weight lies in it."""
        flat = getattr(self._optimizer, "bit16_groups", None) or self._optimizer.bf16_groups
        masters = getattr(self._optimizer, "single_partition_of_fp32_groups", None)
        masters = masters if masters is not None else self._optimizer.fp32_groups_flat_partition
        for weights, master in zip(flat, masters, strict=True):
            moments = self._moments(master)
            for weight in weights:
                mapping = weight._hp_mapping
                if mapping is None:  # lies wholly on other ranks
                    continue
                place, count = (
                    mapping.get_hp_fragment_address().start,
                    mapping.get_hp_fragment_address().numel,
                )
                start = mapping.lp_fragment_address.start
                yield fragment_of(self._names[id(weight)], start, master, moments, place, count)

    def _fragments_of_stage_3(self) -> Iterator[Fragment]:
        """Each rank holds one slice of every weight, padded to equal length; the padding is no part of a fragment."""
        rank = self.world.rank
        for weights, master in zip(
            self._optimizer.fp16_groups, self._optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            moments = self._moments(master)
            place = 0
            for weight in weights:
                part = weight.partition_numel()
                start = rank * part
                count = max(0, min(part, weight.ds_numel - start))
                if count:
                    yield fragment_of(self._names[id(weight)], start, master, moments, place, count)
                place += part

    def _write_weights_from_masters(self) -> None:
        stage = self._run.engine.zero_stage
        if stage == 3:
            self._write_stage_3_weights()
        elif stage > 0:
            self._optimizer.update_lp_params()
        elif not is_plain(self._run):
            for weight, master in self._weights_and_masters():
                weight.data.copy_(master.data)

    def _write_stage_3_weights(self) -> None:
        optimizer = self._optimizer
        optimizer.checkpoint_event_prologue()
        for group, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            optimizer.fp16_partitioned_groups_flat[group].data.copy_(master.data)
            pieces = optimizer.unflatten(
                optimizer.fp16_partitioned_groups_flat[group],
                optimizer.fp16_partitioned_groups[group],
            )
            for weight, piece in zip(optimizer.fp16_partitioned_groups[group], pieces, strict=True):
                weight.data = piece.data
        optimizer.checkpoint_event_epilogue()


def _built(
    build: Callable[[], TransformerXL],
    run: RunConfig,
    world: World,
    deepspeed: Any,
    config: dict[str, Any],
) -> tuple[TransformerXL, dict[str, Tensor]]:
    """The model and, where the run rounds it, what was drawn: all of it, or under stage 3 this rank's part."""
    if run.engine.zero_stage == 3:
        # Not entered as a context: that would draw in the rounded type, which gives other numbers.
        zero = deepspeed.zero.Init(config_dict_or_path=config)
        dtype = DTYPES[run.engine.precision]
        return build_sharded(
            build, lambda parameter: zero._convert_to_zero_parameters([parameter]), dtype, world
        )
    module = build()
    if run.engine.precision == "fp32":
        return module, {}
    return module, {
        name: parameter.detach().clone() for name, parameter in module.named_parameters()
    }


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed quietly, without compiling its shared-memory operator (only an inference call uses it)."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False
    )
    return deepspeed
