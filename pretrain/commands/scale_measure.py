"""`pretrain scale measure`: the probes of variants at their best rates."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.cli import check_least
from foundation.errors import ConfigError
from foundation.files import read_json
from pretrain.commands.scale import add_sweep, swept_runs
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.collect import row_of
from pretrain.scaling.probed import PROBES
from pretrain.scaling.variants import compared_rows
from pretrain.terminal.text import counted

if TYPE_CHECKING:
    from pretrain.evaluation.probes.probe_settings import ProbeSettings

SHORTEST = 8  # tokens between a needle and its question


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale measure`."""
    add_sweep(parser)
    words = "needles at each distance (default %(default)s)"
    parser.add_argument("--trials", type=int, default=64, metavar="N", help=words)
    words = "test recall up to N tokens (default %(default)s)"
    parser.add_argument("--longest-distance", type=int, default=512, metavar="N", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Write probes.html and probes.json of every run that is compared.

    One that has been probed so already is skipped.
    """
    check_least(arguments, 1, "trials")
    check_least(arguments, SHORTEST, "longest_distance")
    sweep, runs, cells = swept_runs(arguments)
    if sweep.varies != "variants":
        raise ConfigError(f"{arguments.sweep} varies {sweep.varies}, expected variants")
    compared = [row for rows in compared_rows(list(map(row_of, cells))).values() for row in rows]

    from data_pipeline.corpora.corpus import Corpus  # late: torch takes seconds
    from pretrain.commands.evaluation_outputs import probe_with_status, write_probes
    from pretrain.distributed.world import destroy_process_group, init_world
    from pretrain.evaluation.evaluate import TrainedScorer
    from pretrain.evaluation.probes.probe_settings import ProbeSettings
    from pretrain.weights.trained_model import load_trained

    world = init_world()
    try:
        for path in (runs / row.name for row in compared):
            config = RunDir.open(path).config
            settings = ProbeSettings(
                names=("needle", "position"),
                memory_length=config.model.longest_memory,
                segment_length=config.data.segment_length,
                lanes=config.evaluation.lanes,
                max_tokens=config.evaluation.max_tokens,
                trials=arguments.trials,
                longest_distance=arguments.longest_distance,
                seed=0,
            )
            if _is_probed(path / PROBES, config.optim.steps, settings):
                continue
            trained = load_trained(path, world.device)
            corpus = Corpus.open(trained.corpus_directory() / "validation")
            results = probe_with_status(TrainedScorer(trained, world), path, corpus, settings)
            found = write_probes(path, path, trained.step, results)["summary"]
            print(f"{path.name}: needle {found['needle_accuracy']:.1%}", flush=True)
    finally:
        destroy_process_group()
    count = counted(len(compared), "run")
    print(f"{count} probed; next: pretrain scale collect {arguments.sweep}")
    return 0


def _is_probed(path: Path, step: int, settings: ProbeSettings) -> bool:
    """Whether the file has these probes of the run after this step."""
    try:
        found = read_json(path)
        wanted = asdict(settings) | {"names": list(settings.names)}
        return found["step"] == step and wanted.items() <= found["settings"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
