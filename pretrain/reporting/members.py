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

LEVEL = 0.95  # of the intervals
NO_EFFECT = ("seed", "checkpoint.", "metrics.")  # runs that differ only in these are one member
COLUMNS = {
    "member": "{member}",
    "n": "{n}",
    "loss": "{loss:.4f}",
    "standard error": "{standard_error:.4f}",
    "difference": "{difference:+.4f}{unclear}",
    "95% interval": "{interval_low:+.4f} to {interval_high:+.4f}",
    "validated on": "{scored_tokens:,} tokens of {scored_documents:,} documents",
}
NOTE = (
    "A loss is the mean over n seeds; differences are from {}, paired by seed. Intervals are over "
    "seeds, and a ? is about documents: on another text such a difference may be none, even where "
    "its interval excludes 0."
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


def beside(members: Sequence[Member], baseline: str = "") -> list[dict[str, Any]]:
    """Return the numbers of each member, lowest mean loss first, and its difference from the
    baseline, by default the first; None where seeds are too few, or texts differ."""
    ordered = sorted(members, key=lambda member: (math.isnan(member.loss), member.loss))
    base = next((member for member in ordered if member.name == baseline), ordered[0])
    rows = []
    for member in ordered:
        text, loss = member.text(min(member.losses)), member.loss
        row = {"member": member.name, "n": len(member.losses), "loss": loss, "standard_error": None}
        row |= {"difference": None, "unclear": "", "interval_low": None, "interval_high": None}
        row |= {"scored_tokens": text.tokens or None, "scored_documents": text.documents}
        if math.isnan(loss):
            row |= {"loss": None, "scored_tokens": None}
        elif errors := _half_interval(list(member.losses.values())):
            row["standard_error"] = errors[0]
        rows.append(row | ({} if member is base else _difference(base, member)))
    return rows


def _difference(base: Member, member: Member) -> dict[str, Any]:
    seeds = [seed for seed in base.losses if seed in member.losses]
    texts = [(member.text(seed), base.text(seed)) for seed in seeds]
    if not seeds or any(text.part_tokens != other.part_tokens for text, other in texts):
        return {}
    pairs = [member.losses[seed] - base.losses[seed] for seed in seeds]
    mean, errors = fmean(pairs), _half_interval(pairs)
    known = [
        error * _quantile(len(pair[0].parts))
        for pair in texts
        if (error := difference_error(*pair)) is not None
    ]
    ends = {"interval_low": mean - errors[1], "interval_high": mean + errors[1]} if errors else {}
    is_unclear = bool(known) and abs(mean) < fmean(known)
    return {"difference": mean, "unclear": "?" * is_unclear, **ends}


def member_rows(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] = COLUMNS
) -> list[list[str]]:
    """Return a table of texts, heads first; `-` where a number is None."""

    def cell(row: Mapping[str, Any], form: str) -> str:
        try:
            return form.format(**row)
        except TypeError:  # None has no decimals
            return "-"

    return [[*columns], *([cell(row, form) for form in columns.values()] for row in rows)]


def without_shared(rows: Sequence[Sequence[str]], of: str) -> tuple[list[list[str]], list[str]]:
    """Return a table without the columns in which all rows agree but the first, and a line on them
    that begins with `of`, if there are any."""
    columns = [*zip(*rows, strict=True)]
    shared = [c for c in columns[1:] if len(rows) > 2 and len({*c[1:]}) == 1]
    kept = zip(*(column for column in columns if column not in shared), strict=True)
    words = [f"{head}: {cell}" for head, cell, *_ in shared if cell != "-"]
    return [list(row) for row in kept], [f"{of}: {'; '.join(words)}"] * bool(words)


def _half_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the standard error of a mean and half its interval; None for fewer than two."""
    if len(values) < 2:
        return None
    error = stdev(values) / math.sqrt(len(values))
    return error, error * _quantile(len(values))


def _quantile(count: int) -> float:
    """Return half the interval of a mean of `count` values, in standard errors."""
    from scipy.special import stdtrit  # late: it takes long to import

    return float(stdtrit(count - 1, (1 + LEVEL) / 2))


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


def write_table(
    path: Path,
    rows: Sequence[Sequence[str]],
    numbers: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write a table, heads first, as LaTeX below the notes, and as CSV, with `numbers` if given."""
    lines = numbers or [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    cells = [
        {k: f"{x:.6g}" if isinstance(x, float) else x for k, x in row.items()} for row in lines
    ]
    write_csv(path.with_suffix(".csv"), list(lines[0] if lines else rows[0]), cells)
    comments = "".join(f"% {note}\n" for note in notes)
    write_text(path.with_suffix(".tex"), comments + latex_table(rows))
