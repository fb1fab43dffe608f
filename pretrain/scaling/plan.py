"""Plans: cells are settings times values, each at equal tokens or FLOPs, written as a sweep file.

`varied` makes a run of every combination of the values of some axes: learning rates, lengths,
members of a comparison, seeds. `plan_sizes` makes those whose values follow from a budget: shapes
around its optimum, with a rule's rate and batch.
"""

import functools
import itertools
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import SPLITS
from data_pipeline.lanes.lane_plan import check_lanes
from data_pipeline.lanes.mixture import plan_of
from foundation.errors import ConfigError, DataError
from foundation.settings import differences, load_config
from foundation.typed_values import json_text, to_tree
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import RunCost, computed_step_flops, run_cost
from pretrain.scaling.recipe import FAR_SIZE, Family, at_flops, refuse_unsuited, with_steps
from pretrain.sweeps.sweep_file import FORMAT, Cell, Kind, Sweep

MOST_SIZES = 1000  # of a budget
RATE_FACTORS = (0.5, 2.0)  # of the plan's rate, in runs that check it
CHECKED_BUDGETS = 2  # the smallest: their runs cost least
LARGEST_CHANGE = 1.5  # of rate and batch between the runs of one trunk
TAIL = 5  # parts of a run with the schedule wsd, the last of which decays
TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022; where nothing better is known


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that a plan has made, with its cost and what the sweep file notes about it."""

    run: RunConfig
    cost: RunCost
    facts: Mapping[str, float]
    holdout: bool = False  # to be predicted, not fitted
    starts_from: str = ""  # name of the run that it continues, at the step `starts_at`
    starts_at: int = 0

    @property
    def name(self) -> str:
        return self.run.name


def planned_run(
    run: RunConfig, facts: Mapping[str, float] | None = None, *, holdout: bool = False
) -> PlannedRun:
    """The run, evaluated at its end only and with its last checkpoint kept, and its facts."""
    run = replace(
        run,
        evaluation=replace(run.evaluation, interval=0),
        checkpoint=replace(run.checkpoint, keep_last=1),
    )
    cost = run_cost(run)
    names = ("parameters", "body_parameters", "steps", "tokens", "tokens_per_step", "flops")
    known = {**(facts or {}), **{name: getattr(cost, name) for name in names}}
    known["learning_rate"] = run.optim.learning_rate
    return PlannedRun(run=run, cost=cost, facts=known, holdout=holdout)


# Part of a cell's name -> the overrides that it stands for.
Axis = Mapping[str, Sequence[str]]


def axis(letters: str, setting: str, values: Sequence[float]) -> Axis:
    """The axis of one setting; no part of a name if there is one value."""
    distinct = sorted({*values})
    return {
        f"{letters}{value:g}" if len(distinct) > 1 else "": [f"{setting}={value!r}"]
        for value in distinct
    }


def length_axes(base: RunConfig, segments: Sequence[int], memories: Sequence[int]) -> list[Axis]:
    """Segment lengths at the base's tokens per step, so with other lanes; and memory lengths."""
    if min(segments) < 1 or min(memories) < 0:
        raise ConfigError("--segments must be positive and --memories 0 or more")
    if len({*segments}) * len({*memories}) < 2:
        raise ConfigError("one segment with one memory length leaves nothing to compare; add one")
    of_segments: dict[str, Sequence[str]] = {}
    for segment in sorted({*segments}):
        lanes, rest = divmod(base.tokens_per_step, segment * base.optim.gradient_segments)
        if rest:
            raise ConfigError(
                f"segments of {segment} do not divide the {base.tokens_per_step} tokens of a step; "
                "use divisors of it"
            )
        of_segments[f"t{segment}"] = [f"data.segment_length={segment}", f"data.lanes={lanes}"]
    of_memories = {
        f"m{memory}": [
            f"model.memory_length={json_text(base.model.with_memory(memory).memory_length)}"
        ]
        for memory in sorted({*memories})
    }
    return [of_segments, of_memories]


