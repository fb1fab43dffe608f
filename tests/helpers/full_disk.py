"""A disk that is full: the kernel lets no file of this process grow."""

import contextlib
import resource
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def full_disk(largest_file: int = 0) -> Iterator[Callable[[], None]]:
    """In the block a file larger than this is "File too large", until the function is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def free_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
    try:
        yield free_space
    finally:
        free_space()
