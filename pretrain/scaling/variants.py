"""A comparison of variants of one model at equal training FLOPs: its file, and the runs it needs.

name: variants
experiment: ../experiments/variants.yaml    # relative to this file
flops: 6e11                 # of training, of every run
rates: [2e-3, 4e-3, 8e-3]   # every member is trained with each, with the first seed
seeds: [1, 2]               # the others train each member at its best rate alone
settings: [model.d_model=64]                # of all members; may be left out
members:                    # settings by which each differs from the experiment
  no-memory: [model.memory_length=0]
  transformer-xl: []

A cell's name is cFLOPS-MEMBER-lrRATE-sSEED, so other FLOPs are other runs. Torch-free.
Letters: S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from foundation.errors import ConfigError, DataError
from foundation.settings import MOST, load_config, require_name
from foundation.yaml_files import read_tree
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import computed_flops_of_step, cost_of
from pretrain.scaling.collect import Row
from pretrain.scaling.plan import PlannedRun, planned_run
from pretrain.scaling.probed import PROBED
from pretrain.scaling.recipe import refuse_unsuited, with_steps
from pretrain.scaling.sweep_file import check_overrides

FEWEST_STEPS = 50  # so that whole steps miss the FLOPs by at most 1%
_PLANNED = ("name", "seed", "optim.steps", "optim.learning_rate", "evaluation.interval")
_PLANNED += ("optim.schedule.warmup_steps", "optim.schedule.decay_steps", "checkpoint.interval")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared, and how."""

    name: str
    experiment: Path
    flops: float
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    members: Mapping[str, tuple[str, ...]]
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_name("name", self.name)
        for member in self.members:
            require_name("members", member)
        if not self.flops >= 1:
            raise ConfigError(f"flops={self.flops:g} must be 1 or more")
        if len(self.members) < 2:
            raise ConfigError(f"found {len(self.members)} members, expected two or more")
        if not self.rates or min(self.rates) <= 0 or len({*self.rates}) < len(self.rates):
            raise ConfigError(
                f"rates={list(self.rates)}: expected one or more different positive numbers"
            )
        if not self.seeds or min(self.seeds) < 0 or len({*self.seeds}) < len(self.seeds):
            raise ConfigError(
                f"seeds={list(self.seeds)}: expected one or more different numbers of 0 or more"
            )
        for overrides in (self.settings, *self.members.values()):
            _refuse_planned(overrides)


def _refuse_planned(overrides: Sequence[str]) -> None:
    for each in overrides:
        if each.partition("=")[0] in _PLANNED:
            raise ConfigError(f"{each} follows from flops, rates and seeds; leave it out")


def read_comparison(path: Path) -> Comparison:
    """Return the comparison in a file; ConfigError lists everything that is wrong with it."""
    tree = read_tree(path)
    members = tree.get("members")
    for member, overrides in members.items() if isinstance(members, dict) else ():
        check_overrides(f"{path}: members.{member}", overrides)
    check_overrides(f"{path}: settings", tree.get("settings", []))
    return load_config(Comparison, path)


def member_runs(
    comparison: Comparison, experiment: Path, settings: Sequence[str]
) -> dict[str, RunConfig]:
    """Return every member with the steps that its FLOPs pay for; `settings` replace the file's.

    Steps count all that is computed: also what Muon takes, and what is computed a second time.
    Raises ConfigError for settings that do not go together or follow from the FLOPs, and for too
    few or too many FLOPs.
    """
    _refuse_planned(settings)
    found = {}
    for member, overrides in comparison.members.items():
        changed = [*comparison.settings, *settings, *overrides]
        run = load_config(RunConfig, experiment, changed, overridden_by=f"member {member}")
        refuse_unsuited(run)
        run = with_vocabulary(run)
        steps = round(comparison.flops / computed_flops_of_step(run, 1))
        if steps < FEWEST_STEPS:
            raise ConfigError(
                f"flops={comparison.flops:g} pay for {steps} steps of {run.tokens_per_step:,} "
                f"tokens of {member} ({cost_of(run).parameters:,} parameters), expected at least "
                f"{FEWEST_STEPS}; use more FLOPs or fewer lanes"
            )
        if steps > MOST:
            raise ConfigError(
                f"flops={comparison.flops:g} pay for {steps:.2g} steps of {member}, expected at "
                f"most {MOST:g}; use fewer FLOPs"
            )
        found[member] = with_steps(run, steps)
    return found


