"""Whether lm-eval knows a task, before lm-eval and torch are imported, which takes long."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from foundation.errors import ConfigError
from foundation.yaml_files import YAML_SUFFIXES

# In lm-eval's own files, which are of many hands: `task: x`, `"tag": "x"`, `- x`.
_NAME = re.compile(
    rb"""(?:["']?(?:task|group|tag)["']?\s*:|^\s*-)\s*["']?(\w[\w.-]*[a-z0-9])""", re.MULTILINE
)


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise ConfigError without lm-eval, and for a missing file or an unknown name."""
    package = importlib.util.find_spec("lm_eval")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("tasks need lm-eval; `pip install 'xl-pretrain[lm-eval]'`")
    for task in tasks:
        if task.endswith(YAML_SUFFIXES) and not Path(task).is_file():
            raise ConfigError(f"{task} is not a file; give the YAML file or the name of a task")
    names = [task for task in tasks if not task.endswith(YAML_SUFFIXES)]
    if names:
        _check_names(names, Path(package.submodule_search_locations[0]) / "tasks")


def silence_libraries() -> None:
    """Leave out the libraries' progress bars, and lm-eval's warning of each metric's defaults.

    Before tqdm is imported, which reads its variable then.
    """
    for name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def _check_names(names: Sequence[str], folder: Path) -> None:
    """Raise ConfigError for a name that stands in no file of the folder."""
    known: set[str] = set()
    missing = {name: _whole(name) for name in names}
    for content in _contents_of(folder):
        missing = {name: word for name, word in missing.items() if not word.search(content)}
        if not missing:
            return
        known.update(name.decode() for name in _NAME.findall(content))
    name = next(iter(missing))
    close = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`lm-eval ls tasks` lists all."
    raise ConfigError(f"lm-eval has no task {name!r}; {hint} A task of your own is a .yaml file")


def _whole(name: str) -> re.Pattern[bytes]:
    return re.compile(rb"(?<![\w.-])" + re.escape(name.encode()) + rb"(?![\w.-])")


def _contents_of(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        if path.suffix in (*YAML_SUFFIXES, ".py"):
            yield path.read_bytes()
