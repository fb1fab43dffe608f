"""The recurrent memory: plain tuples, because DeepSpeed's hooks walk nothing else.

(hidden_BMD of level 0, ..., hidden_BMD of level num_layers - 1, documents_BM): the inputs of every layer for the last M
tokens of each lane, without gradient, and the document each row belongs to, int32, relative to the last row's (0 the
same, -1 the one before). M grows from 0 to the memory length; all lanes have the same M.

With compression (Rae et al. 2019) the levels' compressed rows come between: (hidden_BMD per level, compressed_BKD per
level, compressed_documents_BK, documents_BM). Rows leave the memory `compression_rate` at a time, oldest first, and
each such group becomes one compressed row: M may exceed the memory length by up to rate - 1 rows that wait for theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Memory = tuple[Tensor, ...]


def empty_memory(
    num_layers: int,
    num_lanes: int,
    d_model: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    compressed: bool = False,
) -> Memory:
    """The memory at the start of a stream: no rows."""
    levels = tuple(
        torch.zeros(num_lanes, 0, d_model, dtype=dtype, device=device) for _ in range(num_layers)
    )
    documents = torch.zeros(num_lanes, 0, dtype=torch.int32, device=device)
    return (*levels, *levels, documents, documents) if compressed else (*levels, documents)


def memory_num_rows(memory: Memory | None) -> int:
    """M, the number of tokens remembered as they are."""
    return memory[-1].shape[1] if memory else 0


def memory_num_lanes(memory: Memory) -> int:
    """B, the number of lanes."""
    return memory[-1].shape[0]


def recent_rows(memory: Memory, num_layers: int) -> Memory:
    """The memory without its compressed rows."""
    return (*memory[:num_layers], memory[-1])


def compressed_rows(memory: Memory, num_layers: int) -> Memory:
    """The compressed rows alone, in the same layout; () where nothing is compressed."""
    return memory[num_layers:-1]


def keep_last_rows(memory: Memory, length: int) -> Memory:
    """Recent or compressed rows cut to the last `length`."""
    surplus = memory[-1].shape[1] - length if memory else 0
    return tuple(part[:, surplus:] for part in memory) if surplus > 0 else memory


def take_lanes(memory: Memory, first: int, count: int) -> Memory:
    """The memory of `count` lanes from row `first` on."""
    assert 0 <= first <= memory_num_lanes(memory) - count, (first, count, memory_num_lanes(memory))
    return tuple(part[first : first + count] for part in memory)


def concatenate_lanes(memories: Sequence[Memory]) -> Memory:
    """One memory for the lanes of all `memories` in order; they hold the same number of rows."""
    return tuple(torch.cat(parts) for parts in zip(*memories, strict=True))


def segment_documents(remembered_BM: Tensor, num_tokens: int, starts_BL: Tensor | None) -> Tensor:
    """The document of every row of the segment, [B, L]; 0 is the one at the end of memory."""
    if starts_BL is None:
        return remembered_BM.new_zeros(len(remembered_BM), num_tokens)
    return starts_BL.cumsum(1, dtype=torch.int32)


def extended(
    recent: Memory, inputs_BLD: Sequence[Tensor], documents_BL: Tensor, length: int
) -> Memory:
    """The recent rows after a segment: the last `length` of what was remembered and the segment's layer inputs."""
    new = (*inputs_BLD, documents_BL)
    parts = [_last_rows(old, part.detach(), length) for old, part in zip(recent, new, strict=True)]
    return (*parts[:-1], parts[-1] - documents_BL[:, -1:])


def behind_forgotten(memory: Memory | None, starts_BL: Tensor) -> Memory | None:
    """The memory after a segment that is not remembered: the same rows, their documents counted from its last token."""
    if memory is None:
        return None
    begun_B1 = starts_BL.sum(1, keepdim=True, dtype=torch.int32).to(memory[-1].device)
    return tuple(part if part.is_floating_point() else part - begun_B1 for part in memory)


def _last_rows(old_BMX: Tensor, new_BLX: Tensor, length: int) -> Tensor:
    surplus = old_BMX.shape[1] + new_BLX.shape[1] - length
    # A fresh tensor of exactly the rows kept: a view would keep the whole segment's activations alive.
    kept = [old_BMX[:, max(0, surplus) :], new_BLX[:, max(0, surplus - old_BMX.shape[1]) :]]
    return torch.cat(kept, dim=1)
