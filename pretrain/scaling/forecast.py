"""Forecast cards: what a law predicts of a run, written before it, and how it came out.

A card is YAML: the prediction, the law and its backtests, and the hash of the table of runs that it
rests on. `launcher submit --forecast CARD` puts the card's hash into the ledger before the run
starts. Its grade, beside the card as `NAME.grade.json`, says whether the measured loss is inside.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from foundation.errors import ConfigError, DataError
from foundation.files import read_value, sha256_of, write_json, write_new
from foundation.typed_values import to_tree
from foundation.yaml_files import dump_yaml
from pretrain.costs.flops import run_cost
from pretrain.rundir.code_version import code_version
from pretrain.rundir.evaluated_text import EvaluatedText
from pretrain.rundir.events import Forecast, TrainingBegan
from pretrain.rundir.forecast import FORMAT, check_subject, read_forecast
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.backtest import Backtest
from pretrain.scaling.fit import TITLES, Fit, law_of_runs, loss_interval
from pretrain.scaling.frontier import Approach
from pretrain.scaling.intervals import Interval, amount, as_loss, as_size, shown
from pretrain.scaling.law import LawLine
from pretrain.terminal.text import counted, fitted_table


@dataclass(frozen=True, kw_only=True)
class ForecastCard:
    """A forecast: of the best run of C FLOPs, or with `is_of_run` of one size and tokens."""

    format: int
    date: str
    code: str  # version of the program
    table: str  # file of the runs that were fitted
    table_sha256: str
    runs: int
    largest_budget: float
    law: str
    is_of_run: bool
    flops: float
    parameters: Interval
    tokens: Interval
    loss: Interval
    backtests: tuple[Backtest, ...]


@dataclass(frozen=True, kw_only=True)
class Grade:
    """How a forecast came out."""

    card_sha256: str
    run: str
    is_signed: bool  # the run's ledger had the card before training began
    flops: float
    parameters: int
    loss: float
    standard_error: float | None
    evaluated: str  # the text of the loss
    error: float  # (predicted - measured) / measured
    is_inside: bool


def make_card(fit: Fit, approach: Approach, table: Path, flops: float) -> ForecastCard:
    """Return the forecast of the best run of so many FLOPs."""
    size, tokens, loss = fit.optimum(approach, flops)
    return _card(fit, approach, table, flops, (size, tokens, loss), is_of_run=False)


def make_run_card(fit: Fit, table: Path, parameters: float, tokens: float) -> ForecastCard:
    """Return the forecast of one run by the first law of N and D with an interval, if there is one;
    ConfigError without such a law.
    """
    laws = (law for law in fit.approaches if isinstance(law.line, LawLine) and law.left_out)
    law = next(laws, None) or law_of_runs(fit)
    flops = fit.flops_law.flops(parameters, tokens)
    loss = fit.beyond_runs(loss_interval(law, parameters, tokens), flops)
    exact = (Interval(value, value, value) for value in (parameters, tokens))
    return _card(fit, law, table, flops, (*exact, loss), is_of_run=True)


def _card(
    fit: Fit,
    law: Approach,
    table: Path,
    flops: float,
    answer: Sequence[Interval],
    *,
    is_of_run: bool,
) -> ForecastCard:
    size, tokens, loss = answer
    if not math.isfinite(loss.low):
        why = law.no_interval or "the loss is not forecast so far from the runs"
        raise ConfigError(
            f"{law.title} gives no interval of the loss at {flops:.3g} FLOPs, and a forecast needs "
            f"one: {why}; add budgets, or name another --law: {', '.join(TITLES)}"
        )
    return ForecastCard(
        format=FORMAT,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        code=code_version(),
        table=table.name,
        table_sha256=sha256_of(table),
        runs=len(fit.points),
        largest_budget=fit.largest,
        law=law.key,
        is_of_run=is_of_run,
        flops=flops,
        parameters=size,
        tokens=tokens,
        loss=loss,
        backtests=tuple(fit.backtests.get(law.key, ())),
    )


def write_card(card: ForecastCard, path: Path) -> None:
    """Write a card; an existing file is an error: what is forecast does not change."""
    about = f"# A forecast: loss {shown(card.loss, as_loss)} at {card.flops:.3g} FLOPs.\n"
    write_new(path, about + dump_yaml(to_tree(card)))


def read_card(path: Path) -> ForecastCard:
    """Return a card; DataError for any other file."""
    return read_forecast(path, ForecastCard)


def grade_run(path: Path, card: ForecastCard, run: Path) -> Grade:
    """Return how the card's run came out, by its last evaluation on the validation split.

    ConfigError while it is not finished, if it is not the forecast one, or another was graded.
    """
    run_dir = RunDir.open(run)
    config, sha256 = run_dir.config, sha256_of(path)
    steps = config.optim.steps
    ends = [
        line
        for line in run_dir.read_metrics()
        if line.get("kind") == "evaluation" and line["step"] == steps
    ]
    loss = ends[-1].get("loss") if ends else None
    if loss is None:
        raise ConfigError(
            f"{run} has no finite loss of its last step, {steps:,}; grade it when it is finished"
        )
    check_subject(path, config)
    before = _grade_of(path)
    if before and before.run != str(run_dir.path):
        raise ConfigError(
            f"{_grade_path(path)} has the grade of {before.run}; to grade another run, remove it"
        )
    cost, text = run_cost(config), EvaluatedText.of_line(ends[-1])
    ledger = run_dir.ledger.read()
    early = itertools.takewhile(lambda event: not isinstance(event, TrainingBegan), ledger)
    return Grade(
        card_sha256=sha256,
        run=str(run_dir.path),
        is_signed=sha256 in [item.sha256 for item in find_events([*early], Forecast)],
        flops=float(cost.flops),
        parameters=cost.parameters,
        loss=float(loss),
        standard_error=text.standard_error,
        evaluated=text.description,
        error=card.loss.value / loss - 1,
        is_inside=card.loss.low <= loss <= card.loss.high,
    )


def write_grade(path: Path, grade: Grade) -> None:
    """Write a card's grade beside it."""
    write_json(_grade_path(path), to_tree(grade))


