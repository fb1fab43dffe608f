"""Names of files, paths that stay below a directory, and URLs where a path is expected."""

import re
from pathlib import Path

from foundation.errors import DataError, is_one_line

LONGEST_NAME_BYTES = 255
_URL = re.compile(r"([a-z][a-z0-9-]+):/+(.*)")


def is_plain_name(name: str) -> bool:
    """Whether this is the name of a visible file in some directory, and nothing else."""
    return (
        0 < len(name.encode(errors="replace")) <= LONGEST_NAME_BYTES
        and not name.startswith(".")
        and "/" not in name
        and is_one_line(name)
    )


def path_below(root: Path, name: str) -> Path:
    """Return the path `name` below `root`; DataError if the name is not plain or has a link.

    For names in files of others: neither `..` nor a link leads out of `root`, and no path has two
    names, such as `a/b` and `a//b`.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise DataError(
            f"found the name {name!r}, expected a plain path that stays inside {root}; rename it"
        )
    path = root
    for part in parts[:-1]:
        path = path / part
        if path.is_symlink():
            raise DataError(f"{path} is a link, expected a folder; remove it")
    return path / parts[-1]


def url_of(path: Path | str) -> str | None:
    """Return the URL that `path` holds, or None if it is a plain path.

    Settings and command lines accept a URL wherever they accept a corpus directory. pathlib turns
    `s3://` into `s3:/`; this restores the slashes.
    """
    match = _URL.fullmatch(str(path))
    return f"{match[1]}://{match[2]}" if match else None


def path_text(path: Path | str) -> str:
    """Return `path` as the user wrote it."""
    return url_of(path) or str(path)


def absolute(path: Path) -> Path:
    """Return the absolute path; a URL stays as it is."""
    return path if url_of(path) else path.resolve()
