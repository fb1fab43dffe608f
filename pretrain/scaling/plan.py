"""Plans: cells are settings times values, each at equal tokens or FLOPs, written as a sweep file.

`varied` makes a run of every combination of the values of some axes: learning rates, lengths,
members of a comparison, seeds. `plan_sizes` makes those whose values follow from a budget: shapes
around its optimum, with a rule's rate and batch, and for a machine with the settings that make it
fit. Every number of memory and time is one of `describe`'s: nothing here estimates any.

`--simulate` says how certain a sweep's answers would be: losses of its runs are drawn from an
assumed law with noise and fitted as `scale fit` fits them, and many such sweeps differ by that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import SPLITS
from data_pipeline.lanes.lane_plan import check_lanes
from data_pipeline.lanes.mixture import plan_of
from foundation.errors import ConfigError, DataError
from foundation.settings import differences, load_config
from foundation.typed_values import json_text, to_tree
from pretrain.config.resolve import with_precision, with_vocabulary
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.costs.device_memory import largest_footprint
from pretrain.costs.fitting import advice, cheapest_fit
from pretrain.costs.flops import RunCost, computed_step_flops, pass_lanes, run_cost
from pretrain.costs.hardware import GIB, Hardware
from pretrain.costs.run_time import run_time
from pretrain.scaling.fit import TITLES
from pretrain.scaling.frontier import Line, fit_isoflop
from pretrain.scaling.law import LEVEL, FlopsLaw, Law, LawLine, as_size, fit_flops_law, refit
from pretrain.scaling.recipe import (
    FAR_SIZE,
    Family,
    Rule,
    at_flops,
    power_of_two,
    refuse_unsuited,
    wanted_lanes,
    with_budget,
    with_steps,
)
from pretrain.scaling.table import Array, Points
from pretrain.sweeps.sweep_file import FORMAT, Cell, Kind, Sweep
from pretrain.terminal.text import counted

MOST_SIZES = 1000  # of a budget
RATE_FACTORS = (0.5, 2.0)  # of the plan's rate, at one size of each budget
LARGEST_CHANGE = 1.5  # of rate and batch between the runs of one trunk
TAIL = 5  # of a run with the schedule wsd the last one of so many parts decays
TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022; where nothing better is known
MICRO_BATCHES = 8  # a rank's lanes are 8 to 16 times a power of two, or fewer than 16
ROUNDED = 1 / 8  # most by which whole lanes on every rank may change the rule's batch
# Besiroglu et al. 2024, of the runs of Hoffmann et al. 2022.
ASSUMED = Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
SWEEPS = 100


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
    """A run of every combination of the axes' values, the last axis changing first.

    Raises ConfigError for settings that do not exist or do not go together.
    """
    runs = []
    for parts in itertools.product(*(axis.items() for axis in axes)):
        name = "-".join(filter(None, (part for part, _ in parts)))
        made = [*overrides, *itertools.chain(*(settings for _, settings in parts))]
        run = load_config(RunConfig, experiment, made, overridden_by=f"cell {name}")
        refuse_unsuited(run)
        runs.append(with_vocabulary(replace(run, name=name)))
    return runs


def at_computed_flops(run: RunConfig, flops: float) -> RunConfig:
    """The run with the steps that these FLOPs pay for, with all that is computed.

    So also what Muon takes, and what is computed a second time.
    """
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
    """Return a run of every size and seed at each budget, and one per hold-out (budget: size).

    Raises ConfigError for a base that cannot be scaled, or a budget that is too small for whole
    steps.
    """
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
    """What shows whether the runs can be trusted: rates and seeds beside those of the plan.

    The middle size of each budget at RATE_FACTORS of its rate, which no law is fitted to; and of
    the smallest budget with two more seeds, where no run has several.
    """
    budgets: dict[float, list[PlannedRun]] = {}
    for item in runs:
        if not item.holdout:
            budgets.setdefault(item.facts["budget"], []).append(item)
    middles = [budgets[budget][len(budgets[budget]) // 2] for budget in sorted(budgets)]
    found = []
    for item, factor in itertools.product(middles, RATE_FACTORS):
        rate = float(f"{factor * item.run.optim.learning_rate:.4g}")
        optim = replace(item.run.optim, learning_rate=rate)
        run = replace(item.run, name=f"{item.name}-rate{factor:g}", optim=optim)
        facts = {**item.facts, "learning_rate": rate, "rate_factor": factor}
        if "hours" in facts:  # a branch's are those after its start
            facts["hours"] *= item.cost.steps / (item.cost.steps - item.starts_at)
        found.append(replace(item, run=run, facts=facts, starts_from="", starts_at=0))
    if len({item.run.seed for item in runs}) == 1:
        first = middles[0]
        for seed in (first.run.seed + 1, first.run.seed + 2):
            run = replace(first.run, name=f"{first.name}-s{seed}", seed=seed)
            found.append(replace(first, run=run, starts_from="", starts_at=0))
    return found


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
    """Runs of one shape and seed as branches of one, and a line on what that saves.

    With the schedule `wsd`, runs that differ in their number of steps are the same until the
    shorter one decays its rate, in its last fifth (Hägele et al. 2024). So each continues the next
    shorter one from there, and ends bitwise as if it had been trained alone. They have the rate,
    lanes and engine of the longest of them, and the warm-up of the shortest.
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
                    "--rule base or closer budgets"
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
    found = [made[item.name] for item in runs]
    whole = sum(item.cost.flops for item in found)
    saved = sum(item.cost.flops * item.starts_at / item.cost.steps for item in found)
    branches = sum(item.starts_at > 0 for item in found)
    return found, (
        f"trunks: {branches} of {len(found)} runs continue a shorter one of their shape before its "
        f"rate decays: {whole - saved:.3g} FLOPs in place of {whole:.3g}, {saved / whole:.0%} "
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
    """Raise DataError if the corpus is too small for a run, as repeated tokens are worth less.

    That is one that reads a token twice, or has a lane with nothing to read.
    """
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

    Cells start from the experiment's file, so settings that `base` changes become overrides as
    well. What one cell overrides all do, so that an edit of the experiment changes no planned
    setting. A vocabulary size that `base` leaves unset remains unset: it is read from the corpus
    when the cell runs.
    """
    plain = to_tree(load_config(RunConfig, experiment))
    vocabulary = base.model.vocab_size
    trees = [
        to_tree(replace(item.run, model=replace(item.run.model, vocab_size=vocabulary)))
        for item in runs
    ]
    names = list(dict.fromkeys(name for tree in trees for name in differences(plain, tree)))
    relative = Path(os.path.relpath(experiment.resolve(), directory.resolve()))
    cells = [
        Cell(
            name=item.name,
            experiment=relative,
            overrides=tuple(
                f"{name}={functools.reduce(operator.getitem, name.split('.'), tree)}"
                for name in names
            ),
            facts=dict(item.facts),
            holdout=item.holdout,
            starts_from=item.starts_from,
            starts_at=item.starts_at,
        )
        for item, tree in zip(runs, trees, strict=True)
    ]
    return Sweep(format=FORMAT, name=name, varies=varies, notes=tuple(notes), cells=tuple(cells))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The nodes that cells may use, and how fast they are."""

    hardware: Hardware
    mfu: float
    rule: Rule

    def make(self, shaped: RunConfig, budget: float) -> tuple[RunConfig, dict[str, float]]:
        """The run of a shape and a budget with the engine settings that make it fit, and facts.

        ConfigError if none does; it says on how many ranks it would.
        """
        hardware = self.hardware
        on_gpu, capacity = hardware.on_gpu, hardware.usable_memory
        run, ranks = self._on_ranks(shaped, budget)
        accumulation_steps(run, ranks)  # raises where the experiment's lanes do not divide
        known = with_precision(run, best="bf16" if on_gpu else "fp32")
        found = cheapest_fit(known, ranks, capacity, on_gpu)
        if found is None:
            remedy = advice(known, ranks, capacity, on_gpu)
            raise ConfigError(
                f"at {budget:.3g} FLOPs {run.model.num_layers}x{run.model.d_model} do not fit into "
                f"{capacity / GIB:,.1f} GiB on each of {counted(ranks, 'rank')} "
                f"({hardware.name}): {remedy}; use more --nodes, a smaller --spread, fewer "
                "--sizes or smaller budgets"
            )
        known = replace(known, engine=found.engine)
        run = replace(run, engine=replace(found.engine, precision=run.engine.precision))
        memory = largest_footprint(known, ranks, on_gpu)
        once = replace(known, evaluation=replace(known.evaluation, interval=0))
        time = run_time(once, ranks, hardware.device.peak(known.engine) * self.mfu)
        host_bytes = memory.host if on_gpu else memory.device + memory.copy  # a CPU's is its device
        return run, {
            "nodes": ranks // hardware.ranks_per_node,
            "ranks": ranks,
            "hours": (time.training + (time.evaluation or 0.0)) / 3600,
            "device_gib": memory.device / GIB,
            "host_gib": hardware.ranks_per_node * host_bytes / GIB,
            "checkpoint_gib": memory.checkpoint / GIB,
        }

    def _on_ranks(self, shaped: RunConfig, budget: float) -> tuple[RunConfig, int]:
        """The run on as many nodes as its batch divides over, and its ranks."""
        on_node, wanted = self.hardware.ranks_per_node, wanted_lanes(shaped, budget, self.rule)
        counts = [each * on_node for each in range(self.hardware.nodes, 0, -1)]
        if not wanted:  # the experiment's own lanes
            dividing = [ranks for ranks in counts if shaped.data.lanes % ranks == 0]
            return with_budget(shaped, budget, self.rule), (dividing or counts[-1:])[0]
        for ranks in counts:
            # A round number of lanes on each rank: of 97 the only micro-batch that divides is 1.
            multiple = ranks * max(1, power_of_two(wanted / ranks) // MICRO_BATCHES)
            lanes = multiple * max(1, round(wanted / multiple))
            if abs(lanes / wanted - 1) <= ROUNDED or ranks == counts[-1]:
                return with_budget(shaped, budget, self.rule, multiple), ranks
        raise AssertionError("the fewest nodes always end the loop")


def placement(item: PlannedRun) -> dict[str, str]:
    """Where a cell runs, what it occupies and how long it takes, by the heads of a table."""
    facts, ranks, engine = item.facts, int(item.facts["ranks"]), item.run.engine
    offloaded = "memories" * engine.offload_memories, "optimizer" * engine.offload_optimizer
    return {
        "nodes": f"{facts['nodes']:.0f}",
        "micro-batch": f"{pass_lanes(item.run, ranks)}x{accumulation_steps(item.run, ranks)}",
        "ZeRO": str(engine.zero_stage),
        "recomputed": engine.activation_checkpointing,
        "offloaded": ", ".join(filter(None, offloaded)) or "-",
        "GiB a rank": f"{facts['device_gib']:,.1f}",
        "checkpoint GiB": f"{facts['checkpoint_gib']:,.1f}",
        "hours": f"{facts['hours']:,.2f}",
    }


def placement_totals(runs: Sequence[PlannedRun], hardware: Hardware, mfu: float) -> list[str]:
    """Hours of all cells one after another, and what they occupy, in a line each."""
    hours = sum(item.facts["hours"] for item in runs)
    of_ranks = sum(item.facts["hours"] * item.facts["ranks"] for item in runs)
    unit = "GPU-hours" if hardware.on_gpu else "core-hours"
    device, host = (max(i.facts[f"{name}_gib"] for i in runs) for name in ("device", "host"))
    return [
        f"every cell fits: {hours:,.1f} hours one after another ({of_ranks:,.0f} {unit} at "
        f"{mfu:.0%} MFU, of which small models use less: --mfu), at most {device:,.1f} GiB a rank "
        f"and {host:,.1f} GiB of host memory a node",
        hardware.describe(),
    ]


def simulated_table(runs: Sequence[PlannedRun], target: float, noise: float) -> list[list[str]]:
    """Heads and rows: N* and loss at `target` FLOPs with 95% of the simulated sweeps.

    For the plan, for the plan without each budget, and with each budget's runs twice. `noise` is
    the relative standard deviation of a run's loss. ConfigError beyond reason.
    """
    if not (0 < target < np.inf and 0 < noise < 0.5):
        raise ConfigError(
            f"--simulate {target:g} --noise {noise:g}: expected positive FLOPs, and a noise from "
            "0.0001 to 0.5 of the loss"
        )
    fitted = [item for item in runs if not item.holdout and "rate_factor" not in item.facts]
    points, total = _points_of(fitted), sum(item.cost.flops for item in runs)
    # A run has the same noise in every row, so that rows can be compared.
    noise_KP = noise * np.random.default_rng(0).standard_normal((SWEEPS, 2 * len(points)))
    twice = points.take(np.tile(np.arange(len(points)), 2))
    rows = [["plan", "FLOPs", "law", "N*", "times", "loss"]]
    for name, chosen_P in _changes(points.budget_P):
        changed = twice.take(chosen_P)
        flops = total + changed.flops_P.sum() - points.flops_P.sum()
        flops_law = fit_flops_law(changed.parameters_P, changed.tokens_P, changed.flops_P)
        for key, answers_K2 in _answers(changed, flops_law, np.log(target), noise_KP[:, chosen_P]):
            ends = [50, 50 - LEVEL / 2, 50 + LEVEL / 2]
            n_3, loss_3 = np.nanpercentile(answers_K2, ends, axis=0).T
            size = "{} [{}, {}]".format(*map(as_size, np.exp(n_3).tolist()))
            loss = "{:.4f} [{:.4f}, {:.4f}]".format(*loss_3)
            row = [name, f"{flops / total:.0%}", TITLES[key], size]
            rows.append([*row, f"{np.exp(n_3[2] - n_3[1]):.2f}", loss])
    return rows


def _changes(budget_P: Array) -> Iterator[tuple[str, Array]]:
    """Names and indices of runs, which begin again after the last: all; without, or twice, some."""
    everything = np.arange(len(budget_P))
    yield "as it is", everything
    budgets = np.unique(budget_P)
    for budget in budgets if len(budgets) > 2 else ():
        yield f"without {budget:.2g}", everything[budget_P != budget]
    for budget in budgets:
        again = len(budget_P) + everything[budget_P == budget]
        yield f"{budget:.2g} twice", np.concatenate([everything, again])


def _answers(
    points: Points, flops_law: FlopsLaw, log_target: float, noise_KP: Array
) -> Iterator[tuple[str, Array]]:
    """Each law's ln N* and loss [K, 2] over the simulated sweeps, if most of them have it."""
    lines: dict[str, list[Line]] = {"parametric": [], "isoflop": []}
    loss_P = ASSUMED.loss(points.parameters_P, points.tokens_P)
    for noise_P in noise_KP:
        drawn = replace(points, loss_P=loss_P * np.exp(noise_P))
        lines["parametric"].append(LawLine(refit(ASSUMED, drawn), flops_law))
        # Too few budgets may have a vertex inside their sizes.
        with contextlib.suppress(DataError):
            lines["isoflop"].append(fit_isoflop(drawn).frontier)
    for key, found in lines.items():
        if len(found) > SWEEPS / 2:
            yield key, np.array([(x.log_parameters(log_target), x.loss(log_target)) for x in found])


def _points_of(runs: Sequence[PlannedRun]) -> Points:
    names = ("parameters", "tokens", "flops", "budget")
    columns: Any = {f"{name}_P": np.array([float(i.facts[name]) for i in runs]) for name in names}
    return Points(
        names=tuple(item.name for item in runs),
        **columns,
        loss_P=np.ones(len(runs)),
        progress_P=np.ones(len(runs)),
        holdout_P=np.zeros(len(runs), bool),
        source="the plan",
    )
