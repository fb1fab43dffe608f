"""How often the interval of a task's accuracy holds the truth, on simulated sweeps.

`python -m tests.task_coverage --replicates N`, part of `make coverage`: the loss follows a known
law and the accuracy a known sigmoid of it, each with noise. Asked is the accuracy of the
compute-optimal run at the largest budget and at ten times that. Sweeps whose first law of N and D
is the tied one have no interval. Ends with status 1 if a share of the others is below FEWEST.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pretrain.scaling.law import Law, log_optimum
from pretrain.scaling.table import Points
from pretrain.scaling.task_fit import Sigmoid, fit_task
from pretrain.terminal.text import fitted_table
from tests.helpers.scaling import BESIROGLU, HOFFMANN, SIX_N, simulated

LAWS = (HOFFMANN, BESIROGLU)
CHANCE = 0.25
TRUTH = Sigmoid(floor=CHANCE, ceiling=1.0, steepness=6.0, middle=2.7)
LOSS_NOISE = 0.005
NOISES = (0.01, 0.03)  # standard deviations of an accuracy: 2,000 and 200 questions
RANGE, BUDGETS, SIZES = (1e18, 1e20), 5, 5
FACTORS = (1.0, 10.0)  # of the largest budget
REPLICATES = 25
FIRST_SEED = 1_000_000
FEWEST = 0.9


def with_accuracies(law: Law, points: Points, noise: float, seed: int) -> Points:
    """The runs with accuracies by their true losses, with noise."""
    true_P = TRUTH.at(law.loss(points.parameters_P, points.tokens_P))
    noise_P = noise * np.random.default_rng(seed).standard_normal(len(points))
    return replace(points, accuracy_P=np.clip(true_P + noise_P, 0, 1))


def answers(law: Law, noise: float, seed: int) -> Iterator[tuple[float, bool, float]]:
    """For each factor: whether the interval holds the true accuracy, and how wide it is (NaN: there
    is none).
    """
    sweep = {"budgets": (*RANGE, BUDGETS), "num_sizes": SIZES, "noise": LOSS_NOISE}
    points = simulated(law, **sweep, seed=2 * seed)
    task = fit_task(with_accuracies(law, points, noise, 2 * seed + 1), CHANCE)
    for factor in FACTORS:
        n, d = np.exp(log_optimum(law.theta, np.log(factor * RANGE[1]), SIX_N))
        true = float(TRUTH.at(law.loss(n, d)))
        _, accuracy = task.predict(float(n), float(d))
        yield factor, accuracy.low <= true <= accuracy.high, accuracy.high - accuracy.low


def main() -> int:
    """Print the table; status 1 if a share is too low."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicates", type=int, default=REPLICATES, help="per law and noise")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.replicates)
    heads = "noise of the accuracy, times the largest budget, intervals, held, mean width"
    rows = [heads.split(", ")]
    shares: list[float] = []
    for noise in NOISES:
        found = [answer for seed in seeds for law in LAWS for answer in answers(law, noise, seed)]
        found = [answer for answer in found if np.isfinite(answer[2])]
        for factor in FACTORS:
            held = [is_held for at, is_held, _ in found if at == factor]
            width = float(np.mean([wide for at, _, wide in found if at == factor]))
            shares.append(float(np.mean(held)))
            cells = [f"{noise:.0%}", f"{factor:g}", str(len(held)), f"{shares[-1]:.0%}"]
            rows.append([*cells, f"{100 * width:.1f} points"])
    print(fitted_table(rows))
    return int(min(shares) < FEWEST)


if __name__ == "__main__":
    raise SystemExit(main())
