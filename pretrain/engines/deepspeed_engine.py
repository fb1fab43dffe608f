"""DeepSpeed ZeRO 0 to 3 as an Engine; the only module that imports deepspeed.

Under ZeRO-3 each parameter is sharded as soon as it is drawn, so no rank ever holds the model.
As a context, `deepspeed.zero.Init` would draw in the rounded type, so that a run would not start
from the same weights as in other stages. It would also hold a whole module at a time.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from data_pipeline.lanes.segment_batch import SegmentBatch
from foundation.errors import ConfigError
from foundation.settings import assert_never
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import bucket_elements, overlaps_reduction
from pretrain.costs.flops import parameter_counts
from pretrain.distributed.world import World
from pretrain.engines.engine import ModelEngine, StepResult
from pretrain.engines.zero_fragments import ZeroFragments
from pretrain.model.adopted import LanguageModel
from pretrain.model.memory import Memory
from pretrain.model.parameters import dtype_of
from pretrain.optim.optimizers import build_optimizer, clip_gradients, must_skip
from pretrain.optim.parameter_groups import Fragment, FragmentIndex, LayerMeter, set_learning_rate
from pretrain.terminal.log import adopt_logger

# The fp32 weights of a model in half precision, as drawn and before rounding, by name.
InitialWeights = dict[str, Tensor]
# DeepSpeed ignores these sections when it is given an optimizer; the value is what to use instead.
UNUSED_SECTIONS = {"optimizer": "optim.name and its settings", "scheduler": "optim.schedule"}
# The keys of zero_optimization that are allowed: tests train, save and resume bitwise with each.
# Others can make DeepSpeed update weights by its own Adam, swap them to a disk, or (for example
# round_robin_gradients) start from weights other than the drawn ones.
TRIED = {
    "contiguous_gradients", "overlap_comm", "reduce_bucket_size", "reduce_scatter",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
    "stage3_model_persistence_threshold", "stage3_param_persistence_threshold",
    "sub_group_size", "use_multi_rank_bucket_allreduce", "zero_hpz_partition_size",
    "offload_param.device=cpu", "offload_param.pin_memory",
}  # fmt: skip


def build_replicated(
    build: Callable[[], LanguageModel], dtype: torch.dtype, device: torch.device
) -> tuple[LanguageModel, InitialWeights]:
    """Return the model in `dtype` on the device, and the drawn fp32 weights if `dtype` is smaller.

    Host memory needs one fp32 copy of the weights: each is rounded on its way to the device.
    """
    module = build()
    if dtype == torch.float32:
        return module, {}
    initial = {name: parameter.detach() for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, dtype)
    return module, initial


def build_sharded(
    build: Callable[[], LanguageModel],
    partition: Callable[[nn.Parameter], None],
    dtype: torch.dtype,
    world: World,
) -> tuple[LanguageModel, InitialWeights]:
    """Return the model that `build` makes, sharded, and this rank's slice of each unrounded weight.

    Each parameter is drawn whole, equally on every rank, rounded to `dtype` and passed to
    `partition` before the next one is drawn. Slices are on the CPU and cut as ZeRO-3 cuts: one per
    rank, of equal length except for the last ones. If `dtype` is fp32 no slices are returned.
    """
    initial: dict[nn.Parameter, Tensor] = {}
    partitioned: set[nn.Parameter] = set()

    # torch calls this when a module registers a parameter, which our modules do right after drawing
    # it. So at most one whole parameter exists at any time.
    def on_registration(_module: nn.Module, _name: str, parameter: nn.Parameter) -> None:
        # Without data it will be registered again. One of an earlier module is tied to this one.
        if parameter.is_meta or parameter in partitioned:
            return
        partitioned.add(parameter)
        if parameter.dtype != dtype:
            length = -(-parameter.numel() // world.world_size)
            own = parameter.detach().view(-1)[world.rank * length : (world.rank + 1) * length]
            initial[parameter] = own.clone()
            parameter.data = parameter.data.to(dtype)
        partition(parameter)

    handle = register_module_parameter_registration_hook(on_registration)
    try:
        module = build()
    finally:
        handle.remove()
    return module, {
        name: initial[parameter]
        for name, parameter in module.named_parameters()
        if parameter in initial
    }


def deepspeed_settings(
    run: RunConfig, world_size: int, accumulation_steps: int, on_gpu: bool
) -> dict[str, Any]:
    """Return DeepSpeed's settings, derived from the run's, with `engine.deepspeed_extra` merged in.

    Raises ConfigError if `deepspeed_extra` contradicts a derived setting.
    """
    batch = run.data.lanes
    derived: dict[str, Any] = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // (world_size * accumulation_steps),
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": 0.0 if is_unwrapped(run) else run.optim.clip_norm,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # would synchronize the device in every pass
        "zero_allow_untested_optimizer": True,  # DeepSpeed's check rejects subclasses such as ours
        "zero_optimization": {
            "stage": run.engine.zero_stage,
            # True would replace torch.nn.functional.linear in the whole process, so that bf16
            # results would differ between stages.
            "memory_efficient_linear": False,
        },
    }
    if run.engine.offload_optimizer:
        derived["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        # torch's fused AdamW is as fast on the CPU as DeepSpeed's, and needs no compiler.
        derived["zero_force_ds_cpu_optimizer"] = False
    match run.engine.number_format:
        case "fp32":
            pass
        case "bf16":
            # DeepSpeed's check would make the host wait a second time. `must_skip` finds non-finite
            # gradients by their norm, which the host reads anyway.
            derived["bf16"] = {"enabled": True, "check_grad_overflow": False}
        case "fp16":
            # DeepSpeed's scale is constant: `_backward` sets each step's (`loss_scale.py`).
            derived["fp16"] = {"enabled": True, "loss_scale": 1.0}
        case _:
            assert_never(run.engine.number_format)
    if run.engine.number_format != "fp32" and run.engine.zero_stage > 0:
        # Stage 0 supports only the weights' own type here.
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
    if run.engine.zero_stage > 0:
        derived["communication_data_type"] = "fp32"
    for key in UNUSED_SECTIONS.keys() & run.engine.deepspeed_extra.keys():
        raise ConfigError(
            f"engine.deepspeed_extra.{key} has no effect; use {UNUSED_SECTIONS[key]} instead"
        )
    merged = _merged(derived, run.engine.deepspeed_extra, "engine.deepspeed_extra")
    zero = merged["zero_optimization"] = _buckets(run, on_gpu) | merged["zero_optimization"]
    within = zero.get("zero_hpz_partition_size", 1)
    if isinstance(within, int) and within > 1 and world_size % min(within, world_size):
        raise ConfigError(
            "engine.deepspeed_extra.zero_optimization.zero_hpz_partition_size: found "
            f"{within}, expected a divisor of the {world_size} ranks; use a node's ranks"
        )
    return merged


def _buckets(run: RunConfig, on_gpu: bool) -> dict[str, Any]:
    """Return default sizes that follow from the model; `engine.deepspeed_extra` can replace them.

    DeepSpeed's own defaults are for billions of parameters: buckets of 2 GB, and under ZeRO-3 up to
    a billion gathered parameters.
    """
    if run.engine.zero_stage == 0:
        return {}
    overlaps = overlaps_reduction(run, on_gpu)
    settings: dict[str, Any] = {
        # False would reduce each gradient to its owner alone, which halves the traffic. But where
        # stage 2 overlaps, DeepSpeed synchronizes the device before each of these sums, and needs
        # more sums on more ranks, so nothing overlaps (docs/performance.md#gradient-reduction).
        "use_multi_rank_bucket_allreduce": overlaps,
        "reduce_bucket_size": bucket_elements(run),
        "overlap_comm": overlaps,
    }
    if run.engine.zero_stage == 3:
        layer = parameter_counts(run.model).body // run.model.num_layers
        settings |= {
            "stage3_prefetch_bucket_size": layer,
            "stage3_max_live_parameters": 2 * layer + bucket_elements(run),
            "stage3_max_reuse_distance": layer,
        }
    return settings


def check_settings(deepspeed: Any, settings: dict[str, Any]) -> None:
    """Raise a ConfigError of one line if DeepSpeed rejects the settings."""
    try:
        deepspeed.DeepSpeedConfig(copy.deepcopy(settings))
    except (ValueError, AssertionError, deepspeed.DeepSpeedConfigError) as error:
        reason = " ".join(str(error).split("For further information")[0].split())
        raise ConfigError(
            f"engine.deepspeed_extra: DeepSpeed rejects it: {reason}; correct or remove it"
        ) from None


def is_unwrapped(run: RunConfig) -> bool:
    """Return whether DeepSpeed runs our optimizer without a wrapper: at stage 0 in fp32.

    DeepSpeed would then clip gradients without reporting their norm, so the engine clips them.
    """
    return run.engine.zero_stage == 0 and run.engine.number_format == "fp32"


def _merged(derived: dict[str, Any], extra: Mapping[str, Any], where: str) -> dict[str, Any]:
    merged = dict(derived)
    for key, value in extra.items():
        is_section = isinstance(value, Mapping) and isinstance(merged.get(key, {}), dict)
        if is_section and (value or key in merged):
            merged[key] = _merged(merged.get(key, {}), value, f"{where}.{key}")
        elif key in merged and merged[key] != value:
            raise ConfigError(
                f"{where}.{key}: found {value!r}, expected {merged[key]!r}, which follows from the "
                "run's settings; remove it"
            )
        else:
            name = f"{where}.{key}".removeprefix("engine.deepspeed_extra.zero_optimization.")
            if key not in merged and not {name, f"{name}={value}"} & TRIED:
                raise ConfigError(
                    f"{where}.{key}: found {value!r}, which was not tried with exact resumption; "
                    f"remove it, or use, in zero_optimization, {', '.join(sorted(TRIED))}"
                )
            merged[key] = value
    return merged


class DeepSpeedEngine(ModelEngine):
    """ZeRO (Rajbhandari et al. 2020): stage 1 shards moments, 2 also gradients, 3 also weights."""

    def __init__(
        self,
        run: RunConfig,
        build: Callable[[], LanguageModel],
        world: World,
        accumulation_steps: int,
    ) -> None:
        """`build` makes the model; under stage 3 each parameter is sharded once it is drawn."""
        deepspeed = _import_deepspeed(world.device)
        on_gpu = world.device.type == "cuda"
        settings = deepspeed_settings(run, world.world_size, accumulation_steps, on_gpu)
        check_settings(deepspeed, settings)
        super().__init__(run, world, accumulation_steps)
        self._stage = run.engine.zero_stage
        self._slots_done = 0
        dtype = dtype_of(run.engine.number_format)
        if self._stage == 3:
            # After a rewind, the process group that zero_hpz_partition_size had made for the old
            # engine is still set, and DeepSpeed would refuse to make another.
            deepspeed.utils.groups.__dict__["_ZERO_PARAM_INTRA_PARALLEL_GROUP"] = None
            zero = deepspeed.zero.Init(config_dict_or_path=settings)
            module, initial = build_sharded(
                build, lambda parameter: zero._convert_to_zero_parameters([parameter]), dtype, world
            )
            for layer in module.layers if run.engine.compiles or run.model.adopted else ():
                # Gather the layer as a whole: compiled code cannot run hooks of inner modules, and
                # layers of others read parameters of modules that they do not call.
                deepspeed.utils.set_z3_leaf_module(layer, True)
        else:
            module, initial = build_replicated(build, dtype, world.device)
        optimizer = build_optimizer(module, run.optim, run.engine.number_format)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings
        )
        self.module: nn.Module = self._engine.module
        self.module.train()
        self._fragments = ZeroFragments(self.module, self._optimizer, self._stage, world)
        self._set_initial_state(initial)
        self._norm: float | None = None  # the current step's gradient norm; None until it is read
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
        nll_BL, memory = self._read(self._engine, slot, memory, step)
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
        # DeepSpeed may itself skip the update if the norm is not finite, as `must_skip` would.
        self._engine.step()
        skipped = self._must_skip()
        if skipped and getattr(self._optimizer, "cpu_offload", False):
            # With offloading, stages 1 and 2 keep the gradients of a skipped update and would add
            # them to the next one.
            for group in self._optimizer.averaged_gradients:
                self._optimizer.averaged_gradients[group] = None
        layers = self._meter.squares() if measure_layers and not skipped else None
        return self._result(self._grad_norm(), skipped, layers)

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
        # Hooks on gradients refer to the engine from C++, where Python's garbage collector does not
        # look.
        self._engine.destroy()
        if self._stage == 3:  # a global list and a cache of DeepSpeed refer to the modules
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
        """Return the norm of the gradients. Only the first call of a step waits for the device."""
        if self._norm is None:
            # The optimizer asks during its step, when get_global_grad_norm() still returns the
            # previous step's norm.
            scaled = self.loss_scaler is not None and self._stage == 0
            scale = float(self._optimizer.loss_scale) if scaled else 1.0
            self._norm = float(self._optimizer._global_grad_norm) / scale
        return self._norm

    def _must_skip(self) -> bool:
        return must_skip(self._grad_norm(), self._run.recovery.skip_grad_norm)

    def _set_initial_state(self, initial: InitialWeights) -> None:
        """Copy the unrounded initial weights into the masters, and clear moments and step count.

        DeepSpeed makes masters from weights that are already rounded to bf16 or fp16. And at stage
        0 in half precision it takes an optimizer step on zero gradients while it initializes. With
        a learning rate of 0 the weights stay, but the step is counted.
        """
        for fragment in self.fragments():
            if fragment.name in initial:
                # Under stage 3 `initial` has only this rank's slice, which starts at the fragment.
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
    import deepspeed.runtime.compiler

    # Only inference uses this operator. Otherwise DeepSpeed would compile it at the first start on
    # each machine, which takes a minute.
    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    # DeepSpeed imports its own Muon, which no run uses. That compiles functions at import, and to
    # import torch's compiler for it takes longer than all other imports together.
    deepspeed.runtime.compiler.__dict__["compile"] = lambda: lambda function: function
    # DeepSpeed warns about optimizers that it has not tested. Our tests run ours under every stage.
    adopt_logger("DeepSpeed", ignored="untested optimizer")
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False
    )
    return deepspeed
