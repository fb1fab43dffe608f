"""Fault injection: PRETRAIN_FAULT lets a run fail at an exact step, for tests and for users.

It is KIND@STEP or KIND:NUMBER@STEP:

    sigkill@7     SIGKILL every rank right after step 7, before its checkpoint. No handler runs;
                  what was written stays, unlike in a power failure
    nan@7         make one lane's hidden states NaN in step 7
    inf@7         make gradients infinite in step 7, as a loss scale that is too large does; losses
                  stay finite
    oom:2@7       from step 7 on, run out of memory in forward passes of more than 2 lanes
    slow:0.5@7    from step 7 on, take 0.5 seconds longer for each forward pass
    sigterm-in-evaluation@7, sigkill-in-evaluation@7
                  send the process this signal in the evaluation after step 7, after two batches
    short-evaluation@7
                  score no more after step 7 than in other evaluations, though it is the last step

The first and the last affect all ranks, the others the last rank only.
"""

import os
import re
import signal
from dataclasses import dataclass

from foundation.errors import ConfigError

VARIABLE = "PRETRAIN_FAULT"
IN_EVALUATION = {"sigterm-in-evaluation": signal.SIGTERM, "sigkill-in-evaluation": signal.SIGKILL}
SHORT_EVALUATION = "short-evaluation"
KINDS = ("sigkill", "nan", "inf", "oom", "slow", *IN_EVALUATION, SHORT_EVALUATION)
FORM = re.compile(rf"({'|'.join(KINDS)})(?::(\d+(?:\.\d+)?))?@([1-9]\d*)")


@dataclass(frozen=True)
class Fault:
    """One fault of a run, at or from a step on."""

    step: int  # 0: never
    kind: str = "sigkill"
    number: float = 0.0

    def trigger(self, step: int) -> None:
        """Kill this process, after `step`, if that is the fault."""
        if self.kind == "sigkill" and step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def fault_from_environment() -> Fault:
    """Return the fault of PRETRAIN_FAULT, or one that never happens if it is unset."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return Fault(step=0)
    match = FORM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{VARIABLE}={text!r}: expected KIND@STEP or KIND:NUMBER@STEP with KIND of "
            f"{', '.join(KINDS)} and STEP of 1 or more"
        )
    kind, number, step = match.groups()
    return Fault(step=int(step), kind=kind, number=float(number or 0.0))
