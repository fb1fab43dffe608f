"""How the cost of a token grows with segment, memory, layers and vocabulary: measured, next to what its FLOPs say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pretrain.config.run import ModelConfig
from pretrain.costs.flops import flops_of
from pretrain.model.memory import Memory
from pretrain.model.transformer_xl import TransformerXL

LANES, ROUNDS = 4, 4


@dataclass(frozen=True)
class Point:
    """One model and segment length."""

    name: str
    model: ModelConfig
    segment_length: int

    @property
    def flops_per_token(self) -> float:
        return flops_of(self.model, self.segment_length, LANES).training


def points() -> list[Point]:
    """A base, then one change of it each."""
    model = ModelConfig(vocab_size=4096, num_layers=4, d_model=256, num_heads=4, memory_length=128)
    base = Point("4 layers of width 256, segment = memory = 128, vocabulary 4,096", model, 128)
    return [
        base,
        *(replace(base, name=f"segment {length}", segment_length=length) for length in (64, 256)),
        *(
            replace(base, name=f"{label} {value:,}", model=replace(model, **{setting: value}))
            for setting, label, values in (
                ("memory_length", "memory", (0, 512)),
                ("num_layers", "layers", (2, 8)),
                ("vocab_size", "vocabulary", (1024, 16384)),
            )
            for value in values
        ),
    ]


def growth_table() -> str:
    """Cost per token over that of the first point, measured and by FLOPs, as a Markdown table."""
    all_points = points()
    steps = [_training_step(point) for point in all_points]
    seconds: list[list[float]] = [[] for _ in all_points]
    for round_number in range(ROUNDS + 1):
        for point, step, measured in zip(all_points, steps, seconds, strict=True):
            begin = time.perf_counter()
            step()
            if round_number:
                measured.append((time.perf_counter() - begin) / (LANES * point.segment_length))
    rows = [["training cost per token", "measured", "by FLOPs"]]
    for point, measured in zip(all_points, seconds, strict=True):
        times = statistics.median(measured) / statistics.median(seconds[0])
        rows.append(
            [
                point.name,
                f"{times:.2f}",
                f"{point.flops_per_token / all_points[0].flops_per_token:.2f}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join(
        [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
    )


def _training_step(point: Point) -> Callable[[], None]:
    """Forward and backward with a full memory from the second call on."""
    torch.manual_seed(0)
    module = TransformerXL(point.model)
    tokens_BT = torch.randint(point.model.vocab_size, (LANES, point.segment_length + 1))
    memory: list[Memory | None] = [None]

    def step() -> None:
        while memory[0] is None or memory[0][-1].shape[1] < point.model.memory_length:
            with torch.no_grad():
                _, memory[0] = module(tokens_BT[:, :-1], tokens_BT[:, 1:], memory[0])
        nll_BL, memory[0] = module(tokens_BT[:, :-1], tokens_BT[:, 1:], memory[0])
        nll_BL.mean().backward()

    return step
