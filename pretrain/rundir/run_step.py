"""RUN@STEP, RUN@best and RUN@last: how a command line names a checkpoint of a run. Torch-free."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from foundation.errors import ConfigError
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.verify import counts, steps_that_count
from pretrain.errors import CheckpointError
from pretrain.rundir.evaluated_text import EvaluatedText
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path

logger = logging.getLogger(__name__)


class RunStep(NamedTuple):
    """A run's directory and the step of one of its checkpoints; None: none was named."""

    run: Path
    step: int | None = None


def run_step(text: str | Path) -> RunStep:
    """Return what RUN, RUN@STEP, RUN@best or RUN@last names; RUN may be a name in runs/.

    `best` is the checkpoint with the lowest validation loss (`_best`), `last` the latest one.
    CheckpointError if the run has no such checkpoint, with a list of its checkpoints; ConfigError
    if RUN is no run. Without `@` no file is read. The checkpoint's contents are not checked.
    """
    head, at, name = str(text).rpartition("@")
    if not at or "/" in name or run_path(text).exists():
        return RunStep(run_path(text))
    run_dir = RunDir.open(run_path(head))
    if name.isdecimal():
        if counts(step_directory(run_dir.checkpoints, int(name))):
            return RunStep(run_dir.path, int(name))
        raise CheckpointError(
            f"{run_dir.path} has no usable checkpoint of step {name}; {_kept(run_dir)}"
        )
    if name not in ("best", "last"):
        raise ConfigError(f"{text}: found {name!r} behind @, expected a step, best or last")
    steps = steps_that_count(run_dir.checkpoints)
    if name == "best":
        steps = _best(run_dir, steps)
    if not steps:
        lacking = "no evaluated checkpoint" if name == "best" else "no checkpoint yet"
        raise CheckpointError(f"{run_dir.path} has {lacking}; {_kept(run_dir)}")
    return RunStep(run_dir.path, steps[-1])


def _best(run_dir: RunDir, steps: Sequence[int]) -> list[int]:
    """Return the step with the lowest loss, in a list; [] if there are no losses.

    Only losses on the same tokens are compared: on the ones that most checkpoints were scored on,
    by the run or `pretrain evaluate`. The best of them is then compared on each longer text that it
    was scored on, too. The last evaluation of a run may read more tokens than the others. Steps
    that are not compared are logged.
    """
    losses: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for line in [*run_dir.read_metrics(), *run_dir.read_evaluations()]:
        if line["kind"] == "evaluation" and line["step"] in steps and line["loss"] is not None:
            losses[EvaluatedText.of_line(line).part_tokens][line["step"]] = line["loss"]
    if not losses:
        return []
    text = max(losses, key=lambda text: (len(losses[text]), sum(text)))
    compared, best = set(losses[text]), min(losses[text], key=losses[text].__getitem__)
    for longer in sorted((own for own in losses if sum(own) > sum(text)), key=sum):
        if best in losses[longer]:
            text, best = longer, min(losses[longer], key=losses[longer].__getitem__)
            compared.update(losses[longer])
    if others := sorted({step for own in losses.values() for step in own} - compared):
        logger.warning(
            "best of %s is step %d, of steps %s by their losses on the same %s tokens; scored on "
            "others: %s; 'pretrain evaluate %s' compares these",
            run_dir.path, best, _listed(sorted(compared)), f"{sum(text):,}", _listed(others),
            " ".join(f"{run_dir.path}@{step}" for step in (best, *others[-2:])),
        )  # fmt: skip
    return [best]


def _kept(run_dir: RunDir) -> str:
    """Return what to name instead, for the end of an error."""
    steps = steps_that_count(run_dir.checkpoints)
    return f"name one of its steps: {_listed(steps)}" if steps else "train until one is saved"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))
