"""Cases of the fused kernel in triton's interpreter; as a module it runs them, prints JSON."""

from __future__ import annotations

import json
import mmap
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foundation.files import write_json
from tests.helpers.exact_attention import exact_attention, kept_weights
from tests.helpers.triton_interpreter import prepare_interpreter

if TYPE_CHECKING:
    from pretrain.kernels.triton.tiling import Tiles

ARGUMENTS = ("query", "key", "value", "position", "u", "v", "distance_bias", "sinks")
LANE_KEYS = [7, -3, 2**62 + 5, 123_456_789_012]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, compared with float64; `wide` tiles have twice as many queries as keys."""

    B: int = 1
    N: int = 2
    G: int = 0  # 0: N
    L: int
    M: int
    H: int = 16
    max_distance: int | None = None
    documents: int = 0  # boundaries per lane
    dropout: float = 0.0
    positions: bool = True
    distance_bias: bool = False
    sinks: bool = False
    deterministic: bool = False
    from_table: bool = False  # tiles of a table beside the kernels
    wide: bool = False
    long_keys: bool = False  # the keys' tile has four times as many keys as queries
    size: int = 16  # of the tiles
    key_strides: tuple[int, int] | None = None  # from key to key, and from group to group
    workspace_groups: int = 100  # of heads that fit into the workspace
    filling_programs: int = 640  # of the keys' kernel; with fewer, the heads of a group have one
    dtype: torch.dtype = torch.float32
    device: str = "cpu"  # on a GPU with the tiles of its head width


# Every two options that meet in a kernel meet in a case.
CASES: dict[str, Case] = {
    "aligned": Case(L=32, M=16),
    "odd sizes, pairs of heads": Case(B=3, L=21, M=13, deterministic=True, workspace_groups=5),
    "tiles of 64, wide": Case(N=1, L=130, M=10, H=32, size=64, wide=True, deterministic=True),
    "no memory, documents": Case(B=2, L=35, M=0, documents=3, wide=True),
    "no memory, dropout": Case(L=20, M=0, dropout=0.3, deterministic=True),
    "memory longer than the segment": Case(L=19, M=40, wide=True),
    "short memory, short window": Case(L=37, M=5, max_distance=9, deterministic=True),
    "one query, sinks": Case(B=2, L=1, M=33, sinks=True),
    "one query, no memory": Case(B=2, L=1, M=0, deterministic=True),
    "head width 41, long tiles of keys": Case(
        L=40, M=30, H=41, documents=2, dropout=0.3, long_keys=True, deterministic=True
    ),
    "head width 41, distance bias": Case(L=20, M=13, H=41, distance_bias=True),
    "head width 80": Case(N=1, L=20, M=9, H=80, max_distance=9),
    "head width 128, grouped": Case(G=1, L=20, M=9, H=128, deterministic=True),
    "same length, dropout": Case(L=33, M=20, max_distance=20, dropout=0.3, wide=True),
    "window of one": Case(L=20, M=20, max_distance=1),
    "documents and window": Case(B=2, L=34, M=20, documents=2, max_distance=18, wide=True),
    "many documents": Case(L=37, M=20, documents=12, deterministic=True),
    "groups, no positions": Case(B=2, N=4, G=2, L=20, M=13, positions=False, workspace_groups=1),
    "a group at a time": Case(N=6, G=2, L=18, M=15, deterministic=True, workspace_groups=1),
    "grouped queries that fill the device": Case(
        B=3, N=4, G=2, L=21, M=13, documents=2, deterministic=True, filling_programs=8
    ),
    "a lane of 2^31 elements": Case(L=20, M=49, key_strides=(1 << 25, 16), dtype=torch.float16),
    "groups span 2^31": Case(N=3, L=9, M=9, key_strides=(16, 1 << 30), dtype=torch.float16),
    "distance bias and sinks without positions": Case(
        L=33, M=13, distance_bias=True, sinks=True, positions=False, wide=True, deterministic=True
    ),
    "sinks, dropout of grouped queries": Case(
        N=4, G=2, L=20, M=13, sinks=True, documents=3, dropout=0.3, deterministic=True
    ),
    "everything": Case(
        B=2, N=4, G=2, L=34, M=20, H=24, max_distance=25, documents=2, dropout=0.2,
        distance_bias=True, sinks=True, wide=True,
    ),
    "tiles of a table": Case(L=20, M=13, deterministic=True, from_table=True),
    "float16, dropout": Case(L=20, M=13, dropout=0.3, dtype=torch.float16),
    "float16, documents": Case(L=20, M=13, documents=2, dtype=torch.float16, deterministic=True),
}  # fmt: skip


def errors_of(case: Case) -> dict[str, float]:
    """Relative errors (2-norm) of the output and of every gradient."""
    generator = torch.Generator().manual_seed(case.L * 1000 + case.M)
    exact_inputs = [
        None if tensor is None else tensor.to(case.dtype).double().requires_grad_()
        for tensor in _inputs(case, generator)
    ]
    documents_BC = _documents(case, generator) if case.documents else None
    gradient_BLNH = torch.randn(case.B, case.L, case.N, case.H, generator=generator).to(case.dtype)
    threshold, keep = round(case.dropout * 65536), None
    if threshold:
        keep = kept_weights(LANE_KEYS[: case.B], case.N, case.L, case.L + case.M, threshold)
    exact = exact_attention(
        *exact_inputs[:6],
        distance_bias_CN=exact_inputs[6],
        sinks_N=exact_inputs[7],
        documents_BC=documents_BC,
        max_distance=case.max_distance,
        keep_BNLC=keep,
        dropout=threshold / 65536,
    )
    exact.backward(gradient_BLNH.double())
    place = (case.device, case.dtype)
    inputs = [None if t is None else t.detach().to(*place).requires_grad_() for t in exact_inputs]
    if case.key_strides is not None:
        inputs[1:3] = [_spread(tensor.detach(), *case.key_strides) for tensor in inputs[1:3]]
    output = fused(case, inputs, documents_BC)
    output.backward(gradient_BLNH.to(case.device))
    errors = {"output": _relative(output, exact)}
    for name, tensor, reference in zip(ARGUMENTS, inputs, exact_inputs, strict=True):
        if tensor is not None:
            assert tensor.grad.dtype == tensor.dtype
            errors[name] = _relative(tensor.grad, reference.grad)
    return errors


def fused(case: Case, inputs: list[Tensor | None], documents_BC: Tensor | None) -> Tensor:
    """The kernel on this case's options and tiles."""
    from pretrain.kernels.triton import tiling
    from pretrain.kernels.triton.attention import fused_relative_attention
    from pretrain.kernels.triton.tiling import Tile, Tiles

    tiling.FILLING_PROGRAMS = case.filling_programs
    size, longer = case.size, 2 * case.size if case.wide else case.size
    tiles = Tiles(
        forward=Tile(longer, size, 1),
        query_gradient=Tile(longer, size, 1),
        key_gradient=Tile(size, 4 * size if case.long_keys else longer, 1),
        position_gradient=Tile(size, longer, 1),
    )
    if case.from_table:
        _install(tiles, case.H)
    longest = max(tiles.key_gradient.columns, longer)
    score_row = -(-(case.L + case.M) // longest) * longest
    keys_B = torch.tensor(LANE_KEYS[: case.B], device=case.device)
    group_bytes = case.N // (case.G or case.N) * case.L * score_row * case.dtype.itemsize
    return fused_relative_attention(
        *inputs[:6],
        distance_bias_CN=inputs[6],
        sinks_N=inputs[7],
        max_distance=case.max_distance,
        documents_BC=None if documents_BC is None else documents_BC.to(case.device),
        dropout=case.dropout,
        deterministic=case.deterministic,
        tiles=None if case.from_table or case.device != "cpu" else tiles,
        workspace_bytes=case.workspace_groups * group_bytes,
        dropout_keys_B=keys_B if case.dropout else None,
    )


def _install(tiles: Tiles, head_width: int) -> None:
    """Have the kernels take `tiles` from a table, as a search on a device of 9.0 writes it."""
    from pretrain.kernels.triton import tiling

    row = {"capability": [9, 0], "head_width": 64}
    rows = [{**row, "kernel": name, **tile} for name, tile in asdict(tiles).items()]
    with tempfile.TemporaryDirectory() as directory:
        tiling.TABLE = Path(directory) / "tiles.json"
        tree = {"format": 1, "kernels": tiling.kernels_version(), "tiles": rows}
        write_json(tiling.TABLE, tree)
        assert tiling.tiles_for(head_width, (9, 0)) == tiles  # and it is read once


def _inputs(case: Case, generator: torch.Generator) -> list[Tensor | None]:
    B, N, G, L, C, H = case.B, case.N, case.G or case.N, case.L, case.L + case.M, case.H

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Keys and values as a projection leaves them: interleaved, so their rows are not dense.
    key_BCGH, value_BCGH = normal(B, C, 2, G, H).unbind(2)
    position: list[Tensor | None] = [None, None, None]
    if case.positions:
        position = [normal(C, N, H), normal(N, H), normal(N, H)]
    return [
        normal(B, L, N, H),
        key_BCGH,
        value_BCGH,
        *position,
        normal(C, N) if case.distance_bias else None,
        3 * normal(N) if case.sinks else None,
    ]


def _spread(tensor_BCGH: Tensor, row: int, head: int) -> Tensor:
    """Return the one lane with these strides, in memory of which only the pages used exist."""
    _, C, G, H = tensor_BCGH.shape
    size = (C - 1) * row + (G - 1) * head + H
    pages = mmap.mmap(-1, size * tensor_BCGH.element_size())
    flat = torch.frombuffer(pages, dtype=tensor_BCGH.dtype)
    spread_BCGH = flat.as_strided(tensor_BCGH.shape, (size, row, head, 1))
    return spread_BCGH.copy_(tensor_BCGH).requires_grad_()


def _documents(case: Case, generator: torch.Generator) -> Tensor:
    C = case.L + case.M
    starts_BC = torch.zeros(case.B, C, dtype=torch.int32)
    for lane in starts_BC:
        lane[torch.randperm(C, generator=generator)[: case.documents]] = 1
    return starts_BC.cumsum(1, dtype=torch.int32) - 5


def _relative(value: Tensor, exact: Tensor) -> float:
    value, exact = value.detach().cpu().double(), exact.detach()
    # What is exactly zero (one key in sight: no score matters) is compared with numbers of size
    # one.
    size = exact.norm() if exact.abs().max() > 1e-12 else torch.tensor(float(exact.numel())).sqrt()
    return float((value - exact).norm() / size)


if __name__ == "__main__":
    # New tensors are filled with NaN, so that nothing the kernels have not written is used.
    torch.use_deterministic_algorithms(True)
    prepare_interpreter()
    print(json.dumps({name: errors_of(CASES[name]) for name in sys.argv[1:] or CASES}))
