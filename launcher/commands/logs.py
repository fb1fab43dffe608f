"""`launcher logs`: the log of one of a run's ranks, also while it is written, or only the errors of
all logs."""

import argparse
import io
import os
import shlex
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from foundation.cli import check_least
from foundation.errors import ConfigError, printable
from foundation.files import TAIL_BYTES, lines_of, open_appended, read_together
from launcher.error_lines import error_lines
from launcher.run_state import read_states
from launcher.run_status import State
from pretrain.rundir.attempt_files import AttemptFiles, list_attempts
from pretrain.rundir.events import AttemptEnded
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path

_POLL_SECONDS = 0.3
_STATE_SECONDS = 3.0  # between two looks at whether the run is still active
_LONGEST_LINE = 1 << 16  # bytes; longer lines are cut, or printed in parts by --follow
_MOST_BYTES = 1 << 24  # at a log's end, in which the last --lines are searched
_NUM_LAST_LINES = 10  # of a log, to show if a run failed without an error line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher logs`."""
    add = parser.add_argument
    add("run", type=run_path, metavar="RUN", help="run, or its name in runs/")
    add("--rank", type=int, help="which rank (default 0; with --errors all)")
    add("--attempt", type=int, metavar="N", help="which attempt (default: the latest)")
    add("--errors", action="store_true", help="only errors and stacks, of ranks, srun and the job")
    add("--lines", type=int, default=50, metavar="N", help="last N lines (default 50); 0: all")
    add("--follow", action="store_true", help="print new lines until the run ends or Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Print logs of one attempt; return 0."""
    check_least(arguments, 0, "lines", "rank", "attempt")
    for other in ("errors", "attempt"):
        if arguments.follow and getattr(arguments, other) not in (False, None):
            raise ConfigError(f"--{other} and --follow contradict each other; give one of them")
    (state,) = read_states([arguments.run])
    run_dir = RunDir(arguments.run)
    attempt = _chosen(run_dir.logs, arguments.attempt)
    if arguments.errors:
        if not _print_errors(arguments, run_dir, attempt):
            nothing = f"no errors in attempt {attempt.number}" if attempt else "no logs yet"
            if attempt and attempt.number:
                nothing += f"; see also --attempt {attempt.number - 1}"
            has_failed = state.state is State.FAILED
            last = _last_lines_of_all(run_dir.logs, attempt) if has_failed else []
            print("\n".join(last) or nothing)
        return 0
    rank = arguments.rank or 0
    if arguments.follow:
        try:
            return _follow(arguments, run_dir.logs, rank)
        except KeyboardInterrupt:
            return 0
    path = _rank_log(attempt, rank) if attempt else _job_log(run_dir.logs)
    if path is None:
        raise ConfigError(f"{run_dir.logs} contains no logs yet; the run is {state.description}")
    for line in _last_lines(path, arguments.lines):
        print(printable(line), end="")
    return 0


def _chosen(logs: Path, number: int | None = None) -> AttemptFiles | None:
    """Return this attempt, or the latest; None before the first."""
    attempts = {attempt.number: attempt for attempt in list_attempts(logs)}
    if number is None:
        return attempts[max(attempts)] if attempts else None
    if number not in attempts:
        known = "no attempts yet"
        if attempts:
            known = f"the attempts {min(attempts)} to {max(attempts)}"
        raise ConfigError(f"--attempt={number}: the run has {known}")
    return attempts[number]


def _rank_log(attempt: AttemptFiles, rank: int) -> Path:
    """Return one rank's log; ConfigError if there is no such rank."""
    logs = attempt.logged_ranks()
    if not logs:
        raise ConfigError(
            f"attempt {attempt.number} has no logs of ranks: either none started, and 'launcher "
            "logs RUN --errors' says why, or they were started without the launcher"
        )
    if rank not in logs:
        raise ConfigError(f"--rank={rank}: attempt {attempt.number} has the ranks 0 to {max(logs)}")
    return logs[rank]


def _job_log(logs: Path) -> Path | None:
    """Return the log of the latest Slurm job: decisions of its supervisor, and what Slurm wrote."""
    return max(logs.glob("slurm-*.log"), key=lambda path: path.stat().st_mtime, default=None)


def _print_errors(
    arguments: argparse.Namespace, run_dir: RunDir, attempt: AttemptFiles | None
) -> bool:
    """Print an attempt's errors, first the rank that failed first; return whether it has any."""
    found_any = False
    for name, errors in _sources(run_dir, attempt, arguments):
        for line in errors:
            print(printable(f"[{name}] {line.rstrip()}"), flush=True)
            found_any = True
    traces = attempt.traces() if attempt else {}
    for prefix, ranks in traces.items():
        directory = attempt.directory if attempt else Path()
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        print(
            f"[collectives] the last ones of {which} are in {directory / prefix}*; compare with: "
            f"{shlex.join(['torchfrtrace', '--prefix', prefix, '-j', str(directory)])}"
        )
    return found_any or bool(traces)


def _sources(
    run_dir: RunDir, attempt: AttemptFiles | None, arguments: argparse.Namespace
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each log's name and last errors: first the rank that failed first, srun and the job.
    The other ranks' logs are read together, once the caller has printed the first ones."""

    def errors_of(log: Path) -> Sequence[str]:
        return deque(error_lines(_last_lines(log, 0)), maxlen=arguments.lines or None)

    logs: dict[int, Path] = {}
    if attempt:
        logs = attempt.logged_ranks()
        if arguments.rank is not None:
            logs = {arguments.rank: _rank_log(attempt, arguments.rank)}
        ended = find_events(run_dir.ledger.read(), AttemptEnded)
        first = {end.attempt_number: end.first_failure for end in ended}.get(attempt.number)
        if first is not None and first in logs:
            yield f"rank {first}", errors_of(logs.pop(first))
        if attempt.srun_log.exists():
            yield "srun", errors_of(attempt.srun_log)
    if arguments.attempt is None and (log := _job_log(run_dir.logs)):
        yield "job", errors_of(log)
    others = read_together(errors_of, list(logs.values()))
    yield from ((f"rank {rank}", errors) for rank, errors in zip(logs, others, strict=True))


def _last_lines_of_all(logs: Path, attempt: AttemptFiles | None) -> list[str]:
    """Return the last lines of srun's and the job's logs, for a failed run without error lines."""
    return [
        printable(f"[{name}] {line.rstrip()}")
        for name, path in (("srun", attempt and attempt.srun_log), ("job", _job_log(logs)))
        for line in (_last_lines(path, _NUM_LAST_LINES) if path and path.exists() else ())
    ]


def _follow(arguments: argparse.Namespace, logs: Path, rank: int) -> int:
    """Print what the rank writes, in this attempt and the next ones, while the run is active."""
    path, offset = None, 0
    checked, ending = time.monotonic(), ""
    while True:
        latest = _chosen(logs)
        # The ranks of an attempt create their logs one after the other.
        newest = latest.logged_ranks().get(rank) if latest else None
        if latest and newest and newest != path:
            if path:
                _print_from(path, offset)
                print(f"--- attempt {latest.number}", flush=True)
            offset = 0 if path else _start_of_last_lines(newest, arguments.lines)
            path = newest
        if path:
            offset = _print_from(path, offset)
        if ending:
            print(f"--- the run is {ending}", flush=True)
            return 0
        if time.monotonic() - checked > _STATE_SECONDS:
            checked = time.monotonic()
            (state,) = read_states([arguments.run])
            if latest and not path and state.ranks is not None and rank >= state.ranks:
                _rank_log(latest, rank)  # raises: this rank will never have a log
            if not state.is_active:
                ending = state.description  # print once more before the end: lines may have come
        time.sleep(_POLL_SECONDS)


def _print_from(path: Path, offset: int) -> int:
    """Print the lines of a log from `offset` on; return the offset of its end."""
    with open_appended(path) as file:
        file.seek(offset)
        while line := file.readline(_LONGEST_LINE):
            print(printable(_text(line)), end="", flush=True)
        return file.tell()


def _last_lines(path: Path, count: int) -> Iterable[str]:
    """Return the last `count` lines, or an iterator over all if it is 0; long lines are cut."""
    lines = lines_of(path, _LONGEST_LINE, _start_of_last_lines(path, count))
    parts = (part for line in lines for part in _text(line).splitlines(keepends=True))
    return deque(parts, maxlen=count) if count else parts


def _text(line: bytes) -> str:
    return line.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def _start_of_last_lines(path: Path, count: int) -> int:
    """Return the offset of the last `count` lines, `_MOST_BYTES` from the end at most; 0: all."""
    with open_appended(path) as file:
        size, most = os.fstat(file.fileno()).st_size, TAIL_BYTES
        while count:
            start = file.seek(max(0, size - most))
            lines = io.BytesIO(file.read(size - start)).readlines()
            if len(lines) > count or not start:
                return size - sum(map(len, lines[-count:]))
            if most >= _MOST_BYTES:
                return start
            most *= 16
    return 0
