"""A run's past as its directory has it, thinned to what a chart can show. Torch-free.

The size of a history does not grow with the run. B marks buckets: stretches of equally many steps.
"""

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import DataError, printable
from pretrain.checkpoint.verify import latest_step
from pretrain.config.run import RunConfig
from pretrain.costs.flops import model_in_words
from pretrain.reporting.results import RunResults, results_of
from pretrain.rundir.evaluated_text import EvaluatedText
from pretrain.rundir.events import Event, Published, ResumeFrom, Rewind, TrainingBegan
from pretrain.rundir.history import Interruption, find_events, interruptions, last_event, time_spent
from pretrain.rundir.metric_names import smoothed_loss
from pretrain.rundir.metrics_file import (
    MetricsSummary,
    TimeSpent,
    latest_measurements,
    read_measurements,
    summarize,
)
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_step import run_step

MOST_BUCKETS = 1500  # a run of no more steps is kept whole
logger = logging.getLogger(__name__)

Line = Mapping[str, Any]
PartTokens = tuple[int, ...]  # of an `EvaluatedText`: which text a loss rests on


@dataclass(frozen=True)
class Measurements:
    """What is kept of metrics.jsonl; sums and counts are of all steps.

    Arrays have the buckets that have losses.
    """

    train: list[Line]  # of each bucket the last one, and those that stand out
    evaluations: list[Line]
    loss_steps_B: np.ndarray  # the last step with a loss
    loss_sums_B: np.ndarray
    num_losses_B: np.ndarray
    num_skipped: int
    spent: TimeSpent


