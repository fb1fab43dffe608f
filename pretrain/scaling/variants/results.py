"""What came out of a comparison: the best rate of each member, and its measurements over the seeds.

Letters: S seeds, X bins of positions in a document. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from data_pipeline.errors import DataError
from pretrain.costs.device_memory import lane_bytes
from pretrain.rundir.metrics_summary import summarize_file
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.speeds import run_speed
from pretrain.scaling.collect import Row, row_of
from pretrain.scaling.variants.comparison import member_of
from pretrain.scaling.variants.probed import read_probed
from pretrain.scaling.which_runs import PlacedCell

FAR = 512  # tokens: a position in a document from which much of it may be out of a short memory


@dataclass(frozen=True, kw_only=True)
class MemberRun:
    """A cell and its run, as far as it has come."""

    member: str
    rate: float
    seed: int
    path: Path
    row: Row

    @property
    def has_ended(self) -> bool:
        """Whether all steps are made and evaluated, with a finite loss or not."""
        return self.row.progress == 1.0 and isinstance(self.row.loss, float)

    @property
    def loss(self) -> float:
        return self.row.loss if isinstance(self.row.loss, float) else math.inf


def read_runs(cells: Sequence[PlacedCell]) -> list[MemberRun]:
    """Return every cell of a comparison."""
    return [
        MemberRun(
            member=member_of(each.cell.name),
            rate=each.config.optim.learning_rate,
            seed=each.config.seed,
            path=each.path,
            row=row_of(each),
        )
        for each in cells
    ]


def best_rates(runs: Sequence[MemberRun]) -> dict[str, float]:
    """Return the rate of the lowest loss of each member whose runs of the first seed have ended.

    A member that diverged at every rate has none.
    """
    found = {}
    for member in dict.fromkeys(run.member for run in runs):
        tuned = [run for run in runs if run.member == member and run.seed == runs[0].seed]
        best = min(tuned, key=lambda run: run.loss)
        if all(run.has_ended for run in tuned) and math.isfinite(best.loss):
            found[member] = best.rate
    return found


def compared_runs(runs: Sequence[MemberRun]) -> dict[str, list[MemberRun]]:
    """Return the finished runs of each member at its best rate, a run per seed.

    DataError if there are none.
    """
    compared = {}
    for member, rate in best_rates(runs).items():
        at_best = [run for run in runs if (run.member, run.rate) == (member, rate)]
        if finished := [run for run in at_best if not run.row.excluded]:
            compared[member] = finished
    if not compared:
        raise DataError(
            "no member has ended at all of its rates; let the sweep finish, or run the same "
            "command again to continue it"
        )
    return compared


def missing_lines(runs: Sequence[MemberRun]) -> list[str]:
    """Return a line for every run that takes no part and every member that cannot be compared."""
    best = best_rates(runs)
    lines = [f"left out: {run.path.name}: {run.row.excluded}" for run in runs if run.row.excluded]
    for member in dict.fromkeys(run.member for run in runs if run.member not in best):
        lines.append(f"left out: {member}: no best rate, since not all of its rates have ended")
    return lines


@dataclass(frozen=True, kw_only=True)
class MemberResult:
    """One member; losses are of the validation split, in nats per token."""

    member: str
    parameters: int
    tokens: int  # that each run trained on
    flops: float  # of each run
    rate: float
    is_edge: bool  # the best rate is the lowest or the highest one tried
    losses_S: tuple[float, ...]
    lane_bytes: int  # what each lane carries
    tokens_per_second: float | None  # the median of all runs of the member
    first_positions_X: tuple[int, ...]  # in a document; each bin ends before the next
    position_losses_X: tuple[float, ...]  # the mean of the seeds
    position_tokens_X: tuple[int, ...]
    needle: Mapping[int, float]  # distance -> accuracy, the mean of the seeds
    needle_chance: float

    @property
    def loss(self) -> float:
        return fmean(self.losses_S)

    @property
    def spread(self) -> float | None:
        """Half the range of the seeds; None with one seed."""
        losses = self.losses_S
        return (max(losses) - min(losses)) / 2 if len(losses) > 1 else None

    @property
    def far_loss(self) -> float | None:
        """The loss of tokens with at least FAR tokens of their document before them."""
        bins = [
            (loss, tokens)
            for first, loss, tokens in zip(
                self.first_positions_X, self.position_losses_X, self.position_tokens_X, strict=True
            )
            if first >= FAR and tokens
        ]
        counted = sum(tokens for _, tokens in bins)
        return sum(loss * tokens for loss, tokens in bins) / counted if counted else None

    @property
    def needle_accuracy(self) -> float | None:
        return fmean(self.needle.values()) if self.needle else None


def results_of(runs: Sequence[MemberRun]) -> list[MemberResult]:
    """Return the members that can be compared, in their order.

    DataError if there are none, or a run has not been probed.
    """
    return [
        _result(found, [run for run in runs if run.member == member])
        for member, found in compared_runs(runs).items()
    ]


def _result(compared: Sequence[MemberRun], of_member: Sequence[MemberRun]) -> MemberResult:
    run, row = compared[0], compared[0].row
    rates = {each.rate for each in of_member}
    probes = [read_probed(each.path) for each in compared]
    first = probes[0]
    shared = [x for x in first.needle if all(x in each.needle for each in probes)]
    speeds = [speed for each in of_member if (speed := _speed(each))]
    return MemberResult(
        member=run.member,
        parameters=int(row.N),
        tokens=int(row.D),
        flops=float(row.C),
        rate=run.rate,
        is_edge=len(rates) > 1 and run.rate in (min(rates), max(rates)),
        losses_S=tuple(each.loss for each in compared),
        lane_bytes=lane_bytes(RunDir(run.path).config),
        tokens_per_second=median(speeds) if speeds else None,
        first_positions_X=first.first_positions_X,
        position_losses_X=tuple(map(fmean, zip(*(each.losses_X for each in probes), strict=False))),
        position_tokens_X=first.tokens_X,
        needle={x: fmean(each.needle[x] for each in probes) for x in shared},
        needle_chance=first.chance,
    )


def _speed(run: MemberRun) -> float | None:
    """Return the speed of training, without evaluations and saves."""
    if not isinstance(run.row.D, int):
        return None
    return run_speed(run.row.D, summarize_file(RunDir(run.path).metrics).seconds)
