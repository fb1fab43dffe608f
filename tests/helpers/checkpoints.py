"""Checkpoints that verify, for tests that load none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from foundation.files import sha256_of
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.pieces import key_of, report_of


def index_of(step: int, num_ranks: int) -> dict[str, object]:
    """What rank 0 knows of a checkpoint."""
    counts = dict.fromkeys(("tokens_seen", "optimizer_steps"), step)
    rest = {"run": "run", "config": {}, "loss_scale": None, "validation_loss": None}
    return {"step": step, "world_size": num_ranks, **counts, **rest}


def engine_file(step: int, rank: int, gap: int = 0) -> bytes:
    """A rank's 100 elements of the only parameter; `gap` elements after them are nobody's."""
    key = key_of("w", rank * (100 + gap), "weight")
    return save({key: np.full(100, step, np.float32)})


def publish_step(
    root: Path, step: int, num_ranks: int = 2, gap: int = 0, node_ranks: int = 1, **more: object
) -> Path:
    """A published checkpoint of a parameter that no model has, from nodes of `node_ranks`."""
    partial = files.partial_directory(root, step, "attempt")
    partial.mkdir(parents=True)
    reports = []
    for rank in range(num_ranks):
        (partial / files.rank_file("engine", rank)).write_bytes(engine_file(step, rank, gap))
        on_node = rank % node_ranks
        with open(partial / files.rank_file("state", rank - on_node), "ab") as file:
            file.write(bytes([step % 256, rank % 256]) * 100)
        report = {"first_lane": rank, "num_lanes": 1, "cursor": None}
        reports.append({**report, **report_of_files(partial, rank, gap, on_node)})
    final = files.step_directory(root, step)
    marker.publish(partial, final, {**index_of(step, num_ranks), **more}, reports)
    return final


def report_of_files(partial: Path, rank: int, gap: int = 0, on_node: int = 0) -> dict[str, Any]:
    """What a rank reports of its files, of which `engine_file` is one.

    The other one has been written by as many ranks before it as it has `on_node`.
    """
    written = {}
    for kind, before in ("engine", 0), ("state", on_node):
        path = partial / files.rank_file(kind, rank - before)
        start = before * path.stat().st_size // (before + 1)
        size, sha256 = path.stat().st_size - start, sha256_of(path, start=start)
        written[path.name] = {"start": start, "bytes": size, "sha256": sha256}
    key = key_of("w", rank * (100 + gap), "weight")
    return {"files": written, "pieces": report_of({key: 100}, rank)}
