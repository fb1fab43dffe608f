"""Which runs to make: at each budget a few sizes around the predicted optimum, each a legal shape with whole steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from data_pipeline.errors import ConfigError
from pretrain.config.run import RunConfig
from pretrain.costs.flops import RunCost, cost_of
from pretrain.scaling.recipe import Rule, refuse_unsuited, with_budget
from pretrain.scaling.shapes import nearest_shape, refuse_far_shape

TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022; where nothing better is known


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A cell's run with its cost."""

    name: str
    run: RunConfig
    cost: RunCost
    budget: float
    holdout: bool

    @property
    def facts(self) -> dict[str, float]:
        """What is noted beside the cell."""
        return {
            "budget": self.budget,
            "flops": self.cost.flops,
            "parameters": self.cost.parameters,
            "body_parameters": self.cost.body_parameters,
            "tokens": self.cost.tokens,
            "steps": self.cost.steps,
            "learning_rate": self.run.optim.learning_rate,
            "tokens_per_step": self.cost.tokens_per_step,
        }


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
    """`num_sizes` sizes at each budget, `spread` apart around `optimum(budget)` parameters, and one per hold-out.

    Raises ConfigError for a base that cannot be scaled or a budget that is too small for whole steps.
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
                f"at {budget:.3g} FLOPs only {len(distinct)} of {num_sizes} sizes around {optimum(budget):.3g} "
                "parameters are different legal shapes; use a larger --spread, fewer sizes or a base with smaller heads"
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
    """Parameters N(C) at which C FLOPs pay for `tokens_per_parameter` N tokens, with this family's exact FLOPs."""

    def optimum(budget: float) -> float:
        size = math.sqrt(budget / (6 * tokens_per_parameter))
        for _ in range(
            20
        ):  # FLOPs per token change slowly with the size, so this settles in a few rounds
            per_parameter = _flops_per_parameter(base, size, keep_layers)
            size = math.sqrt(budget / (per_parameter * tokens_per_parameter))
        return size

    return optimum


def _planned(
    run: RunConfig, budget: float, seed: int, suffix: str, holdout: bool = False
) -> PlannedRun:
    name = f"c{budget:.3g}-d{run.model.d_model}-l{run.model.num_layers}{suffix}".replace("+", "")
    run = replace(run, name=name, seed=seed, evaluation=replace(run.evaluation, interval=0))
    return PlannedRun(name=name, run=run, cost=cost_of(run), budget=budget, holdout=holdout)


def _flops_per_parameter(base: RunConfig, size: float, keep_layers: bool) -> float:
    cost = cost_of(nearest_shape(base, size, keep_layers))
    return cost.flops_per_token / cost.parameters
