from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from foundation.files import sha256_of
from pretrain.checkpoint.background_save import (
    PART_ALIGNMENT,
    Pieces,
    copy_to_host,
    layout_of,
    part_of_file,
    whole_file,
)
from pretrain.checkpoint.destinations import BLOCK_BYTES, write_file


def written(path: Path, tensors: Pieces) -> dict[str, object]:
    layout = layout_of(tensors)
    host = torch.full(
        (layout.num_bytes + 100,), 0xAB, dtype=torch.uint8
    )  # a longer buffer, used before
    copy_to_host(tensors, layout, host)
    return write_file(path, replace(whole_file(layout), body=host.numpy().data), lambda: None)


def test_the_library_reads_every_type_and_shape_bitwise(tmp_path):
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "bytes": [torch.arange(7, dtype=torch.uint8)],
        "half": [random(3, 5).to(torch.bfloat16)],
        "half.16": [random(3).to(torch.float16)],
        "documents": [torch.arange(-3, 3, dtype=torch.int32).view(2, 3)],
        "count": [torch.tensor([2**40])],
        "double": [random(1).double()],
        "odd|0|weight": [random(11)],
        "empty": [torch.empty(2, 0, 4)],
        "turned": [random(4, 6).t()],
    }
    described = written(tmp_path / "file.safetensors", tensors)
    loaded = load_file(tmp_path / "file.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, (tensor,) in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    path = tmp_path / "file.safetensors"
    assert described == {"start": 0, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def test_pieces_become_one_tensor(tmp_path):
    slots = [torch.arange(12.0).view(2, 3, 2), torch.arange(12.0, 18.0).view(1, 3, 2)]
    written(tmp_path / "file", {"memory": slots})
    with safe_open(tmp_path / "file", framework="pt") as handle:
        assert torch.equal(handle.get_slice("memory")[1:3], torch.cat(slots)[1:3])


def parts_of_ranks(path: Path, tensors: dict[int, Pieces]) -> dict[int, dict[str, Any]]:
    """Ranks that write one file, the last one first; returns what each has written."""
    layouts = {rank: layout_of(own) for rank, own in tensors.items()}
    headers = {rank: layout.header for rank, layout in layouts.items()}
    described = {}
    for rank in reversed(tensors):
        host = torch.full((layouts[rank].num_bytes + 100,), 0xAB, dtype=torch.uint8)
        copy_to_host(tensors[rank], layouts[rank], host)
        part = replace(part_of_file(headers, rank), body=host.numpy().data)
        described[rank] = write_file(path, part, lambda: None)
    return described


def test_the_library_reads_a_file_of_which_several_ranks_each_write_whole_pages(tmp_path):
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"x" * 99_999)  # of a former try
    tensors: dict[int, Pieces] = {
        8: {"memory": [torch.randn(3, 500)], "random": [torch.arange(7, dtype=torch.uint8)]},
        9: {"random": [torch.arange(5, dtype=torch.uint8)]},  # no lanes
        11: {},
        12: {"memory": [torch.randn(2, 512)]},  # a whole page: nothing to fill
    }
    described = parts_of_ranks(path, tensors)
    loaded = {key: each for key, each in load_file(path).items() if not key.endswith("|padding")}
    expected = {f"{rank}|{name}": own[name][0] for rank, own in tensors.items() for name in own}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    end = 0
    for rank in tensors:
        part = described[rank]
        assert part["start"] == end
        end += part["bytes"]
        assert end % PART_ALIGNMENT == 0
        assert part["sha256"] == sha256_of(path, start=part["start"], num_bytes=part["bytes"])
    assert end == path.stat().st_size


def test_writing_can_be_canceled_between_blocks(tmp_path):
    calls = []

    def give_up_at_the_third() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    layout = layout_of({"long": [torch.empty(3 * BLOCK_BYTES, dtype=torch.uint8)]})
    host = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    part = replace(whole_file(layout), body=host.numpy().data)
    with pytest.raises(InterruptedError):
        write_file(tmp_path / "file", part, give_up_at_the_third)
    assert (tmp_path / "file").stat().st_size < layout.num_bytes
