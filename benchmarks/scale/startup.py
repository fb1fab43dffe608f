"""What the imports of a trainer ask of the disk that has its environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scale.costs import RANKS, Reasoned, Row
from foundation.own_programs import code_that_runs

# What a rank imports.
MODULES = (
    "pretrain.run", "pretrain.commands.train", "deepspeed", "pretrain.engines.deepspeed_engine"
)  # fmt: skip
_PATH = re.compile(r'^(?:\d+ +)?\w+\([^"]*"([^"]+)"')


def startup_costs(directory: Path) -> Iterator[Row]:
    """Yield the file-system calls of the imports of all ranks."""
    name = "imports: stat and open calls of all ranks on the environment's disk"
    if shutil.which("strace") is None:
        yield Reasoned(name=name, reason="strace is not installed, so they are not counted")
        return
    calls = calls_of(directory / "calls", "-c", f"import {', '.join(MODULES)}")
    yield Reasoned(
        name=name, at_ranks=[calls * ranks for ranks in RANKS],
        reason=f"{calls:,} of one rank are counted (strace); every rank makes as many",
    )  # fmt: skip


def calls_of(log: Path, *arguments: str) -> int:
    """Return how many file-system calls of this Python name a path in the environment or in this
    checkout."""
    traced = ["strace", "-f", "-e", "trace=%file", "-o", str(log), sys.executable, *arguments]
    subprocess.run(traced, check=True, capture_output=True, cwd=code_that_runs())
    roots = (str(code_that_runs()), sys.prefix, sysconfig.get_path("purelib"))
    named = (_PATH.match(line) for line in log.read_text(errors="replace").splitlines())
    return sum(bool(found and found[1].startswith(roots)) for found in named)