def planned_cells(
    comparison: Comparison, runs: Mapping[str, RunConfig], best: Mapping[str, float]
) -> Iterator[PlannedRun]:
    """Yield the runs to train: every rate with the first seed, the best rates with the others.

    Members take turns, so that what slows the machine for a while slows all of them.
    """
    first, *others = comparison.seeds
    tuned = [(member, rate, first) for rate in comparison.rates for member in runs]
    repeated = [
        (member, best[member], seed) for seed in others for member in runs if member in best
    ]
    for member, rate, seed in tuned + repeated:
        run, flops = runs[member], comparison.flops
        optim = replace(run.optim, learning_rate=rate)
        name = cell_name(member, flops, rate, seed)
        yield planned_run(replace(run, name=name, seed=seed, optim=optim), {"budget": flops})


def cell_name(member: str, flops: float, rate: float, seed: int) -> str:
    """Return the name of a cell, in which the member can be found again."""
    return f"c{flops:.3g}-{member}-lr{rate:g}-s{seed}".replace("+", "")


def member_of(cell: str) -> str:
    """Return the member that a cell trains, by the cell's name."""
    return cell.partition("-")[2].rpartition("-lr")[0]


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """The rate of the lowest loss of each member whose runs of the first seed have all ended.

    A member that diverged at every rate has none.
    """
    found = {}
    first = next((row.seed for row in rows if row.seed != ""), "")
    for member in dict.fromkeys(member_of(row.name) for row in rows):
        tuned = [row for row in rows if member_of(row.name) == member and row.seed in (first, "")]
        best = min(tuned, key=_loss_of)
        has_ended = all(row.progress == 1.0 and row.loss != "" for row in tuned)
        if has_ended and math.isfinite(_loss_of(best)):
            found[member] = float(best.learning_rate)
    return found


def compared_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The finished runs of each member at its best rate, one per seed; DataError for none."""
    found = {}
    for member, rate in best_rates(rows).items():
        at_best = [
            row for row in rows if (member_of(row.name), row.learning_rate) == (member, rate)
        ]
        if finished := [row for row in at_best if not row.excluded]:
            found[member] = finished
    if not found:
        raise DataError(
            "no member has ended at all of its rates; let the sweep finish, or run the same "
            "command again to continue it"
        )
    return found


def _loss_of(row: Row) -> float:
    return float(row.loss) if row.loss != "" else math.inf


@dataclass(frozen=True, kw_only=True)
class MemberResult:
    """One member at its best rate; losses are of the validation split, in nats per token."""

    member: str
    first: Row  # of its runs
    losses_S: tuple[float, ...]
    is_edge: bool  # the best rate is the lowest or the highest one tried
    tokens_per_second: float  # the median of all runs of the member, of training alone
    probes: Mapping[str, float]  # the means of the seeds, by column

    @property
    def loss(self) -> float:
        return fmean(self.losses_S)

    @property
    def spread(self) -> float | None:
        """Half the range of the seeds; None with one seed."""
        losses = self.losses_S
        return (max(losses) - min(losses)) / 2 if len(losses) > 1 else None

    def probed(self, name: str) -> dict[int, float]:
        """The values of the columns probes/NAME/NUMBER, by their numbers."""
        start = f"{PROBED}{name}/"
        found = {
            key.removeprefix(start): x for key, x in self.probes.items() if key.startswith(start)
        }
        return {int(key): value for key, value in found.items()}


def results_of(rows: Sequence[Row]) -> list[MemberResult]:
    """The members that can be compared, in their order. DataError if there are none."""
    found = []
    for member, compared in compared_rows(rows).items():
        mine = [row for row in rows if member_of(row.name) == member]
        rates = {float(row.learning_rate) for row in mine if row.learning_rate != ""}
        rate = float(compared[0].learning_rate)
        speeds = [float(row.D) / float(row.seconds) for row in mine if row.seconds]
        shared = [
            name
            for name in compared[0].tasks
            if name.startswith(PROBED) and all(name in row.tasks for row in compared)
        ]
        found.append(
            MemberResult(
                member=member,
                first=compared[0],
                losses_S=tuple(float(row.loss) for row in compared),
                is_edge=len(rates) > 1 and rate in (min(rates), max(rates)),
                tokens_per_second=median(speeds) if speeds else math.nan,
                probes={name: fmean(row.tasks[name] for row in compared) for name in shared},
            )
        )
    return found
