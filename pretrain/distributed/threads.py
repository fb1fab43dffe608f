"""CPU threads of a process that computes: how many, and how they wait for each other. Torch-free.

PyTorch's threads meet at the end of every operation. By default those of GNU OpenMP spin for about
3 ms before they sleep. On cores that others use too, a thread then spins while the one it waits
for is not scheduled: operations of microseconds take milliseconds, and the spinning counts as CPU
time. Those that only sleep wake up late, which costs small operations half their speed on idle
cores. Spinning for about 10 us does neither (docs/performance.md has the measurements).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

# OpenMP's own variable, for every library, and GNU's refinement of it: rounds of spinning, of which
# the library counts 100,000 as a millisecond.
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads sleep soon, unless the user chose how they wait. Before torch is imported."""
    if not WAITING.keys() & environment.keys():
        environment.update(WAITING)


def describe_waiting(environment: Mapping[str, str] = os.environ) -> str:
    """Return how this process's threads were told to wait: `passive, spin 1000`."""
    policy, spin = (environment.get(name) for name in WAITING)
    return ", ".join(filter(None, [policy, spin and f"spin {spin}"])) or "as OpenMP decides"


def set_threads(count: int) -> None:
    """Compute with this many threads; 0: with as many as torch chose."""
    import numpy as np  # late: the launcher and wrong command lines do without them
    import torch

    if count:
        torch.set_num_threads(count)
    # numpy warns of what follows when it looks at its limits, so let it look before.
    np.finfo(np.float32)
    np.finfo(np.float64)
    # Denormals, such as alibi's weights of far keys (below 1e-38), are 100 times slower on a CPU
    # than zeros.
    torch.set_flush_denormal(True)