def varied(experiment: Path, overrides: Sequence[str], axes: Sequence[Axis]) -> list[RunConfig]:
    """Return a run of every combination of the axes' values, the last axis changing first."""
    runs = []
    for parts in itertools.product(*(axis.items() for axis in axes)):
        name = "-".join(filter(None, (part for part, _ in parts)))
        made = [*overrides, *itertools.chain(*(settings for _, settings in parts))]
        run = load_config(RunConfig, experiment, made, overridden_by=f"cell {name}")
        refuse_unsuited(run)
        runs.append(with_vocabulary(replace(run, name=name)))
    return runs


def at_computed_flops(run: RunConfig, flops: float) -> RunConfig:
    """Return the run with the steps that these FLOPs pay for, recomputation and Muon included."""
    return at_flops(run, flops, computed_step_flops(run, 1))


# What makes a cell of a shape and a budget: the whole run, and what else is known about it.
Maker = Callable[[RunConfig, float], tuple[RunConfig, Mapping[str, float]]]


def spread_sizes(
    optimum: Callable[[float], float], num_sizes: int, spread: float
) -> Callable[[float], list[float]]:
    """Return the sizes of a budget: `num_sizes`, `spread` apart around its optimum."""
    if not (1 <= num_sizes <= MOST_SIZES and 1 < spread < math.inf):
        raise ConfigError(
            f"found {num_sizes} sizes {spread:g}x apart, expected 1 to {MOST_SIZES} and a spread "
            "above 1"
        )
    steps = [index - (num_sizes - 1) / 2 for index in range(num_sizes)]
    return lambda budget: [optimum(budget) * spread**step for step in steps]


def plan_sizes(
    family: Family,
    budgets: Sequence[float],
    sizes: Callable[[float], Sequence[float]],
    make: Maker,
    *,
    seeds: Sequence[int],
    holdouts: Mapping[float, float] | None = None,
) -> list[PlannedRun]:
    """Return a run of every size and seed at each budget, and one per hold-out (budget: size)."""
    refuse_unsuited(family.base)
    runs: list[PlannedRun] = []

    def add(shaped: RunConfig, budget: float, marks: Mapping[str, int], held: bool = False) -> None:
        run, facts = make(shaped, budget)
        name = f"c{budget:.3g}-d{run.model.d_model}-l{run.model.num_layers}".replace("+", "")
        for mark, seed in marks.items():
            named = replace(run, name=name + mark, seed=seed)
            runs.append(planned_run(named, {"budget": budget, **facts}, holdout=held))

    for budget in budgets:
        wanted = sizes(budget)
        shaped = [family.nearest(size, FAR_SIZE) for size in wanted]
        distinct = list({run_cost(run).parameters: run for run in shaped}.values())
        if len(distinct) < len(wanted):
            raise ConfigError(
                f"at {budget:.3g} FLOPs only {len(distinct)} of {len(wanted)} sizes from "
                f"{min(wanted):.3g} to {max(wanted):.3g} parameters are different legal shapes; "
                "use a larger --spread, fewer sizes, or a base with smaller heads"
            )
        for run in distinct:
            add(run, budget, {f"-s{seed}" if len(seeds) > 1 else "": seed for seed in seeds})
    for budget, size in (holdouts or {}).items():
        add(family.nearest(size), budget, {"-holdout": seeds[0]}, held=True)
    return runs


