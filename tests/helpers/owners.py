"""Files of another user, for tests that may run as any user."""

import os
from pathlib import Path

import pytest

NOBODY = 65_534


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file another user's; where only root could, make all files another user's."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
