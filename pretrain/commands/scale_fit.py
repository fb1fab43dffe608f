"""`pretrain scale collect`, `fit` and `report`: from runs to their table, its fit and its page."""

import argparse
import math
from pathlib import Path

from foundation.cli import Answer, add_json, check_output_directory, check_output_file
from foundation.errors import ConfigError, DataError
from foundation.files import YAML_SUFFIXES, make_directory, refuse_overwrite, write_text
from foundation.settings import load_config
from foundation.tables import check_table_path
from foundation.typed_values import to_tree
from foundation.yaml_files import dump_yaml
from pretrain.commands.scale import (
    add_family,
    add_question,
    add_runs,
    check_amount,
    check_question,
    rule_name,
    rule_of,
)
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import run_cost
from pretrain.scaling.collect import rate_checks, row_of, shown_rows, with_one_text, write_rows
from pretrain.scaling.fit import (
    TITLES,
    Fit,
    doubts,
    fit_all,
    law_of_runs,
    loss_interval,
    refuse_wild,
    run_doubts,
)
from pretrain.scaling.frontier import Approach
from pretrain.scaling.intervals import amount, as_loss, shown
from pretrain.scaling.recipe import Family, outside_step_law, run_of_size, step_law_rule
from pretrain.scaling.report import fit_lines, fit_tree, ratio_line, write_fit_page
from pretrain.scaling.table import Columns, Points, read_points
from pretrain.sweeps.cell_runs import cells_directory, cells_of
from pretrain.sweeps.sweep_file import read_sweep
from pretrain.terminal.text import counted, fitted_table


