"""`launcher logs`: the log of one of a run's ranks, also while it is written, or only the errors of
all of them."""

from __future__ import annotations

import argparse
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import ConfigError
from launcher.status.slurm_queue import read_states
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.log import LINE_START

_POLL_SECONDS = 0.3
_STATE_SECONDS = 3.0  # between two looks at whether the run is still active
_RANK_LOG = re.compile(r"attempt-(\d+)-rank-(\d+)\.log")
# Starts a block that lasts as long as lines are indented: a traceback, or the stacks of a rank that
# hung or crashed.
_BLOCK = re.compile(
    r"Traceback \(most recent call last\)|(Current )?[Tt]hread 0x\w+.*most recent call first"
    r"|Fatal Python"
)
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # of each line of a traceback in a group of ranks
# Errors in lines that are not ours: uncaught exceptions, NCCL, Slurm.
_ERROR = re.compile(
    r"^error: |^\w*(Error|Exception|Interrupt)\b|\berror:|\bfatal\b|out of memory|oom-kill"
    r"|segmentation fault|NCCL WARN|CANCELLED AT|NODE FAIL",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankLogs:
    """The logs of one attempt's ranks, by rank."""

    attempt: int
    paths: dict[int, Path]

    def path_of(self, rank: int) -> Path:
        """One rank's log; ConfigError if there is no such rank."""
        if rank not in self.paths:
            raise ConfigError(
                f"--rank={rank}: attempt {self.attempt} has the ranks 0 to {max(self.paths)}"
            )
        return self.paths[rank]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher logs`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--rank", type=int, help="which rank (default 0; with --errors all)")
    parser.add_argument(
        "--errors",
        action="store_true",
        help="only errors, tracebacks and stacks, also those of the Slurm job",
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
    """Print the log of the latest attempt; 0."""
    if arguments.lines < 0:
        raise ConfigError(f"--lines={arguments.lines} must be 0 or more")
    if arguments.errors and arguments.follow:
        raise ConfigError("--errors and --follow contradict each other; give one of them")
    (state,) = read_states([arguments.run])
    logs = RunDir(arguments.run).logs
    latest = latest_attempt(logs)
    if arguments.errors:
        return _print_errors(arguments, logs, latest)
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
        print(line, end="")
    return 0


def latest_attempt(logs: Path) -> RankLogs | None:
    """The logs of the last attempt; None if there are none yet."""
    found: dict[int, dict[int, Path]] = {}
    for path in logs.glob("attempt-*-rank-*.log"):
        if match := _RANK_LOG.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    if not found:
        return None
    attempt = max(found)
    return RankLogs(attempt, dict(sorted(found[attempt].items())))


def error_lines(lines: Iterable[str]) -> Iterator[str]:
    """Whole tracebacks and stacks, lines logged as errors, and lines of others that look like
    errors."""
    in_block = False
    for raw in lines:
        level = LINE_START.match(raw)
        line = _TORCH_PREFIX.sub("", raw)
        if _BLOCK.search(line):
            in_block = True
            yield line
        elif in_block:
            yield line
            in_block = line.startswith((" ", "\t")) or not line.strip()
        elif level["level"] in ("ERROR", "CRITICAL") if level else _ERROR.search(line):
            yield line


def _job_log(logs: Path) -> Path | None:
    """The log of the latest Slurm job: its supervisor's decisions, and what Slurm wrote."""
    return max(logs.glob("slurm-*.log"), key=lambda path: path.stat().st_mtime, default=None)


def _print_errors(arguments: argparse.Namespace, logs: Path, latest: RankLogs | None) -> int:
    job = _job_log(logs)
    sources = {"job": job} if job else {}
    if latest and arguments.rank is not None:
        sources[f"rank {arguments.rank}"] = latest.path_of(arguments.rank)
    elif latest:
        sources |= {f"rank {rank}": path for rank, path in latest.paths.items()}
    found_any = False
    for name, path in sources.items():
        with open(path, errors="replace") as file:
            for line in deque(error_lines(file), maxlen=arguments.lines or None):
                print(f"[{name}] {line.rstrip()}")
                found_any = True
    if not found_any:
        print(f"no errors in attempt {latest.attempt}" if latest else "no logs yet")
    return 0


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
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        print(new.decode(errors="replace"), end="", flush=True)


def _last_lines(path: Path, count: int) -> deque[str]:
    with open(path, errors="replace") as file:
        return deque(file, maxlen=count or None)


def _start_of_last_lines(path: Path, count: int) -> int:
    lines = path.read_bytes().splitlines(keepends=True)
    return sum(map(len, lines[:-count])) if count else 0
