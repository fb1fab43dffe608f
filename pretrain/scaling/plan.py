"""Plans: a few legal sizes around the predicted optimum of each budget, written as a sweep file."""

from __future__ import annotations

import argparse
import functools
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.config_loader import differences, load_config, to_tree
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import SPLITS
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.lanes.lane_plan import check_lanes
from data_pipeline.lanes.mixture import plan_of
from data_pipeline.yaml_files import Tree
from pretrain.config.run import RunConfig
from pretrain.costs.flops import RunCost, cost_of
from pretrain.scaling.recipe import (
    Rule,
    nearest_shape,
    refuse_far_shape,
    refuse_unsuited,
    with_budget,
)
from pretrain.scaling.sweep_file import FORMAT, Cell, Sweep, reader_of, sweep_path, write_sweep
from pretrain.terminal.text import counted

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


def plan_runs(
    base: RunConfig,
    budgets: Sequence[float],
    optimum: Callable[[float], float],
    *,
    num_sizes: int,
    spread: float,
    rule: Rule,
    seeds: Sequence[int],
    holdouts: Sequence[float] = (),
    lanes_multiple: int = 1,
    keep_layers: bool = False,
) -> list[PlannedRun]:
    """Return `num_sizes` sizes at each budget, `spread` apart around `optimum(budget)`, and one run
    per hold-out.

    Raises ConfigError for a base that cannot be scaled or a budget that is too small for whole
    steps.
    """
    refuse_unsuited(base)
    if num_sizes < 1 or spread <= 1 or not budgets or min((*budgets, *holdouts)) <= 0 or not seeds:
        raise ConfigError(
            "a plan needs positive budgets, at least one size and seed, and a spread above 1"
        )
    runs: list[PlannedRun] = []
    for budget in budgets:
        middle = (num_sizes - 1) / 2
        sizes = [optimum(budget) * spread ** (index - middle) for index in range(num_sizes)]
        shaped = [nearest_shape(base, size, keep_layers) for size in sizes]
        for run, size in zip(shaped, sizes, strict=True):
            refuse_far_shape(run, size)
        distinct = {cost_of(run).parameters: run for run in shaped}
        if len(distinct) < num_sizes:
            raise ConfigError(
                f"at {budget:.3g} FLOPs only {len(distinct)} of {num_sizes} sizes around "
                f"{optimum(budget):.3g} "
                "parameters are different legal shapes; use a larger --spread, fewer sizes or a "
                "base with smaller heads"
            )
        sized = [with_budget(run, budget, rule, lanes_multiple) for run in distinct.values()]
        runs += [
            _planned(run, budget, seed, f"-s{seed}" if len(seeds) > 1 else "")
            for run in sized
            for seed in seeds
        ]
    for budget in holdouts:
        run = with_budget(
            nearest_shape(base, optimum(budget), keep_layers), budget, rule, lanes_multiple
        )
        runs.append(_planned(run, budget, seeds[0], "-holdout", holdout=True))
    return runs


def optimum_at_ratio(
    base: RunConfig, tokens_per_parameter: float, keep_layers: bool = False
) -> Callable[[float], float]:
    """Return N(C), at which C FLOPs buy `tokens_per_parameter` N tokens, counted exactly."""

    def optimum(budget: float) -> float:
        size = math.sqrt(budget / (6 * tokens_per_parameter))
        # FLOPs per token change slowly with the size, so this fixed point is reached in a few
        # rounds.
        for _ in range(20):
            per_parameter = _flops_per_parameter(base, size, keep_layers)
            size = math.sqrt(budget / (per_parameter * tokens_per_parameter))
        return size

    return optimum


def _planned(
    run: RunConfig, budget: float, seed: int, suffix: str, holdout: bool = False
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
    }
    return planned_run(replace(run, name=name, seed=seed), facts, holdout=holdout)


def _flops_per_parameter(base: RunConfig, size: float, keep_layers: bool) -> float:
    cost = cost_of(nearest_shape(base, size, keep_layers))
    return cost.flops_per_token / cost.parameters


def check_corpus(
    base: RunConfig, runs: Sequence[PlannedRun], *, fewer_tokens: str, fewer_lanes: str
) -> list[str]:
    """Return a note if the corpus is not here; DataError if it is too small for a run.

    That is one that reads over one epoch or has a lane with nothing to read. `fewer_tokens` and
    `fewer_lanes` are what to change in the plan then.
    """
    directory = base.data.directory() / SPLITS[0]
    if not directory.is_dir():
        return [f"note: no corpus at {base.data.path}, so nothing checks that it has enough tokens"]
    corpus = Corpus.open(directory, check_hashes=False)
    tokens = {item.name: item.cost.tokens for item in runs}
    refuse_more_tokens(tokens, corpus.num_tokens, fewer_tokens)
    shown = {(item.run.data.lanes, item.run.seed): item.name for item in reversed(runs)}
    for (lanes, seed), name in shown.items():
        try:
            check_lanes(plan_of(corpus, lanes, seed), corpus.manifest.longest_document)
        except DataError as error:
            raise DataError(f"{name}: {error}; in a plan: {fewer_lanes}") from error
    return []


def refuse_more_tokens(tokens: Mapping[str, int], available: int, advice: str) -> None:
    """Raise DataError if a cell reads over one epoch: repeated tokens are worth less."""
    greedy = [name for name, count in tokens.items() if count > available]
    if greedy:
        worst = max(greedy, key=tokens.__getitem__)
        raise DataError(
            f"{len(greedy)} of {len(tokens)} cells need more tokens than the corpus has "
            f"({available:,}); {worst} needs {tokens[worst]:,}: {advice}"
        )


def write_plan(
    arguments: argparse.Namespace,
    name: str,
    base: RunConfig,
    runs: Sequence[PlannedRun],
    notes: Sequence[str],
) -> None:
    """Write the sweep `name`; print its path, and what comes next.

    `base` includes the overrides of the command line.
    """
    path = sweep_path(arguments.output, name)
    sweep = make_sweep(name, arguments.experiment, base, runs, path.parent, notes)
    write_sweep(path, sweep)
    print(f"sweep: {path} ({counted(len(runs), 'cell')})")
    _, then = reader_of(sweep)
    print(f"next: launcher sweep submit {path} --local (or --cluster FILE), then {then} {path}")


def make_sweep(
    name: str,
    experiment: Path,
    base: RunConfig,
    runs: Sequence[PlannedRun],
    directory: Path,
    notes: Sequence[str],
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
    return Sweep(format=FORMAT, name=name, notes=tuple(notes), cells=tuple(cells))


def _with_vocabulary_of(base: RunConfig, run: RunConfig) -> RunConfig:
    return replace(run, model=replace(run.model, vocab_size=base.model.vocab_size))


def _value_of(tree: Tree, name: str) -> Any:
    return functools.reduce(operator.getitem, name.split("."), tree)
