"""How a rank uses its device: variables, repeatable results, and the precision of the run.

The precision is chosen once, when a run starts, and from then on one of its settings. On a GPU
several operations do not repeat their bits by themselves. What remains outside of it: another
device, library or number of ranks rounds differently, and NCCL may choose another algorithm on
other nodes. `docs/reliability.md` lists all of it.

What its collectives did last helps whoever looks into a hang. torch's flight recorder keeps the
last 2,000 of gloo and of NCCL unless TORCH_FR_BUFFER_SIZE is 0, and writes them itself where NCCL
fails or times out. The watchdog of a rank ends it earlier than that, so the rank writes them
before. Exchanges in rounds are not among them: a line in the log names the rank that one waits for.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d  # the recorder has no public functions
from torch.utils import deterministic

from foundation.errors import DataError
from foundation.files import atomic_write
from foundation.ownership import private_directory
from pretrain.config.engine import Attention, attention_in
from pretrain.config.model import Precision, PrecisionSetting
from pretrain.config.resolve import with_precision
from pretrain.config.run import RunConfig
from pretrain.distributed.collectives import any_rank, broadcast_value, raise_on_all_ranks
from pretrain.distributed.messages import describe_waits
from pretrain.distributed.slurm_variables import is_slurm_task
from pretrain.distributed.world import World
from pretrain.kernels.triton.settings import unsupported_reason
from pretrain.kernels.triton.tiling import tiles_for
from pretrain.rundir.attempt_files import trace_prefix
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)

TRITON_CACHE = "TRITON_CACHE_DIR"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
NEW_ALLOCATOR = "PYTORCH_ALLOC_CONF"  # its name in newer versions of torch


def set_device_variables(environment: MutableMapping[str, str], local: Path) -> None:
    """Set them before CUDA is used; `local` is a directory on the node's own disk.

    Segments that grow keep memory whole while the sizes of tensors change. More than a MiB of
    pinned host memory is not rounded up to a power of two, if torch can reuse such blocks. On
    Slurm, triton's compiled kernels stay on the node: hundreds of ranks that write into one home
    directory on a network disk wait for each other.
    """
    if ALLOCATOR not in environment and NEW_ALLOCATOR not in environment:
        environment[ALLOCATOR] = "expandable_segments:True"
        if tuple(map(int, version("torch").split(".")[:2])) >= (2, 15):
            environment[ALLOCATOR] += ",pinned_max_round_threshold_mb:1"
    if is_slurm_task(environment) and TRITON_CACHE not in environment:
        cache = local / f"triton-{os.getuid()}"
        with contextlib.suppress(OSError, DataError):  # its files are executed
            environment[TRITON_CACHE] = str(private_directory(cache))


# Eight buffers of 4 MiB per stream: with them a matrix product takes the same path every time.
CUBLAS_WORKSPACE = ":4096:8"


def set_determinism(config: RunConfig, device: torch.device) -> None:
    """Let a GPU repeat its results bit by bit, unless the run asks for atomic sums.

    Call it before the first matrix product: cuBLAS reads its variable only then.
    """
    if device.type != "cuda":
        return
    kernel = config.engine.attention_kernel
    if kernel == "atomic":
        logger.warning("not bitwise: engine.attention_kernel=%s sums in no fixed order", kernel)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else every new tensor would be filled first, a pass over memory for nothing.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def check_tiles(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if the fused kernels have a table of tiles that does not fit the GPU.

    Tiles decide how sums are rounded, so a run does not start with others than those meant for it.
    """
    if device.type != "cuda" or unsupported_reason(device):
        return
    kind, _ = attention_in(config.engine, config.model, on_gpu=True)
    if kind is Attention.FUSED:
        tiles_for(config.model.head_width, torch.cuda.get_device_capability(device))


def with_precision_of_run(config: RunConfig, directory: Path, world: World) -> RunConfig:
    """Return the settings with a precision in place of `auto`. A collective.

    A run that exists keeps the precision it has recorded, on any device: other rounding from one
    step to the next is the user's decision. A new one gets bf16 if every rank's device has it.
    """
    best: Precision = "fp32" if any_rank(not has_bf16(world.device)) else "bf16"
    recorded: PrecisionSetting = "auto"
    with raise_on_all_ranks():  # settings that cannot be read are every rank's error
        if world.is_main and RunDir(directory).exists():
            recorded = RunDir.open(directory).config.engine.precision
    recorded = broadcast_value(recorded, str)
    kept = best if recorded == "auto" else recorded
    resolved = with_precision(config, kept)
    if world.is_main and resolved != config and kept != best:
        logger.info(
            "engine.precision=auto: %s, as the run has it, although %s suits this device",
            kept,
            best,
        )
    return resolved


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 faster than in fp32; few CPUs do."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


# Where torch writes by itself; the second name is that of older versions.
OWN_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ENTRY = b"record_id"  # a field of every collective in a dump


def set_trace_files(environment: MutableMapping[str, str], logs: Path) -> None:
    """Let torch write its own dumps among the logs of the attempt, unless the user chose."""
    if not any(name in environment for name in OWN_FILES):
        environment.update(dict.fromkeys(OWN_FILES, trace_prefix(logs, "nccl", environment)))


def write_last_collectives(logs: Path, rank: int, environment: Mapping[str, str]) -> list[Path]:
    """Write a file for each backend that was used; returns their paths.

    First without the lines of code that started the collectives: to find the first of those, torch
    reads the symbols of its libraries, which took 6 s on a machine that had not read them yet.
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
    """The pickled records of each backend that has any, with or without Python's stacks."""
    if not dist.is_initialized():
        return
    for backend, recorders in _recorders().items():
        found = (dump(includeStackTraces=has_stacks) for dump in recorders)
        content = next((each for each in found if _ENTRY in each), None)
        if content is not None:
            yield backend, content


def _recorders() -> dict[str, list[Callable[..., bytes]]]:
    """What may know the collectives of each backend, by version of torch."""
    of_nccl, of_hooks = (getattr(c10d, f"_dump_{name}_trace", None) for name in ("nccl", "fr"))

    def recorded_by(name: str, **options: bool) -> bytes:
        try:
            return of_hooks(backend=name, **options) if of_hooks else b""
        except TypeError:  # older versions know gloo's alone
            return of_hooks(**options) if of_hooks and name == "gloo" else b""

    nccl: list[Callable[..., bytes]] = [partial(recorded_by, "nccl2")]
    if of_nccl:  # the process group of older versions, and of TORCH_DIST_USE_NCCL2=0
        nccl.append(of_nccl)
    return {"nccl": nccl, "gloo": [partial(recorded_by, "gloo")]}
