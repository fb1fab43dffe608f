"""What is alive while an engine is built and in its backward passes.

Every rank counts the bytes of all tensors that hold as much as one whole parameter, operation by
operation, and compares its fragments with the model built whole. Then it counts the bytes of all
tensors while it trains. It writes OUTPUT/SETTING-RANK.json for each of the settings.
"""

import gc
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_pipeline.lanes.segment_batch import SegmentBatch
from foundation.settings import parse_config
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.engines.engine import Engine
from pretrain.model.memory import Memory
from pretrain.model.transformer_xl import TransformerXL
from pretrain.run import build_engine
from tests.gpu_stubs.accelerator import reduce_as_on_a_gpu
from tests.helpers.forked_ranks import run_ranks

AS_ON_A_GPU = "-gpu"  # ends the names of cells whose gradients are summed so


class LiveTensors(TorchDispatchMode):
    """Within it: `peak` bytes at a time in storages of exactly one of the given sizes, however they
    came about. Without sizes: in all storages, those that were there before included. Tensors on
    `meta` take none; `on_meta` counts these alone, from their start.
    """

    def __init__(self, sizes: set[int] | None, on_meta: bool = False) -> None:
        super().__init__()
        self._sizes, self._on_meta = sizes, on_meta
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._most = 0  # bytes that can be alive
        if sizes is None and not on_meta:
            self._add(each for each in gc.get_objects() if isinstance(each, Tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add(tree_leaves(result))
        return result

    def _add(self, found: Iterable[Any]) -> None:
        for tensor in found:
            if not isinstance(tensor, Tensor) or tensor.is_meta != self._on_meta:
                continue
            storage = tensor.untyped_storage()
            known = self._alive.get(storage._cdata)
            if known is not None and not known[0].expired():
                continue
            if self._sizes is None or storage.nbytes() in self._sizes:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self._most += storage.nbytes()
        if self._most > self.peak:  # some of them may be gone
            self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
            self._most = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._most)


class SentBytes(TorchDispatchMode):
    """Within it: number of `collectives`, and bytes `sent` by a rank on average, in a ring."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._share = (num_ranks - 1) / num_ranks
        self.sent, self.collectives = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            passes, largest = 2 if "allreduce" in str(func) else 1, 0
            for side in args[:2]:
                tensors = (leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor))
                largest = max(largest, sum(tensor.nbytes for tensor in tensors))
            self.sent += passes * largest * self._share
            self.collectives += 1
        return func(*args, **(kwargs or {}))


def measure(run: RunConfig) -> dict[str, Any]:
    """The peak while the run's engine is built, what the whole model takes, and whether its weights
    are as drawn. Then what its passes need.
    """
    world = init_world()
    torch.manual_seed(run.seed)
    whole = dict(TransformerXL(run.model).named_parameters())
    state = torch.get_rng_state()
    counts = {value.numel() for value in whole.values() if value.ndim > 1}
    sizes = {count * width for count in counts for width in (2, 4)}
    with LiveTensors(sizes) as live:
        engine = build_engine(run, world)
    result = {
        "peak": live.peak,
        "largest": 4 * max(value.numel() for value in whole.values()),
        "whole": 4 * sum(value.numel() for value in whole.values()),
        "as_drawn": _is_as_drawn(engine, {name: value.detach() for name, value in whole.items()}),
        "random_state_as_drawn": torch.equal(state, torch.get_rng_state()),
    }
    del whole
    result |= peak_of_training(run, engine)
    del engine
    gc.collect()
    return result


def peak_of_training(run: RunConfig, engine: Engine) -> dict[str, Any]:
    """The bytes of all tensors at the peak of a second step's passes; DeepSpeed's optimizer."""
    slots = accumulation_steps(run, engine.world.world_size)
    lanes = lanes_of_rank(run, engine.world.rank, engine.world.world_size)
    tokens = np.ones((len(lanes), run.lane_tokens_per_step), np.int64)
    batch = SegmentBatch(tokens, tokens, np.zeros_like(tokens, bool), lanes)
    memories: list[Memory | None] = [None] * slots
    peak, collectives = 0, SentBytes(engine.world.world_size)
    for step in (1, 2):
        gc.collect()
        collectives.sent = 0.0
        with LiveTensors(None) as live, collectives:
            for slot, part in enumerate(batch.split(slots)):
                _, memories[slot] = engine.forward_backward(part, memories[slot], step)
        with collectives:
            engine.step(1e-3)
        peak = live.peak
    wrapper = type(engine._optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    name = wrapper.__name__ if wrapper.__module__.startswith("deepspeed.") else ""
    return {"peak_of_training": peak, "optimizer": name, "sent": collectives.sent}


def _is_as_drawn(engine: Engine, whole: dict[str, Tensor]) -> bool:
    """Whether this rank's weights are the drawn ones bit by bit, and all moments zero."""
    seen = 0
    for fragment in engine.fragments():
        values = fragment.values["weight"]
        drawn = whole[fragment.name].view(-1)[fragment.start : fragment.start + values.numel()]
        same = torch.equal(values.detach().view(torch.int32), drawn.view(torch.int32))
        still = not any(bool(fragment.values[kind].any()) for kind in ("exp_avg", "exp_avg_sq"))
        if not (same and still):
            return False
        seen += values.numel()
    return seen > 0 and engine.optimizer_step_count() == 0


def measure_rank(output: Path, name: str, tree: dict[str, Any]) -> int:
    """One rank's result, in a file."""
    torch.set_num_threads(1)
    if name.endswith(AS_ON_A_GPU):
        reduce_as_on_a_gpu()
    result = measure(parse_config(RunConfig, tree, name))
    (output / f"{name}-{init_world().rank}.json").write_text(json.dumps(result))
    destroy_process_group()
    return 0


def measured_by_ranks(
    cells: dict[str, dict[str, Any]], num_ranks: int, output: Path
) -> dict[str, list[dict[str, Any]]]:
    """The findings of every rank in each cell."""
    found = {}
    for name, tree in cells.items():  # each in new processes, where nothing else is alive
        run_ranks(num_ranks, partial(measure_rank, output, name, tree), output)
        paths = [output / f"{name}-{rank}.json" for rank in range(num_ranks)]
        found[name] = [json.loads(path.read_text()) for path in paths]
    return found


# Weights outweigh everything else; the largest bucket is half of the model.
_MODEL = {"vocab_size": 2000, "num_layers": 2, "d_model": 128, "num_heads": 2, "d_inner": 128}
_SHARDED = {"stage3_param_persistence_threshold": 0}
_BUCKET = {"zero_optimization": {**_SHARDED, "reduce_bucket_size": 2000 * 128}}


def zero_cell(stage: int, precision: str, lanes: int = 3, **engine: Any) -> dict[str, Any]:
    """Return the settings of a run whose ranks read a lane in each pass."""
    settings = {"zero_stage": stage, "precision": precision, "deepspeed_extra": _BUCKET, **engine}
    data, settings = {"lanes": lanes, "segment_length": 4}, {"micro_batch_lanes": 1, **settings}
    return {"model": _MODEL, "data": data, "engine": settings}


def sending_cells(lanes: int) -> dict[str, dict[str, Any]]:
    """Return the runs whose sent bytes the table of static costs has."""
    # Without a small bucket the weights stay gathered from the forward to the backward pass.
    whole = {"deepspeed_extra": {"zero_optimization": _SHARDED}}
    cells = {
        f"zero{stage}-{precision}": zero_cell(stage, precision, lanes)
        for stage in (1, 2)
        for precision in ("fp32", "bf16")
    }
    return {**cells, "zero3-fp32": zero_cell(3, "fp32", lanes, **whole)}


def sent_over_minimum(name: str, ranks: list[dict[str, Any]]) -> float:
    """Return the bytes that ranks send in a step, over one reduce-scatter and one all-gather.

    Sums are fp32, weights in the precision; of as many parts as ranks, all but one are another's.
    """
    elements = ranks[0]["whole"] / 4 * (len(ranks) - 1) / len(ranks)
    minimum = elements * (8 if name.endswith("fp32") else 6)
    return round(max(rank["sent"] for rank in ranks) / minimum, 2)
