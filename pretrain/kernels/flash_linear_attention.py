"""Kernels of flash-linear-attention for the gated delta rule, each with one configuration.

The package selects a configuration of each kernel by timing several in every process, and they
round differently. No kernel of this path adds atomically, so with one configuration per kernel the
same inputs give the same bits. CONFIGURATIONS fit every head width and GPU since the A100; none was
selected by timing. A resume compares their `fingerprint`.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable
from typing import Any

VERSION = "0.6.0"  # of fla-core, which contains the kernels
CHUNK_TOKENS = 64
HOPPER = 9  # compute capability
WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))  # Triton's versions from the first on, before the second
_CHUNK_FWD = "fla.ops.gated_delta_rule.chunk_fwd"
_DELTA_H = "fla.ops.common.chunk_delta_h"
# Module and kernel -> its blocks, warps and stages.
CONFIGURATIONS: dict[str, tuple[dict[str, int], int, int]] = {
    "fla.modules.norm.l2norm l2norm_fwd_kernel": ({"BT": 32}, 4, 3),
    "fla.modules.norm.l2norm l2norm_bwd_kernel": ({"BT": 32}, 4, 3),
    "fla.ops.utils.cumsum chunk_local_cumsum_scalar_kernel": ({}, 2, 3),
    f"{_CHUNK_FWD} chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 64}, 4, 3),
    "fla.ops.gated_delta_rule.wy_fast recompute_w_u_fwd_kernel": ({}, 4, 2),
    "fla.ops.gated_delta_rule.wy_fast prepare_wy_repr_bwd_kernel": ({}, 4, 2),
    # Two warps, because with four Blackwell computes wrong results.
    f"{_DELTA_H} chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 2, 2),
    f"{_DELTA_H} chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 2, 2),
    "fla.ops.common.chunk_o chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
    "fla.ops.common.chunk_o chunk_bwd_kernel_dv_local": ({}, 4, 2),
    "fla.ops.common.chunk_o chunk_bwd_kernel_dqkwg": ({}, 4, 2),
}


@functools.cache
def missing_package() -> str:
    """Return why the kernels are not used here; empty if they are."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "flash-linear-attention is not installed here; pip install fla-core==" + VERSION
    if version != VERSION:
        return f"found fla-core {version}, expected {VERSION}, whose configurations are known"
    return _wrong_triton()


def _wrong_triton() -> str:
    """Return why the package refuses the installed Triton on this GPU; empty if it does not.

    https://github.com/fla-org/flash-linear-attention/issues/640
    """
    import torch

    if not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER):
        return ""
    installed = importlib.metadata.version("triton")
    version = tuple(int(number) for number in re.findall(r"\d+", installed)[:3])
    if not WRONG_ON_HOPPER[0] <= version < WRONG_ON_HOPPER[1]:
        return ""
    first, fixed = (".".join(map(str, numbers)) for numbers in WRONG_ON_HOPPER)
    return (
        f"found Triton {installed}, which from {first} on computes wrong gradients on Hopper GPUs; "
        f"expected {fixed} or later"
    )


def fingerprint() -> str:
    """Return the name of the kernels and their configurations."""
    digest = hashlib.sha256(repr(sorted(CONFIGURATIONS.items())).encode()).hexdigest()
    return f"fla-core {VERSION}, configurations {digest[:8]}"


@functools.cache
def chunk_gated_delta_rule() -> Callable[..., Any]:
    """Return the package's function, when each of its kernels has one configuration."""
    # Otherwise other packages that happen to be installed replace kernels.
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    from triton import Config
    from triton.runtime.autotuner import Autotuner

    for name, (blocks, warps, stages) in CONFIGURATIONS.items():
        module, _, kernel = name.partition(" ")
        tuner = getattr(importlib.import_module(module), kernel)
        while not isinstance(tuner, Autotuner):  # wrappers that derive arguments are around it
            tuner = tuner.fn
        # With a single configuration triton times nothing and reads no cache.
        tuner.configs = [Config(dict(blocks), num_warps=warps, num_stages=stages)]
    return rule