def _grade_path(card: Path) -> Path:
    return card.with_suffix(".grade.json")


def _grade_of(card: Path) -> Grade | None:
    """Return the grade beside a card, if there is one."""
    path = _grade_path(card)
    return read_value(Grade, path) if path.exists() else None


def card_line(card: ForecastCard) -> str:
    """Describe a card."""
    run = f"N {shown(card.parameters, as_size)}, D {shown(card.tokens, as_size)}"
    if card.is_of_run:
        run = f"N {amount(card.parameters.value)}, D {amount(card.tokens.value)}"
    times = card.flops / card.largest_budget
    return (
        f"forecast: loss {shown(card.loss, as_loss)} at {card.flops:.3g} FLOPs, {times:.3g} times "
        f"the largest of {counted(card.runs, 'run')}; {run}"
    )


def grade_lines(card: ForecastCard, grade: Grade) -> list[str]:
    """Describe how a forecast came out."""
    error = "" if grade.standard_error is None else f" ± {grade.standard_error:.4f}"
    signed = (
        "before the run began" if grade.is_signed else "not in the run's ledger before it began"
    )
    return [
        f"{'inside' if grade.is_inside else 'OUTSIDE'}: measured {as_loss(grade.loss)}{error} on "
        f"{grade.evaluated}, forecast {shown(card.loss, as_loss)} ({grade.error:+.2%})",
        f"N {amount(grade.parameters)}, forecast {shown(card.parameters, as_size)}",
        f"signed: {signed}",
    ]


def read_grades(directory: Path) -> list[tuple[str, ForecastCard, Grade | None]]:
    """Return name, card and grade (None if not graded yet) of every card in a directory.

    A grade of a card that was changed afterwards is an error.
    """
    graded = []
    for path in sorted(directory.glob("*.yaml")):
        card, grade = read_card(path), _grade_of(path)
        if grade and grade.card_sha256 != sha256_of(path):
            raise DataError(
                f"{path} is not the card that {_grade_path(path).name} graded; grade it again"
            )
        graded.append((path.stem, card, grade))
    return graded


def grades_table(graded: Sequence[tuple[str, ForecastCard, Grade | None]]) -> list[list[str]]:
    """Heads and a row per card."""
    rows = [["forecast", "law", "times", "loss forecast", "measured", "error", "inside", "signed"]]
    for name, card, grade in graded:
        row = [name, card.law, f"{card.flops / card.largest_budget:.3g}", shown(card.loss, as_loss)]
        if grade:
            row += [as_loss(grade.loss), f"{grade.error:+.2%}"]
            row += ["yes" if grade.is_inside else "no", "yes" if grade.is_signed else "no"]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return rows


def coverage_line(graded: Sequence[tuple[str, ForecastCard, Grade | None]]) -> str:
    """Compare the claimed coverage with the measured one."""
    grades = [grade for _, _, grade in graded if grade]
    if not grades:
        return f"{counted(len(graded), 'forecast')}, none graded yet"
    inside = sum(grade.is_inside for grade in grades)
    error = np.median([abs(grade.error) for grade in grades])
    return (
        f"{inside} of {counted(len(grades), 'graded forecast')} inside their 95% intervals; median "
        f"error {error:.2%}"
    )


def write_cards_page(cards: Path, directory: Path, title: str) -> str:
    """Write report.html about the cards of a folder; return what to print."""
    from pretrain.scaling.report import Part, write_parts

    graded = read_grades(cards)
    if not graded:
        raise DataError(
            f"{cards} has no forecast cards (*.yaml); 'pretrain scale forecast' writes one"
        )
    rows, line = grades_table(graded), coverage_line(graded)
    parts = [Part(title="Forecasts", rows=rows, lines=[line])]
    path = write_parts(parts, cards, directory, title, line, [])
    return "\n".join([fitted_table(rows), line, f"report: {path}"])