def check_runs(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return runs that show whether the plan can be trusted.

    The smallest and the largest size of the two smallest budgets at RATE_FACTORS of their rates: a
    rate that is wrong at one end tilts a law. And the middle size of the smallest budget with two
    more seeds, where no run has several.
    """
    budgets: dict[float, list[PlannedRun]] = {}
    for item in runs:
        if not item.holdout:
            budgets.setdefault(item.facts["budget"], []).append(item)
    smallest = [budgets[budget] for budget in sorted(budgets)[:CHECKED_BUDGETS]]
    ends = [sizes[end] for sizes in smallest for end in sorted({0, len(sizes) - 1})]
    checks = []
    for item, factor in itertools.product(ends, RATE_FACTORS):
        rate = float(f"{factor * item.run.optim.learning_rate:.4g}")
        optim = replace(item.run.optim, learning_rate=rate)
        run = replace(item.run, name=f"{item.name}-rate{factor:g}", optim=optim)
        facts = {**item.facts, "learning_rate": rate, "rate_factor": factor}
        if "hours" in facts:  # a branch's are those after its start
            facts["hours"] *= item.cost.steps / (item.cost.steps - item.starts_at)
        checks.append(replace(item, run=run, facts=facts, starts_from="", starts_at=0))
    if len({item.run.seed for item in runs}) == 1:
        first = smallest[0][len(smallest[0]) // 2]
        for seed in (first.run.seed + 1, first.run.seed + 2):
            run = replace(first.run, name=f"{first.name}-s{seed}", seed=seed)
            checks.append(replace(first, run=run, starts_from="", starts_at=0))
    return checks


def trunk_sizes(
    sizes: Callable[[float], Sequence[float]], budgets: Sequence[float], spread: float
) -> Callable[[float], list[float]]:
    """The same about each budget, of one row of sizes for all, so that budgets share shapes."""
    smallest, largest = sizes(min(budgets))[0], sizes(max(budgets))[-1]
    count = 2 + math.floor(math.log(largest / smallest) / math.log(spread))
    row = [smallest * spread**index for index in range(count)]
    reach = math.sqrt(spread)
    return lambda budget: [
        size for size in row if sizes(budget)[0] / reach < size < sizes(budget)[-1] * reach
    ]


def as_trunks(runs: Sequence[PlannedRun]) -> tuple[list[PlannedRun], str]:
    """Return runs of one shape and seed as branches of one, and a line on what that saves.

    With the schedule `wsd`, runs of different length are the same until the shorter one decays its
    rate (Hägele et al. 2024). So each continues the next shorter one from there, with the rate,
    lanes and engine of the longest and the warm-up of the shortest, as if it had been trained
    alone.
    """
    chains: dict[tuple[int, int], list[PlannedRun]] = {}
    for item in runs:
        chains.setdefault((item.cost.parameters, item.run.seed), []).append(item)
    made: dict[str, PlannedRun] = {}
    for chain in chains.values():
        chain.sort(key=lambda item: item.facts["budget"])
        longest, before, warmup = chain[-1], None, 0
        settings = [(item.run.data.lanes, item.run.optim.learning_rate) for item in chain]
        for values in zip(*settings, strict=True):
            if max(values) > LARGEST_CHANGE * min(values):
                raise ConfigError(
                    f"--trunks: runs of {longest.name}'s shape would have rates or lanes over "
                    f"{LARGEST_CHANGE:g}x apart by the rule, and a trunk has one of each; use "
                    "--rule base, or --tuned with a sweep of this model's rates"
                )
        for item in chain:
            steps = longest.cost.steps * item.facts["budget"] / longest.facts["budget"]
            run = with_steps(replace(longest.run, name=item.name), TAIL * round(steps / TAIL))
            warmup = warmup or run.optim.schedule.warmup_steps
            schedule = replace(run.optim.schedule, shape="wsd", warmup_steps=warmup)
            saves = run.optim.steps // TAIL
            # A longer run starts at the last save but one.
            every = 0 if item is longest else (TAIL - 1) * saves
            kept = replace(run.checkpoint, interval=saves, keep_every=every)
            run = replace(run, optim=replace(run.optim, schedule=schedule), checkpoint=kept)
            start = before.run.optim.steps * (TAIL - 1) // TAIL if before else 0
            facts = {**longest.facts, "budget": item.facts["budget"]}
            if "hours" in facts:
                facts["hours"] *= (run.optim.steps - start) / longest.cost.steps
            planned = planned_run(run, facts, holdout=item.holdout)
            if before:
                planned = replace(planned, starts_from=before.name, starts_at=start)
            made[item.name] = before = planned
    planned_runs = [made[item.name] for item in runs]
    whole = sum(item.cost.flops for item in planned_runs)
    saved = sum(item.cost.flops * item.starts_at / item.cost.steps for item in planned_runs)
    branches = sum(item.starts_at > 0 for item in planned_runs)
    return planned_runs, (
        f"trunks: {branches} of {len(planned_runs)} runs continue a shorter one of their shape "
        f"before its rate decays: {whole - saved:.3g} FLOPs in place of {whole:.3g}, "
        f"{saved / whole:.0%} "
        "saved; each shape has the rate and lanes of its longest run, the warm-up of its shortest, "
        f"and steps in multiples of {TAIL}"
    )


def optimum_at_ratio(family: Family, tokens_per_parameter: float) -> Callable[[float], float]:
    """Return N(C), at which C FLOPs buy `tokens_per_parameter` N tokens, counted exactly."""

    def optimum(budget: float) -> float:
        size = math.sqrt(budget / (6 * tokens_per_parameter))
        # FLOPs per token change slowly with the size: a few rounds reach this fixed point.
        for _ in range(20):
            cost = run_cost(family.nearest(size))
            per_parameter = cost.flops_per_token / cost.parameters
            before, size = size, math.sqrt(budget / (per_parameter * tokens_per_parameter))
            if math.isclose(before, size, rel_tol=1e-9):
                break
        return size

    return optimum


def corpus_of(base: RunConfig) -> Corpus | None:
    """The corpus of training; None if it is not here."""
    directory = base.data.directory() / SPLITS[0]
    return Corpus.open(directory, False, base.data.cache) if directory.is_dir() else None


def check_corpus(corpus: Corpus, runs: Sequence[PlannedRun]) -> None:
    """Raise DataError if a run would read a token twice, or has a lane with nothing to read."""
    if greedy := [i for i in runs if i.cost.tokens > corpus.num_tokens]:
        worst = max(greedy, key=lambda item: item.cost.tokens)
        raise DataError(
            f"{len(greedy)} of {len(runs)} cells need more tokens than the corpus has "
            f"({corpus.num_tokens:,}); {worst.name} needs {worst.cost.tokens:,}: use fewer FLOPs "
            "or steps, larger sizes, or more text"
        )
    names = {(item.run.data.lanes, item.run.seed): item.name for item in reversed(runs)}
    for (lanes, seed), name in names.items():
        try:
            check_lanes(plan_of(corpus, lanes, seed), corpus.manifest.longest_whole)
        except DataError as error:
            remedy = "in a plan: longer segments, or for sizes --rule base"
            raise DataError(f"{name}: {error}; {remedy}") from error


def _name_in_all(name: str, trees: Sequence[Mapping[str, Any]]) -> str:
    """Return the setting's name, or the mapping's that has it if some trees lack it."""
    parts = name.split(".")
    while True:
        try:
            for tree in trees:
                functools.reduce(operator.getitem, parts, tree)
        except KeyError:  # a setting of a kind of layer, such as model.mixers.KIND
            parts.pop()
        else:
            return ".".join(parts)


def _override(name: str, tree: Mapping[str, Any]) -> str:
    value: Any = functools.reduce(operator.getitem, name.split("."), tree)
    return f"{name}={json_text(value) if isinstance(value, Mapping) else value}"


def make_sweep(
    name: str,
    experiment: Path,
    base: RunConfig,
    runs: Sequence[PlannedRun],
    directory: Path,
    notes: Sequence[str],
    varies: Kind = "sizes",
) -> Sweep:
    """Return the runs as a sweep whose file will be in `directory`.

    Settings that `base` changes in its file become overrides. What one cell overrides all do, so
    that an edit of the experiment changes no planned setting. A vocabulary size that `base` leaves
    unset is read from the corpus when the cell runs.
    """
    plain = to_tree(load_config(RunConfig, experiment))
    vocabulary = base.model.vocab_size
    trees = [
        to_tree(replace(item.run, model=replace(item.run.model, vocab_size=vocabulary)))
        for item in runs
    ]
    differing = dict.fromkeys(name for tree in trees for name in differences(plain, tree))
    names = list(dict.fromkeys(_name_in_all(name, trees) for name in differing))
    relative = Path(os.path.relpath(experiment.resolve(), directory.resolve()))
    cells = [
        Cell(
            name=item.name,
            experiment=relative,
            overrides=tuple(_override(name, tree) for name in names),
            facts=dict(item.facts),
            holdout=item.holdout,
            starts_from=item.starts_from,
            starts_at=item.starts_at,
        )
        for item, tree in zip(runs, trees, strict=True)
    ]
    return Sweep(format=FORMAT, name=name, varies=varies, notes=tuple(notes), cells=tuple(cells))
