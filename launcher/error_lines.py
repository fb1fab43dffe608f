"""Finds the lines of a log that report an error, whichever program wrote them."""

import re
from collections.abc import Iterable, Iterator

from pretrain.terminal.log import LINE_START

# Starts a block that lasts as long as lines are indented: a traceback, or the stacks of a rank that
# hung or crashed.
_BLOCK = re.compile(
    r"Traceback \(most recent call last\)|(Current )?[Tt]hread 0x\w+.*most recent call first"
    r"|Fatal Python"
)
_LONGEST = 4096  # characters of a line; the time of a search may grow with their square
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # before each line of a rank's traceback
# Errors in lines that are not ours: uncaught exceptions, NCCL, Slurm, shells, containers.
_ERROR = re.compile(
    r"^error: |^\w*(Error|Exception|Interrupt)\b|\berror:|\bfatal\b|out of memory|oom-kill"
    r"|segmentation fault|NCCL WARN|CANCELLED AT|NODE FAIL|command not found"
    r"|no such file or directory|permission denied",
    re.IGNORECASE,
)


def error_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield whole tracebacks and stacks, lines logged as errors, and lines that look like errors.
    Long lines are cut."""
    in_block = False
    for raw in (line[:_LONGEST] for line in lines):
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
