"""This project's programs: their versions, and command lines that start them as child processes.
This module imports only the standard library.

`python -m` looks for every module in the working directory first, so a file numpy.py in the
directory where a user works would run as the user. (-P, which prevents that, needs Python 3.11.)
Inside a Slurm job the modules may be another user's: on a node that does not see the job's
directory, Slurm starts programs in /tmp, where all users can write.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

_RUN = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
# Runs a module as `python -m` does, but does not search the working directory. The directory with
# the parent process's code comes first, unless Python searches it anyway.
_START = (
    "import sys; sys.path[:] = filter(None, sys.path); root = sys.argv.pop(1); "
    f"root in sys.path or sys.path.insert(0, root); {_RUN}"
)


def own_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this project in this Python."""
    return [sys.executable, *own_arguments(module, *arguments)]


def own_arguments(module: str, *arguments: str) -> list[str]:
    """Return the arguments of Python that run a module of this project, with the current code."""
    return ["-c", _START, str(code_that_runs()), module, *arguments]


def code_that_runs() -> Path:
    """Return the directory that has this project's packages as this process imports them."""
    return Path(__file__).absolute().parents[1]


def make_startable(code: Path) -> None:
    """Let `copied_arguments` start the modules of a directory, a copy of this project's code."""
    text = f'"""`python {code.name} MODULE ARGUMENTS`: only this directory\'s modules."""\n\n'
    (code / "__main__.py").write_text(f"{text}import sys\n\n{_RUN.replace('; ', chr(10))}\n")


def copied_arguments(code: Path, module: str, *arguments: str) -> list[str]:
    """Return the arguments of Python that run a module of a copy of the code from anywhere."""
    return [str(code), module, *arguments]


def versions(libraries: Sequence[str] = ()) -> str:
    """Return the version of these programs, with the commit of a checkout, and of the libraries."""
    import contextlib  # late, as the next three: only this function needs them
    import shutil
    import subprocess
    from importlib import metadata

    git = ["git", "-C", str(code_that_runs()), "describe", "--always", "--dirty"]
    commit = ""
    if (code_that_runs() / ".git").exists() and shutil.which("git"):
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    texts = [installed_version() + (f" ({commit})" if commit else "")]
    for name in libraries:
        with contextlib.suppress(metadata.PackageNotFoundError):
            texts.append(f"{name} {metadata.version(name)}")
    return ", ".join(texts)


def installed_version() -> str:
    """Return the version of these programs; 0 where they are not installed."""
    from importlib import metadata  # late: it imports modules for email and zip files

    try:
        return metadata.version("xl-pretrain")
    except metadata.PackageNotFoundError:
        return "0"
