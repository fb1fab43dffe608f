"""`pretrain scale tasks`: size and data to a task's loss, that loss to its accuracy, a backtest."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from foundation.errors import DataError
from foundation.tables import write_csv
from pretrain.commands import scale
from pretrain.scaling.table import Points
from pretrain.scaling.task_fit import Sigmoid, fit_sigmoid, fit_task
from tests.helpers.scaling import HOFFMANN, simulated

TRUTH = Sigmoid(floor=0.25, ceiling=1.0, steepness=6.0, middle=2.7)
RUNS = simulated(noise=0.002)


def with_accuracies(points, noise=0.004, seed=0) -> Points:
    """The runs with what the sigmoid gives at the losses that the law says, and a little noise."""
    rng = np.random.default_rng(seed)
    true_P = TRUTH.at(HOFFMANN.loss(points.parameters_P, points.tokens_P))
    noisy_P = np.clip(true_P + noise * rng.standard_normal(len(points)), 0, 1)
    return replace(points, accuracy_P=noisy_P)


def test_a_sigmoid_without_noise_is_found_exactly():
    loss_P = np.linspace(2.2, 3.4, 15)
    for chance in (None, 0.25):
        found = fit_sigmoid(loss_P, TRUTH.at(loss_P), chance)
        assert list(vars(found).values()) == pytest.approx(list(vars(TRUTH).values()), rel=1e-4)


def test_both_steps_predict_a_run_and_the_interval_holds_the_truth():
    task = fit_task(with_accuracies(RUNS))
    size, tokens = 3e9, 1e11
    loss, accuracy = task.predict(size, tokens)
    true_loss = float(HOFFMANN.loss(size, tokens))
    assert loss.value == pytest.approx(true_loss, rel=0.01)
    assert accuracy.value == pytest.approx(float(TRUTH.at(true_loss)), abs=0.02)
    assert accuracy.low < float(TRUTH.at(true_loss)) < accuracy.high
    assert accuracy.high - accuracy.low < 0.15


def test_below_four_budgets_there_is_neither_interval_nor_backtest(tmp_path, capsys):
    few = with_accuracies(simulated(num_sizes=5, budgets=(1e18, 1e20, 3), noise=0.002))
    task = fit_task(few)
    loss, accuracy = task.predict(1e9, 2e10)
    assert np.isnan([loss.low, loss.high, accuracy.low, accuracy.high]).all()
    assert 0 < accuracy.value < 1
    assert task.backtest() is None
    assert command("tasks", written(tmp_path, few), "--accuracy", "tasks/task/acc") == 0
    assert task.law.no_interval in capsys.readouterr().out


# Of so many budgets the intervals of a law leave out single runs.
MANY = simulated(num_sizes=3, budgets=(1e18, 1e20, 22), noise=0.002)


def test_the_backtest_of_many_budgets_does_not_see_the_losses_of_the_largest_one():
    last_P = MANY.budget_P == MANY.budgets[-1]
    spoilt = replace(MANY, loss_P=MANY.loss_P * (1 + 0.004 * last_P))
    before, after = (fit_task(with_accuracies(runs), 0.25) for runs in (MANY, spoilt))
    laws = [task.law.left_out[(22 - 1) % 20].law.loss(1e9, 2e10) for task in (before, after)]
    assert len(before.left_out) == len(before.law.left_out) == 20
    assert laws[0] == pytest.approx(laws[1], rel=1e-4)


def test_the_backtest_never_sees_the_largest_budget():
    runs = with_accuracies(RUNS)
    loss, second, both = fit_task(runs, 0.25).backtest()
    assert loss < 0.01
    assert max(second, both) < 0.02
    last_P = RUNS.budget_P == RUNS.budgets[-1]
    spoilt = replace(runs, accuracy_P=runs.accuracy_P - 0.05 * last_P)
    again = fit_task(spoilt, 0.25).backtest()
    assert again[0] == loss
    assert again[1:] == pytest.approx([0.05, 0.05], abs=0.015)


@pytest.mark.parametrize(
    ("accuracy_P", "said"),
    [
        (np.linspace(20, 80, 8)[::-1], "from 0 to 1"),
        (np.linspace(0.2, 0.8, 8), "--task-loss"),
        (np.full(8, 0.25), "from 0.25 to 0.25 "),
        (np.linspace(0.1, 0.0, 8), "correct --chance"),
    ],
)
def test_accuracies_that_no_sigmoid_explains_are_refused(accuracy_P, said):
    with pytest.raises(DataError, match=said):
        fit_sigmoid(np.linspace(2.5, 3.5, 8), accuracy_P, chance=0.1)


def written(directory, runs: Points):
    """The table of the runs, whose task has a loss of its own."""
    columns = ("name", "N", "D", "C", "budget", "loss", "loss/task", "tasks/task/acc")
    values = zip(
        runs.names, runs.parameters_P, runs.tokens_P, runs.flops_P, runs.budget_P,
        runs.loss_P + 1, runs.loss_P, runs.accuracy_P, strict=True,
    )  # fmt: skip
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    write_csv(directory / "runs.csv", columns, rows)
    return directory / "runs.csv"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return written(tmp_path_factory.mktemp("tasks"), with_accuracies(RUNS))


def command(*words: object) -> int:
    return scale.PROGRAM.main([str(word) for word in words])


def test_the_command_prints_both_steps_the_backtest_and_the_answer(table, capsys):
    words = ("tasks", table, "--accuracy", "tasks/task/acc", "--task-loss", "loss/task")
    assert command(*words, "--chance", "0.25", "--params", "3e9", "--tokens", "1e11") == 0
    said = capsys.readouterr().out
    assert [line[:6] for line in said.splitlines()[1:3]] == ["step 1", "step 2"]
    errors = re.search(r"loss ([\d.]+)%, accuracy ([\d.]+) points", said)
    assert float(errors[1]) < 1
    assert float(errors[2]) < 2
    answer = re.search(r"N 3G, D 100G: .*tasks/task/acc ([\d.]+)% \[([\d.]+)%, ([\d.]+)%\]", said)
    value, low, high = map(float, answer.groups())
    assert low < 100 * float(TRUTH.at(HOFFMANN.loss(3e9, 1e11))) < high
    assert low < value < high


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--accuracy", "tasks/other/acc"), "no column 'tasks/other/acc' for --column accuracy="),
        (("--accuracy", "tasks/task/acc", "--params", "1e9"), "give --flops, or --params and --to"),
        (("--accuracy", "tasks/task/acc", "--chance", "25"), "--chance 25 and --ceiling 1: "),
        (("--accuracy", "tasks/task/acc", "--flops", "1e26"), "extrapolation"),
    ],
)
def test_mistakes_are_one_line(table, words, said, capsys):
    assert command("tasks", table, *words) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_ceiling_is_known_where_runs_are_all_below_the_middle():
    """Runs of up to 41% of a task whose best is 100%: a fitted ceiling would be near what they
    reach.
    """
    truth = Sigmoid(floor=0.25, ceiling=1.0, steepness=3.0, middle=2.2)
    loss_P = np.linspace(2.6, 3.6, 16)
    noise_P = 0.003 * np.random.default_rng(0).standard_normal(16)
    found = fit_sigmoid(loss_P, truth.at(loss_P) + noise_P, 0.25)
    assert found.at(2.0) == pytest.approx(float(truth.at(2.0)), abs=0.03)
    with pytest.raises(DataError, match=r"--ceiling 0\.3"):
        fit_sigmoid(loss_P, truth.at(loss_P), 0.25, ceiling=0.3)


def test_mid_schedule_rows_are_pairs_of_the_second_step_alone():
    points = replace(with_accuracies(RUNS), progress_P=np.where(np.arange(len(RUNS)) % 2, 1.0, 0.5))
    task = fit_task(points)
    assert len(task.fit.points) == len(RUNS) // 2
    assert len(task.loss_P) == len(RUNS)


def test_an_accuracy_far_below_the_measured_losses_is_warned_of(table, capsys):
    words = ("tasks", table, "--accuracy", "tasks/task/acc", "--task-loss", "loss/task")
    assert command(*words, "--params", "1e13", "--tokens", "1e14", "--force") == 0
    assert re.match(r"warning: .* \d+% .* below", capsys.readouterr().out)
