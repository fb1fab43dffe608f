"""Which nodes of a step do not respond; asked in a thread, since a controller may take minutes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from data_pipeline.errors import UserError
from launcher.slurm import client as slurm

_ASK_SECONDS = 10.0


class SilentNodes:
    """What the controller says of these nodes, as of some seconds ago."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._found: frozenset[str] = frozenset()
        self._asked = -_ASK_SECONDS
        self._thread: threading.Thread | None = None

    def names(self) -> frozenset[str]:
        """Those that do not respond or were taken out; empty until the controller has answered."""
        is_asking = self._thread is not None and self._thread.is_alive()
        if not is_asking and time.monotonic() - self._asked >= _ASK_SECONDS:
            self._asked = time.monotonic()
            self._thread = threading.Thread(target=self._ask, name="silent nodes", daemon=True)
            self._thread.start()
        return self._found

    def _ask(self) -> None:
        with contextlib.suppress(UserError):  # without an answer: what was known before
            states = slurm.node_states(self._nodes).items()
            self._found = frozenset(
                node
                for node, state in states
                if slurm.is_silent(state) or slurm.is_taken_out(state)
            )
