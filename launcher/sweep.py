"""A sweep's cells: their states and tables, and how they run: here, or as Slurm array jobs."""

import contextlib
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.errors import EXIT_INTERRUPTED, ConfigError, UserError
from foundation.programs import own_command
from launcher.restart_policy import RestartPolicy
from launcher.run_state import RunState, is_run, read_states, submitted_config
from launcher.run_status import State
from launcher.slurm.client import Slurm
from launcher.slurm.sbatch import (
    Job,
    Snapshot,
    check_request,
    check_run,
    render_array,
    replaced_snapshot,
    resolve_here,
)
from launcher.stop_signals import StopSignals
from pretrain.config.cluster import ClusterConfig, NodeRange
from pretrain.config.resolve import with_absolute_paths, with_vocabulary
from pretrain.costs.flops import run_cost
from pretrain.processes.local_ranks import RankGroup, describe_failure
from pretrain.reporting.results import differing_settings
from pretrain.rundir.branch import begin_cell
from pretrain.rundir.events import Submitted
from pretrain.rundir.exit_statuses import EXIT_STOPPED, describe_exit
from pretrain.rundir.ownership import make_run_directory, refuse_foreign_run
from pretrain.rundir.run_dir import RunDir
from pretrain.sweeps.cell_runs import PlacedCell, config_of, other_settings, refuse_others
from pretrain.sweeps.sweep_file import Sweep

ARRAYS = ".arrays"  # next to the cells' directories; no cell's name starts with a dot
_POLL_SECONDS = 0.2
_STOPPED = (EXIT_STOPPED, EXIT_INTERRUPTED)  # of a stopped cell, with a checkpoint and without


@dataclass(frozen=True, kw_only=True)
class CellRun(PlacedCell):
    """A cell, its run directory and its state."""

    state: RunState

    @property
    def is_done(self) -> bool:
        """Whether a checkpoint has reached the number of steps that the sweep file has now."""
        return self.state.is_done and (self.state.checkpoint or 0) >= self.config.optim.steps

    @property
    def is_waiting(self) -> bool:
        """Whether it has to be started: it is neither done nor active."""
        return not self.is_done and not self.state.is_active


def read_cells(sweep: Sweep, sweep_path: Path, runs: Path) -> list[CellRun]:
    """Return all cells in the order of the file. A run with other settings than its cell has the
    state OTHER, and its step and checkpoint are not reported."""
    paths = [runs / cell.name for cell in sweep.cells]
    started = [path for path in paths if is_run(path)]
    known = {Path(state.path): state for state in read_states(started)}
    cells = []
    for cell, path in zip(sweep.cells, paths, strict=True):
        config = config_of(cell, sweep_path)
        state = known.get(path)
        own = submitted_config(path) if state and state.is_active else None
        other = other_settings(path, config, own)
        if other or not state:
            word = State.OTHER if other else State.NEW
            state = RunState(
                name=cell.name, path=str(path), state=word, reason=other, steps=config.optim.steps
            )
        cells.append(CellRun(cell=cell, config=config, path=path, state=state))
    return cells


def refuse_other_cells(cells: Sequence[CellRun]) -> None:
    """Raise ConfigError if a directory holds another run than its cell."""
    refuse_others(
        (cell.path, cell.state.reason) for cell in cells if cell.state.state is State.OTHER
    )


def longest_first(cells: Sequence[CellRun]) -> list[CellRun]:
    """Return the cells by training FLOPs left, the most first, then in the order of the file. If
    several run at a time, a long one that starts last would run alone in the end."""

    def flops_left(cell: CellRun) -> float:
        try:
            flops = run_cost(with_vocabulary(cell.config)).flops
        except UserError:  # the corpus is missing, and the cell itself will report that
            return 0.0
        return flops * (1 - cell.state.step / cell.config.optim.steps)

    return sorted(cells, key=flops_left, reverse=True)


def can_start(cells: Sequence[CellRun], unfinished: Collection[str] = ()) -> list[CellRun]:
    """Return the cells that need no checkpoint of a cell that is here or in `unfinished`."""
    names = {*unfinished, *(cell.cell.name for cell in cells)}
    return [cell for cell in cells if cell.cell.starts_from not in names]


