"""The development folder beside the repository, for tests that compare with data too large or too old to keep in it."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def shared_path(name: str) -> Path:
    """A file or folder of `../shared`; the test is skipped where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not here")
    return path
