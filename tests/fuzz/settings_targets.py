"""Settings and results: YAML files, tables of runs."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from data_pipeline.config import CorpusConfig
from foundation.settings import load_config
from foundation.typed_values import to_tree
from launcher import cli as launcher
from launcher.slurm.sbatch import Job, render
from pretrain import cli as pretrain
from pretrain.config.cluster import ClusterConfig, NodeRange, load_cluster
from pretrain.config.run import RunConfig
from pretrain.kernels.triton.tiling import kernels_version, tiles_in
from pretrain.scaling.collect import PROBES, probe_columns
from pretrain.scaling.table import read_points
from pretrain.sweeps.sweep_file import read_sweep
from tests.fuzz.target import Target, command

LINES_OF_A_SCRIPT = 24  # at most, besides what a cluster file adds
TINY_MODEL = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_inner": 16, "memory_length": 8}


def settings_of_run(corpus: Path) -> dict[str, Any]:
    return {
        "name": "fuzz",
        "model": TINY_MODEL,
        "data": {"path": str(corpus), "lanes": 2, "segment_length": 8},
        # constant, so that the steps to repeat do not depend on how many there will be
        "optim": {"steps": 3, "learning_rate": 1e-3, "schedule": {"shape": "constant"}},
        "engine": {
            "kind": "torch", "zero_stage": 0, "watchdog_timeout_seconds": 0,
        },
        "checkpoint": {"interval": 2, "storage_patience_seconds": 0},
        "evaluation": {"interval": 2, "lanes": 1, "max_tokens": 20},
        "metrics": {"interval": 1, "tensorboard": False},
    }  # fmt: skip


def settings_targets(directory: Path, experiment: Path, corpus: Path) -> dict[str, Target]:
    """Settings are read as YAML, of which JSON is a part."""
    (directory / "settings").mkdir()

    def settings(path: Path, read: Callable[[Path], object]) -> Target:
        more = {"is_protected": False, "names_files": True}
        return Target(path.parent, path.name, read, yaml.safe_load, **more)

    def target(name: str, tree: Mapping[str, Any], read: Callable[[Path], object]) -> Target:
        path = directory / "settings" / f"{name}.yaml"
        path.write_text(yaml.safe_dump(dict(tree)))
        return settings(path, lambda copy: read(copy / path.name))

    named = {"name": "fuzz", "experiment": str(experiment)}
    sweep = {"format": 1, **named, "grid": {"optim.learning_rate": [1e-3, 2e-3], "seed": [1, 2]}}
    cell = {"name": "x", "experiment": str(experiment), "overrides": ["seed=1"]}
    cells = {"format": 1, "name": "fuzz", "notes": ["a"], "cells": [cell]}
    variants = {**named, "flops": 1e8, "rates": [1e-3, 2e-3], "seeds": [1, 2]}
    variants["members"] = {"short": ["model.memory_length=4"], "long": []}
    text = {"input": ["x"], "output": "y", "threads": 1, "tokenizer": {"kind": "bytes"}}
    full = ClusterConfig(
        gpus_per_node="8", options={"mem": "0", "exclusive": None}, setup=("true",),
        environment={"NCCL_DEBUG": "INFO", "TOKEN": "env:HOME"},
    )  # fmt: skip
    every = to_tree(load_config(RunConfig, experiment))
    return {
        "experiment": target("experiment", settings_of_run(corpus), _read_experiment),
        "parent of an experiment": settings(experiment, _read_extended),
        "every setting": target("every", every, _read_experiment),
        "cluster": target("cluster", to_tree(full), _read_cluster),
        "grid of a sweep": target("grid", sweep, _read_sweep),
        "cells of a sweep": target("cells", cells, _read_sweep),
        "comparison of variants": target("variants", variants, _plan_variants),
        "settings of a corpus": target("corpus", text, partial(load_config, CorpusConfig)),
    }


def _read_experiment(path: Path) -> None:
    load_config(RunConfig, path)
    command(pretrain.main, "describe", path)


def _read_extended(copy: Path) -> None:
    (copy / "child.yaml").write_text("extends: experiment.yaml\nseed: 2\n")
    load_config(RunConfig, copy / "child.yaml")


def _read_cluster(path: Path) -> None:
    """Render a script: every line has to be one that the launcher or `setup` wanted."""
    cluster = load_cluster(path)
    place = Path("/runs/x")
    job = Job(
        name="x", run_dir=place, code=place, python="python3", nodes=NodeRange(1, 2),
        cluster=cluster, attempts_without_progress=3,
    )  # fmt: skip
    expected = len(cluster.options) + len(cluster.environment)
    lines = [line for line in render(job).splitlines() if line not in cluster.setup]
    assert len(lines) <= expected + LINES_OF_A_SCRIPT, lines


def _read_sweep(path: Path) -> None:
    read_sweep(path)
    command(launcher.main, "sweep", "status", path, "--runs-dir", path.parent / "runs")


def _plan_variants(path: Path) -> None:
    output = path.parent / "planned.yaml"
    output.unlink(missing_ok=True)
    plan = ["scale", "plan", path, "--output", output]
    command(pretrain.main, *plan, "optim.schedule.shape=cosine")


def result_targets(directory: Path) -> dict[str, Target]:
    home = directory / "results"
    home.mkdir()
    rows = [{"name": f"r{n}", "N": 1e6 * n, "D": 2e7, "loss": 3.0 / n} for n in range(1, 5)]
    (home / "runs.json").write_text(json.dumps(rows))
    columns = list(rows[0])
    lines = [",".join(columns), *(",".join(map(str, row.values())) for row in rows)]
    (home / "runs.csv").write_text("\n".join(lines) + "\n")
    row = {"capability": [9, 0], "kernel": "forward", "rows": 64, "columns": 64, "warps": 4}
    tiles = [{**row, "head_width": width, "stages": 2} for width in (64, 128)]
    table = {"format": 1, "kernels": kernels_version(), "tiles": tiles}
    (home / "tiles.json").write_text(json.dumps(table))
    needle = {"distance": 8, "accuracy": 0.5, "chance": 0.1}
    position = {"first_positions": [0, 1], "losses": [3.0, 2.5], "tokens": [4, 60]}
    probes = {"step": 3, "probes": {"needle": [needle], "position": [position]}}
    (home / PROBES).write_text(json.dumps(probes))

    def target(name: str, read: Callable[[Path], object], parse: Any = json.loads) -> Target:
        return Target(home, name, lambda copy: read(copy / name), parse, is_protected=False)

    tiles = partial(tiles_in, head_width=128, capability=(9, 0))
    return {
        "probes of a run": Target(home, PROBES, probe_columns, is_protected=False),
        "tiles of the fused kernels": target(
            "tiles.json", lambda path: tiles_in(path, 128, (9, 0))
        ),
        "results as CSV": target("runs.csv", read_points, None),
        "results as JSON": target("runs.json", read_points),
    }
