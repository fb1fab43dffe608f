"""How certain a plan's answers would be: sweeps drawn from an assumed law with noise, and fitted.

Each is fitted as `scale fit` fits runs; their answers differ by what the sweep leaves open. K marks
simulated sweeps.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foundation.errors import ConfigError, DataError
from pretrain.scaling.fit import TITLES
from pretrain.scaling.frontier import Approach, Line, fit_isoflop
from pretrain.scaling.intervals import LEVEL, as_loss, as_size
from pretrain.scaling.law import FlopsLaw, Law, LawLine, fit_flops_law, refit
from pretrain.scaling.plan import PlannedRun
from pretrain.scaling.table import Array, Points

# Besiroglu et al. 2024, of the runs of Hoffmann et al. 2022.
ASSUMED = Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
SWEEPS = 100


def simulated_table(runs: Sequence[PlannedRun], target: float, noise: float) -> list[list[str]]:
    """Return heads and rows: N* and loss at `target` FLOPs with 95% of the simulated sweeps.

    For the plan, without each budget, and with each budget's runs twice; the last row is of the law
    itself. A loss that `fit` would not print is "-". `noise` is the relative
    standard deviation of a run's loss. ConfigError beyond reason.
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
            n_3, loss_3 = np.percentile(answers_K2, ends, axis=0).T
            size = "{} [{}, {}]".format(*map(as_size, np.exp(n_3).tolist()))
            loss = "{} [{}, {}]".format(*map(as_loss, loss_3.tolist()))
            row = [name, f"{flops / total:.0%}", TITLES[key], size]
            rows.append([*row, f"{np.exp(n_3[2] - n_3[1]):.2f}", loss if loss_3[0] > 0 else "-"])
    truth = LawLine(ASSUMED, fit_flops_law(points.parameters_P, points.tokens_P, points.flops_P))
    size, loss = np.exp(truth.log_parameters(np.log(target))), truth.loss(np.log(target))
    return [*rows, ["the law itself", "", "", as_size(float(size)), "", as_loss(float(loss))]]


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
    for key, fitted in lines.items():
        if len(fitted) > SWEEPS / 2:
            # As `fit` says no loss beyond budgets that show no floor, so do these.
            answers = [Approach(key, "", None, line) for line in fitted]
            losses = [answer.loss(log_target).value for answer in answers]
            sizes = [float(line.log_parameters(log_target)) for line in fitted]
            yield key, np.stack([sizes, losses], axis=1)


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
