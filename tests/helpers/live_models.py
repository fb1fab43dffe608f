"""How many models of the process's earlier starts are alive when a run builds the next one.

For each wrapper that DeepSpeed has of its optimizers, one of them compiled, it trains an experiment
in the process. Its phases and faults, and a spike of three skipped updates after ten,
make the run start again, until it gives up. Writes live.json: the counts of each cell, a
start each.
"""

import contextlib
import gc
import json
from pathlib import Path
from typing import Any

import pretrain.run
from foundation.settings import load_config
from pretrain.config.resolve import resolve
from pretrain.config.run import RunConfig
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.engines.engine import cpu_has_fp16
from pretrain.errors import TrainingError
from pretrain.model.transformer_xl import TransformerXL
from pretrain.recovery import rewind
from pretrain.run import build_engine, run_training

CELLS = ((0, "bf16", False), (2, "fp16" if cpu_has_fp16() else "fp32", False), (3, "bf16", True))


def write_counts(experiment: Path, output: Path) -> int:
    counts: list[int] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        gc.collect()
        counts.append(sum(type(each) is TransformerXL for each in gc.get_objects()))
        return build_engine(*arguments, **options)

    pretrain.run.build_engine = counting
    rewind.SPIKE_STEPS, rewind.WINDOW, rewind.MOST_SKIPPED = 3, 10, 1.0
    world, found = init_world(600), {}
    for stage, precision, compiles in CELLS:
        name = f"zero{stage}-{precision}" + ("-compiled" if compiles else "")
        settings = [f"engine.zero_stage={stage}", f"engine.precision={precision}"]
        settings.append(f"engine.compile={str(compiles).lower()}")
        config = resolve(load_config(RunConfig, experiment, settings))
        with contextlib.suppress(TrainingError):
            run_training(config, output / name, world)
        found[name], counts[:] = list(counts), []
    (output / "live.json").write_text(json.dumps(found))
    destroy_process_group()
    return 0
