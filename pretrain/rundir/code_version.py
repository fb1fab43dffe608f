"""The version of the code that a run was trained with. Torch-free."""

from __future__ import annotations

import hashlib
from pathlib import Path

from foundation.own_programs import installed_version

PACKAGES = ("data_pipeline", "pretrain")  # all that a rank runs


def code_version() -> str:
    """Return `VERSION+DIGEST`.

    Equal digests mean equal source files, whether committed, copied or installed.
    """
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return f"{installed_version()}+{digest.hexdigest()[:12]}"
