"""How often the host waits for a value of the device in a step."""

import json
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.config.run import DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.distributed.world import World, destroy_process_group, init_world
from pretrain.run import build_engine
from tests.helpers.forked_ranks import run_ranks

ENGINES = {"torch": {"kind": "torch"}, **{f"zero{n}": {"zero_stage": n} for n in range(4)}}
CELLS: dict[str, dict[str, Any]] = {
    f"{name}-{precision}": {**engine, "precision": precision}
    for name, engine in ENGINES.items()
    for precision in ("fp32", "bf16")
}


class Reads(TorchDispatchMode):
    """Counts reads of single values, by the package that asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"pretrain": 0, "deepspeed": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = traceback.extract_stack()
            if not any(frame.name == "_refuse_unknown" for frame in frames):  # on a CPU only
                files = [frame.filename for frame in frames]
                packages = [name for file in files for name in self.counts if f"/{name}/" in file]
                self.counts[packages[-1]] += 1
        return func(*args, **(kwargs or {}))


def reads_of_a_step(settings: dict[str, Any], world: World) -> dict[str, int]:
    """Return the reads of the fourth step: in the first ones ZeRO-3 compares orders of ranks."""
    model = ModelConfig(vocab_size=37, num_layers=2, d_model=16, num_heads=2, memory_length=4)
    run = RunConfig(
        model=model,
        data=DataConfig(lanes=2, segment_length=4),
        optim=OptimConfig(weight_decay=0.1, clip_norm=0.5),
        engine=EngineConfig(**settings),
    )
    engine = build_engine(run, world)
    tokens_BL = np.arange(8).reshape(2, 4)
    batch = SegmentBatch(tokens_BL, tokens_BL + 1, tokens_BL == 0, range(2))
    memory, reads = None, Reads()
    for step in range(4):
        reads = Reads()
        with reads:
            _, memory = engine.forward_backward(batch, memory, step)
            assert not engine.step(1e-3).skipped
    engine.close()
    return reads.counts


def measured_reads(output: Path) -> dict[str, dict[str, int]]:
    """Return the reads of a step by pretrain and by DeepSpeed in each cell, trained by one rank."""
    run_ranks(1, partial(write_reads, output / "reads.json"), output)
    return json.loads((output / "reads.json").read_text())


def write_reads(path: Path) -> int:
    world = init_world()
    found = {name: reads_of_a_step(settings, world) for name, settings in CELLS.items()}
    path.write_text(json.dumps(found))
    destroy_process_group()
    return 0
