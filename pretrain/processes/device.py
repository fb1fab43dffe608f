"""How a rank uses its device: variables, repeatable results, and the precision of the run.

The precision is chosen once, when a run starts, and is one of its settings from then on. On a GPU
several operations repeat their bits only if torch is told so. Even then another device, library or
number of ranks rounds differently, and NCCL may choose another algorithm on other nodes.
`docs/reliability.md` lists all of this.
"""

import contextlib
import logging
import os
from collections.abc import MutableMapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch.utils import deterministic

from foundation.errors import DataError
from foundation.ownership import private_directory
from pretrain.config.engine import Attention, EngineConfig, attention_in
from pretrain.config.model import Precision
from pretrain.config.resolve import with_precision
from pretrain.config.run import RunConfig
from pretrain.distributed.collectives import any_rank, broadcast_value, raise_on_all_ranks
from pretrain.distributed.slurm_variables import is_slurm_task
from pretrain.distributed.world import World
from pretrain.kernels.triton.settings import unsupported_reason
from pretrain.kernels.triton.tiling import tiles_for
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)

TRITON_CACHE = "TRITON_CACHE_DIR"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
NEW_ALLOCATOR = "PYTORCH_ALLOC_CONF"  # the name of ALLOCATOR in newer versions of torch
# Eight buffers of 4 MiB per stream: with them a matrix product takes the same path every time.
CUBLAS_WORKSPACE = ":4096:8"


def set_device_variables(environment: MutableMapping[str, str], local: Path) -> None:
    """Set torch's and triton's variables, before CUDA is used; `local` is on the node's own disk.

    The allocator's expandable segments do not fragment while the sizes of tensors change. Blocks of
    pinned host memory above a MiB are not rounded up to a power of two, if torch can reuse such
    blocks. On Slurm, triton's compiled kernels stay on the node: hundreds of ranks that write into
    one home directory on a network disk wait for each other.
    """
    if ALLOCATOR not in environment and NEW_ALLOCATOR not in environment:
        environment[ALLOCATOR] = "expandable_segments:True"
        if tuple(map(int, version("torch").split(".")[:2])) >= (2, 15):
            environment[ALLOCATOR] += ",pinned_max_round_threshold_mb:1"
    if is_slurm_task(environment) and TRITON_CACHE not in environment:
        cache = local / f"triton-{os.getuid()}"
        with contextlib.suppress(OSError, DataError):  # private, because its files are executed
            environment[TRITON_CACHE] = str(private_directory(cache))


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
    # By default every new tensor would then be filled first, a useless pass over memory.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def check_tiles(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if the table of tiles for the fused kernels does not fit the GPU.

    Tiles decide how sums are rounded, so a run uses the tiles of its table or does not start.
    """
    if device.type != "cuda" or unsupported_reason(device):
        return
    kind, _ = attention_in(config.engine, config.model, on_gpu=True)
    if kind is Attention.FUSED:
        tiles_for(config.model.head_width, torch.cuda.get_device_capability(device))


def with_precision_of_run(config: RunConfig, directory: Path, world: World) -> RunConfig:
    """Return the settings with a precision, and compiled or not, instead of `auto`. A collective.

    A run that exists keeps what it has recorded on any device: to round otherwise from some step on
    is the user's decision. A new one gets bf16 if every rank's device has it.
    """
    best: Precision = "fp32" if any_rank(not has_bf16(world.device)) else "bf16"
    recorded = EngineConfig()
    with raise_on_all_ranks():  # settings that cannot be read are every rank's error
        if world.is_main and RunDir(directory).exists():
            recorded = RunDir.open(directory).config.engine
    recorded = broadcast_value(recorded, EngineConfig)
    asked = config.engine
    precision = recorded.precision if asked.precision == "auto" else asked.precision
    if asked.precision == "auto" and precision not in ("auto", best) and world.is_main:
        logger.info(
            "engine.precision=auto: %s, as the run has it, although %s suits this device",
            precision,
            best,
        )
    compiles = recorded.compile if asked.compile == "auto" else asked.compile
    engine = replace(asked, precision=precision, compile=compiles)
    return with_precision(replace(config, engine=engine), best)


def has_bf16(device: torch.device) -> bool:
    """Return whether the device computes in bf16 faster than in fp32; few CPUs do."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
