"""Plans: sizes around the optimum of each budget, or lengths of one model, as a sweep file."""

from __future__ import annotations

import functools
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
from foundation.settings import differences, load_config, to_tree
from foundation.yaml_files import Tree
from pretrain.config.run import RunConfig
from pretrain.costs.flops import RunCost, cost_of
from pretrain.scaling.recipe import Family, refuse_unsuited, with_steps
from pretrain.scaling.sweep_file import FORMAT, Axis, Cell, Sweep, write_sweep
from pretrain.terminal.text import counted

MOST_SIZES = 1000  # of a budget
RATE_FACTORS = (0.5, 2.0)  # of the plan's rate, at one size of each budget
TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022; where nothing better is known


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that a plan has made, with its cost and what the sweep file notes about it."""

    run: RunConfig
    cost: RunCost
    facts: Mapping[str, float]
    holdout: bool = False  # to be predicted, not fitted

    @property
    def name(self) -> str:
        return self.run.name


def planned_run(run: RunConfig, facts: Mapping[str, float], *, holdout: bool = False) -> PlannedRun:
    """The run, evaluated at its end only; its tokens and FLOPs are among the facts."""
    run = replace(run, evaluation=replace(run.evaluation, interval=0))
    cost = cost_of(run)
    facts = {**facts, "tokens": cost.tokens, "flops": cost.flops}
    return PlannedRun(run=run, cost=cost, facts=facts, holdout=holdout)


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
    middle = (num_sizes - 1) / 2

    def sizes(budget: float) -> list[float]:
        best = optimum(budget)
        return [best * spread ** (index - middle) for index in range(num_sizes)]

    return sizes


def plan_runs(
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
    if not budgets or min((*budgets, *(holdouts or ()))) <= 0 or not seeds:
        raise ConfigError("a plan needs positive budgets and at least one seed")
    runs: list[PlannedRun] = []
    for budget in budgets:
        for run in _distinct_shapes(family, budget, sizes(budget)):
            made, facts = make(run, budget)
            runs += [
                _planned(made, budget, facts, seed, f"-s{seed}" if len(seeds) > 1 else "")
                for seed in seeds
            ]
    for budget, size in (holdouts or {}).items():
        made, facts = make(family.nearest(size), budget)
        runs.append(_planned(made, budget, facts, seeds[0], "-holdout", holdout=True))
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
    for item in middles:
        optim = item.run.optim
        for factor in RATE_FACTORS:
            rate = float(f"{factor * optim.learning_rate:.4g}")
            run = replace(item.run, optim=replace(optim, learning_rate=rate))
            facts = {"learning_rate": rate, "rate_factor": factor}
            found.append(_again(item, run, f"-rate{factor:g}", facts))
    if len({item.run.seed for item in runs}) == 1:
        first = middles[0]
        for seed in (first.run.seed + 1, first.run.seed + 2):
            found.append(_again(first, replace(first.run, seed=seed), f"-s{seed}", {}))
    return found


def _again(item: PlannedRun, run: RunConfig, suffix: str, facts: Mapping[str, float]) -> PlannedRun:
    run = replace(run, name=item.name + suffix)
    return replace(item, run=run, facts={**item.facts, **facts})


def _distinct_shapes(family: Family, budget: float, sizes: Sequence[float]) -> list[RunConfig]:
    shaped = [family.nearest(size) for size in sizes]
    for run, size in zip(shaped, sizes, strict=True):
        family.refuse_far(run, size)
    distinct = list({cost_of(run).parameters: run for run in shaped}.values())
    if len(distinct) < len(sizes):
        raise ConfigError(
            f"at {budget:.3g} FLOPs only {len(distinct)} of {len(sizes)} sizes from "
            f"{min(sizes):.3g} to {max(sizes):.3g} "
            "parameters are different legal shapes; use a larger --spread, fewer sizes, a "
            + ("ladder with more rungs" if family.rungs else "base with smaller heads")
        )
    return distinct


def optimum_at_ratio(family: Family, tokens_per_parameter: float) -> Callable[[float], float]:
    """Return N(C), at which C FLOPs buy `tokens_per_parameter` N tokens, counted exactly."""

    def optimum(budget: float) -> float:
        size = math.sqrt(budget / (6 * tokens_per_parameter))
        # FLOPs per token change slowly with the size, so this fixed point is reached in a few
        # rounds.
        for _ in range(20):
            cost = cost_of(family.nearest(size))
            per_parameter = cost.flops_per_token / cost.parameters
            before, size = size, math.sqrt(budget / (per_parameter * tokens_per_parameter))
            if math.isclose(before, size, rel_tol=1e-9):
                break
        return size

    return optimum


def _planned(
    run: RunConfig,
    budget: float,
    known: Mapping[str, float],
    seed: int,
    suffix: str,
    holdout: bool = False,
) -> PlannedRun:
    name = f"c{budget:.3g}-d{run.model.d_model}-l{run.model.num_layers}{suffix}".replace("+", "")
    cost = cost_of(run)
    facts = {
        "budget": budget,
        "parameters": cost.parameters,
        "body_parameters": cost.body_parameters,
        "steps": cost.steps,
        "learning_rate": run.optim.learning_rate,
        "tokens_per_step": cost.tokens_per_step,
        **known,
    }
    return planned_run(replace(run, name=name, seed=seed), facts, holdout=holdout)


def plan_lengths(
    base: RunConfig, segments: Sequence[int], memories: Sequence[int]
) -> list[PlannedRun]:
    """Every segment length with every memory length, at the base's tokens and at its FLOPs.

    Every run has the base's tokens per step: in more lanes of shorter segments, or fewer of longer
    ones. At equal tokens a longer context costs more FLOPs; at equal FLOPs it reads fewer tokens.
    Raises ConfigError where a segment does not divide the tokens of a step, or a budget pays for
    too few steps.
    """
    refuse_unsuited(base)
    if not segments or not memories or min(segments) < 1 or min(memories) < 0:
        raise ConfigError("--segments must be positive and --memories 0 or more")
    if len({*segments}) * len({*memories}) < 2:
        raise ConfigError(
            "one segment with one memory length leaves nothing to compare; give at least two of "
            "either"
        )
    runs: list[PlannedRun] = []
    for segment in sorted({*segments}):
        for memory in sorted({*memories}):
            runs += _runs_of(base, _with_context(base, segment, memory), f"t{segment}-m{memory}")
    return runs


def _with_context(base: RunConfig, segment: int, memory: int) -> RunConfig:
    lanes, rest = divmod(base.tokens_per_step, segment * base.optim.gradient_segments)
    if rest:
        raise ConfigError(
            f"segments of {segment} do not divide the {base.tokens_per_step} tokens of a step "
            "(data.lanes="
            f"{base.data.lanes} x data.segment_length={base.data.segment_length}); use divisors "
            "of it"
        )
    return replace(
        base,
        model=base.model.with_memory(memory),
        data=replace(base.data, segment_length=segment, lanes=lanes),
    )


def _runs_of(base: RunConfig, run: RunConfig, context: str) -> list[PlannedRun]:
    """The run at the base's tokens and at its FLOPs; one run if the steps are the same."""
    cost = cost_of(run)
    at_flops = round(cost_of(base).flops / (cost.flops_per_token * cost.tokens_per_step))
    steps = {f"{context}-same-tokens": base.optim.steps, f"{context}-same-flops": at_flops}
    if at_flops == base.optim.steps:
        steps = {context: at_flops}
    facts = {
        "segment_length": run.data.segment_length,
        "memory_length": run.model.longest_memory,
    }
    return [
        planned_run(replace(with_steps(run, count), name=name), facts)
        for name, count in steps.items()
    ]


