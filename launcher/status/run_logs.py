"""Which log files a run has, and which of their lines tell of errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import ConfigError
from pretrain.terminal.log import LINE_START

_RANK_LOG = re.compile(r"attempt-(\d+)-rank-(\d+)\.log")
# What begins a block whose indented lines belong to it: a traceback, or the stacks of a rank that hung or crashed.
_BLOCK = re.compile(
    r"Traceback \(most recent call last\)|(Current )?[Tt]hread 0x\w+.*most recent call first|Fatal Python"
)
_PREFIX = re.compile(
    r"^\[rank\d+\]: ?"
)  # torch's, before each line of a traceback in a group of ranks
_ERROR = re.compile(
    r"^error: |^\w*(Error|Exception|Interrupt)\b|\berror:|\bfatal\b|out of memory|oom-kill|segmentation fault"
    r"|NCCL WARN|gave up|hung|CANCELLED AT|NODE FAIL|was ended by",
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


def newest_attempt(logs: Path) -> RankLogs | None:
    """The last attempt that left logs; None before any."""
    found: dict[int, dict[int, Path]] = {}
    for path in logs.glob("attempt-*-rank-*.log"):
        if match := _RANK_LOG.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    if not found:
        return None
    attempt = max(found)
    return RankLogs(attempt, dict(sorted(found[attempt].items())))


def job_log(logs: Path) -> Path | None:
    """What the newest Slurm job itself said: its supervisor's decisions and Slurm's own words."""
    return max(logs.glob("slurm-*.log"), key=lambda path: path.stat().st_mtime, default=None)


def error_lines(lines: Iterable[str]) -> Iterator[str]:
    """Tracebacks and stacks as they stand, and lines that speak of an error."""
    in_block = False
    for raw in lines:
        level = LINE_START.match(raw)
        line = _PREFIX.sub("", raw)
        if _BLOCK.search(line):
            in_block = True
            yield line
        elif in_block:
            yield line
            in_block = line.startswith((" ", "\t")) or not line.strip()
        elif level["level"] in ("ERROR", "CRITICAL") if level else _ERROR.search(line):
            yield line
