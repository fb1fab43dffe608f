"""`pretrain checkpoint list | verify | prune RUN`: what a run has saved, whether it is whole, and what may go."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from data_pipeline.errors import CheckpointError, ConfigError
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.rundir.run_dir import RunDir

EXIT_DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain checkpoint`."""
    parser.add_argument(
        "action",
        choices=("list", "verify", "prune"),
        help="list them, read them all, or remove some",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--keep-last", type=int, help="prune: the newest K stay (default: as the run is configured)"
    )
    parser.add_argument(
        "--keep-every", type=int, help="prune: multiples of N stay too (default: as configured)"
    )
    parser.add_argument(
        "--keep-best",
        type=int,
        help="prune: the K of lowest validation loss stay too (default: same)",
    )
    parser.add_argument("--dry-run", action="store_true", help="prune: only say what would go")


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked; 1 if `verify` found a checkpoint damaged."""
    run_dir = RunDir.open(arguments.run)
    if arguments.action == "prune":
        return _prune(run_dir, arguments)
    if arguments.dry_run or any(number is not None for number in _kept(arguments)):
        raise ConfigError(
            f"--keep-... and --dry-run belong to 'checkpoint prune', not 'checkpoint {arguments.action}'"
        )
    steps = files.steps_on_disk(run_dir.checkpoints)
    if not steps:
        print(f"{run_dir.checkpoints} holds no checkpoint yet")
        return 0
    return _list(run_dir, steps) if arguments.action == "list" else _verify(run_dir, steps)


def _list(run_dir: RunDir, steps: list[int]) -> int:
    print(f"{'step':>10}  {'ranks':>5}  {'tokens':>14}  {'validation':>10}  {'MiB':>9}")
    for step in steps:
        directory = files.step_directory(run_dir.checkpoints, step)
        mebibytes = sum(path.stat().st_size for path in directory.iterdir()) / 2**20
        print(f"{step:10}  {_origin(directory)}  {mebibytes:9.1f}")
    return 0


def _origin(directory: Path) -> str:
    """Ranks, tokens and validation loss, as the index says without being checked."""
    try:
        index = json.loads((directory / files.INDEX).read_text())
        loss = index.get("validation_loss")
        return f"{index['world_size']:5}  {index['tokens_seen']:14}  {'-' if loss is None else f'{loss:.4f}':>10}"
    except (OSError, ValueError, KeyError):
        return f"{'?':>5}  {'unreadable':>14}  {'?':>10}"


def _verify(run_dir: RunDir, steps: list[int]) -> int:
    damaged = 0
    for step in steps:
        try:
            marker.verify(files.step_directory(run_dir.checkpoints, step))
            print(f"step {step}: good", flush=True)
        except CheckpointError as error:
            damaged += 1
            print(f"step {step}: DAMAGED  {error}", flush=True)
    print(f"{len(steps) - damaged} of {len(steps)} checkpoints are good")
    return EXIT_DAMAGED if damaged else 0


def _kept(arguments: argparse.Namespace) -> tuple[int | None, int | None, int | None]:
    return arguments.keep_last, arguments.keep_every, arguments.keep_best


def _prune(run_dir: RunDir, arguments: argparse.Namespace) -> int:
    configured = run_dir.config.checkpoint
    defaults = (configured.keep_last, configured.keep_every, configured.keep_best)
    last, every, best = (
        default if asked is None else asked
        for asked, default in zip(_kept(arguments), defaults, strict=True)
    )
    if last < 1 or every < 0 or best < 0:
        raise ConfigError(
            f"--keep-last {last} must be at least 1, --keep-every {every} and --keep-best {best} at least 0"
        )
    with run_dir.locked():  # a run that trains removes its own
        steps = files.steps_on_disk(run_dir.checkpoints)
        going = files.steps_to_prune(
            steps, last, every, files.best_steps(run_dir.checkpoints, best)
        )
        _refuse_to_remove_the_last_good(run_dir, going)
        if not arguments.dry_run:
            files.prune(run_dir.checkpoints, last, every, best)
    verb = "would remove" if arguments.dry_run else "removed"
    print(f"{verb} the checkpoints of {len(going)} steps: {', '.join(map(str, going)) or 'none'}")
    return 0


def _refuse_to_remove_the_last_good(run_dir: RunDir, going: list[int]) -> None:
    """CheckpointError if checkpoints would go and none of those that stay can be resumed from."""
    if not going:
        return
    staying = [step for step in files.steps_on_disk(run_dir.checkpoints) if step not in going]
    for step in reversed(staying):
        try:
            marker.verify(files.step_directory(run_dir.checkpoints, step))
            return
        except CheckpointError:
            continue
    raise CheckpointError(
        f"{run_dir.checkpoints}: every checkpoint that would stay is damaged (steps {', '.join(map(str, staying))}); "
        "nothing was removed; keep more of them, 'pretrain checkpoint verify' says which are good"
    )
