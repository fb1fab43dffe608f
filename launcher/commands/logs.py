"""`launcher logs`: what a run's ranks say, as they say it, or only what went wrong."""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path

from data_pipeline.errors import ConfigError
from launcher.status.queue_state import read_states
from launcher.status.run_logs import RankLogs, error_lines, job_log, newest_attempt
from pretrain.rundir.run_dir import RunDir

_POLL_SECONDS = 0.3
_LOOK_SECONDS = 3.0  # between two looks at whether the run still goes on
_GOES_ON = ("running", "queued", "requeued", "preempted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher logs`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument(
        "--rank", type=int, help="which rank (default 0; with --errors all of them)"
    )
    parser.add_argument(
        "--errors", action="store_true", help="only errors, tracebacks and stacks, of the job too"
    )
    parser.add_argument(
        "--lines",
        type=int,
        default=50,
        metavar="N",
        help="the last N; 0: all (default %(default)s)",
    )
    parser.add_argument("--follow", action="store_true", help="go on, until the run ends or Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Print the newest attempt's log; 0."""
    if arguments.lines < 0:
        raise ConfigError(f"--lines={arguments.lines} must be 0 or more")
    if arguments.errors and arguments.follow:
        raise ConfigError("--errors and --follow contradict each other; give one of them")
    (state,) = read_states([arguments.run])
    logs = RunDir(arguments.run).logs
    newest = newest_attempt(logs)
    if arguments.errors:
        return _print_errors(arguments, logs, newest)
    rank = arguments.rank or 0
    if arguments.follow:
        try:
            return _follow(arguments, logs, rank)
        except KeyboardInterrupt:
            return 0
    path = newest.path_of(rank) if newest else job_log(logs)
    if path is None:
        raise ConfigError(f"{logs} holds no logs yet; the run is {state.describe}")
    for line in _last_lines(path, arguments.lines):
        print(line, end="")
    return 0


def _print_errors(arguments: argparse.Namespace, logs: Path, newest: RankLogs | None) -> int:
    job = job_log(logs)
    sources = {"job": job} if job else {}
    if newest:
        ranks = (
            newest.paths
            if arguments.rank is None
            else {arguments.rank: newest.path_of(arguments.rank)}
        )
        sources |= {f"rank {rank}": path for rank, path in ranks.items()}
    said_any = False
    for name, path in sources.items():
        with open(path, errors="replace") as file:
            for line in deque(error_lines(file), maxlen=arguments.lines or None):
                print(f"[{name}] {line.rstrip()}")
                said_any = True
    if not said_any:
        print(f"no errors in attempt {newest.attempt}" if newest else "no logs yet")
    return 0


def _follow(arguments: argparse.Namespace, logs: Path, rank: int) -> int:
    """Print what the newest attempt's rank writes, go over to the next attempt's log, end with the run."""
    tail: _Tail | None = None
    looked, ending = time.monotonic(), ""
    while True:
        newest = newest_attempt(logs)
        # the ranks of an attempt begin their logs one after the other
        path = newest.paths.get(rank) if newest else None
        if newest and path and (tail is None or tail.path != path):
            if tail is not None:
                tail.print_new()
                print(f"--- attempt {newest.attempt}", flush=True)
            tail = _Tail(
                path, 0 if tail is not None else _start_of_last_lines(path, arguments.lines)
            )
        if tail is not None:
            tail.print_new()
        if ending:
            print(f"--- the run is {ending}", flush=True)
            return 0
        if time.monotonic() - looked > _LOOK_SECONDS:
            looked = time.monotonic()
            (state,) = read_states([arguments.run])
            if newest and tail is None and state.ranks is not None and rank >= state.ranks:
                newest.path_of(rank)  # there is none, and will be none
            if state.state not in _GOES_ON:
                ending = (
                    state.describe
                )  # after one more look at the log: its last lines may have come since
        time.sleep(_POLL_SECONDS)


class _Tail:
    """A log and how far it was printed."""

    def __init__(self, path: Path, position: int) -> None:
        self.path = path
        self._position = position

    def print_new(self) -> None:
        with open(self.path, "rb") as file:
            file.seek(self._position)
            new = file.read()
        self._position += len(new)
        print(new.decode(errors="replace"), end="", flush=True)


def _last_lines(path: Path, count: int) -> deque[str]:
    with open(path, errors="replace") as file:
        return deque(file, maxlen=count or None)


def _start_of_last_lines(path: Path, count: int) -> int:
    lines = path.read_bytes().splitlines(keepends=True)
    return sum(map(len, lines[:-count])) if count else 0