def tokens_here(base: RunConfig) -> int | None:
    """How many training tokens the corpus has; None if it is not here."""
    directory = base.data.directory() / SPLITS[0]
    return Corpus.open(directory, check_hashes=False).num_tokens if directory.is_dir() else None


def check_corpus(
    base: RunConfig,
    runs: Sequence[PlannedRun],
    *,
    fewer_tokens: str,
    fewer_lanes: str,
    max_epochs: float = 1.0,
) -> list[str]:
    """Return a note if the corpus is not here; DataError if it is too small for a run.

    That is one that reads over `max_epochs` or has a lane with nothing to read. `fewer_tokens` and
    `fewer_lanes` are what to change in the plan then.
    """
    directory = base.data.directory() / SPLITS[0]
    if not directory.is_dir():
        return [f"note: no corpus at {base.data.path}, so nothing checks that it has enough tokens"]
    corpus = Corpus.open(directory, check_hashes=False)
    tokens = {item.name: item.cost.tokens for item in runs}
    refuse_more_tokens(tokens, corpus.num_tokens, fewer_tokens, max_epochs)
    shown = {(item.run.data.lanes, item.run.seed): item.name for item in reversed(runs)}
    for (lanes, seed), name in shown.items():
        try:
            check_lanes(plan_of(corpus, lanes, seed), corpus.manifest.longest_document)
        except DataError as error:
            raise DataError(f"{name}: {error}; in a plan: {fewer_lanes}") from error
    return []


