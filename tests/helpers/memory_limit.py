import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def memory_limit(spare: int) -> Iterator[None]:
    """Let this process have `spare` more bytes than it has, which may be too few for a thread."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
