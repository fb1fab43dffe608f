"""Whether two runs are the same run: losses and state, bitwise, or to rounding where ranks or ZeRO stage differed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from data_pipeline.lanes.lane_stream import LaneCursor
from pretrain.checkpoint import marker
from pretrain.checkpoint.directory import step_directory
from pretrain.rundir.run_dir import RunDir

MAX_SHOWN = 5


def differences(left: RunDir, right: RunDir, step: int, tolerance: float = 0.0) -> list[str]:
    """Return where the losses or the checkpoints of `step` differ; empty if every bit agrees.

    With a tolerance, losses may differ by rounding, and of the checkpoints only the progress counts.
    """
    ends = [marker.verify(step_directory(each.checkpoints, step)) for each in (left, right)]
    if tolerance:
        return losses_apart(left, right, tolerance) + differing_progress(*ends)
    return differing_losses(left, right) + differing_state(*ends)


def differing_losses(left: RunDir, right: RunDir) -> list[str]:
    """Where the per-step metrics of two runs disagree, a line each; empty when every bit agrees."""
    first, second = _per_step(left), _per_step(right)
    problems = [
        f"step {step}: only in {left.path.name}" for step in sorted(first.keys() - second.keys())
    ]
    problems += [
        f"step {step}: only in {right.path.name}" for step in sorted(second.keys() - first.keys())
    ]
    for step in sorted(first.keys() & second.keys()):
        for name in ("loss", "grad_norm", "learning_rate", "tokens"):
            if first[step].get(name) != second[step].get(name):
                problems.append(
                    f"step {step}: {name} {first[step].get(name)!r} against {second[step].get(name)!r}"
                )
    return problems


def losses_apart(left: RunDir, right: RunDir, tolerance: float) -> list[str]:
    """Where two runs' losses are further apart than `tolerance` of their size, or any step's tokens or rate differ."""
    first, second = _per_step(left), _per_step(right)
    problems = [
        f"step {step}: only in one of the runs" for step in sorted(first.keys() ^ second.keys())
    ]
    for step in sorted(first.keys() & second.keys()):
        ours, theirs = first[step], second[step]
        if not _are_close(ours["loss"], theirs["loss"], tolerance):
            problems.append(f"step {step}: loss {ours['loss']!r} against {theirs['loss']!r}")
        problems += [
            f"step {step}: {name} {ours[name]!r} against {theirs[name]!r}"
            for name in ("learning_rate", "tokens")
            if ours[name] != theirs[name]
        ]
    return problems


def _are_close(loss: float | None, other: float | None, tolerance: float) -> bool:
    """None stands for a loss that was no number."""
    return (
        loss == other
        if loss is None or other is None
        else math.isclose(loss, other, rel_tol=tolerance)
    )


def differing_progress(left: marker.Checkpoint, right: marker.Checkpoint) -> list[str]:
    """Where two checkpoints, of any numbers of ranks, disagree about steps, tokens or where each lane stands."""
    problems = _differing_counters(
        left, right, ("step", "tokens_seen", "optimizer_steps", "loss_scale")
    )
    if _joined_cursor(left) != _joined_cursor(right):
        problems.append("lane cursors differ")
    return problems


def differing_state(left: marker.Checkpoint, right: marker.Checkpoint) -> list[str]:
    """Where two checkpoints of the same world size disagree: tensors by name, cursors, counters."""
    problems = _differing_counters(
        left, right, ("step", "tokens_seen", "optimizer_steps", "loss_scale", "world_size")
    )
    cursors = [[report["cursor"] for report in found.rank_reports] for found in (left, right)]
    if cursors[0] != cursors[1]:
        problems.append("lane cursors differ")
    names = sorted(left.index["files"].keys() | right.index["files"].keys())
    for name in names:
        problems += _differing_tensors(left.directory / name, right.directory / name)
    return problems


def summary(problems: list[str]) -> str:
    """The first few problems and how many there are."""
    shown = "\n".join(f"  {problem}" for problem in problems[:MAX_SHOWN])
    more = len(problems) - MAX_SHOWN
    return shown + (f"\n  and {more} more" if more > 0 else "")


def _differing_counters(
    left: marker.Checkpoint, right: marker.Checkpoint, keys: tuple[str, ...]
) -> list[str]:
    return [
        f"{key}: {left.index.get(key)!r} against {right.index.get(key)!r}"
        for key in keys
        if left.index.get(key) != right.index.get(key)
    ]


def _joined_cursor(found: marker.Checkpoint) -> dict[str, Any]:
    cursors = [LaneCursor.from_tree(report["cursor"]) for report in found.rank_reports]
    return LaneCursor.join(cursors).to_tree()


def _per_step(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in run_dir.read_metrics() if line["kind"] == "train"}


def _differing_tensors(left: Path, right: Path) -> list[str]:
    for path in (left, right):
        if not path.exists():
            return [f"{path}: missing"]
    with safe_open(left, framework="pt") as first, safe_open(right, framework="pt") as second:
        names = sorted({*first.keys(), *second.keys()})
        both = set(first.keys()) & set(second.keys())
        return [
            f"{left.name}: {name}"
            for name in names
            if name not in both or not _same_bits(first.get_tensor(name), second.get_tensor(name))
        ]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(
        torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    )