def refuse_more_tokens(
    tokens: Mapping[str, int], available: int, advice: str, max_epochs: float = 1.0
) -> None:
    """Raise DataError if a cell reads over `max_epochs`: repeated tokens are worth less."""
    greedy = [name for name, count in tokens.items() if count > available * max_epochs]
    if greedy:
        worst = max(greedy, key=tokens.__getitem__)
        often = "" if max_epochs == 1 else f" in {max_epochs:g} epochs"
        raise DataError(
            f"{len(greedy)} of {len(tokens)} cells need more tokens than the corpus has "
            f"({available:,}{often}); {worst} needs {tokens[worst]:,}: {advice}"
        )


def write_plan(
    path: Path,
    sweep: Sweep,
    where: str = "--local (or --cluster FILE)",
    then: str = "",
) -> None:
    """Write the sweep; print its path, and what comes next (empty `then`: to collect it)."""
    write_sweep(path, sweep)
    print(f"sweep: {path} ({counted(len(sweep.cells), 'cell')})")
    then = then or f"pretrain scale collect {path}"
    print(f"next: launcher sweep submit {path} {where}, then {then}")


def make_sweep(
    name: str,
    experiment: Path,
    base: RunConfig,
    runs: Sequence[PlannedRun],
    directory: Path,
    notes: Sequence[str],
    varies: Axis = "sizes",
) -> Sweep:
    """Return the runs as a sweep whose file will be in `directory`.

    Cells start from the experiment's file, so settings that `base` changes become overrides as
    well. What one cell overrides all do, so that an edit of the experiment changes no planned
    setting. A vocabulary size that `base` leaves unset remains unset: it is read from the corpus
    when the cell runs.
    """
    plain = load_config(RunConfig, experiment)
    relative = Path(os.path.relpath(experiment.resolve(), directory.resolve()))
    trees = [to_tree(_with_vocabulary_of(base, item.run)) for item in runs]
    names = list(
        dict.fromkeys(name for tree in trees for name in differences(to_tree(plain), tree))
    )
    cells = [
        Cell(
            name=item.name,
            experiment=relative,
            overrides=tuple(f"{name}={_value_of(tree, name)}" for name in names),
            facts=dict(item.facts),
            holdout=item.holdout,
        )
        for item, tree in zip(runs, trees, strict=True)
    ]
    return Sweep(format=FORMAT, name=name, varies=varies, notes=tuple(notes), cells=tuple(cells))


def _with_vocabulary_of(base: RunConfig, run: RunConfig) -> RunConfig:
    return replace(run, model=replace(run.model, vocab_size=base.model.vocab_size))


def _value_of(tree: Tree, name: str) -> Any:
    return functools.reduce(operator.getitem, name.split("."), tree)
