from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from data_pipeline.files import sha256_of
from pretrain.checkpoint.tensor_files import (
    BLOCK_BYTES,
    Pieces,
    copy_to_host,
    layout_of,
    write_file,
)


def written(path: Path, tensors: Pieces) -> dict[str, object]:
    layout = layout_of(tensors)
    host = torch.full(
        (layout.num_bytes + 100,), 0xAB, dtype=torch.uint8
    )  # a longer buffer, used before
    copy_to_host(tensors, layout, host)
    return write_file(path, layout, host, between_blocks=lambda: None)


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
    assert described == {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def test_pieces_become_one_tensor(tmp_path):
    slots = [torch.arange(12.0).view(2, 3, 2), torch.arange(12.0, 18.0).view(1, 3, 2)]
    written(tmp_path / "file", {"memory": slots})
    with safe_open(tmp_path / "file", framework="pt") as handle:
        assert torch.equal(handle.get_slice("memory")[1:3], torch.cat(slots)[1:3])


def test_writing_can_be_canceled_between_blocks(tmp_path):
    calls = []

    def give_up_at_the_third() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    layout = layout_of({"long": [torch.empty(3 * BLOCK_BYTES, dtype=torch.uint8)]})
    host = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    with pytest.raises(InterruptedError):
        write_file(tmp_path / "file", layout, host, give_up_at_the_third)
    assert (tmp_path / "file").stat().st_size < layout.num_bytes
