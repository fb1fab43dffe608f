"""What a rank's collectives did last, which it writes before its watchdog ends it.

torch's flight recorder keeps the last 2,000 of gloo and of NCCL unless TORCH_FR_BUFFER_SIZE is 0.
torch writes them itself only when NCCL fails or times out; the watchdog ends a rank earlier. It
does not record exchanges in rounds (`messages.py`): for these, a line in the log names the rank
that this rank waits for.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d  # the recorder has no public functions

from foundation.files import atomic_write
from pretrain.distributed.messages import describe_waits
from pretrain.rundir.attempt_files import trace_prefix

logger = logging.getLogger(__name__)


# Variables that say where torch itself writes; the second is for older versions.
OWN_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ENTRY = b"record_id"  # a field of every collective in a dump


def set_trace_files(environment: MutableMapping[str, str], logs: Path) -> None:
    """Let torch write its own dumps among the logs of the attempt, unless the user chose."""
    if not any(name in environment for name in OWN_FILES):
        environment.update(dict.fromkeys(OWN_FILES, trace_prefix(logs, "nccl", environment)))


def write_last_collectives(logs: Path, rank: int, environment: Mapping[str, str]) -> list[Path]:
    """Write a file for each backend that was used; returns their paths.

    First without stacks of the code that started the collectives: for the first stack, torch reads
    the symbols of its libraries, which took 6 s on a machine that had not read them yet.
    """
    for wait in describe_waits():
        logger.warning(wait)
    paths: dict[str, Path] = {}
    for has_stacks in (False, True):
        for backend, content in dumps(has_stacks):
            path = Path(f"{trace_prefix(logs, backend, environment)}{rank}")
            with atomic_write(path, sync=False) as file:
                file.write(content)
            if backend not in paths:
                logger.warning("wrote the last collectives of %s to %s", backend, path)
            paths[backend] = path
    return list(paths.values())


def dumps(has_stacks: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the pickled records of each backend that has any, with or without Python's stacks."""
    if not dist.is_initialized():
        return
    for backend, recorders in _recorders().items():
        contents = (dump(includeStackTraces=has_stacks) for dump in recorders)
        content = next((content for content in contents if _ENTRY in content), None)
        if content is not None:
            yield backend, content


def _recorders() -> dict[str, list[Callable[..., bytes]]]:
    """Return the functions that may dump a backend's collectives; torch's version decides."""
    dump_nccl, dump_fr = (getattr(c10d, f"_dump_{name}_trace", None) for name in ("nccl", "fr"))

    def recorded_by(name: str, **options: bool) -> bytes:
        try:
            return dump_fr(backend=name, **options) if dump_fr else b""
        except TypeError:  # older versions know gloo's alone
            return dump_fr(**options) if dump_fr and name == "gloo" else b""

    nccl: list[Callable[..., bytes]] = [partial(recorded_by, "nccl2")]
    if dump_nccl:  # the process group of older versions, and of TORCH_DIST_USE_NCCL2=0
        nccl.append(dump_nccl)
    return {"nccl": nccl, "gloo": [partial(recorded_by, "gloo")]}
