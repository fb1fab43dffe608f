"""Which start of a run may write: RUN/attempt holds the token of the newest one.

Ranks on a host that was cut off from the others may live on while the run has long gone on elsewhere. They find another
token there, and end before they write a measurement or publish a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from data_pipeline.errors import UserError
from data_pipeline.files import write_text

# A supervisor claims the run for the ranks it starts and tells them their token here; ranks without one claim it.
VARIABLE = "PRETRAIN_ATTEMPT"


class StaleAttempt(UserError):
    """A newer attempt has the run."""


class Fence:
    """The right of one attempt to write into a run's directory."""

    def __init__(self, run_dir: Path, token: str) -> None:
        self.token = token
        self._path = run_dir / "attempt"

    def claim(self) -> None:
        """Be the newest attempt; every older one is fenced off from now on."""
        write_text(self._path, self.token + "\n")

    def check(self) -> None:
        """Raise StaleAttempt if a newer attempt has claimed the run."""
        newest = self._path.read_text().strip()
        if newest != self.token:
            raise StaleAttempt(
                f"attempt {self.token} ends here: {newest} has taken over {self._path.parent}"
            )
