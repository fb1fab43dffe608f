"""Reads what Weights & Biases keeps on disk: the library's own records, in LevelDB's framing."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4  # kinds of pieces that end a record


def records_of(path: Path) -> Iterator[Any]:
    """Every whole record of a .wandb file, as the library's protobuf message."""
    from wandb.proto import wandb_internal_pb2

    kind_of_record: Any = wandb_internal_pb2  # its classes are made when it is imported
    data, position, record = path.read_bytes(), HEADER, b""
    assert data.startswith(b":W&B")
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        record += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            yield kind_of_record.Record.FromString(record)
            record = b""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of the history, as name -> value."""
    records = [each for each in records_of(path) if each.WhichOneof("record_type") == "history"]
    return [
        {each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in items}
        for items in (record.history.item for record in records)
    ]
