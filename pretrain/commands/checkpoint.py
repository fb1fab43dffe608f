"""`pretrain checkpoint list | verify | prune RUN`: list, check or delete checkpoints.

`pretrain checkpoint fetch URL RUN` makes a run directory from a mirror.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.cli import Program
from foundation.errors import CheckpointError, ConfigError, printable
from foundation.files import read_json
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.recovery.loss_spikes import SpikeDetector
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path
from pretrain.terminal.text import text_table

EXIT_CORRUPTED = 1
HERE = "pretrain.commands.checkpoint"
PROGRAM = Program(
    "pretrain checkpoint",
    "The checkpoints of a run.",
    {
        "list": (f"{HERE}:list", "list step, ranks, tokens, validation loss and size of each"),
        "verify": (f"{HERE}:verify", "read every byte of each; exit status 1 if one is corrupted"),
        "prune": (f"{HERE}:prune", "delete those that the run's settings, or flags, do not keep"),
        "fetch": (f"{HERE}:fetch", "make a run directory from what checkpoint.mirror has uploaded"),
    },
)


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=run_path, metavar="RUN", help="run, or its name in runs/")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    add_list_arguments(parser)


def add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    add_list_arguments(parser)
    flags = {
        "--keep-last": "keep the latest N",
        "--keep-every": "also keep steps that are multiples of N; 0: none",
    }
    for flag, meaning in flags.items():
        parser.add_argument(
            flag, type=int, metavar="N", help=f"{meaning} (default: the run's setting)"
        )
    parser.add_argument("--dry-run", action="store_true", help="report only, delete nothing")


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the run's mirror: checkpoint.mirror/NAME")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory to make")


def run_fetch(arguments: argparse.Namespace) -> int:
    """Make the run directory from the latest checkpoint of the mirror."""
    from pretrain.rundir.restore import restore_run

    step = restore_run(arguments.url, arguments.run)
    print(f"{arguments.run} has step {step}; start the run with this run directory to resume it")
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """Print a line per checkpoint; nothing is verified."""
    root, steps = _checkpoints(arguments.run)
    losses = {
        line["step"]: f"{line['loss']:.4f}"
        for line in RunDir.open(arguments.run).read_metrics()
        if line["kind"] == "evaluation" and line["loss"] is not None
    }
    rows = [_row(files.step_directory(root, step), step, losses.get(step, "-")) for step in steps]
    if rows:
        print(text_table([("step", "ranks", "tokens", "validation", "MiB"), *rows], left=()))
    return 0


def _row(directory: Path, step: int, loss: str) -> tuple[str, ...]:
    size = "?"
    try:
        size = f"{sum(path.stat().st_size for path in directory.iterdir()) / 2**20:.1f}"
        index = read_json(directory / files.INDEX)
        return str(step), str(index["world_size"]), str(index["tokens_seen"]), loss, size
    except (OSError, ValueError, KeyError, TypeError):
        return str(step), "?", "unreadable", loss, size


def run_verify(arguments: argparse.Namespace) -> int:
    """Read every checkpoint; 1 if one is corrupted."""
    root, steps = _checkpoints(arguments.run)
    valid = 0
    for step in steps:
        try:
            marker.verify(files.step_directory(root, step))
            valid += 1
            print(f"step {step}: valid", flush=True)
        except CheckpointError as error:
            print(f"step {step}: CORRUPTED  {error}", flush=True)
    if steps:
        print(f"{valid} of {len(steps)} checkpoints are valid")
    return 0 if valid == len(steps) else EXIT_CORRUPTED


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete checkpoints that are not to be kept; CheckpointError if no valid one would remain."""
    run_dir = RunDir.open(arguments.run)
    configured = run_dir.config.checkpoint
    last, every = (
        getattr(configured, name) if getattr(arguments, name) is None else getattr(arguments, name)
        for name in ("keep_last", "keep_every")
    )
    if last < 1 or every < 0:
        raise ConfigError(f"--keep-last={last} must be at least 1, --keep-every={every} at least 0")
    root = run_dir.checkpoints
    with run_dir.locked():  # a run that trains prunes its own checkpoints
        steps = files.steps_on_disk(root)
        valid = marker.steps_that_count(root)
        latest = max(valid, default=0)  # from which the run would resume
        detector = SpikeDetector(run_dir.config)
        detector.observe(line for line in run_dir.read_metrics() if line["step"] <= latest)
        suspected = detector.suspected_since
        pruned = files.steps_to_prune(steps, valid, last, every, suspected_since=suspected)
        _require_valid_rest(root, pruned, [step for step in steps if step not in pruned])
        if not arguments.dry_run:
            pruned = files.prune(root, valid, last, every, suspected)
    verb = "would delete" if arguments.dry_run else "deleted"
    print(f"{verb} the checkpoints of {len(pruned)} steps: {', '.join(map(str, pruned)) or 'none'}")
    return 0


def _require_valid_rest(root: Path, pruned: list[int], rest: list[int]) -> None:
    """CheckpointError if checkpoints are to be deleted and the run could resume from no other."""
    if not pruned:
        return
    for step in reversed(rest):
        try:
            marker.verify(files.step_directory(root, step))
            return
        except CheckpointError:
            continue
    raise CheckpointError(
        f"{root}: every checkpoint to keep is corrupted (steps {', '.join(map(str, rest))}); "
        "nothing was deleted. Keep more of them; 'pretrain checkpoint verify' names valid ones"
    )


def _checkpoints(run: Path) -> tuple[Path, list[int]]:
    """The directory of a run's checkpoints and their steps."""
    root = RunDir.open(run).checkpoints
    steps = files.steps_on_disk(root)
    if not steps:
        print(printable(f"no checkpoint found in {root}"))
    return root, steps
