"""Checkpoints that verify, for tests that load none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from foundation.files import content_of, sha256_of, write_json
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.disk import publish
from pretrain.checkpoint.pieces import piece_key, piece_report


def index_of(step: int, num_ranks: int) -> dict[str, object]:
    """What rank 0 knows of a checkpoint."""
    counts = dict.fromkeys(("tokens_seen", "optimizer_steps"), step)
    rest = {"run": "run", "config": {}, "loss_scale": None}
    return {"step": step, "world_size": num_ranks, **counts, **rest}


def rank_content(step: int, rank: int, state: bytes, gap: int = 0) -> bytes:
    """A rank's 100 elements of the only parameter, and its state.

    `gap` elements after them are nobody's.
    """
    key = piece_key("w", rank * (100 + gap), "weight")
    tensors = {key: np.full(100, step, np.float32), "state": np.frombuffer(state, np.uint8)}
    return save(tensors)


def publish_step(root: Path, step: int, num_ranks: int = 2, gap: int = 0, **more: object) -> Path:
    """A published checkpoint of a parameter that no model has."""
    partial = files.partial_directory(root, step, "attempt")
    partial.mkdir(parents=True)
    reports = []
    for rank in range(num_ranks):
        state = bytes([step % 256, rank % 256]) * 100
        (partial / files.rank_file(rank)).write_bytes(rank_content(step, rank, state, gap))
        report = {"first_lane": rank, "num_lanes": 1, "cursor": None}
        reports.append({**report, **report_of_file(partial, rank, gap)})
    final = files.step_directory(root, step)
    publish(partial, final, {**index_of(step, num_ranks), **more}, reports)
    return final


def report_of_file(partial: Path, rank: int, gap: int = 0) -> dict[str, Any]:
    """What a rank reports of its file, which has the content of `rank_content`."""
    key = piece_key("w", rank * (100 + gap), "weight")
    written = vars(content_of(partial / files.rank_file(rank)))
    return {**written, "pieces": piece_report({key: 100}, rank)}


def flip_a_bit(path: Path) -> None:
    """Damage a file in its middle; a second time repairs it."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def rewrite_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index, with a marker that agrees with it."""
    index = json.loads((directory / files.INDEX).read_text())
    change(index)
    write_json(directory / files.INDEX, index)
    (directory / files.MARKER).write_text(sha256_of(directory / files.INDEX) + "\n")
