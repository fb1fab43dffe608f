"""Members of a comparison: runs that differ only in their seeds, and a table of their losses.

A difference between members is paired in two ways. Paired by seeds, it has an interval, which says
whether training again would show the difference. Paired by parts of the split, it may get a mark,
which says that another text might not show it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from foundation.cli import value_text
from foundation.files import write_text
from foundation.tables import latex_table, write_csv
from pretrain.rundir.evaluated_text import EvaluatedText, difference_error
from pretrain.terminal.text import format_number

LEVEL = 0.95  # of the intervals
NO_EFFECT = ("seed", "checkpoint.", "metrics.")  # runs that differ only in these are one member
HEADS = ("member", "n", "loss", "standard error", "difference", "95% interval", "validated on")
NOTE = (
    "n: seeds. Differences are from the first member, paired by seed; ? marks one that the text of "
    "the validation split cannot tell from none."
)


@dataclass(frozen=True)
class Member:
    """Final losses of one member's runs, and the text they were measured on, by seed."""

    name: str
    losses: dict[int, float]
    texts: dict[int, EvaluatedText]

    @property
    def loss(self) -> float:
        """The mean; NaN if the seeds were scored on different texts."""
        texts = {self.text(seed).part_tokens for seed in self.losses}
        return fmean(self.losses.values()) if len(texts) == 1 else math.nan

    def text(self, seed: int) -> EvaluatedText:
        return self.texts.get(seed, EvaluatedText())


def member_rows(members: Sequence[Member]) -> list[tuple[str, ...]]:
    """Return heads and a row per member, lowest mean loss first."""
    ordered = by_loss(members)
    rows: list[tuple[str, ...]] = [HEADS]
    for member in ordered:
        name, count, text = (
            member.name,
            str(len(member.losses)),
            member.text(next(iter(member.losses))),
        )
        if math.isnan(member.loss):
            rows.append((name, count, *"----", "different texts"))
            continue
        errors = _half_interval(list(member.losses.values()))
        cells = name, count, f"{member.loss:.4f}", format_number(errors and errors[0], ".4f")
        rows.append((*cells, *_difference(ordered[0], member), text.description))
    return rows


def by_loss(members: Sequence[Member]) -> list[Member]:
    """Return the members, lowest mean loss first, and last the ones without a mean."""
    return sorted(members, key=lambda member: (math.isnan(member.loss), member.loss))


def _difference(first: Member, member: Member) -> tuple[str, str]:
    """Return the cells of a member's difference from the first, and of its interval."""
    seeds = [seed for seed in first.losses if seed in member.losses]
    texts = [[one.text(seed) for one in (member, first)] for seed in seeds]
    if member is first or not seeds or any(a.part_tokens != b.part_tokens for a, b in texts):
        return "-", "-"
    pairs = [member.losses[seed] - first.losses[seed] for seed in seeds]
    mean, errors = fmean(pairs), _half_interval(pairs)
    known = [error for pair in texts if (error := difference_error(*pair)) is not None]
    is_unclear = bool(known) and abs(mean) < 1.96 * fmean(known)
    interval = f"{mean - errors[1]:+.4f} to {mean + errors[1]:+.4f}" if errors else "-"
    return f"{mean:+.4f}{'?' * is_unclear}", interval


def _half_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the standard error of a mean and half its interval; None for fewer than two."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # late: it takes long to import

    error = stdev(values) / math.sqrt(len(values))
    return error, error * float(stdtrit(len(values) - 1, (1 + LEVEL) / 2))


def member_names(names: Sequence[str], changed: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the member of each run: its name without the seed, if this distinguishes just the
    members; else the settings that differ."""
    keys = [key for key in changed if not key.startswith(NO_EFFECT)]
    values = [tuple(value_text(changed[key][index]) for key in keys) for index in range(len(names))]
    stems = [re.sub(r"-?(s|seed)-?\d+$", "", name) or name for name in names]
    if len({*zip(stems, values, strict=True)}) == len({*values}) == len({*stems}):
        return stems
    short = [key.rpartition(".")[2] for key in keys]
    first = dict(reversed([*zip(values, stems, strict=True)]))
    return [
        " ".join(f"{key}={text}" for key, text in zip(short, of_run, strict=True)) or first[of_run]
        for of_run in values
    ]


def write_table(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write a table, heads first, as CSV and as LaTeX beside it."""
    lines = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    write_csv(path.with_suffix(".csv"), rows[0], lines)
    write_text(path.with_suffix(".tex"), latex_table(rows))
