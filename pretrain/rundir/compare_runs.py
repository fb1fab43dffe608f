"""Compare two runs: losses and state, bitwise or within rounding.

Runs with different numbers of ranks or ZeRO stages are compared within rounding: the norm of two
tensors' difference may be a fraction of the first one's norm. Each function returns a line per
difference.
"""

import math
from pathlib import Path

import torch
from safetensors import safe_open

from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.load import FragmentReader, load_cursor, load_memory
from pretrain.checkpoint.verify import verify
from pretrain.errors import CheckpointError
from pretrain.rundir.run_dir import RunDir

MAX_SHOWN = 5
STATE_TOLERANCE = 1e-4  # a fraction of the first norm, for fp32; about 1e-6 was measured
COUNTERS = ("step", "tokens_seen", "optimizer_steps", "loss_scale")


def run_differences(
    left: RunDir, right: RunDir, step: int, tolerance: float | None = None
) -> list[str]:
    """Return where losses or checkpoints of `step` differ; with a tolerance, beyond rounding."""
    ours, theirs = (verify(step_directory(run.checkpoints, step)) for run in (left, right))
    if tolerance is None:
        of_state = differing_state(ours, theirs)
    else:
        of_state = differing_progress(ours, theirs)
        of_state += differing_values(ours, theirs, STATE_TOLERANCE)
    return differing_losses(left, right, tolerance) + of_state


def differing_losses(left: RunDir, right: RunDir, tolerance: float | None = None) -> list[str]:
    """Return where the metrics of steps differ.

    With a tolerance, losses may differ by that fraction, and gradient norms are not compared.
    Learning rates and tokens must be equal in both cases.
    """
    names = ["loss", "learning_rate", "tokens", *(["grad_norm"] if tolerance is None else [])]
    first, second = (
        {line["step"]: line for line in run_dir.read_metrics() if line["kind"] == "train"}
        for run_dir in (left, right)
    )
    problems = [
        f"step {step}: only in {(left if step in first else right).path.name}"
        for step in sorted(first.keys() ^ second.keys())
    ]
    for step in sorted(first.keys() & second.keys()):
        for name in names:
            ours, theirs = first[step].get(name), second[step].get(name)
            if not _agree(ours, theirs, tolerance if name == "loss" else None):
                problems.append(f"step {step}: {name} {ours!r} against {theirs!r}")
    return problems


def differing_progress(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Return where checkpoints of any numbers of ranks differ: in COUNTERS or lanes' cursors."""
    problems = _differing_counters(left, right, COUNTERS)
    if load_cursor(left).to_tree() != load_cursor(right).to_tree():
        problems.append("lane cursors differ")
    return problems


def differing_values(left: Checkpoint, right: Checkpoint, tolerance: float) -> list[str]:
    """Return where weights, moments, EMA or memories differ by more than `tolerance`, for any
    numbers of ranks."""
    problems = []
    with FragmentReader(left) as first, FragmentReader(right) as second:
        for parameter, kind in sorted(first.pieces() | second.pieces()):
            name = f"{parameter} ({kind})"
            try:
                ours, theirs = (reader.whole(parameter, kind) for reader in (first, second))
            except CheckpointError as error:
                problems.append(f"{name}: {error}")
                continue
            problems += _differing_pair(name, ours, theirs, tolerance)
    return problems + _differing_memories(left, right, tolerance)


def differing_state(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Return where checkpoints of equal numbers of ranks differ: tensors, cursors, counters."""
    problems = _differing_counters(left, right, (*COUNTERS, "world_size"))
    cursors = [[report["cursor"] for report in saved.rank_reports] for saved in (left, right)]
    if cursors[0] != cursors[1]:
        problems.append("lane cursors differ")
    for name in sorted(left.files.keys() | right.files.keys()):
        problems += _differing_tensors(left.directory / name, right.directory / name)
    return problems


def difference_lines(problems: list[str]) -> str:
    """Return the first few problems and the number of the others."""
    shown = "\n".join(f"  {problem}" for problem in problems[:MAX_SHOWN])
    more = len(problems) - MAX_SHOWN
    return shown + (f"\n  and {more} more" if more > 0 else "")


def _agree(ours: float | None, theirs: float | None, tolerance: float | None) -> bool:
    """Return whether two numbers agree; None stands for one that was not finite."""
    if ours is None or theirs is None or tolerance is None:
        return ours == theirs
    return math.isclose(ours, theirs, rel_tol=tolerance)


def _differing_counters(left: Checkpoint, right: Checkpoint, keys: tuple[str, ...]) -> list[str]:
    return [
        f"{key}: {left.index.get(key)!r} against {right.index.get(key)!r}"
        for key in keys
        if left.index.get(key) != right.index.get(key)
    ]


def _differing_memories(left: Checkpoint, right: Checkpoint, tolerance: float) -> list[str]:
    ours, theirs = (
        load_memory(saved, range(sum(report["num_lanes"] for report in saved.rank_reports))) or {}
        for saved in (left, right)
    )
    if ours.keys() != theirs.keys():
        return [f"memories: {len(ours)} parts against {len(theirs)}"]
    return [
        problem
        for name, mine in ours.items()
        for problem in _differing_pair(f"memory of {name}", mine, theirs[name], tolerance)
    ]


def _differing_pair(
    name: str, left: torch.Tensor, right: torch.Tensor, tolerance: float
) -> list[str]:
    if left.dtype != right.dtype or left.shape != right.shape:
        return [f"{name}: {tuple(left.shape)} {left.dtype} against {tuple(right.shape)}"]
    if not left.is_floating_point():  # the number of each row's document, in a memory
        return [] if torch.equal(left, right) else [f"{name}: differs"]
    difference = float((left.double() - right.double()).norm())
    norm = float(left.double().norm())
    if difference <= tolerance * norm:  # False for NaN
        return []
    return [f"{name}: differs by {difference:.1e}, the norm of the first is {norm:.1e}"]


def _differing_tensors(left: Path, right: Path) -> list[str]:
    for path in (left, right):
        if not path.exists():
            return [f"{path}: missing"]
    with safe_open(left, framework="pt") as first, safe_open(right, framework="pt") as second:
        both = {*first.keys()} & {*second.keys()}
        return [
            f"{left.name}: {name}"
            for name in sorted({*first.keys(), *second.keys()})
            if name not in both or not _same_bits(first.get_tensor(name), second.get_tensor(name))
        ]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # As bytes: NaN equals itself, and 0.0 differs from -0.0.
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
