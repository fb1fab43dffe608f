"""Faults asked for by name, so that proofs and tests can kill a run at an exact step.

PRETRAIN_FAULT="sigkill@7" kills every rank right after step 7, before any checkpoint of that step: no handler runs and
nothing is flushed, as when a node loses power.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from data_pipeline.errors import ConfigError

VARIABLE = "PRETRAIN_FAULT"


@dataclass(frozen=True)
class Fault:
    step: int  # 0: never

    def strike(self, step: int) -> None:
        """End this process without warning if `step` is the one asked for."""
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def fault_from_environment() -> Fault:
    """Read PRETRAIN_FAULT; no fault when it is unset."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return Fault(step=0)
    kind, _, step = text.partition("@")
    if kind != "sigkill" or not step.isdigit() or int(step) < 1:
        raise ConfigError(f"{VARIABLE}={text!r} is not of the form sigkill@STEP with STEP of 1 or more")
    return Fault(step=int(step))
