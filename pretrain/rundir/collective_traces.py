"""Files with the last collectives of each rank, written when an attempt hangs. Torch-free.

RUN/logs/attempt-3/nccl-rank-12     torch's flight recorder of rank 12; `torchfrtrace` reads it
RUN/logs/attempt-3/gloo-rank-12     the same of the small exchanges between processors
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from pretrain.rundir.run_dir import AttemptFiles

VARIABLE = "PRETRAIN_ATTEMPT_FILES"  # from the launcher: LOGS/attempt-3
BACKENDS = ("nccl", "gloo")
_NAME = re.compile(rf"(?:{'|'.join(BACKENDS)})-rank-(\d+)")


def variables_of_attempt(logs: Path, attempt: int) -> dict[str, str]:
    """The environment variable from which the ranks of an attempt know where the files go."""
    return {VARIABLE: str(AttemptFiles(logs, attempt).directory)}


def make_trace_directory(logs: Path, environment: Mapping[str, str]) -> None:
    """Create what a launcher has created for ranks of its own."""
    Path(trace_prefix(logs, "", environment)).parent.mkdir(parents=True, exist_ok=True)


def trace_prefix(logs: Path, backend: str, environment: Mapping[str, str]) -> str:
    """The path of a rank's file without the rank; attempt 0 for a rank without a launcher."""
    return f"{environment.get(VARIABLE) or AttemptFiles(logs, 0).directory}/{backend}-rank-"


def traces_of_attempt(logs: Path, attempt: int) -> dict[str, list[int]]:
    """Return prefix of names -> ranks, of the files that an attempt left."""
    found: dict[str, list[int]] = defaultdict(list)
    for path in AttemptFiles(logs, attempt).directory.glob("*-rank-*"):
        if match := _NAME.fullmatch(path.name):
            found[path.name.removesuffix(match[1])].append(int(match[1]))
    return {prefix: sorted(ranks) for prefix, ranks in sorted(found.items())}
