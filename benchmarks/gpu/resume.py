"""Check that a run saved while it trains, and restored into a new engine, continues bitwise."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.gpu.findings import Context
from benchmarks.gpu.training import Trainer, forget, one_rank, small_run
from foundation.errors import UserError
from pretrain.config.engine import EngineConfig
from pretrain.distributed.world import World

# Name of a cell -> settings of the engine, settings of the model.
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"ZeRO {stage}": ({"zero_stage": stage}, {}) for stage in range(4)},
    "offload": ({"zero_stage": 2, "offload_optimizer": True, "offload_memories": True,
                 "micro_batch_lanes": 2}, {}),
    "ZeRO 3, all of it": ({"zero_stage": 3, "activation_checkpointing": "full",
                           "offload_optimizer": True}, {}),
    "compiled": ({"compile": True}, {"dropout": 0.0, "positions": "rope", "norm": "rmsnorm",
                                     "attention_dropout": 0.0}),
    "hybrid": ({}, {"layer_kinds": ("deltanet", "attention")}),
}  # fmt: skip


def run(context: Context) -> None:
    """Check every cell, also after one has failed."""
    with one_rank() as world:
        for name in CELLS:
            try:
                differences = resumed_differences(name, context, world)
            except (RuntimeError, UserError, AssertionError) as error:
                differences = [f"{type(error).__name__}: {error}"[:300]]
            context.add(name, passed=not differences, differences=differences)


def resumed_differences(name: str, context: Context, world: World) -> list[str]:
    """Return how a restored run differs from the one that continued; [] if it does not."""
    engine, model = CELLS[name]
    run = small_run(context, EngineConfig(**engine), **model)
    directory, half = context.work / name.replace(" ", "-"), context.size(4, 2)
    trainer = Trainer(run, context.corpus, world, directory)
    first = trainer.steps(half)
    trainer.save()
    expected, bits = trainer.steps(half), trainer.bits()
    trainer.finish()
    trainer.engine.close()
    del trainer
    forget(context.device)
    resumed = Trainer(run, context.corpus, world, directory, resumes=True)
    found = resumed.steps(half)
    differences = [] if found == expected else [f"losses {found}, expected {expected}"]
    if resumed.bits() != bits:
        differences.append("weights, moments or memories")
    if not all(math.isfinite(float.fromhex(loss)) for loss in first + expected):
        differences.append(f"losses are not finite: {first + expected}")
    resumed.engine.close()
    return differences
