"""Where results will be written, checked before the work: a fit takes seconds, an evaluation minutes."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.errors import ConfigError


def refuse_no_file(option: str, path: Path | None, example: str) -> None:
    """ConfigError unless a file can be at `path`: it is no directory, and what it lies in is one or does not exist."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; name a file, such as {path / example}")
    _refuse_below_file(option, path)


def refuse_no_directory(option: str, path: Path) -> None:
    """ConfigError unless `path` is a directory or can become one."""
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{option} {path} is a file; name a directory, which will hold several files"
        )
    _refuse_below_file(option, path)


def _refuse_below_file(option: str, path: Path) -> None:
    nearest = next((parent for parent in path.parents if parent.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise ConfigError(
            f"{option} {path}: {nearest} is a file, so nothing can lie in it; choose another place"
        )
