"""The fastest tile of each kernel: candidates are timed one by one, the table is tiles.json.

pretrain/kernels/triton/tiling.py describes its format and reads it. "tiles" has the fastest row
of each kernel and head width. `seconds` is the time of the forward pass for "forward", else of the
whole backward pass with the other kernels' tiles as configured. In "tried" a row that could not run
says why in "refused".
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.attention import SHAPES, AttentionInputs, Shape
from benchmarks.gpu.findings import Context, wait_for
from benchmarks.gpu.processes import INTERPRETER
from benchmarks.measure import timed
from foundation.files import write_json
from pretrain.kernels.triton.tiling import (
    FORMAT,
    KERNELS,
    TABLE,
    Tile,
    Tiles,
    built_in_tiles,
    kernels_version,
    tiles_for,
)

SIZES, WARPS, STAGES = (32, 64, 128), (2, 4, 8), (1, 2, 3)
ROWS_PER_WARP = 16  # of a tensor-core instruction: more warps would repeat each other's work
ROUNDS, COMPILERS = 7, 12
BROKEN = ("AcceleratorError", "RuntimeError: Triton Error [CUDA]")  # no later kernel would run
DRY_SHAPE, DRY_TILE = Shape(B=1, L=16, M=16, N=1, H=16, G=1), Tile(16, 16, warps=1)
SEARCHED = (SHAPES[0], SHAPES[2])  # one of each head width


@dataclass(frozen=True)
class Candidate:
    """One tile of one kernel, with the shape to time it on."""

    shape: Shape
    kernel: str
    tile: Tile


def run(context: Context) -> None:
    """Compile all candidates in parallel, then time them alone, the widest heads first."""
    if context.is_dry:
        os.environ[INTERPRETER] = "1"  # read when the kernels are imported, below
        tried = [Candidate(DRY_SHAPE, kernel, DRY_TILE) for kernel in KERNELS]
    else:
        tried = [each for shape in SEARCHED for each in candidates(shape)]
        compile_all(tried)
    rows: list[dict[str, Any]] = []
    measured = rows_of(tried, context)
    for (shape, kernel), group in itertools.groupby(tried, lambda each: (each.shape, each.kernel)):
        found = [next(measured) for _ in group]
        rows += found
        write_table(context.out / TABLE.name, rows)
        timed_rows = [row for row in found if "seconds" in row]
        best = min(timed_rows, key=lambda row: row["seconds"], default=None)
        context.add(f"{kernel}, {shape}", tried=len(found), best=best)


def candidates(shape: Shape) -> Iterator[Candidate]:
    """Yield the tiles that a kernel takes and whose warps all have rows of their own."""
    for kernel in KERNELS:
        for rows in SIZES:
            for columns in SIZES:
                # The kernels of keys and positions keep a block of keys and walk over queries.
                kept = rows if kernel in KERNELS[:2] else columns
                for warps in WARPS:
                    if not 32 <= ROWS_PER_WARP * warps <= kept or kept > 2 * ROWS_PER_WARP * warps:
                        continue
                    for stages in STAGES[: 3 if rows * columns <= 64 * 64 else 2]:
                        tile = Tile(rows, columns, warps, stages)
                        if is_allowed(kernel, tile):
                            yield Candidate(shape, kernel, tile)


def is_allowed(kernel: str, tile: Tile) -> bool:
    """Whether the kernel takes such a tile at all."""
    try:
        replace(built_in_tiles(128, (9, 0)), **{kernel: tile})
    except ValueError:
        return False
    return True


def compile_all(tried: list[Candidate]) -> None:
    """Fill triton's cache from several processes; `row_of` reports what does not compile."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(COMPILERS, mp_context=context) as pool:
        list(pool.map(_compile, tried))


def _compile(candidate: Candidate) -> None:
    # In the candidate's shape: triton makes other code for sizes that are 1 or multiples of 16.
    try:
        works_of(candidate, torch.device("cuda"), torch.bfloat16)[0]()
    except Exception as error:  # too much shared memory, or a compiler's refusal
        print(f"{candidate}: {error}", flush=True)


def rows_of(tried: list[Candidate], context: Context) -> Iterator[dict[str, Any]]:
    """Yield the row of each candidate, timed in another process: a wrong access ends its device."""
    if context.is_dry:
        yield from (row_of(candidate, context) for candidate in tried)
        return
    left = list(tried)
    while left:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            refused = ""
            while left and not refused.startswith(BROKEN):
                row = pool.submit(row_of, left.pop(0), context).result()
                refused = row.get("refused", "")
                yield row


def row_of(candidate: Candidate, context: Context) -> dict[str, Any]:
    """Return the table's row of a candidate, with `seconds` or, if it cannot run, `refused`."""
    capability = (0, 0) if context.is_dry else torch.cuda.get_device_capability()
    row: dict[str, Any] = {
        "capability": list(capability),
        "head_width": candidate.shape.H,
        "kernel": candidate.kernel,
        **asdict(candidate.tile),
    }
    try:
        warm_up, work = works_of(candidate, context.device, context.dtype)
        warm_up()
        seconds = [timed(work)() for _ in range(context.size(ROUNDS, 1))]
    except Exception as error:  # too much shared memory, or a compiler's refusal
        if context.is_dry:
            raise
        return {**row, "refused": f"{type(error).__name__}: {error}"[:120]}
    return {**row, "seconds": statistics.median(seconds)}


def works_of(candidate: Candidate, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a warm-up, and what to time: the forward or the backward pass."""
    from pretrain.kernels.triton.attention import fused_relative_attention

    inputs, shape = AttentionInputs(candidate.shape, device, dtype), candidate.shape
    key_BCGH, value_BCGH = inputs.key_value_BC2GH.unbind(2)
    attend = partial(
        fused_relative_attention,
        *(inputs.query_BLNH, key_BCGH, value_BCGH, inputs.position_CNH, *inputs.biases_NH),
        deterministic=True,
        tiles=tiles_with(candidate, shape.H, device),
    )

    def forward() -> Tensor:
        output = attend()
        wait_for(device)
        return output

    if candidate.kernel == "forward":
        return forward, forward
    output = forward()

    def backward() -> None:
        torch.autograd.grad(output, inputs.leaves, inputs.gradients[shape.L], retain_graph=True)
        wait_for(device)

    return backward, backward


def tiles_with(candidate: Candidate, head_width: int, device: torch.device) -> Tiles:
    """Return the configured tiles with the candidate's in its place."""
    if device.type == "cpu":
        return Tiles(**dict.fromkeys(KERNELS, candidate.tile))
    configured = tiles_for(head_width, torch.cuda.get_device_capability(device))
    return replace(configured, **{candidate.kernel: candidate.tile})


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the fastest row of each kernel, and all rows so far."""
    best: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["head_width"], row["kernel"])
        if "seconds" in row and (key not in best or row["seconds"] < best[key]["seconds"]):
            best[key] = row
    tiles = list(best.values())
    write_json(
        path, {"format": FORMAT, "kernels": kernels_version(), "tiles": tiles, "tried": rows}
    )
