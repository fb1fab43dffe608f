"""A comparison of variants of one model at equal training FLOPs: its file, and the runs it plans.

    name: variants
    experiment: ../experiments/variants.yaml    # relative to this file
    flops: 6e11                 # training FLOPs of every run
    rates: [2e-3, 4e-3, 8e-3]   # every member is trained with each...
    seeds: [1, 2]               # ...and each of these
    settings: [model.d_model=64]                # for all members; optional
    baseline: no-memory         # differences are from this member; optional: the best one
    members:                    # how each member differs from the experiment
      no-memory: [model.memory_length=0]
      transformer-xl: []

A file that extends another keeps what it does not set; its members replace the other's. A cell's
name is cFLOPS-MEMBER-lrRATE-sSEED, so other FLOPs make other runs. Torch-free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.errors import ConfigError
from foundation.settings import parse_config, require_name
from foundation.typed_values import to_tree
from foundation.yaml_files import parse_overrides, read_tree
from pretrain.config.run import RunConfig
from pretrain.scaling.plan import PlannedRun, at_computed_flops, planned_run, varied
from pretrain.sweeps.sweep_file import check_overrides

# Settings that follow from the comparison, so no member may set them.
_PLANNED = ("name", "seed", "optim.steps", "optim.learning_rate", "optim.schedule.warmup_steps")
_PLANNED += ("optim.schedule.decay_steps",)
_WITH_INTERVALS = ("evaluation", "checkpoint")  # planned, too, unless they are given


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The contents of a comparison's file."""

    name: str
    experiment: Path
    flops: float
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    members: Mapping[str, tuple[str, ...]]
    settings: tuple[str, ...] = ()
    baseline: str = ""

    def __post_init__(self) -> None:
        require_name("name", self.name)
        for member in self.members:
            require_name("members", member)
        if len(self.members) < 2:
            raise ConfigError(f"found {len(self.members)} members, expected two or more")
        if self.baseline not in ("", *self.members):
            raise ConfigError(
                f"baseline={self.baseline}: expected one of {', '.join(self.members)}"
            )
        for name, values, least in (("rates", self.rates, 1e-300), ("seeds", self.seeds, 0)):
            if not values or min(values) < least or len({*values}) < len(values):
                raise ConfigError(
                    f"{name}={list(values)}: expected one or more different numbers, none negative"
                )
        for setting in (
            *self.settings,
            *(setting for item in self.members.values() for setting in item),
        ):
            if setting.partition("=")[0] in _PLANNED:
                raise ConfigError(f"{setting} follows from flops, rates and seeds; leave it out")


def read_comparison(path: Path, overrides: Sequence[str] = ()) -> Comparison:
    """Return the comparison in a file, with further settings of all members."""
    tree = read_tree(path, whole="members", relative="experiment")
    members = tree.get("members")
    for member, settings in members.items() if isinstance(members, dict) else ():
        check_overrides(f"{path}: members.{member}", settings)
    check_overrides(f"{path}: settings", tree.get("settings", []))
    comparison = parse_config(Comparison, tree, str(path))
    return replace(comparison, settings=(*comparison.settings, *overrides))


def plan_members(comparison: Comparison, experiment: Path) -> list[PlannedRun]:
    """Return every member at every rate and seed, with the steps that its FLOPs pay for.

    Members take turns, so that whatever slows the machine for a while slows all of them.
    """
    budget = f"c{comparison.flops:.3g}".replace("+", "")
    members = {f"{budget}-{name}": item for name, item in comparison.members.items()}
    rates = {f"lr{rate:g}": [f"optim.learning_rate={rate!r}"] for rate in comparison.rates}
    seeds = {f"s{seed}": [f"seed={seed}"] for seed in comparison.seeds}
    runs = varied(experiment, comparison.settings, [members, rates, seeds])
    runs.sort(key=lambda run: (run.seed, run.optim.learning_rate))
    flops, planned = comparison.flops, []
    for run in runs:
        member = member_name(run.name)
        facts = {"budget": flops, "baseline": float(member == comparison.baseline)}
        item = planned_run(at_computed_flops(run, flops), facts)
        given = (*comparison.settings, *comparison.members[member])
        tree, asked = to_tree(item.run), parse_overrides(given)
        for section in _WITH_INTERVALS:
            if isinstance(of := asked.get(section), dict) and "interval" in of:
                tree[section]["interval"] = of["interval"]
        planned.append(replace(item, run=parse_config(RunConfig, tree, run.name)))
    return planned


def member_name(cell: str) -> str:
    """Return the member that a cell trains, by the cell's name."""
    return cell.partition("-")[2].rpartition("-lr")[0]