def can_begin(cell: CellRun, runs: Path) -> bool:
    """Make the run of a cell that starts from another one's run. If that run does not allow it,
    print the reason and return False."""
    source, step = cell.cell.starts_from, cell.cell.starts_at
    try:
        if source:
            begin_cell(cell.config, runs / cell.cell.name, runs / source, step)
    except (UserError, OSError) as error:
        print(f"{cell.cell.name}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def describe(cells: Sequence[CellRun]) -> str:
    """Return how many cells are done, how many are active, and how the others ended."""
    done, waiting = sum(cell.is_done for cell in cells), [cell for cell in cells if cell.is_waiting]
    ended = [str(c.state.state) for c in waiting if c.state.state not in (State.NEW, State.DONE)]
    counts = {"active": len(cells) - done - len(waiting), **Counter(ended)}
    others = "".join(f", {count} {word}" for word, count in counts.items() if count)
    return f"{done} of {len(cells)} cells are done{others}"


def cell_settings(cells: Sequence[CellRun]) -> list[dict[str, Any]]:
    """Return each cell's values of the settings in which cells differ; defaults are values, too."""
    values = differing_settings([cell.config for cell in cells])
    return [{key: values[key][index] for key in values} for index in range(len(cells))]


def run_cells(
    cells: Sequence[CellRun],
    sweep_path: Path,
    runs: Path,
    at_a_time: int,
    ranks: int,
    stop: StopSignals,
) -> list[str]:
    """Run the cells, which save on a request to stop; return the names of the failed ones."""
    waiting, failed = list(cells), []
    unfinished: set[str] = set()  # cells that have ended here without being done
    running: dict[str, RankGroup] = {}
    passed_on = 0
    try:
        while running or (can_start(waiting, unfinished) and not stop.requests):
            while ready := can_start(waiting, {*running, *unfinished}):
                if len(running) >= at_a_time or stop.requests:
                    break
                cell = ready[0]
                waiting.remove(cell)
                name = cell.cell.name
                if not can_begin(cell, runs):
                    failed.append(name)
                    unfinished.add(name)
                    continue
                running[name] = _started(cell, sweep_path, runs, ranks, at_a_time)
                print(f"{name}: process {running[name].pids[0]}", flush=True)
            for name, group in list(running.items()):
                if (status := group.poll()[0]) is not None:
                    del running[name]
                    if status not in _STOPPED or not stop.requests:
                        print(f"{name}: {describe_exit(status) if status else 'done'}", flush=True)
                    if status:
                        unfinished.add(name)
                    if status not in (0, *_STOPPED):
                        failed.append(name)
                        print(describe_failure([status], group.logs, lines=5), flush=True)
            if stop.requests > passed_on:
                for group in running.values():
                    if passed_on == 0:
                        group.terminate()
                    else:
                        group.kill()
                passed_on = stop.requests
            time.sleep(_POLL_SECONDS)
    finally:
        for group in running.values():
            group.kill()
    return failed


def _started(cell: CellRun, sweep_path: Path, runs: Path, ranks: int, at_a_time: int) -> RankGroup:
    experiment = sweep_path.parent / cell.cell.experiment
    command = own_command("launcher", "local", str(experiment), f"--ranks={ranks}")
    command += [f"--run-dir={cell.path}", *cell.cell.overrides]
    threads = max(1, len(os.sched_getaffinity(0)) // (ranks * at_a_time))
    shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    return RankGroup(command, 1, runs / "logs" / cell.cell.name, environment=shared)


def cells_by_nodes(
    cells: Sequence[CellRun], cluster: ClusterConfig, nodes: NodeRange, *, is_dry_run: bool = False
) -> tuple[dict[int, list[CellRun]], int]:
    """Return number of nodes -> cells, and how many cells cannot run. Each cell gets the fewest
    nodes within `nodes` that can run it. If none can, print its name and the reason."""
    groups: dict[int, list[CellRun]] = {}
    num_refused = 0
    for cell in cells:
        try:
            groups.setdefault(_fewest_nodes(cell, cluster, nodes, is_dry_run), []).append(cell)
        except UserError as error:
            print(f"error: cell {cell.cell.name}: {error}", file=sys.stderr)
            num_refused += 1
    return dict(sorted(groups.items())), num_refused


def array_job(
    cells: Sequence[CellRun],
    num_nodes: int,
    cluster: ClusterConfig,
    sweep: str,
    runs: Path,
    at_a_time: int | None,
    after: str | None = None,
) -> tuple[Job, str]:
    """Return the job of cells that need equally many nodes, and its script; task i is the cell i.

    It starts when job `after` ends. A hash of the cells' last known jobs names its directory, so a
    retry finds the job if sbatch's answer was lost, and cells that have run get a new directory.
    """
    before = [(str(cell.path.resolve()), cell.state.job) for cell in cells]
    name = f"{sweep}-{hashlib.sha256(repr(before).encode()).hexdigest()[:8]}"
    directory = runs.resolve() / ARRAYS / name
    job = Job(
        name=name,
        run_dir=directory,
        code=Snapshot(directory).code,
        python=sys.executable,
        nodes=NodeRange(num_nodes, num_nodes),
        cluster=cluster,
        attempts_without_progress=RestartPolicy.attempts_without_progress,
    )
    return job, render_array(job, [cell.path.resolve() for cell in cells], at_a_time, after)


def submit_array(job: Job, script: str, cells: Sequence[CellRun]) -> str:
    """Save what the cells run; submit them, never twice; record it in ledgers; return the id."""
    slurm = Slurm()
    check_request(job.cluster, job.nodes, slurm.partitions())
    for shared in (job.run_dir.parent.parent, job.run_dir.parent):  # runs/SWEEP, runs/SWEEP/.arrays
        make_run_directory(shared)
        refuse_foreign_run(shared)
    with contextlib.ExitStack() as undone:
        for cell in cells:
            config, run_dir = with_absolute_paths(cell.config), RunDir(cell.path)
            snapshot = undone.enter_context(replaced_snapshot(run_dir))
            snapshot.take_settings(config, job.cluster)
        snapshot = undone.enter_context(replaced_snapshot(RunDir(job.run_dir)))
        snapshot.take_code(script)
        number, work_dir = slurm.submit(snapshot.script, str(job.code))
    for index, cell in enumerate(cells):
        task = f"{number}_{index}"
        submitted = Submitted(job=task, job_name=job.name, work_dir=work_dir)
        RunDir(cell.path).ledger.append(submitted)
    return number


def _fewest_nodes(cell: CellRun, cluster: ClusterConfig, nodes: NodeRange, is_dry_run: bool) -> int:
    config = resolve_here(with_absolute_paths(cell.config))
    planned = cell.cell.facts.get("nodes", 1)  # by 'pretrain scale plan'
    problem = ""
    for count in range(int(max(nodes.least, min(nodes.most, planned))), nodes.most + 1):
        try:
            path = cell.path.resolve()
            only = NodeRange(count, count)
            for line in check_run(config, cluster, only, path, is_dry_run=is_dry_run):
                print(f"{cell.cell.name}: {line}", file=sys.stderr)
            return count
        except ConfigError as error:
            problem = problem or str(error)
    raise ConfigError(problem)
