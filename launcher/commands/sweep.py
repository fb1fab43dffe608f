"""`launcher sweep`: run the unfinished cells of a sweep file, on this machine or as array jobs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from foundation.cli import Answer, Program, add_json, check_least, targets
from foundation.errors import EXIT_USER_ERROR, ConfigError
from foundation.files import make_directory
from launcher.slurm.sbatch import cluster_here, missing_notes
from launcher.stop_signals import StopSignals
from launcher.sweep import (
    CellRun,
    array_job,
    can_begin,
    can_start,
    cell_settings,
    cells_by_nodes,
    describe,
    longest_first,
    read_cells,
    refuse_other_cells,
    run_cells,
    submit_array,
)
from pretrain.config.cluster import parse_nodes
from pretrain.config.resolve import with_absolute_paths
from pretrain.config.run import accumulation_steps
from pretrain.rundir.exit_statuses import EXIT_STOPPED
from pretrain.rundir.run_dir import RunDir
from pretrain.sweeps.cell_runs import cells_directory
from pretrain.sweeps.sweep_file import Sweep, read_sweep
from pretrain.terminal.text import counted

PROGRAM = Program(
    "launcher sweep",
    "The cells of a sweep file: a grid, or cells as 'pretrain scale plan' writes them.",
    targets(
        "launcher.commands.sweep:",
        {
            "submit": "start the cells that are neither done nor active",
            "status": "show state, results and settings of each cell",
        },
    ),
)


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP", help="sweep file")
    add("--runs-dir", type=Path, help="parent of the cells' run directories (default runs/SWEEP)")


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher sweep status`."""
    _add_sweep(parser)
    add_json(parser)


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher sweep submit`."""
    _add_sweep(parser)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--local", action="store_true", help="on this machine")
    add("--cluster", type=Path, help="on Slurm: cluster file (configs/clusters/*.yaml)")
    add = parser.add_argument
    add("-j", "--jobs", type=int, help="cells at a time (default: here 1, on a cluster all)")
    add("--ranks", type=int, default=1, help="with --local: ranks of each cell (default 1)")
    words = "with --cluster: nodes of each cell; 1:4 gives each the fewest that it needs"
    add("--nodes", default="1", metavar="N|A:B", help=words)
    words = "print the batch scripts, or with --local the cells in order; start nothing"
    add("--dry-run", action="store_true", help=words)


def run_status(arguments: argparse.Namespace) -> Answer:
    """Return state, results and settings of each cell."""
    from launcher.status_tables import console, sweep_status

    cells, terminal = _read(arguments)[2], console()
    with terminal.capture() as table:
        terminal.print(sweep_status(cells))
    values = [
        {"cell": cell.cell.name, "settings": settings, **cell.state.tree}
        for cell, settings in zip(cells, cell_settings(cells), strict=True)
    ]
    return Answer(table.get().rstrip("\n"), values)


def run_submit(arguments: argparse.Namespace) -> int:
    """Return 0 if every cell is done or in the queue, 2 if one failed, 75 if stopped on request."""
    check_least(arguments, 1, "jobs", "ranks")
    if not arguments.local and not arguments.cluster:
        raise ConfigError("neither --local nor --cluster is given; choose where the cells run")
    sweep, runs, cells = _read(arguments)
    refuse_other_cells(cells)
    print(describe(cells), flush=True)
    if arguments.cluster:
        return _submit(sweep, cells, arguments, runs)
    return _run_here(sweep, cells, arguments, runs)


def _read(arguments: argparse.Namespace) -> tuple[Sweep, Path, list[CellRun]]:
    """Return the sweep, the parent of its run directories, and its cells."""
    sweep = read_sweep(arguments.sweep)
    runs = cells_directory(sweep, arguments.runs_dir)
    return sweep, runs, read_cells(sweep, arguments.sweep, runs)


def cells_flags(sweep: Sweep, arguments: argparse.Namespace) -> str:
    """Return what names these cells on the command line of another command."""
    runs = cells_directory(sweep, arguments.runs_dir)
    is_default = runs == cells_directory(sweep)
    return f"{arguments.sweep}{'' if is_default else f' --runs-dir {runs}'}"


def _submit(
    sweep: Sweep, cells: Sequence[CellRun], arguments: argparse.Namespace, runs: Path
) -> int:
    cluster, nodes = cluster_here(arguments.cluster), parse_nodes(arguments.nodes)
    if nodes.spare:
        raise ConfigError(
            f"--nodes={arguments.nodes}: found spare nodes, expected N or A:B; cells of "
            "a sweep have none"
        )
    active = [cell.cell.name for cell in cells if cell.state.is_active]
    unfinished = [cell for cell in cells if cell.is_waiting]
    waiting = can_start(unfinished, active)
    if held := len(unfinished) - len(waiting):
        print(f"{counted(held, 'cell')} start from others: submit again when those have ended")
    status = 0
    if not arguments.dry_run and any(cell.cell.starts_from for cell in waiting):
        with RunDir(runs).locked("sweep"):
            begun = [cell for cell in waiting if can_begin(cell, runs)]
        if len(begun) < len(waiting):
            status = EXIT_USER_ERROR
        waiting = begun
    groups, num_refused = cells_by_nodes(waiting, cluster, nodes, is_dry_run=arguments.dry_run)
    if num_refused:
        status = EXIT_USER_ERROR
    # Each array has its own limit of tasks, so with --jobs arrays run one after the other.
    live = {str(cell.state.job).partition("_")[0] for cell in cells if cell.state.is_active}
    after = ":".join(sorted(live - {"None"})) if arguments.jobs else None
    for count, group in groups.items():
        job, script = array_job(group, count, cluster, sweep.name, runs, arguments.jobs, after)
        if arguments.dry_run:
            print(script, end="")
            continue
        with RunDir(runs).locked("sweep"):
            number = submit_array(job, script, group)
        after = number if arguments.jobs else None
        limit = f", {arguments.jobs} at a time" if arguments.jobs else ""
        cells_and_nodes = f"{counted(len(group), 'cell')} on {counted(count, 'node')} each"
        print(f"job {number}: {cells_and_nodes}{limit}", flush=True)
    missing = [missing_notes(with_absolute_paths(cell.config), cluster, runs) for cell in waiting]
    for line in sorted({line for lines in missing for line in lines}):
        print(line, file=sys.stderr)
    if waiting and not arguments.dry_run:
        print(f"Status: launcher sweep status {cells_flags(sweep, arguments)}")
    return status


def _run_here(
    sweep: Sweep, cells: Sequence[CellRun], arguments: argparse.Namespace, runs: Path
) -> int:
    waiting = [cell for cell in cells if cell.is_waiting]
    for cell in waiting:
        accumulation_steps(cell.config, arguments.ranks)  # one error here, not one from each cell
    order = longest_first(waiting) if (arguments.jobs or 1) > 1 else waiting
    if arguments.dry_run:
        if order:
            from launcher.status_tables import console, settings_table

            console().print(settings_table(order))
        print(f"would start {counted(len(order), 'cell')}, {arguments.jobs or 1} at a time")
        return 0
    make_directory(runs)
    with StopSignals() as stop, RunDir(runs).locked("sweep"):
        failed = run_cells(order, arguments.sweep, runs, arguments.jobs or 1, arguments.ranks, stop)
        if stop.requests:
            print("stopped on request; rerun the same command to continue")
            return EXIT_STOPPED
    if failed:
        count, names = counted(len(failed), "cell"), ", ".join(failed)
        print(f"{count} failed: {names}; rerun the same command to start only these again")
        return EXIT_USER_ERROR
    cells = read_cells(sweep, arguments.sweep, runs)
    if all(cell.is_done for cell in cells):
        print(f"all {len(cells)} cells are done; curves: pretrain report {runs}")
        if all(cell.facts for cell in sweep.cells):  # planned
            print(f"table and figures: pretrain scale collect {cells_flags(sweep, arguments)}")
            print(f"then: pretrain scale report {runs / 'runs.csv'}")
        return 0
    print(f"{describe(cells)}; rerun the same command to start the others")
    return EXIT_STOPPED
