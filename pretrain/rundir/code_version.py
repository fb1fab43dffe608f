"""The version of the source code that a start of a run records. Torch-free."""

import hashlib
from pathlib import Path

from foundation.files import SMALL_FILE_BYTES, read_regular
from foundation.programs import installed_version

CODE_PACKAGES = ("data_pipeline", "foundation", "pretrain")  # all that a rank runs


def code_version() -> str:
    """Return `VERSION+DIGEST`, the digest of all source files, wherever they are."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in CODE_PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            content = read_regular(path, SMALL_FILE_BYTES)
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return f"{installed_version()}+{digest.hexdigest()[:12]}"
