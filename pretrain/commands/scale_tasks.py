"""`pretrain scale tasks`: the accuracy of a task from size and data, in two steps."""

from __future__ import annotations

import argparse
import math

from foundation.errors import ConfigError
from pretrain.commands.scale import add_question, add_runs, check_question
from pretrain.commands.scale_fit import points_of
from pretrain.scaling.fit import refuse_wild, run_doubts
from pretrain.scaling.law import ParametricFit, amount, as_loss, shown
from pretrain.scaling.table import Columns
from pretrain.scaling.task_fit import FARTHEST, TaskFit, fit_task
from pretrain.terminal.text import counted

_as_percent = "{:.1%}".format


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain scale tasks`."""
    add_runs(parser)
    add = parser.add_argument
    add("--accuracy", required=True, metavar="COLUMN", help="such as tasks/hellaswag/acc_norm")
    add("--task-loss", default="", metavar="COLUMN", help="such as loss/hellaswag (default: loss)")
    add("--chance", type=float, metavar="P", help="accuracy by chance (default: fitted)")
    add("--ceiling", type=float, default=1.0, metavar="P", help="accuracy at a loss of 0")
    add_question(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print both steps, the backtest and the prediction."""
    is_asked = bool(check_question(arguments))
    ends = arguments.chance, arguments.ceiling
    if not 0 <= (ends[0] or 0) < ends[1] <= 1:
        raise ConfigError(
            f"--chance {ends[0] or 0:g} and --ceiling {ends[1]:g}: expected 0 <= chance < ceiling "
            "<= 1"
        )
    arguments.column = [*arguments.column, f"accuracy={arguments.accuracy}"]
    if arguments.task_loss:
        arguments.column.append(f"loss={arguments.task_loss}")
    loss, task = Columns.parse(arguments.column).loss, fit_task(points_of(arguments), *ends)
    lines = _step_lines(task, loss, arguments.accuracy)
    if errors := task.backtest():
        error, second, both = errors
        lines.append(
            f"without the largest budget, mean absolute errors there: loss {error:.2%}, accuracy "
            f"{100 * second:.1f} points by step 2 alone and {100 * both:.1f} by both"
        )
    else:
        lines.append(
            f"without an interval or a check on the largest budget: {task.law.no_interval}"
        )
    if is_asked:
        lines = [*_prediction(task, loss, arguments), *lines]
    print("\n".join(lines))
    return 0


def _prediction(task: TaskFit, loss: str, arguments: argparse.Namespace) -> list[str]:
    """The accuracy of the run that is asked for; ConfigError if it is too far away."""
    parameters, tokens = arguments.params, arguments.tokens
    if arguments.flops:
        law, log_flops = task.law, math.log(arguments.flops)
        parameters = law.parameters(log_flops).value
        tokens = law.tokens(log_flops, task.fit.flops_law).value
    doubts, lines = refuse_wild(run_doubts(task.fit, parameters, tokens), arguments.force), []
    predicted, accuracy = task.predict(parameters, tokens)
    if (distance := task.extrapolated(predicted.value)) > FARTHEST:
        lines.append(
            f"warning: a loss of {as_loss(predicted.value)} is {distance:.0%} of the range of the "
            "runs' losses below the lowest: the accuracy is extrapolated; add better runs"
        )
    return [
        *lines,
        *doubts,
        f"N {amount(parameters)}, D {amount(tokens)}: {loss} {shown(predicted, as_loss)}, "
        f"{arguments.accuracy} {shown(accuracy, _as_percent)}",
    ]


def _step_lines(task: TaskFit, loss: str, accuracy: str) -> list[str]:
    sigmoid, fitted = task.sigmoid, task.law.fit
    assert isinstance(fitted, ParametricFit)
    law = fitted.law
    return [
        f"step 1, {counted(len(task.loss_P), 'run')}: {loss} = {law.E:.4g} + {law.A:.4g} / "
        f"N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}, mean absolute error "
        f"{fitted.mean_error:.2%}",
        f"step 2: {accuracy} = {sigmoid.floor:.3f} + {sigmoid.ceiling - sigmoid.floor:.3f} / "
        f"(1 + exp({sigmoid.steepness:.3g} ({loss} - {sigmoid.middle:.3f}))), mean absolute error "
        f"{100 * task.mean_error:.2f} points",
    ]
