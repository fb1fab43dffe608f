"""`pretrain scale variants plan`, `measure` and `report`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from data_pipeline.program import Program, add_experiment
from data_pipeline.yaml_files import find_config
from pretrain.commands.output_paths import check_output_directory
from pretrain.commands.scale import (
    add_report_output,
    add_sweep,
    add_sweep_output,
    sweep_name,
    swept_runs,
)
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.intervals import amount
from pretrain.scaling.plan import check_corpus, make_sweep
from pretrain.scaling.sweep_file import Sweep, sweep_path, write_sweep
from pretrain.scaling.variants.comparison import member_runs, planned_cells, read_comparison
from pretrain.scaling.variants.results import (
    best_rates,
    compared_runs,
    missing_lines,
    read_runs,
    results_of,
)
from pretrain.scaling.which_runs import cells_directory, cells_of
from pretrain.terminal.text import counted, fitted_table, flops_text, number

_READER = "pretrain scale variants measure"
SHORTEST = 8  # tokens between a needle and its question

PROGRAM = Program(
    "pretrain scale variants",
    "Variants of a model at equal training FLOPs.",
    {
        "plan": (
            "pretrain.commands.scale_variants:plan",
            "write a sweep of every member at every rate, and of finished ones with more seeds",
        ),
        "measure": (
            "pretrain.commands.scale_variants:measure",
            "probe the finished runs at the best rates: needle, loss by position",
        ),
        "report": (
            "pretrain.commands.scale_variants:report",
            "write one table and one picture of the members",
        ),
    },
)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale variants plan`."""
    add = parser.add_argument
    words = "file of the comparison: experiment, FLOPs, rates, seeds, members"
    add_experiment(parser, RunConfig, words, file="comparison")
    words = "parent of the cells' run directories (default runs/NAME): where best rates are read"
    add("--runs-dir", type=Path, metavar="DIR", help=words)
    add_sweep_output(parser, name="the comparison's")


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the members and write the sweep file; again when runs have ended, with more cells."""
    comparison = read_comparison(arguments.comparison)
    experiment = find_config(arguments.comparison.parent / comparison.experiment)
    if not experiment.exists():
        raise ConfigError(
            f"{arguments.comparison}: {experiment} does not exist (experiment is relative to the "
            "comparison's file)"
        )
    name = sweep_name(arguments, comparison.name)
    path = sweep_path(arguments.output, name)
    overrides = [*arguments.overrides, *arguments.set]
    runs = member_runs(comparison, experiment, overrides)
    base = load_config(RunConfig, experiment, [*comparison.settings, *overrides])
    notes = [f"{flops_text(comparison.flops)} FLOPs for each run of {', '.join(runs)}"]

    def sweep_with(best: Mapping[str, float]) -> Sweep:
        cells = list(planned_cells(comparison, runs, best))
        return make_sweep(name, experiment, base, cells, path.parent, notes)

    unchecked = check_corpus(
        base,
        list(planned_cells(comparison, runs, {})),
        fewer_tokens="use fewer flops or more text",
        fewer_lanes="smaller data.lanes",
    )
    sweep = sweep_with({})
    folder = cells_directory(sweep, arguments.runs_dir)
    best = best_rates(read_runs(cells_of(sweep, path, folder)))
    sweep = sweep_with(best)
    write_sweep(path, sweep)
    print(fitted_table(_plan_table(runs, best)))
    print("\n".join([*notes, *unchecked]))
    print(f"sweep: {path} ({counted(len(sweep.cells), 'cell')})")
    is_complete = len(best) == len(runs) or len(comparison.seeds) == 1
    where = f"{path}{f' --runs-dir {arguments.runs_dir}' if arguments.runs_dir else ''}"
    then = (
        f"pretrain scale variants measure {where}"
        if is_complete
        else ("this command again, which adds the other seeds at the best rates")
    )
    print(f"next: launcher sweep submit {where} --local (or --cluster FILE), then {then}")
    return 0


def _plan_table(runs: Mapping[str, RunConfig], best: Mapping[str, float]) -> list[list[str]]:
    rows = [["member", "parameters", "steps", "tokens", "best rate"]]
    for member, run in runs.items():
        cost = cost_of(run)
        numbers = [amount(cost.parameters), f"{cost.steps:,}", amount(cost.tokens)]
        rows.append([member, *numbers, number(best.get(member), "g")])
    return rows


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale variants measure`."""
    add_sweep(parser)
    words = "needles at each distance (default %(default)s)"
    parser.add_argument("--trials", type=int, default=64, metavar="N", help=words)
    words = "test recall up to N tokens (default %(default)s)"
    parser.add_argument("--longest-distance", type=int, default=512, metavar="N", help=words)


def run_measure(arguments: argparse.Namespace) -> int:
    """Probe every run that is compared; one that has been probed so already is passed over."""
    from pretrain.commands.variant_probes import probe_runs  # late: torch takes seconds

    if arguments.trials < 1 or arguments.longest_distance < SHORTEST:
        raise ConfigError(f"--trials must be 1 or more, and --longest-distance {SHORTEST} or more")
    runs = read_runs(swept_runs(arguments, _READER)[2])
    compared = [run for found in compared_runs(runs).values() for run in found]
    probe_runs([run.path for run in compared], arguments.trials, arguments.longest_distance)
    print("\n".join([f"{counted(len(compared), 'run')} probed", *missing_lines(runs)]))
    return 0


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale variants report`."""
    add_sweep(parser)
    add_report_output(parser, None, "Variants", shown="variants-report in --runs-dir")


def run_report(arguments: argparse.Namespace) -> int:
    """Print the table, and write it with the picture."""
    from pretrain.scaling.variants.report import (
        variant_notes,
        variant_table,
        write_variant_report,
    )

    _, folder, cells = swept_runs(arguments, _READER)
    output = arguments.output or folder / "variants-report"
    check_output_directory("--output", output)
    runs = read_runs(cells)
    results = results_of(runs)
    paths = write_variant_report(results, output, arguments.title)
    print(fitted_table(variant_table(results)))
    print("\n".join([*variant_notes(results), *missing_lines(runs)]))
    print(
        f"report: {paths['md']} and {', '.join(paths[each].name for each in paths if each != 'md')}"
    )
    return 0
