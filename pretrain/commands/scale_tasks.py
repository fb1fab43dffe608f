"""`pretrain scale tasks`: the accuracy of a task from size and data, in two steps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import numpy as np

from foundation.errors import ConfigError, DataError
from foundation.settings import amount_of
from pretrain.commands.scale import add_runs
from pretrain.commands.scale_fit import points_of
from pretrain.scaling.intervals import amount, as_loss, shown
from pretrain.scaling.law import ParametricFit
from pretrain.scaling.predict import forecast, law_of_runs, refuse_wild, run_doubts
from pretrain.scaling.table import Columns, Points, values_by_name
from pretrain.scaling.task_fit import FARTHEST, Backtest, TaskFit, backtest, fit_task
from pretrain.terminal.text import counted, fitted_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale tasks`."""
    add_runs(parser)
    add = parser.add_argument
    accuracy = "column with the task's accuracy, from 0 to 1, such as tasks/hellaswag/acc_norm"
    add("--accuracy", required=True, metavar="COLUMN", help=accuracy)
    loss = "column with the loss that explains it, such as loss/hellaswag (default: the loss)"
    add("--task-loss", default="", metavar="COLUMN", help=loss)
    chance = "accuracy by chance, the sigmoid's floor (default: fitted)"
    add("--chance", type=float, metavar="P", help=chance)
    ceiling = "accuracy at a loss of 0, the sigmoid's ceiling (default %(default)g)"
    add("--ceiling", type=float, default=1.0, metavar="P", help=ceiling)
    for name, letter, words in (
        ("flops", "C", "the compute-optimal run of this many training FLOPs"),
        ("tokens", "D", "with --params: the run over this many tokens"),
        ("params", "N", "with --tokens: the run of this many parameters"),
    ):
        add(f"--{name}", type=amount_of(name), default=0.0, metavar=letter, help=words)
    force = "predict even far from the fitted runs"
    add("--force", action="store_true", help=force)


def run(arguments: argparse.Namespace) -> int:
    """Print both steps, the backtest and the prediction."""
    _check(arguments)
    if arguments.task_loss:
        arguments.column = [*arguments.column, f"loss={arguments.task_loss}"]
    runs = points_of(arguments)
    columns = Columns.parse(arguments.column)
    accuracies = values_by_name(arguments.runs, arguments.accuracy, columns)
    task = fit_task(runs, accuracies, arguments.chance, arguments.ceiling)
    asked = _asked(task, arguments)
    lines = [
        *_step_lines(task, columns.loss, arguments),
        *_backtest_lines(runs, accuracies, arguments),
    ]
    if asked:
        parameters, tokens = asked
        loss, accuracy = task.predict(parameters, tokens)
        lines += [
            f"N {amount(parameters)}, D {amount(tokens)}: {columns.loss} {shown(loss, as_loss)}, "
            f"{arguments.accuracy} {shown(accuracy, _percent)}"
        ]
        if (distance := task.extrapolated(loss.value)) > FARTHEST:
            lines.insert(
                0,
                f"warning: a loss of {as_loss(loss.value)} is {distance:.0%} of the range of the "
                "runs' losses below the lowest: the accuracy is extrapolated; add better runs",
            )
    print("\n".join(lines))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    given = [name for name in ("flops", "tokens", "params") if getattr(arguments, name)]
    if given not in ([], ["flops"], ["tokens", "params"]):
        raise ConfigError("give --flops, or --params and --tokens together, or none of them")
    chance, ceiling = arguments.chance or 0.0, arguments.ceiling
    if not 0 <= chance < ceiling <= 1:
        raise ConfigError(
            f"--chance {chance:g} and --ceiling {ceiling:g}: expected 0 <= chance < ceiling <= 1"
        )


def _asked(task: TaskFit, arguments: argparse.Namespace) -> tuple[float, float] | None:
    """Parameters and tokens of the run that is asked for; ConfigError if it is too far away."""
    if arguments.flops:
        found = forecast(law_of_runs(task.fit), task.fit.flops_law, flops=arguments.flops)
        asked = found.parameters.value, found.tokens.value
    elif arguments.params:
        asked = arguments.params, arguments.tokens
    else:
        return None
    if not arguments.force:
        refuse_wild(run_doubts(task.fit, *asked))
    return asked


def _step_lines(task: TaskFit, loss: str, arguments: argparse.Namespace) -> list[str]:
    found = task.sigmoid
    parametric = task.fit.estimates.laws[law_of_runs(task.fit).key]
    assert isinstance(parametric, ParametricFit)
    law = parametric.law
    return [
        f"step 1, {counted(len(task.loss_P), 'run')}: {loss} = {law.E:.4g} + {law.A:.4g} / "
        f"N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}, mean absolute error "
        f"{parametric.mean_error:.2%}",
        f"step 2: {arguments.accuracy} = {found.floor:.3f} + {found.ceiling - found.floor:.3f} / "
        f"(1 + exp({found.steepness:.3g} ({loss} - {found.middle:.3f}))), mean absolute error "
        f"{100 * task.mean_error:.2f} points",
    ]


def _backtest_lines(
    runs: Points, accuracies: Mapping[str, float], arguments: argparse.Namespace
) -> list[str]:
    try:
        found = backtest(runs, accuracies, arguments.chance, arguments.ceiling)
    except DataError as error:
        return [f"no backtest: {error}"]
    heads = ["largest budget, left out", "loss", "predicted", "accuracy", "step 2 alone", "both"]
    rows = [
        [
            item.name,
            as_loss(item.loss),
            f"{as_loss(item.predicted_loss)} ({item.predicted_loss / item.loss - 1:+.2%})",
            _percent(item.accuracy),
            *(
                f"{_percent(value)} ({100 * (value - item.accuracy):+.1f})"
                for value in (item.from_measured_loss, item.predicted_accuracy)
            ),
        ]
        for item in found
    ]
    return [fitted_table([heads, *rows]), _errors(found)]


def _errors(found: Sequence[Backtest]) -> str:
    loss = np.mean([abs(item.predicted_loss / item.loss - 1) for item in found])
    second, both = (
        100 * np.mean([abs(getattr(item, name) - item.accuracy) for item in found])
        for name in ("from_measured_loss", "predicted_accuracy")
    )
    return (
        f"mean absolute errors there: loss {loss:.2%}, accuracy {second:.1f} points by step 2 "
        f"alone and {both:.1f} by both"
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
