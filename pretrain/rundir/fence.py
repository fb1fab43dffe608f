"""Fencing: only the latest attempt of a run may write. RUN/attempt contains its token.

Ranks on a node that was cut off from the network may still run after the run has restarted
elsewhere. They find another token there, and exit before they write a measurement or publish a
checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from data_pipeline.errors import UserError
from data_pipeline.files import read_regular, write_text

# A supervisor claims the run for the ranks it starts and passes them the token here; ranks without
# one claim the run.
VARIABLE = "PRETRAIN_ATTEMPT"
LONGEST = 1000  # bytes of a token


class StaleAttempt(UserError):
    """A newer attempt has the run."""


class Fence:
    """The right of one attempt to write into a run directory."""

    def __init__(self, run_dir: Path, token: str) -> None:
        self.token = token
        self._path = run_dir / "attempt"

    def claim(self) -> None:
        """Become the latest attempt; every older one is fenced off from now on."""
        write_text(self._path, self.token + "\n")

    def check(self) -> None:
        """Raise StaleAttempt if a newer attempt has claimed the run."""
        try:
            newest = read_regular(self._path, LONGEST).decode(errors="replace").strip()
        except ValueError as error:
            newest = f"({error})"
        if newest != self.token:
            raise StaleAttempt(
                f"attempt {self.token} exits: attempt {newest} has claimed {self._path.parent}"
            )
