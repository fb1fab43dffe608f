"""A process that computes on CPUs: its threads, how they wait, and its memory. Torch-free.

PyTorch's threads meet at the end of every operation. By default GNU OpenMP's spin for about 3 ms
before they sleep. On cores that others use too, a thread then spins while the one it waits for is
not scheduled: operations of microseconds take milliseconds. Threads that only sleep wake up late,
which costs small operations half their speed on idle cores. Spinning for about 10 us avoids both
(docs/performance.md has the measurements).
"""

import ctypes
import os
from collections.abc import Mapping, MutableMapping

# OpenMP's own variable, for every library, and GNU's refinement of it: rounds of spinning, where
# 100,000 are about a millisecond.
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
# Parameters of GNU's mallopt (malloc.h).
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads sleep soon, unless the user chose how they wait. Call before importing torch."""
    if not WAITING.keys() & environment.keys():
        environment.update(WAITING)


def describe_waiting(environment: Mapping[str, str] = os.environ) -> str:
    """Return how this process's threads were told to wait: `passive, spin 1000`."""
    policy, spin = (environment.get(name) for name in WAITING)
    return ", ".join(filter(None, [policy, spin and f"spin {spin}"])) or "as OpenMP decides"


def keep_freed_memory() -> None:
    """Let freed blocks of up to 1 GiB stay in the process, where the C library is GNU's.

    By default blocks of 32 MiB and more, and what is free above 64 MiB, go back to the system,
    which clears every page again at the next operation. A process that computes on a CPU allocates
    the same tensors in every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Older versions of the library take at most 32 MiB.
    if mallopt is not None and any(mallopt(MMAP_THRESHOLD, 1 << bits) for bits in (30, 25)):
        mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


def set_threads(count: int) -> None:
    """Compute with this number of threads; 0: with torch's choice."""
    import numpy as np  # late: the launcher and wrong command lines do without them
    import torch

    if count:
        torch.set_num_threads(count)
    # numpy would warn of flushed denormals when it computes these limits, so let it compute now.
    np.finfo(np.float32)
    np.finfo(np.float64)
    # Denormals, such as alibi's weights of far keys (below 1e-38), are 100 times slower on a CPU
    # than zeros.
    torch.set_flush_denormal(True)
