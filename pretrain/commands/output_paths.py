"""Output paths of commands, checked before the work: a fit takes seconds, an evaluation minutes."""

from __future__ import annotations

from pathlib import Path

from foundation.errors import ConfigError
from foundation.settings import require_name
from foundation.yaml_files import read_tree


def check_output_file(option: str, path: Path | None, example: str) -> None:
    """Raise ConfigError unless a file can be written at `path`."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; name a file, such as {path / example}")
    _check_parents(option, path)


def check_output_directory(option: str, path: Path) -> None:
    """Raise ConfigError unless `path` is a directory or can become one."""
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{option} {path} is a file; name a directory, since several files are written"
        )
    _check_parents(option, path)


def _check_parents(option: str, path: Path) -> None:
    nearest = next((parent for parent in path.parents if parent.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise ConfigError(
            f"{option} {path}: {nearest} is a file, not a directory; choose another path"
        )


def check_sweep_output(path: Path, name: str) -> None:
    """Raise ConfigError unless a sweep of this name can be written there, in place of none or one.

    An experiment or any other file of the user is not replaced.
    """
    require_name("--name", name)
    check_output_file("--output", path, f"{name}.yaml")
    if path.exists() and not _is_planned_sweep(path):
        raise ConfigError(f"--output {path} exists and is no planned sweep; choose another path")


def _is_planned_sweep(path: Path) -> bool:
    try:
        return "cells" in read_tree(path)
    except ConfigError:
        return False
