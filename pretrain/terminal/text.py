"""Numbers, tables and measurements as text, for all commands and logs. Torch-free."""

import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from foundation.progress import duration

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")


def format_number(value: float | None, form: str) -> str:
    """Return the value in a format such as `,.0f`; `-` for None."""
    return "-" if value is None else format(value, form)


def counted(count: int, noun: str) -> str:
    """Return `1 rank`, `8 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def prefixed(value: float) -> tuple[float, str]:
    """Return `value` as a number below 1000 and a prefix; beyond Q the number may be larger."""
    index = 0
    while index < len(PREFIXES) - 1 and abs(float(f"{value:.3g}")) >= 1000 and math.isfinite(value):
        value, index = value / 1000, index + 1
    return value, PREFIXES[index]


def si(value: float) -> str:
    """Return a number with three digits and a prefix, to be followed by a unit: 8.1 M, 96 G."""
    number, prefix = prefixed(value)
    return f"{number:.3g} {prefix}"


def flops_text(value: float) -> str:
    """Return FLOPs for a table, with an exponent: `7.20e+11`."""
    return f"{value:.2e}" if math.isfinite(value) else "-"


def step_time(seconds: float) -> str:
    """Return the time of a step to three digits or more: 12.345 s, 4.56 ms, 7.89 us."""
    if seconds >= 0.1:
        return f"{seconds:,.3f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.3g} us"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows, heads first, in columns: the first flush left, all others flush right."""
    first, *widths = _widths(rows)
    return "\n".join(
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)]).rstrip()
        for name, *cells in rows
    )


def fitted_table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return `text_table`; for a terminal that is too narrow, several tables, one below the other.

    Each of them starts with the first column, and has at least one more.
    """
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    first, *others = _widths(rows)
    groups: list[list[int]] = [[]]
    left = room = width - first if width else math.inf
    for index, needed in enumerate(others):
        if needed + 2 > left and groups[-1]:
            groups.append([])
            left = room
        groups[-1].append(index)
        left -= needed + 2
    tables = ([[row[0], *(row[1 + index] for index in group)] for row in rows] for group in groups)
    return "\n\n".join(map(text_table, tables))


def distinguished(names: Sequence[str]) -> list[str]:
    """Return the names without the words that all of them begin with: `a-sweep-lr1` -> `lr1`.

    Words end at `-`, `_`, `/`, `+` or a space. No name becomes empty.
    """
    common = os.path.commonprefix([name[:-1] for name in names])  # noqa: RUF071  (no paths)
    common = common if len(names) > 1 else ""
    cut = 1 + max(map(common.rfind, "-_/+ "))
    return [name[cut:] for name in names]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def train_line(lines: Sequence[dict[str, Any]], total_steps: int, seconds_per_step: float) -> str:
    """Return an interval as a line of the log: its train loss, and what its last line has."""
    line, loss = lines[-1], lines[-1]["train_loss"]
    parts = [
        f"step {line['step']:>{len(str(total_steps))}}/{total_steps}",
        f"train loss {format_number(loss, '.4f')}",
        f"{line['tokens_per_second']:,.0f} tok/s",
        f"left {duration((total_steps - line['step']) * seconds_per_step)}",
        f"ppl {format_number(None if loss is None else perplexity(loss), ',.1f')}",
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
    overflowed = sum(bool(line.get("overflowed")) for line in lines)
    if overflowed:
        parts.append(f"overflow {overflowed}")
    if skipped := sum(line["skipped"] for line in lines) - overflowed:
        parts.append(f"SKIPPED {skipped}")
    return "  ".join(parts)


def evaluation_line(
    step: int, values: Mapping[str, Any], others: Mapping[str, float] = MappingProxyType({})
) -> str:
    """Return the results of an evaluation after `step`; `others` are shown by their names."""
    parts = [
        f"after step {step}:",
        f"validation loss {values['loss']:.4f}",
        f"ppl {perplexity(values['loss']):,.1f}",
    ]
    if "documents" in values:
        documents = counted(values["documents"], "document")
        parts.append(f"on {values['tokens']:,} tokens of {documents}")
    if "bits_per_byte" in values:
        parts.append(f"{values['bits_per_byte']:.3f} bits/byte")
    if "loss_without_memory" in values:
        parts.append(f"({values['loss_without_memory']:.4f} without memory)")
    parts += [f"{name} {value:.4f}" for name, value in others.items()]
    return "  ".join(parts)


def perplexity(loss: float) -> float:
    """Return exp(loss); inf from about 1e50 on, the most that a measurement may be."""
    return math.exp(loss) if loss < 115 else math.inf
