"""Peak memory of training steps, really measured: `python -m tests.helpers.peak_memory '[SETTINGS,
...]'`.

Prints a JSON list with the bytes each run's engine and steps took at their highest, over what the
process held before. Set MALLOC_MMAP_THRESHOLD_=65536 for it, so that the C library returns what is
freed.
"""

import ctypes
import gc
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from data_pipeline.lanes.segment_batch import SegmentBatch
from foundation.settings import parse_config
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.distributed.world import World, destroy_process_group, init_world
from pretrain.model.memory import Memory
from pretrain.run import build_engine

STEPS = 2  # the second is the first with a full memory, and later ones take as much
ATTEMPTS = 20
NEGLIGIBLE = 0.01  # of the peak


def measured_peak(run: RunConfig, world: World) -> int:
    """Bytes at the highest point of building the engine and taking a few steps.

    On a machine short of memory the kernel drops pages of libraries meanwhile, which would count
    as memory that the run does not need: then it is measured again, unless they are few.
    """
    take_steps(run, world)  # what libraries keep for themselves from the first use on
    for _ in range(ATTEMPTS):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        # The kernel's high-water mark starts again from here.
        Path("/proc/self/clear_refs").write_text("5")
        before, library_pages = _status("VmRSS"), _status("RssFile")
        take_steps(run, world)
        peak = _status("VmHWM") - before
        if library_pages - _status("RssFile") <= NEGLIGIBLE * peak:
            return peak
        time.sleep(1.0)
    raise SystemExit(f"the machine is short of memory: libraries were dropped {ATTEMPTS} times")


def take_steps(run: RunConfig, world: World) -> None:
    """Training steps on random tokens, memories carried on."""
    engine = build_engine(run, world)
    generator = np.random.default_rng(0)
    memories: list[Memory | None] = [None] * accumulation_steps(run, world.world_size)
    shape = (run.data.lanes, run.lane_tokens_per_step + 1)
    for step in range(STEPS):
        tokens_BX = generator.integers(0, run.model.vocab_size, shape)
        starts_BL = np.zeros_like(tokens_BX[:, 1:], dtype=bool)
        batch = SegmentBatch(tokens_BX[:, :-1], tokens_BX[:, 1:], starts_BL, range(run.data.lanes))
        for slot, part in enumerate(batch.split(len(memories))):
            _, memories[slot] = engine.forward_backward(part, memories[slot], step)
        engine.step(1e-4)


def main() -> None:
    runs = [parse_config(RunConfig, tree, "settings") for tree in json.loads(sys.argv[1])]
    torch.set_num_threads(1)
    world = init_world()
    print(json.dumps([measured_peak(run, world) for run in runs]))
    destroy_process_group()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    main()
