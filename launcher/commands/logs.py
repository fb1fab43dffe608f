"""`launcher logs`: the log of one of a run's ranks, also while it is written, or only the errors of
all logs."""

from __future__ import annotations

import argparse
import shlex
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foundation.errors import ConfigError, printable
from foundation.files import lines_of, read_together
from launcher.error_lines import error_lines
from launcher.status.infer_status import State
from launcher.status.slurm_queue import read_states
from pretrain.rundir.events import AttemptEnded
from pretrain.rundir.ledger import events_of
from pretrain.rundir.run_dir import AttemptFiles, RunDir, attempts_of, traces_of_attempt
from pretrain.rundir.run_paths import run_path

_POLL_SECONDS = 0.3
_STATE_SECONDS = 3.0  # between two looks at whether the run is still active
_NUM_LAST_LINES = 10  # of the logs of a run that failed without an error line
_NO_LINES = "the job could not write a line: its disk was full, or its directory moved or removed"


@dataclass(frozen=True)
class RankLogs:
    """The logs of one attempt's ranks, by rank."""

    attempt: int
    paths: dict[int, Path]

    def path_of(self, rank: int) -> Path:
        """One rank's log; ConfigError if there is no such rank."""
        if not self.paths:
            raise ConfigError(
                f"attempt {self.attempt} has no logs of ranks: either none started, and 'launcher "
                "logs RUN --errors' says why, or they were started without the launcher"
            )
        if rank not in self.paths:
            raise ConfigError(
                f"--rank={rank}: attempt {self.attempt} has the ranks 0 to {max(self.paths)}"
            )
        return self.paths[rank]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher logs`."""
    parser.add_argument("run", type=run_path, metavar="RUN", help="run, or its name in runs/")
    parser.add_argument("--rank", type=int, help="which rank (default 0; with --errors all)")
    parser.add_argument(
        "--attempt", type=int, metavar="N", help="which attempt (default: the latest)"
    )
    parser.add_argument(
        "--errors",
        action="store_true",
        help="only errors, tracebacks and stacks: of the ranks, srun and the Slurm job",
    )
    parser.add_argument(
        "--lines",
        type=int,
        default=50,
        metavar="N",
        help="the last N lines; 0: all (default %(default)s)",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="keep printing new lines until the run ends or Ctrl-C",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print logs of one attempt; 0."""
    if arguments.lines < 0:
        raise ConfigError(f"--lines={arguments.lines} must be 0 or more")
    if arguments.errors and arguments.follow:
        raise ConfigError("--errors and --follow contradict each other; give one of them")
    if arguments.attempt is not None and arguments.follow:
        raise ConfigError("--attempt and --follow contradict each other; give one of them")
    (state,) = read_states([arguments.run])
    run_dir = RunDir(arguments.run)
    logs = run_dir.logs
    latest = _chosen(logs, arguments.attempt)
    if arguments.errors:
        found = _print_errors(arguments, run_dir, latest)
        has_failed = state.state is State.FAILED
        nothing = _NO_LINES if has_failed else "no logs yet"
        if latest:
            nothing = f"no errors in attempt {latest.attempt}"
        if not found:
            print("\n".join(_last_words(logs, latest) if has_failed else []) or nothing)
        return 0
    rank = arguments.rank or 0
    if arguments.follow:
        try:
            return _follow(arguments, logs, rank)
        except KeyboardInterrupt:
            return 0
    path = latest.path_of(rank) if latest else _job_log(logs)
    if path is None:
        raise ConfigError(f"{logs} contains no logs yet; the run is {state.description}")
    for line in _last_lines(path, arguments.lines):
        print(printable(line), end="")
    return 0


def latest_attempt(logs: Path) -> RankLogs | None:
    """The logs of the last attempt; None if there are none yet."""
    return _chosen(logs, None)


def _chosen(logs: Path, number: int | None) -> RankLogs | None:
    attempts = {attempt.number: attempt for attempt in attempts_of(logs)}
    if number is None and not attempts:
        return None
    chosen = max(attempts) if number is None else number
    if chosen not in attempts:
        known = "no attempts yet"
        if attempts:
            known = f"the attempts {min(attempts)} to {max(attempts)}"
        raise ConfigError(f"--attempt={chosen}: the run has {known}")
    return RankLogs(chosen, attempts[chosen].logged_ranks())


def _job_log(logs: Path) -> Path | None:
    """The log of the latest Slurm job: decisions of its supervisor, and what Slurm wrote."""
    return max(logs.glob("slurm-*.log"), key=lambda path: path.stat().st_mtime, default=None)


def _print_errors(arguments: argparse.Namespace, run_dir: RunDir, chosen: RankLogs | None) -> bool:
    """Print the errors of an attempt, the rank that failed first at the top; whether any."""
    found_any = False
    for name, errors in _sources(run_dir, chosen, arguments):
        for line in errors:
            print(printable(f"[{name}] {line.rstrip()}"), flush=True)
            found_any = True
    if chosen is None:
        return found_any
    directory = AttemptFiles(run_dir.logs, chosen.attempt).directory
    for prefix, ranks in traces_of_attempt(run_dir.logs, chosen.attempt).items():
        print(f"[collectives] {describe_traces(directory, prefix, ranks)}")
        found_any = True
    return found_any


def describe_traces(directory: Path, prefix: str, ranks: Sequence[int]) -> str:
    """Where the ranks' last collectives are, and what reads them."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return (
        f"the last of {which} are in {directory / prefix}*; compare them with: "
        f"{shlex.join(['torchfrtrace', '--prefix', prefix, '-j', str(directory)])}"
    )


def _sources(
    run_dir: RunDir, chosen: RankLogs | None, arguments: argparse.Namespace
) -> Iterator[tuple[str, Sequence[str]]]:
    """Names and last errors of all logs: of the rank that failed first, srun, the job, other ranks.

    Those of other ranks are read together, once what came before them has been shown.
    """
    errors_of = partial(_errors, count=arguments.lines)
    ranks = list(chosen.paths) if chosen else []
    if chosen and arguments.rank is not None:
        chosen.path_of(arguments.rank)
        ranks = [arguments.rank]
    ended = events_of(run_dir.ledger.read(), AttemptEnded) if chosen else []
    ends = {end.attempt_number: end.first_failure for end in ended}
    if chosen and (first := ends.get(chosen.attempt)) is not None and first in ranks:
        ranks.remove(first)
        yield f"rank {first}", errors_of(_lines(chosen.paths[first]))
    if chosen and (srun := AttemptFiles(run_dir.logs, chosen.attempt).srun_log).exists():
        yield "srun", errors_of(_lines(srun))
    if arguments.attempt is None and (log := _job_log(run_dir.logs)):
        yield "job", errors_of(_lines(log))
    paths = [chosen.paths[rank] for rank in ranks] if chosen else []
    others = read_together(lambda path: errors_of(_lines(path)), paths)
    yield from ((f"rank {rank}", errors) for rank, errors in zip(ranks, others, strict=True))


def _errors(lines: Sequence[str], count: int) -> Sequence[str]:
    """The last `count` lines that speak of an error; 0: all."""
    return deque(error_lines(lines), maxlen=count or None)


def _last_words(logs: Path, chosen: RankLogs | None) -> list[str]:
    """The last lines of a failed run's logs, which say something nobody would expect."""
    srun = AttemptFiles(logs, chosen.attempt).srun_log if chosen else None
    return [
        printable(f"[{name}] {line.rstrip()}")
        for name, path in (("srun", srun), ("job", _job_log(logs)))
        for line in (_last_lines(path, _NUM_LAST_LINES) if path and path.exists() else ())
    ]


def _lines(path: Path) -> list[str]:
    return list(_last_lines(path, 0))


def _follow(arguments: argparse.Namespace, logs: Path, rank: int) -> int:
    """Print what the rank writes, in this attempt and the next ones, until the run is not active
    any more."""
    tail: _Tail | None = None
    checked, ending = time.monotonic(), ""
    while True:
        latest = latest_attempt(logs)
        # The ranks of an attempt create their logs one after the other.
        path = latest.paths.get(rank) if latest else None
        if latest and path and (tail is None or tail.path != path):
            start = _start_of_last_lines(path, arguments.lines) if tail is None else 0
            if tail is not None:
                tail.print_new()
                print(f"--- attempt {latest.attempt}", flush=True)
            tail = _Tail(path, start)
        if tail is not None:
            tail.print_new()
        if ending:
            print(f"--- the run is {ending}", flush=True)
            return 0
        if time.monotonic() - checked > _STATE_SECONDS:
            checked = time.monotonic()
            (state,) = read_states([arguments.run])
            if latest and tail is None and state.ranks is not None and rank >= state.ranks:
                latest.path_of(rank)  # raises: this rank will never have a log
            if not state.is_active:
                ending = state.description  # print once more before the end: lines may have come
        time.sleep(_POLL_SECONDS)


class _Tail:
    """A log and how far it was printed."""

    def __init__(self, path: Path, offset: int) -> None:
        self.path = path
        self._offset = offset

    def print_new(self) -> None:
        for line in lines_of(self.path, start=self._offset):
            self._offset += len(line)
            print(printable(_text(line)), end="", flush=True)


def _last_lines(path: Path, count: int) -> deque[str]:
    parts = (part for line in lines_of(path) for part in _text(line).splitlines(keepends=True))
    return deque(parts, maxlen=count or None)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def _start_of_last_lines(path: Path, count: int) -> int:
    lengths = [len(line) for line in lines_of(path)]
    return sum(lengths[:-count]) if count else 0
