"""The recurrent memory: plain tuples, because DeepSpeed's hooks walk nothing else.

(hidden_BMD of level 0, ..., hidden_BMD of level num_layers - 1, documents_BM): the inputs of every layer for the last M
tokens of each lane, without gradient, and the document each row belongs to, int32, relative to the last row's (0 the
same, -1 the one before). M grows from 0 to the memory length; all lanes have the same M.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Memory = tuple[Tensor, ...]


def empty_memory(num_layers: int, num_lanes: int, d_model: int, dtype: torch.dtype, device: torch.device) -> Memory:
    """The memory at the start of a stream: no rows."""
    levels = tuple(torch.zeros(num_lanes, 0, d_model, dtype=dtype, device=device) for _ in range(num_layers))
    return (*levels, torch.zeros(num_lanes, 0, dtype=torch.int32, device=device))


def memory_num_rows(memory: Memory | None) -> int:
    """M, the number of tokens remembered."""
    return memory[-1].shape[1] if memory else 0


def memory_num_lanes(memory: Memory) -> int:
    """B, the number of lanes."""
    return memory[-1].shape[0]


def keep_last_rows(memory: Memory, length: int) -> Memory:
    """The memory cut to its last `length` rows."""
    surplus = memory_num_rows(memory) - length
    return tuple(part[:, surplus:] for part in memory) if surplus > 0 else memory


def take_lanes(memory: Memory, first: int, count: int) -> Memory:
    """The memory of `count` lanes from row `first` on."""
    assert 0 <= first <= memory_num_lanes(memory) - count, (first, count, memory_num_lanes(memory))
    return tuple(part[first : first + count] for part in memory)


def concatenate_lanes(memories: Sequence[Memory]) -> Memory:
    """One memory for the lanes of all `memories` in order; they hold the same number of rows."""
    return tuple(torch.cat(parts) for parts in zip(*memories, strict=True))


def document_numbers(memory: Memory, num_tokens: int, starts_BL: Tensor | None) -> Tensor:
    """The document of every row of memory and segment, [B, M + L]; 0 is the one at the end of memory."""
    remembered_BM = memory[-1]
    if starts_BL is None:
        new_BL = remembered_BM.new_zeros(len(remembered_BM), num_tokens)
    else:
        new_BL = starts_BL.cumsum(1, dtype=torch.int32)
    return torch.cat([remembered_BM, new_BL], dim=1)


def extended(memory: Memory, inputs_BLD: Sequence[Tensor], documents_BC: Tensor, length: int) -> Memory:
    """The memory after a segment: the last `length` rows of what was remembered and the segment's layer inputs."""
    levels = [
        _last_rows(level_BMD, new_BLD.detach(), length)
        for level_BMD, new_BLD in zip(memory[:-1], inputs_BLD, strict=True)
    ]
    documents_BC = documents_BC - documents_BC[:, -1:]
    return (*levels, documents_BC[:, max(0, documents_BC.shape[1] - length) :].contiguous())


def _last_rows(old_BMD: Tensor, new_BLD: Tensor, length: int) -> Tensor:
    surplus = old_BMD.shape[1] + new_BLD.shape[1] - length
    # A fresh tensor of exactly the rows kept: a view would keep the whole segment's activations alive.
    kept = [old_BMD[:, max(0, surplus) :], new_BLD[:, max(0, surplus - old_BMD.shape[1]) :]]
    return torch.cat(kept, dim=1)
