"""Caching projected keys and values instead of hidden states changes nothing but the cost."""

from __future__ import annotations

import pytest
import torch

from pretrain.model.cached import CachedStream, RowBuffer, new_stream
from tests.helpers.models import VARIANTS, random_starts, random_tokens, tiny_model

CASES = {
    **VARIANTS,
    "same_length": {"same_length": True},
    "isolated_pre_norm": {"isolate_documents": True},
}
LENGTHS = [5, 9, 1, 1, 9, 9, 2, 9, 9, 9, 1, 9]


@pytest.mark.parametrize(
    ("variant", "memory_length"),
    [
        *(("plain", length) for length in (0, 1, 8, 30)),
        *((name, (8, 30, 1)[place % 3]) for place, name in enumerate(CASES)),
        *((name, 0) for name in ("rope", "isolated", "memory_tokens", "compressive", "deltanet")),
    ],
)
def test_the_losses_are_those_of_remembered_hidden_states(variant, memory_length):
    options = CASES[variant]
    model = tiny_model(**options).eval()
    tokens_BT, starts_BT = random_tokens(3, sum(LENGTHS) + 1), random_starts(3, sum(LENGTHS) + 1)
    stream = new_stream(model, memory_length, max(LENGTHS))
    plain = options.get("compressed_length") or options.get("memory_tokens")
    assert isinstance(stream, CachedStream) == (not plain)
    memory, start = None, 0
    for length in LENGTHS:
        segment, targets = slice(start, start + length), slice(start + 1, start + length + 1)
        arguments = (tokens_BT[:, segment], tokens_BT[:, targets])
        with torch.no_grad():
            expected, memory = model(
                *arguments, memory, starts_BT[:, segment], memory_length=memory_length
            )
        torch.testing.assert_close(
            stream.nll_BL(*arguments, starts_BT[:, segment]), expected, rtol=1e-10, atol=1e-10
        )
        start += length


def test_a_row_buffer_returns_memory_and_new_rows_in_order_and_never_grows():
    rows_of_stream = torch.arange(400.0).view(1, 400, 1)
    buffer = RowBuffer(rows_of_stream, memory_length=10, longest_segment=4)
    size, end = buffer._rows.data_ptr(), 0
    for length in [4, 1, 3, 4, 4, 2] * 16:
        rows = buffer.append(rows_of_stream[:, end : end + length])
        end += length
        assert torch.equal(rows, rows_of_stream[:, max(0, end - length - 10) : end])
    assert buffer._rows.data_ptr() == size


@pytest.mark.parametrize("memory_length", [0, 3, 400])
def test_a_row_buffer_of_a_short_stream_is_no_longer_than_it(memory_length):
    rows_of_stream = torch.arange(12.0).view(1, 12, 1)
    buffer = RowBuffer(rows_of_stream, memory_length, longest_segment=8, num_tokens=12)
    for end in (8, 9, 10, 11, 12):
        length = 8 if end == 8 else 1
        rows = buffer.append(rows_of_stream[:, end - length : end])
        assert torch.equal(rows, rows_of_stream[:, max(0, end - length - memory_length) : end])
    assert buffer._rows.shape[1] == 12
