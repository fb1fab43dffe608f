"""When the launcher started a rank, which the rank's first event comes seconds after."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

STARTED_AT = "PRETRAIN_STARTED_AT"  # seconds since 1970, in the environment of a rank


def seconds_since_start(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds since the launcher started this rank; 0 without a launcher."""
    try:
        return max(0.0, time.time() - float(environment.get(STARTED_AT, "inf")))
    except ValueError:
        return 0.0
