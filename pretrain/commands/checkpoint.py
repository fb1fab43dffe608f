"""`pretrain checkpoint list | verify RUN`: list or check checkpoints.

`pretrain checkpoint fetch URL RUN` makes a run directory from a mirror.
"""

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foundation.cli import Answer, Program, add_json, targets
from foundation.errors import EXIT_USER_ERROR, printable
from foundation.files import LARGEST_LIST_BYTES, SMALL_FILE_BYTES, read_json
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.verify import MOST_REFUSED_BYTES, steps_that_count, verify_and_keep
from pretrain.errors import CheckpointError, OtherVersionError, PrunedError
from pretrain.rundir.evaluated_text import EvaluatedText
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path
from pretrain.terminal.text import format_number, text_table

EXIT_CORRUPTED = 1
SUMMARIES = {
    "list": "list step, ranks, tokens, validation loss and size of each checkpoint",
    "verify": "read every byte of each checkpoint; exit status 1 if one is corrupted",
    "fetch": "make a run directory from what checkpoint.mirror has uploaded",
}
PROGRAM = Program(
    "pretrain checkpoint",
    "The checkpoints of a run.",
    targets("pretrain.commands.checkpoint:", SUMMARIES),
)


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=run_path, metavar="RUN", help="run, or its name in runs/")
    add_json(parser)


add_verify_arguments = add_list_arguments


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the run's mirror: checkpoint.mirror/NAME")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory to make, or to repair")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint (default: the latest)")


def run_fetch(arguments: argparse.Namespace) -> int:
    """Make the run directory from a checkpoint of the mirror."""
    from pretrain.rundir.restore import restore_run

    step = restore_run(arguments.url, arguments.run, step=arguments.step)
    print(f"{arguments.run} has step {step}; start the run with this run directory to resume it")
    return 0


def run_list(arguments: argparse.Namespace) -> Answer:
    """List the checkpoints; nothing is verified."""
    run_dir = RunDir.open(arguments.run)
    lines = [line for line in run_dir.read_metrics() if line["kind"] == "evaluation"]
    losses = {line["step"]: (line["loss"], line.get("tokens")) for line in lines}
    on_disk = files.steps_on_disk(run_dir.checkpoints)
    texts = {
        (EvaluatedText.of_line(line).part_tokens, line.get("tokens"))
        for line in lines
        if line["step"] in on_disk
    }
    usable = steps_that_count(run_dir.checkpoints)
    checkpoints, left = list[dict[str, Any]](), MOST_REFUSED_BYTES
    for step in on_disk:
        directory = files.step_directory(run_dir.checkpoints, step)
        contents = _contents(directory, min(left, LARGEST_LIST_BYTES))
        if contents["tokens"] is None:
            with contextlib.suppress(OSError):
                left = max(left - (directory / files.INDEX).stat().st_size, SMALL_FILE_BYTES)
        loss, scored = losses.get(step, (None, None))
        measured = {"validation": loss, "validation_tokens": scored}
        checkpoints.append({"step": step, **contents, **measured, "uses": _uses(step, usable)})
    rows = [
        (
            str(checkpoint["step"]),
            str(checkpoint["ranks"] or "?"),
            "unreadable" if checkpoint["tokens"] is None else str(checkpoint["tokens"]),
            _loss_text(checkpoint, with_tokens=len(texts) > 1),
            "?" if checkpoint["bytes"] is None else f"{checkpoint['bytes'] / 2**20:.1f}",
            f"{run_dir.path.name}@{checkpoint['step']}: {', '.join(checkpoint['uses']) or 'none'}",
        )
        for checkpoint in checkpoints
    ]
    table = text_table([("step", "ranks", "tokens", "validation", "MiB", "usable for"), *rows])
    return Answer(table if rows else _none_in(run_dir), checkpoints)


def _loss_text(checkpoint: dict[str, Any], with_tokens: bool) -> str:
    loss, tokens = checkpoint["validation"], checkpoint["validation_tokens"]
    return format_number(loss, ".4f") + (f" on {tokens:,}" if with_tokens and tokens else "")


def _uses(step: int, usable: Sequence[int]) -> list[str]:
    """Return what a checkpoint can be used for, given the steps that count."""
    if step not in usable:
        return []
    resume = "resume" if step == usable[-1] else f"resume --from-step {step}"
    return [resume, "branch", "evaluate", "export", "generate"]


def _none_in(run_dir: RunDir) -> str:
    return printable(f"no checkpoint found in {run_dir.checkpoints}")


def _contents(directory: Path, limit: int) -> dict[str, Any]:
    """Return a checkpoint's size, ranks and tokens; None for those that cannot be read."""
    contents: dict[str, Any] = {"ranks": None, "tokens": None, "bytes": None}
    try:
        contents["bytes"] = sum(path.stat().st_size for path in directory.iterdir())
        index = read_json(directory / files.INDEX, limit)
        return contents | {"ranks": index["world_size"], "tokens": index["tokens_seen"]}
    except (OSError, ValueError, KeyError, TypeError):  # a run may be removing it
        return contents


def run_verify(arguments: argparse.Namespace) -> Answer:
    """Read every checkpoint, and print its line at once; the status is 1 if one is corrupted."""
    run_dir, answers = RunDir.open(arguments.run), list[dict[str, Any]]()
    for step in files.steps_on_disk(run_dir.checkpoints):
        state, problem = "valid", None
        try:
            verify_and_keep(files.step_directory(run_dir.checkpoints, step))
        except PrunedError:
            state = "pruned"  # by the run, which is training
        except OtherVersionError as error:
            state, problem = "of another version", str(error)
        except CheckpointError as error:
            state, problem = "CORRUPTED", str(error)
        answers.append({"step": step, "state": state.lower(), "problem": problem})
        if not arguments.json:
            print(f"step {step}: {state}" + (f"  {problem}" if problem else ""), flush=True)
    states = [answer["state"] for answer in answers if answer["state"] != "pruned"]
    valid = states.count("valid")
    status = EXIT_CORRUPTED if "corrupted" in states else EXIT_USER_ERROR
    return Answer(
        f"{valid} of {len(states)} checkpoints are valid" if states else _none_in(run_dir),
        answers,
        0 if valid == len(states) else status,
    )
