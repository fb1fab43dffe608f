"""The version of the source code that a start of a run records. Torch-free."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from foundation.files import SMALL_FILE_BYTES, read_regular
from foundation.programs import installed_version

CODE_PACKAGES = ("data_pipeline", "foundation", "pretrain")  # all that a rank runs


def code_version() -> str:
    """Return `VERSION+DIGEST`, the digest of all source files, wherever they are."""
    return f"{installed_version()}+{code_digest(Path(__file__).parents[2], CODE_PACKAGES)}"


def code_digest(root: Path, packages: Iterable[str]) -> str:
    """Return the digest of all source files of packages in a directory."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            content = read_regular(path, SMALL_FILE_BYTES)
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
