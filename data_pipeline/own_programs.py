"""The command lines of this project's own programs as child processes. Only the standard library.

`python -m` looks for every module in the working directory first, so a file numpy.py in the
directory where a user works would run as the user. (-P, which prevents that, needs Python 3.11.)
"""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m` without the working directory. The parent's code comes first unless it is installed.
_START = (
    "import sys; sys.path[:] = filter(None, sys.path); root = sys.argv.pop(1); "
    "root in sys.path or sys.path.insert(0, root); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def own_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this project in this Python."""
    return [sys.executable, *own_arguments(module, *arguments)]


def own_arguments(module: str, *arguments: str) -> list[str]:
    """The arguments of Python that run a module of this project, with the code that runs now."""
    root = Path(__file__).absolute().parents[1]
    return ["-c", _START, str(root), module, *arguments]
