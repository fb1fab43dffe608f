"""Measurements as lines for people. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from data_pipeline.progress import duration
from pretrain.terminal.text import number


def train_line(lines: Sequence[dict[str, Any]], total_steps: int, seconds_per_step: float) -> str:
    """An interval's measurements: its train loss, everything else at its end.

    What matters most comes first: a progress bar cuts the line at the terminal's width.
    """
    line, loss = lines[-1], lines[-1]["train_loss"]
    parts = [
        f"step {line['step']:>{len(str(total_steps))}}/{total_steps}",
        f"train loss {number(loss, '.4f')}",
        f"{line['tokens_per_second']:,.0f} tok/s",
        f"left {duration((total_steps - line['step']) * seconds_per_step)}",
        f"ppl {number(None if loss is None else perplexity(loss), ',.1f')}",
        f"lr {line['learning_rate']:.2e}",
    ]
    if line["grad_norm"] is not None:
        parts.append(f"grad {line['grad_norm']:.2f}")
    parts += [
        f"MFU {line['mfu']:.1%}",
        f"data wait {line['data_wait']:.1%}",
        f"mem {line['used_memory_gib']:.2f} GiB",
    ]
    if "loss_scale" in line:
        parts.append(f"scale {line['loss_scale']:,.0f}")
    overflowed = sum(bool(each.get("overflowed")) for each in lines)
    if overflowed:
        parts.append(f"overflow {overflowed}")
    if skipped := sum(each["skipped"] for each in lines) - overflowed:
        parts.append(f"SKIPPED {skipped}")
    return "  ".join(parts)


def evaluation_line(
    step: int, values: Mapping[str, float], others: Mapping[str, float] = MappingProxyType({})
) -> str:
    """What an evaluation after `step` found; `others` are shown by their names."""
    parts = [
        f"after step {step}:",
        f"validation loss {values['loss']:.4f}",
        f"ppl {perplexity(values['loss']):,.1f}",
    ]
    if "bits_per_byte" in values:
        parts.append(f"{values['bits_per_byte']:.3f} bits/byte")
    if "loss_without_memory" in values:
        parts.append(f"({values['loss_without_memory']:.4f} without memory)")
    parts += [f"{name} {value:.4f}" for name, value in others.items()]
    return "  ".join(parts)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where it is more than a measurement may be (1e50)."""
    return math.exp(loss) if loss < 115 else math.inf
