"""Checkpoints that verify, for tests that load none."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.files import sha256_of, write_json
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker


def index_of(step: int, num_ranks: int) -> dict[str, object]:
    """What rank 0 knows of a checkpoint."""
    counts = dict.fromkeys(("tokens_seen", "optimizer_steps"), step)
    rest = {"run": "run", "config": {}, "loss_scale": None, "validation_loss": None}
    return {"step": step, "world_size": num_ranks, **counts, **rest}


def publish_step(root: Path, step: int, num_ranks: int = 2, **more: object) -> Path:
    """A published checkpoint whose files hold nothing that could be loaded."""
    partial = files.partial_directory(root, step, "attempt")
    partial.mkdir(parents=True)
    for rank in range(num_ranks):
        for kind in ("engine", "state"):
            (partial / files.rank_file(kind, rank)).write_bytes(bytes([step % 256, rank]) * 100)
        names = [files.rank_file(kind, rank) for kind in ("engine", "state")]
        written = {
            name: {"bytes": (partial / name).stat().st_size, "sha256": sha256_of(partial / name)}
            for name in names
        }
        report = {"files": written, "first_lane": rank, "num_lanes": 1, "cursor": None}
        write_json(partial / files.rank_file("rank", rank), report)
    final = files.step_directory(root, step)
    marker.publish(partial, final, {**index_of(step, num_ranks), **more}, num_ranks)
    return final
