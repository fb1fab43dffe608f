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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from data_pipeline.setting_fields import MOST, require_name
from data_pipeline.yaml_files import read_tree
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import computed_flops_of_step, cost_of
from pretrain.scaling.plan import PlannedRun, planned_run
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
        facts = {"variant_rate": rate, "variant_seed": seed, "variant_flops": flops}
        yield planned_run(replace(run, name=name, seed=seed, optim=optim), facts)


def cell_name(member: str, flops: float, rate: float, seed: int) -> str:
    """Return the name of a cell, in which the member can be found again."""
    return f"c{flops:.3g}-{member}-lr{rate:g}-s{seed}".replace("+", "")


def member_of(cell: str) -> str:
    """Return the member that a cell trains, by the cell's name."""
    return cell.partition("-")[2].rpartition("-lr")[0]
