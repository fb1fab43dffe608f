"""A process of a module that compiles triton's kernels: this one may have its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence


def compiling(module: str, names: Sequence[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield name and findings as the module prints them, one line of JSON each, for `names`."""
    command = [sys.executable, "-W", "ignore", "-m", module, *names]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    assert process.returncode == 0, f"status {process.returncode}: {' '.join(command)}"