def thinned(
    measurements: Iterable[Line], last_step: int, most_buckets: int = MOST_BUCKETS
) -> Measurements:
    """Read all measurements once, oldest first, and return what is kept of them.

    A bucket keeps its last line, and the lines of its last interval's end, highest loss, highest
    norm and last skipped step.
    """
    size = max(1, -(-last_step // most_buckets))
    train: list[Line] = []
    evaluations: list[Line] = []
    losses_B3: list[tuple[int, float, int]] = []
    num_skipped, spent = 0, TimeSpent()
    for _, bucket in itertools.groupby(measurements, lambda line: (line["step"] - 1) // size):
        lines: list[Line] = []
        for line in bucket:
            spent.add(line)
            if line["kind"] == "train":
                lines.append(line)
            else:
                evaluations.append(line)
        skipped = [line for line in lines if line["skipped"]]
        ends = [line for line in lines if "tokens_per_second" in line]
        kept = [*lines[-1:], *ends[-1:], *skipped[-1:]]
        for name in ("loss", "grad_norm"):
            measured = [line for line in lines if line[name] is not None]
            kept += sorted(measured, key=lambda line: -line[name])[:1]
        train += sorted({line["step"]: line for line in kept}.values(), key=lambda x: x["step"])
        num_skipped += len(skipped)
        if losses := {x["step"]: x["loss"] for x in lines if x["loss"] is not None}:
            losses_B3.append((max(losses), sum(losses.values()), len(losses)))
    steps_B, sums_B, counts_B = np.array(losses_B3, float).reshape(-1, 3).T
    return Measurements(
        train=train,
        evaluations=evaluations,
        loss_steps_B=steps_B,
        loss_sums_B=sums_B,
        num_losses_B=counts_B.astype(int),
        num_skipped=num_skipped,
        spent=spent,
    )


@dataclass(frozen=True)
class History:
    """A run's measurements, thinned, and events, oldest first; X marks the steps of a series."""

    path: Path
    config: RunConfig
    measured: Measurements
    ledger: Sequence[Event]
    last_sign: float  # when the latest measurement was written, seconds since 1970
    saved_step: int  # of the latest checkpoint
    text: PartTokens  # that the results rest on: of RUN@STEP's line, or the run's last evaluation
    is_running: bool = False

    @property
    def train(self) -> Sequence[Line]:
        return self.measured.train

    @property
    def evaluations(self) -> Sequence[Line]:
        """The evaluations on the text of the results: only losses of one text are compared."""
        return self.evaluations_by_text.get(self.text, [])

    @property
    def evaluations_by_text(self) -> dict[PartTokens, list[Line]]:
        """All evaluations; those on the text of the results are the last ones."""
        by_text: dict[PartTokens, list[Line]] = {}
        for line in sorted(self.measured.evaluations, key=lambda line: _text_of(line) == self.text):
            by_text.setdefault(_text_of(line), []).append(line)
        return by_text

    @property
    def name(self) -> str:
        """The run's name, and in brackets its directory's name if that differs."""
        return (
            self.config.name
            if self.path.name in (self.config.name, "")
            else f"{self.config.name} ({printable(self.path.name)})"
        )

    @property
    def about(self) -> str:
        """What figures say of the run: its name, model and optimizer, and the code's version."""
        began = last_event(self.ledger, TrainingBegan)
        code = f", xl-pretrain {began.code}" if began and began.code else ""
        return f"{self.name}: {model_in_words(self.config)}{code}"

    def series(
        self, name: str, lines: Sequence[Line] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that have a measurement, and its values; of train lines by default."""
        points = [
            (line["step"], line[name])
            for line in (self.train if lines is None else lines)
            if line.get(name) is not None
        ]
        steps_X, values_X = np.array(points, float).reshape(-1, 2).T
        return steps_X, values_X

    def layers(self, kind: str) -> list[str]:
        """Return the names of layers, such as `layer.0`, whose norms of this kind were measured."""
        measured = next(
            (line for line in self.train if any(key.startswith(f"{kind}/") for key in line)), {}
        )
        return [key.removeprefix(f"{kind}/") for key in measured if key.startswith(f"{kind}/")]

    @cached_property
    def smooth_loss(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and the smoothed loss at each."""
        measured = self.measured
        return measured.loss_steps_B, smoothed_loss(measured.loss_sums_B, measured.num_losses_B)

    @cached_property
    def summary(self) -> MetricsSummary:
        kept = summarize([*self.train, *self.evaluations])
        return replace(kept, spent=self.measured.spent)

    @property
    def results(self) -> RunResults:
        spent = self.time_spent
        goodput = None if spent is None else spent.goodput
        return results_of(self.config, self.summary, self.ledger, goodput)

    @property
    def step(self) -> int:
        return self.train[-1]["step"]

    @property
    def tokens(self) -> int:
        return self.train[-1]["tokens"]

    @property
    def unsaved(self) -> str:
        """How much is saved, as text, if a restart would repeat more than a checkpoint interval."""
        is_far = self.step - self.saved_step > self.config.checkpoint.interval
        saved = f"only step {self.saved_step:,}" if self.saved_step else "no step"
        return f"{saved} of {self.step:,} is saved" if is_far else ""

    @property
    def failures(self) -> list[Interruption]:
        """Attempts that failed, also those that were killed together with their supervisor."""
        return [
            interruption
            for interruption in interruptions(self.ledger, self.is_running)
            if interruption.is_failure
        ]

    @property
    def rewinds(self) -> list[Rewind]:
        return find_events(self.ledger, Rewind)

    @property
    def time_spent(self) -> TimeSpent | None:
        """How time was spent until the run last wrote; None before its first interval of steps."""
        return time_spent(self.summary, self.ledger, self._end)

    @property
    def progress(self) -> tuple[np.ndarray, np.ndarray]:
        """Times in seconds since the first start, and the run's step then, which rewinds lower."""
        points = [(event.time, step) for event, step in self._steps_of_events]
        points += [(event.time + 0.001, event.to_step) for event in self.rewinds]
        # Evaluations take time, too; other jobs' are later, and have no loss without memory.
        own = (line for line in self.measured.evaluations if "loss_without_memory" in line)
        points += [(line["time"], line["step"]) for line in (*self.train, *own) if "time" in line]
        seconds_X, steps_X = np.array(sorted(points), float).reshape(-1, 2).T
        return seconds_X - self._first_second, steps_X

    @property
    def setbacks(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds since the first start, and steps, of all failed attempts and rewinds."""
        points = [(event.time, event.step) for event in [*self.failures, *self.rewinds]]
        seconds_X, steps_X = np.array(sorted(points), float).reshape(-1, 2).T
        return seconds_X - self._first_second, steps_X

    @property
    def _end(self) -> float:
        return max([self.last_sign, *(event.time for event in self.ledger[-1:])])

    @property
    def _first_second(self) -> float:
        times = [event.time for event, _ in self._steps_of_events]
        return min(times, default=self.last_sign)

    @property
    def _steps_of_events(self) -> list[tuple[Event, int]]:
        """Events with the step that the run was at; a save's event is some steps after its step."""
        timely = [e for e in self.ledger if not isinstance(e, (Published, ResumeFrom))]
        steps = ((event, getattr(event, "step", None)) for event in timely)
        return [(event, step) for event, step in steps if step is not None]


def read_history(path: Path) -> History:
    """Return the past of the run in this directory, or up to its checkpoint RUN@STEP.

    DataError if it has made no step yet.
    """
    directory, until = run_step(path)
    run_dir = RunDir.open(directory)
    latest = next(latest_measurements(run_dir.metrics), {"step": 0})["step"]
    last = math.inf if until is None else until
    lines = (line for line in read_measurements(run_dir.metrics) if line["step"] <= last)
    measured = thinned(lines, latest if until is None else until)
    of_checkpoints = [line for line in run_dir.read_evaluations() if line["step"] <= last]
    evaluations: dict[Any, Line] = {}
    for line in (*of_checkpoints, *measured.evaluations):
        key = line["step"], _text_of(line)
        evaluations[key] = {**evaluations.get(key, {}), **line}
    named = [line for line in of_checkpoints if line["step"] == until]
    text = _text_of([{}, *of_checkpoints, *measured.evaluations, *named][-1])
    measured = replace(measured, evaluations=[evaluations[key] for key in sorted(evaluations)])
    if not len(measured.loss_steps_B):
        raise DataError(f"{path} has no measured step yet; train it first")
    ledger, last_sign = run_dir.ledger.history(), run_dir.metrics.stat().st_mtime
    if until is not None:
        times = [line["time"] for line in measured.train if "time" in line]
        last_sign = times[-1] if times else last_sign
        ledger = [event for event in ledger if event.time <= last_sign]
    return History(
        path=path if until is None else directory.with_name(f"{directory.name}@{until}"),
        config=run_dir.config if until is None else run_dir.settings_at(until - 1),
        measured=measured,
        ledger=ledger,
        last_sign=last_sign,
        saved_step=latest_step(run_dir.checkpoints) if until is None else until,
        text=text,
        # Whether another host's lock is held cannot be known: such a run counts as running.
        is_running=until is not None or any(lock.is_held is not False for lock in run_dir.locks()),
    )


def read_histories(paths: Sequence[Path]) -> list[History]:
    """Return the pasts of these runs; leave out, with a warning, those without a measured step."""
    histories, problems = [], []
    for path in paths:
        try:
            histories.append(read_history(path))
        except DataError as error:
            problems.append(error)
    if problems and not histories:
        raise problems[0]
    for problem in problems:
        logger.warning("left out: %s", problem)
    return histories


def _text_of(line: Line) -> PartTokens:
    return EvaluatedText.of_line(line).part_tokens
