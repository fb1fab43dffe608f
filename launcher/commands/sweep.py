"""`launcher sweep`: run the cells of a sweep file, on this machine or as array jobs.

Finished cells are never repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.errors import EXIT_USER_ERROR, ConfigError, UserError
from launcher.commands.watch import add_watch_argument, watch
from launcher.slurm import client as slurm
from launcher.slurm.cluster import load_cluster
from launcher.slurm.sbatch import parse_nodes
from launcher.supervisor import StopSignals
from launcher.sweep_cells import (
    CellRun,
    describe,
    longest_first,
    planned,
    read_cells,
    settings_of,
    write_results,
)
from launcher.sweep_runs import array_of, classes, parts_of, run_cells, submit_array
from pretrain.rundir.exit_status import EXIT_STOPPED
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.sweep_file import Sweep, read_sweep
from pretrain.terminal.text import counted

_ACTIONS = (
    "plan: show the cells",
    "submit: start the cells that are neither done nor active",
    "status: show state, results and settings of each cell",
    "collect: settings and results as CSV",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher sweep`."""
    parser.add_argument(
        "action", choices=("plan", "submit", "status", "collect"), help="; ".join(_ACTIONS)
    )
    parser.add_argument(
        "sweep", type=Path, help="sweep file: a grid, or cells as 'pretrain scale plan' writes them"
    )
    parser.add_argument(
        "--runs-dir", type=Path, help="parent of the cells' run directories (default runs/SWEEP)"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--local", action="store_true", help="on this machine")
    place.add_argument(
        "--cluster", type=Path, help="on Slurm: cluster file (configs/clusters/*.yaml)"
    )
    parser.add_argument(
        "-j",
        "--jobs",
        type=int,
        help="cells at a time (default: 1 on this machine, all on a cluster)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="with --local: ranks of each cell (default %(default)s)",
    )
    parser.add_argument(
        "--nodes",
        default="1",
        metavar="N|A:B",
        help="nodes of each cell; 1:4 gives each the fewest that it needs",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="CSV",
        help="output file of 'collect' (default RUNS/results.csv)",
    )
    add_watch_argument(parser, "with 'status': ")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the batch scripts; write and submit nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 if every cell is done or in the queue (or for `status`), 2 if one failed, 75 if stopped on
    request."""
    sweep = read_sweep(arguments.sweep)
    runs = arguments.runs_dir or Path("runs") / sweep.name
    if arguments.watch and arguments.action != "status":
        raise ConfigError(f"--watch belongs to 'status', found {arguments.action!r}; leave it out")
    if arguments.action != "submit":
        return _show(sweep, arguments, runs)
    for name in ("jobs", "ranks"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name}={value} must be 1 or more")
    if not arguments.local and not arguments.cluster:
        raise ConfigError("neither --local nor --cluster is given; choose where the cells run")
    if arguments.dry_run and arguments.local:
        raise ConfigError(
            "--dry-run prints batch scripts and --local has none; use 'launcher sweep status'"
        )
    cells = read_cells(sweep, arguments.sweep, runs)
    print(describe(cells), flush=True)
    if arguments.cluster:
        return _submit(sweep, cells, arguments, runs)
    return _run_here(cells, arguments, runs)


def _show(sweep: Sweep, arguments: argparse.Namespace, runs: Path) -> int:
    from launcher.commands.sweep_tables import sweep_status
    from launcher.commands.tables import console, plain_table

    def cells() -> list[CellRun]:
        return read_cells(sweep, arguments.sweep, runs)

    if arguments.watch:
        return watch(lambda: sweep_status(cells()))
    if arguments.action == "status":
        console().print(sweep_status(cells()))
        return 0
    found = cells()
    if arguments.action == "collect":
        output = arguments.output or runs / "results.csv"
        write_results(output, found)
        print(f"{output}: {describe(found)}")
        return 0
    console().print(plain_table(list(map(planned, found, settings_of(found)))))
    print(describe(found))
    return 0


def _submit(
    sweep: Sweep, cells: Sequence[CellRun], arguments: argparse.Namespace, runs: Path
) -> int:
    cluster, nodes = load_cluster(arguments.cluster), parse_nodes(arguments.nodes)
    waiting = [cell for cell in cells if cell.is_waiting]
    for count, group in classes(waiting, cluster, nodes).items():
        after = None
        for part in parts_of(group, _largest_array(arguments.dry_run)):
            job, script = array_of(
                part, count, cluster, sweep.name, runs, arguments.jobs, after=after
            )
            if arguments.dry_run:
                print(script, end="")
                continue
            with RunDir(runs).locked("sweep"):
                number = submit_array(job, script, part)
            # Each array has its own limit, so they keep it together only one after the other.
            after = number if arguments.jobs else None
            limit = f", {arguments.jobs} at a time" if arguments.jobs else ""
            print(
                f"job {number}: {counted(len(part), 'cell')} on {counted(count, 'node')} "
                f"each{limit}",
                flush=True,
            )
    if waiting and not arguments.dry_run:
        print(f"Status: launcher sweep status {arguments.sweep} --runs-dir {runs}")
    return 0


def _largest_array(is_dry_run: bool) -> int:
    try:
        return slurm.largest_array()
    except UserError:
        if not is_dry_run:
            raise
        return slurm.USUAL_ARRAY  # without Slurm here, the scripts can be shown nevertheless


def _run_here(cells: Sequence[CellRun], arguments: argparse.Namespace, runs: Path) -> int:
    runs.mkdir(parents=True, exist_ok=True)
    waiting = [cell for cell in cells if cell.is_waiting]
    with StopSignals() as stop, RunDir(runs).locked("sweep"):
        order = longest_first(waiting) if (arguments.jobs or 1) > 1 else waiting
        failed = run_cells(order, arguments.sweep, runs, arguments.jobs or 1, arguments.ranks, stop)
        if stop.requests:
            print("stopped on request; rerun the same command to continue")
            return EXIT_STOPPED
    if failed:
        count, names = counted(len(failed), "cell"), ", ".join(failed)
        print(f"{count} failed: {names}; rerun the same command to start only these again")
        return EXIT_USER_ERROR
    if len(waiting) + sum(cell.is_done for cell in cells) == len(cells):
        print(
            f"all {len(cells)} cells are done; next: launcher sweep collect {arguments.sweep} "
            f"--runs-dir {runs}"
        )
        print(
            f"or, to fit scaling laws:  pretrain scale collect {arguments.sweep} --runs-dir {runs}"
        )
    return 0
