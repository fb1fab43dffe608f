"""How ranks sum gradients in a backward pass: waits of the host, collectives, bytes.

DeepSpeed's stages run with gloo on 2, 4 and 8 ranks and an accelerator that counts. Its partition
rule gives the same numbers for any model and number of ranks:

* parameters of a group stand in one vector, padded to a multiple of 2 ranks, one equal part each;
* in the backward pass gradients fill a bucket, which is summed when the next one does not fit;
* summed to its owner (`reduce`), a bucket takes a collective for each rank that owns a part of it,
  and before each one DeepSpeed 0.19.8 synchronizes the device: nothing overlaps;
* summed to all (`all-reduce`) it takes one, behind the backward pass, with twice the bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.meta import meta_as_gpu, model_on_meta, trained_on_meta
from data_pipeline.lanes.segment_batch import SegmentBatch
from foundation.settings import parse_config
from pretrain.config.run import RunConfig, lanes_of_rank
from pretrain.costs.device_memory import bucket_elements
from pretrain.costs.flops import parameter_counts
from pretrain.distributed.world import World, destroy_process_group, init_world
from pretrain.optim.parameter_groups import parameter_groups
from pretrain.run import build_engine
from tests.gpu_stubs.accelerator import reduce_as_on_a_gpu
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.live_tensors import SentBytes

RANKS = (2, 4, 8)  # numbers of ranks that run and are counted
MANY_RANKS = (64, 512)  # numbers of ranks whose counts are computed
MODEL = {"vocab_size": 300, "num_layers": 4, "d_model": 64, "num_heads": 2, "d_inner": 128}
BUCKET = 20_000  # elements; the largest parameter has 19,200
REDUCTION_COUNTS = ("synchronizations", "collectives", "bytes per parameter")
ROOTED = {"use_multi_rank_bucket_allreduce": False}  # sums each bucket to its owners
CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero{stage}": (stage, {}) for stage in (1, 2, 3)},
    "zero2-reduce": (2, ROOTED),
}


def cell(stage: int, **zero: Any) -> RunConfig:
    """Return a run in bf16 with many buckets."""
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": BUCKET, **zero}
    tree = {
        "model": MODEL,
        "data": {"lanes": max(RANKS), "segment_length": 4},
        "engine": {
            "zero_stage": stage,
            "precision": "bf16",
            "deepspeed_extra": {"zero_optimization": zero},
        },
    }
    return parse_config(RunConfig, tree, f"zero{stage}")


def measured_reductions(output: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return by cell and ranks what the backward pass of a rank waits for and sends."""
    reductions: dict[str, dict[str, dict[str, float]]] = {name: {} for name in CELLS}
    for ranks in RANKS:
        path = output / f"reductions-{ranks}.json"
        run_ranks(ranks, partial(write_reductions, path), output)
        for name, counts in json.loads(path.read_text()).items():
            reductions[name][f"{ranks}"] = counts
    return reductions


def write_reductions(path: Path) -> int:
    """Count as one rank; the first one writes the file."""
    torch.set_num_threads(1)
    world, counts = init_world(), reduce_as_on_a_gpu().counts
    found = {
        name: _counted(cell(stage, **zero), world, counts) for name, (stage, zero) in CELLS.items()
    }
    if world.is_main:
        path.write_text(json.dumps(found))
    destroy_process_group()
    return 0


def _counted(run: RunConfig, world: World, counts: Counter[str]) -> dict[str, float]:
    """Return the counts of the third step: in the first ones ZeRO-3 learns the order of modules."""
    engine = build_engine(run, world)
    lanes = lanes_of_rank(run, world.rank, world.world_size)
    tokens_BL = np.ones((len(lanes), run.lane_tokens_per_step), np.int64)
    batch = SegmentBatch(tokens_BL, tokens_BL, np.zeros_like(tokens_BL, bool), lanes)
    memory, waits, sent = None, 0, SentBytes(world.world_size)
    for step in range(3):
        counts.clear()
        sent = SentBytes(world.world_size)
        with sent:
            _, memory = engine.forward_backward(batch, memory, step)
        waits = counts["synchronize"]
        engine.step(1e-3)
    engine.close()
    return _counts(waits, sent.collectives, sent.sent / parameter_counts(run.model).total)


def computed_reductions(run: RunConfig, ranks: int) -> dict[str, dict[str, float]]:
    """Return what `_counted` would count under ZeRO-2, computed by DeepSpeed's partition rule."""
    buckets, share = owners_of_buckets(run, ranks), (ranks - 1) / ranks
    num_owners = sum(map(len, buckets))
    return {
        # The device is synchronized once more when all sums are on their way.
        "all-reduce": _counts(1, len(buckets), 8 * share),
        "reduce": _counts(1 + num_owners, num_owners, 4 * share),
    }


def _counts(synchronizations: int, collectives: int, sent: float) -> dict[str, float]:
    counts = (synchronizations, collectives, round(sent, 2))
    return dict(zip(REDUCTION_COUNTS, counts, strict=True))


def owners_of_buckets(run: RunConfig, ranks: int) -> list[set[int]]:
    """Return the ranks that own a part of each bucket of a backward pass."""
    module, order = model_on_meta(run.model), []
    owners: dict[nn.Parameter, range] = {}
    for group in parameter_groups(module, run.optim):
        part = 2 * -(-num_elements(group["params"]) // (2 * ranks))
        start = 0
        for parameter in group["params"]:
            last = start + parameter.numel() - 1
            owners[parameter] = range(start // part, last // part + 1)
            start = last + 1
            parameter.register_post_accumulate_grad_hook(order.append)
    with meta_as_gpu():
        for _ in trained_on_meta(module, run.data.segment_length, lanes=1):
            pass
    buckets: list[set[int]] = [set()]
    elements, most = 0, bucket_elements(run)
    for parameter in order:
        if elements + parameter.numel() > most:
            buckets.append(set())
            elements = 0
        elements += parameter.numel()
        buckets[-1].update(owners[parameter])
    return buckets


def num_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of elements of all of them."""
    return sum(parameter.numel() for parameter in parameters)
