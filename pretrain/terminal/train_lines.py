"""Measurements as lines for people. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")


def train_line(lines: Sequence[dict[str, Any]], total_steps: int, seconds_per_step: float) -> str:
    """An interval's measurements: the mean loss of its steps that were not skipped, everything else at its end."""
    line, losses = lines[-1], [each["loss"] for each in lines if not each["skipped"]]
    loss = sum(losses) / len(losses) if losses else math.nan
    parts = [
        f"step {line['step']:>{len(str(total_steps))}}/{total_steps}",
        f"loss {loss:.4f}",
        f"ppl {perplexity(loss):,.1f}",
        f"lr {line['learning_rate']:.2e}",
    ]
    if line["grad_norm"] is not None:
        parts.append(f"grad {line['grad_norm']:.2f}")
    parts += [
        f"{line['tokens_per_second']:,.0f} tok/s",
        f"MFU {line['mfu']:.1%}",
        f"data wait {line['data_wait']:.1%}",
        f"mem {line['memory_gib']:.2f} GiB",
        f"left {clock((total_steps - line['step']) * seconds_per_step)}",
    ]
    if "loss_scale" in line:
        parts.append(f"scale {line['loss_scale']:,.0f}")
    overflowed = sum(bool(each.get("overflowed")) for each in lines)
    if overflowed:
        parts.append(f"overflow {overflowed}")
    if skipped := len(lines) - len(losses) - overflowed:
        parts.append(f"SKIPPED {skipped}")
    return "  ".join(parts)


def evaluation_line(step: int, values: dict[str, float]) -> str:
    """What an evaluation after `step` found."""
    parts = [
        f"validation after step {step}:",
        f"loss {values['loss']:.4f}",
        f"ppl {perplexity(values['loss']):,.1f}",
    ]
    if "bits_per_byte" in values:
        parts.append(f"{values['bits_per_byte']:.3f} bits/byte")
    if "loss_without_memory" in values:
        parts.append(f"(loss {values['loss_without_memory']:.4f} without memory)")
    return "  ".join(parts)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def clock(seconds: float) -> str:
    """A duration as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def prefixed(value: float) -> tuple[float, str]:
    """The number below 1000 and the prefix that together are `value`; beyond Q the number grows."""
    index = 0
    while index < len(PREFIXES) - 1 and abs(float(f"{value:.3g}")) >= 1000 and math.isfinite(value):
        value, index = value / 1000, index + 1
    return value, PREFIXES[index]


def si(value: float) -> str:
    """A number with three digits and its prefix: 8.1 M, 96 G, ready for a unit."""
    number, prefix = prefixed(value)
    return f"{number:.3g} {prefix}"


def counted(count: int, noun: str) -> str:
    """`1 rank`, `8 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Cells under one another, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
