"""`pretrain scale forecast` and `grade`: a card before a run, and how it came out afterwards."""

import argparse
from pathlib import Path

from foundation.cli import Answer, add_json, check_output_file
from foundation.errors import ConfigError
from foundation.files import refuse_overwrite
from pretrain.commands.scale import add_question, add_runs, check_question
from pretrain.commands.scale_fit import add_law, named_law, points_of
from pretrain.rundir.run_paths import run_path
from pretrain.scaling.fit import Fit, doubts, fit_all, refuse_wild, run_doubts
from pretrain.scaling.forecast import (
    card_line,
    grade_lines,
    grade_run,
    make_card,
    make_run_card,
    read_card,
    write_card,
    write_grade,
)
from pretrain.scaling.frontier import Approach
from pretrain.scaling.report import backtest_lines


def add_forecast_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain scale forecast`."""
    add_runs(parser)
    add_question(parser)
    add_law(parser)
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="CARD", help="YAML file to write")


def run_forecast(arguments: argparse.Namespace) -> int:
    """Write the card."""
    asked, output = check_question(arguments), arguments.output
    if not asked:
        raise ConfigError("found no question; give --flops, or --params and --tokens")
    check_output_file("--output", output, "card.yaml")
    if output.suffix != ".yaml":
        raise ConfigError(f"--output {output}: expected a name that ends in .yaml")
    refuse_overwrite(output)
    fit = fit_all(points_of(arguments))
    if asked == ["flops"]:
        law = named_law(fit, arguments.law) or first_with_interval(fit)
        reasons = doubts(fit, arguments.flops, law)
        card = make_card(fit, law, arguments.runs, arguments.flops)
    else:
        reasons = run_doubts(fit, arguments.params, arguments.tokens)
        card = make_run_card(fit, arguments.runs, arguments.params, arguments.tokens)
    if fit.none_because and not arguments.law:
        reasons.append(f"none of these laws describes these runs: {fit.none_because}")
    lines = refuse_wild(reasons, arguments.force)
    write_card(card, output)
    print("\n".join([card_line(card), *backtest_lines(card.backtests), *lines]))
    print(f"card: {output}; before the run starts: launcher submit RUN.yaml --forecast {output}")
    return 0


def first_with_interval(fit: Fit) -> Approach:
    """Return the first law to rely on that has intervals; else the first."""
    laws = [law for law in fit.approaches if law.key not in fit.doubts and not law.no_interval]
    return laws[0] if laws else fit.approaches[0]


def add_grade_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain scale grade`."""
    add = parser.add_argument
    add("card", type=Path, metavar="CARD", help="of 'pretrain scale forecast'")
    add("run", type=run_path, metavar="RUN", help="directory of the run, or its name in runs/")
    add_json(parser)


def run_grade(arguments: argparse.Namespace) -> Answer:
    """Return the grade, and write it beside the card; status 1 if the loss is outside."""
    card = read_card(arguments.card)
    grade = grade_run(arguments.card, card, arguments.run)
    write_grade(arguments.card, grade)
    return Answer("\n".join(grade_lines(card, grade)), grade, int(not grade.is_inside))