def add_collect_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain scale collect`."""
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP", help="sweep file")
    add("--runs-dir", type=Path, metavar="DIR", help="folder of its runs (default runs/SWEEP)")
    add("--output", type=Path, metavar="FILE", help="table to write (default DIR/runs.csv)")


def run_collect(arguments: argparse.Namespace) -> int:
    """Write the table of runs."""
    sweep = read_sweep(arguments.sweep)
    runs = cells_directory(sweep, arguments.runs_dir)
    if not runs.is_dir():
        raise DataError(
            f"{runs} is not a directory; name the one that contains the sweep's run directories "
            "with --runs-dir, or start the sweep with 'launcher sweep submit'"
        )
    output = arguments.output or runs / "runs.csv"
    check_output_file("--output", output, "runs.csv")
    check_table_path(output)
    rows = list(with_one_text(list(map(row_of, cells_of(sweep, arguments.sweep, runs)))))
    write_rows(output, rows)
    left_out = [row for row in rows if row.excluded]
    print(fitted_table(shown_rows(rows)))
    print(f"{output}: {len(rows) - len(left_out)} of {len(rows)} cells have a final loss")
    for row in left_out:
        if row.rate_factor == "" or row.loss == "":
            print(f"left out: {row.name}: {row.excluded}")
    for line in rate_checks(rows):
        print(line)
    if len(versions := {version for row in rows for version in row.code.split()}) > 1:
        print(f"note: {len(versions)} versions of the code trained these cells; see column code")
    if len(left_out) < len(rows):
        fit = f"pretrain scale fit {output}, then " if sweep.varies == "sizes" else ""
        print(f"next: {fit}pretrain scale report {output}")
    return 0


def points_of(arguments: argparse.Namespace) -> Points:
    """Return the runs that the flags of `add_runs` describe."""
    if arguments.runs.suffix in YAML_SUFFIXES:
        raise ConfigError(
            f"{arguments.runs} is no table of runs; if it is a sweep, name the runs.csv that "
            f"'pretrain scale collect {arguments.runs}' writes"
        )
    return read_points(arguments.runs, Columns.parse(arguments.column))


def add_law(parser: argparse.ArgumentParser) -> None:
    """Define `--law`."""
    words = "law to answer by (default: the first, for a forecast the first with an interval)"
    parser.add_argument("--law", choices=list(TITLES), default="", help=words)


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain scale fit`."""
    add_runs(parser)
    add_question(parser)
    add_law(parser)
    add = parser.add_argument
    add("--experiment", type=Path, metavar="FILE", help="whose family of shapes is chosen from")
    add("--write", type=Path, metavar="FILE", help="experiment file to write of the nearest run")
    add_family(parser)
    words = "with --flops: the loss of D/N = R instead of the optimum's, as of a model to be served"
    add("--ratio", type=float, metavar="R", help=words)
    add("--verbose", action="store_true", help="print all there is")
    add_json(parser)


def run_fit(arguments: argparse.Namespace) -> Answer:
    """Return the fit and its answer; status 1 if no law describes the runs."""
    _check(arguments)
    base, flops = None, arguments.flops
    if arguments.experiment:
        base = with_vocabulary(load_config(RunConfig, arguments.experiment))
    fit = fit_all(points_of(arguments))
    law = named_law(fit, arguments.law)
    is_refused = bool(fit.none_because) and not (law or arguments.force)
    lines = []
    if not is_refused and arguments.params:
        return _single_run(fit, arguments)
    if not is_refused and flops:
        refuse_wild(doubts(fit, flops, law or fit.approaches[0]), arguments.force)
        lines += _nearest(base, fit, law or fit.approaches[0], arguments) if base else []
    if arguments.ratio and not is_refused:
        lines.append(ratio_line(fit, flops, arguments.ratio))
    text = fit_lines(fit, flops, arguments.verbose, law, arguments.force)
    return Answer("\n".join([*text, *lines]), fit_tree(fit, flops), int(bool(fit.none_because)))


def named_law(fit: Fit, key: str) -> Approach | None:
    """Return the law of `--law`, None without one; ConfigError if these runs do not allow it."""
    if key in fit.unavailable:
        why = fit.unavailable[key]
        raise ConfigError(f"law {key!r} is not available for these runs: {why}")
    return fit.approach(key)


def _check(arguments: argparse.Namespace) -> None:
    """ConfigError for questions that contradict each other, and files that cannot be written."""
    asked = check_question(arguments)
    if arguments.write:
        if not arguments.experiment:
            raise ConfigError(
                "--write needs --experiment, the experiment whose family of shapes to choose from"
            )
        check_output_file("--write", arguments.write, "best.yaml")
        refuse_overwrite(arguments.write)
    if arguments.experiment and asked != ["flops"]:
        raise ConfigError("--experiment is for the optimum of a budget: add --flops")
    if arguments.ratio is not None:
        check_amount("ratio", arguments.ratio)
        if asked != ["flops"]:
            raise ConfigError("--ratio is for the run of a budget: add --flops")


def _single_run(fit: Fit, arguments: argparse.Namespace) -> Answer:
    law, size, tokens = law_of_runs(fit), arguments.params, arguments.tokens
    reasons = refuse_wild(run_doubts(fit, size, tokens), arguments.force)
    flops = fit.flops_law.flops(size, tokens)
    loss = fit.beyond_runs(loss_interval(law, size, tokens), flops)
    asked = f"N = {amount(size)} over D = {amount(tokens)} ({flops:.3g} FLOPs)"
    lines = [f"loss of {asked} by {law.title}: {shown(loss, as_loss)}", *reasons]
    return Answer("\n".join(lines), {"law": law.key, "loss": loss, "flops": flops})


def _nearest(base: RunConfig, fit: Fit, law: Approach, arguments: argparse.Namespace) -> list[str]:
    """Describe, and write where wanted, the legal run nearest to the optimum."""
    flops, at = arguments.flops, math.log(arguments.flops)
    family = Family(base=base, keep_layers=arguments.keep_layers)
    run = run_of_size(family, law.parameters(at).value, flops, rule_of(base, arguments))
    cost, model = run_cost(run), run.model
    lines = [
        f"nearest legal run: {counted(model.num_layers, 'layer')}, d_model {model.d_model}, "
        f"{counted(model.num_heads, 'head')} of {model.head_width}: N {amount(cost.parameters)}, "
        f"D {amount(cost.tokens)}, {cost.flops:.3g} FLOPs; {counted(run.optim.steps, 'step')} of "
        f"{counted(cost.tokens_per_step, 'token')}, learning rate {run.optim.learning_rate:.3g}"
    ]
    if rule_of(base, arguments) is step_law_rule:
        lines += outside_step_law([run])
    if arguments.write:
        header = (
            f"# The optimum at {flops:.3g} FLOPs by {law.title}: loss "
            f"{shown(fit.optimum(law, flops)[2], as_loss)}\n"
            f"# Written by 'pretrain scale fit' from {arguments.runs.name}; rate and batch: "
            f"{rule_name(arguments)}\n"
        )
        make_directory(arguments.write.parent)
        write_text(arguments.write, header + dump_yaml(to_tree(run)))
        lines.append(f"written: {arguments.write}")
    return lines


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain scale report`."""
    add_runs(parser)
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", help="default: scaling-report beside RUNS, or in it")
    add("--title", default="", help="of the page (default: named after RUNS)")


def run_report(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from pretrain.comparisons.page import rows_without_sizes, write_sweep_page
    from pretrain.scaling.forecast import write_cards_page

    folder = arguments.runs if arguments.runs.is_dir() else arguments.runs.parent
    output = arguments.output or folder / "scaling-report"
    check_output_directory("--output", output)
    if arguments.runs.is_dir():
        print(write_cards_page(arguments.runs, output, arguments.title))
        return 0
    if arguments.runs.suffix == ".csv" and (rows := rows_without_sizes(arguments.runs)):
        print(write_sweep_page(rows, arguments.runs, output, arguments.title))
        return 0
    fit = fit_all(points_of(arguments))
    path = write_fit_page(fit, arguments.runs, output, arguments.title)
    print("\n".join([*fit_lines(fit), f"report: {path}"]))
    return 0
