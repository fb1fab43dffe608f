"""The pieces of parameters in the files of a checkpoint, and that nothing between them is missing.

A key is PARAMETER|START|KIND: the tensor has the elements of the flat parameter from START on.
Torch-free.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.checked_fields import shown
from data_pipeline.errors import CheckpointError, UnreadableError

_KEY = re.compile(r"([^|]+)\|([0-9]{1,15})\|([^|]+)")

# (parameter, kind) -> (start, slice) in order of their starts
Pieces = dict[tuple[str, str], list[tuple[int, Any]]]


@contextlib.contextmanager
def opened(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a file of tensors; CheckpointError if it is none, or lacks what the block reads.

    UnreadableError if it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework=framework) as handle:
            yield handle
    except OSError as error:
        reason = error.strerror or str(error).partition(": ")[0]
        raise UnreadableError(f"{path}: cannot be read any more: {reason}") from None
    except (SafetensorError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: not the tensors of a checkpoint ({reason})") from None


def pieces_of(directory: Path, handles: Mapping[str, Any]) -> Pieces:
    """Return the pieces in the opened files, by their names in `directory`.

    CheckpointError if elements of a parameter are missing or there twice: counts may add up even
    so, and what a piece does not fill is whatever was in memory.
    """
    found: Pieces = {}
    for name, handle in handles.items():
        for key in handle.keys():  # noqa: SIM118  (not a mapping)
            parameter, start, kind = _parsed_key(directory / name, key)
            piece = handle.get_slice(key)
            if len(shape := piece.get_shape()) != 1:
                raise CheckpointError(
                    f"{directory / name}: found {key} of shape {shape}, expected one dimension"
                )
            found.setdefault((parameter, kind), []).append((start, piece))
    for (parameter, kind), pieces in found.items():
        pieces.sort(key=lambda piece: (piece[0], piece[1].get_shape()))
        end = 0
        for start, piece in pieces:
            if start != end:
                raise CheckpointError(
                    f"{directory}: found a piece of {parameter} ({kind}) from element {start}, "
                    f"expected {end}; use another checkpoint"
                )
            end += piece.get_shape()[0]
    return found


def _parsed_key(path: Path, key: str) -> tuple[str, int, str]:
    match = _KEY.fullmatch(key)
    if not match:
        raise CheckpointError(f"{path}: found the key {shown(key)}, expected NAME|START|KIND")
    return match[1], int(match[2]), match[3]
