"""Files of runs (CSV or JSON) as points. A mistake in a file is one DataError that says what to do.

Legend: P points.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.yaml_files import did_you_mean
from pretrain.scaling.points import Array, Exclusion, Points, grouped_budgets, without_repeats
from pretrain.scaling.run_tables import (
    Row,
    column_names,
    flag,
    matches,
    number,
    numbers,
    refuse_where,
    rows_of,
)
from pretrain.scaling.units import (
    bits_note,
    bits_per_nat,
    flops_note,
    is_perplexity,
    refuse_perplexities,
    scaled,
    sizes_note,
)

# Names that published tables have, without case and punctuation.
USUAL = {
    "parameters": ("params", "parameters", "modelsize", "numparams", "nparams", "numparameters"),
    "tokens": ("tokens", "trainingtokens", "numtokens", "ntokens", "traintokens"),
    "flops": ("flops", "flop", "trainingflop", "trainingflops", "compute", "computebudget"),
    "loss": ("finalloss", "valloss", "evalloss", "validationloss", "trainloss"),
}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Column names in a file of runs. Required: parameters, loss, and tokens or FLOPs."""

    parameters: str = "N"
    tokens: str = "D"
    loss: str = "loss"
    flops: str = "C"  # training FLOPs of the whole run; absent: 6 N D
    # the FLOPs a group of runs was planned for; absent: runs of about equal FLOPs are grouped
    budget: str = "budget"
    name: str = "name"
    progress: str = (
        "progress"  # fraction of the learning-rate schedule that was done; absent: all of it
    )
    holdout: str = "holdout"  # true: predicted, never fitted
    bits: str = "bits_per_byte"  # the same losses per byte of the text, where they were measured
    excluded: str = "excluded"  # not empty: why the run takes no part


def read_points(
    path: Path,
    columns: Columns | None = None,
    *,
    where: Sequence[str] = (),
    exclude: Sequence[str] = (),
    holdout: Sequence[str] = (),
    units: Mapping[str, float] | None = None,
) -> Points:
    """Read the runs of a CSV or JSON file. `where` keeps rows (column=value); `exclude` drops some
    (column=value: reason).

    `holdout` (column=value) marks rows to be predicted and never fitted, in addition to those that
    the file marks; `units` are factors of roles. Raises DataError, one line per kind of mistake:
    missing column, not a number, not positive, no rows left.
    """
    rows = rows_of(Path(path))
    columns, read_as = _known(columns or Columns(), column_names(rows[0]) if rows else [])
    _refuse_absent(rows, columns, path)

    def meets(row: Row, condition: str) -> bool:
        return matches(row, condition, path, _name(row, columns))

    rows = [row for row in rows if all(meets(row, condition) for condition in where)]
    if not rows:
        raise DataError(
            f"{path} contains no runs{' that match ' + ' and '.join(where) if where else ''}; "
            "check the file"
        )
    kept: list[Row] = []
    excluded: list[Exclusion] = []
    for row in rows:
        own = _reason_in(row, columns.excluded)
        reasons = [own] if own else []
        reasons += [
            item.partition(":")[2].strip() for item in exclude if meets(row, item.partition(":")[0])
        ]
        if reasons:
            excluded.append(Exclusion(_name(row, columns), reasons[0] or "excluded by hand"))
        else:
            kept.append(row)
    held = [
        {**row, columns.holdout: "yes"} if any(meets(row, item) for item in holdout) else row
        for row in kept
    ]
    points = _from_rows(held, columns, path, units or {})
    notes = (*read_as, *points.notes)
    return without_repeats(replace(points, excluded=tuple(excluded), notes=notes))


def _known(columns: Columns, present: Sequence[str]) -> tuple[Columns, list[str]]:
    """The columns with usual names for those that are absent, and a note for each."""
    notes = []
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in present}
    for role, names in USUAL.items():
        if (
            getattr(columns, role) == getattr(Columns, role)
            and getattr(columns, role) not in present
        ):
            found = [plain[name] for name in names if name in plain]
            if len(found) == 1:
                columns = replace(columns, **{role: found[0]})
                notes.append(f"{role}: column {found[0]!r}")
    return columns, notes


def values_by_name(path: Path, column: str, columns: Columns | None = None) -> dict[str, float]:
    """Return a column of finite numbers by the names of the runs, without rows that lack one.

    DataError if there is no such column, or if two runs of one name differ in it.
    """
    rows = rows_of(Path(path))
    present = column_names(rows[0]) if rows else []
    if not any(column in row for row in rows):
        raise DataError(f"{path}: no column {column!r}{did_you_mean(column, present)}")
    found: dict[str, float] = {}
    for row in rows:
        name, value = _name(row, columns or Columns()), number(row.get(column))
        if math.isfinite(value) and found.setdefault(name, value) != value:
            raise DataError(
                f"{path}: row {row['_line']}: another run is named {name!r}, too, with another "
                f"{column}; give each run its own name"
            )
    return found


def _from_rows(
    rows: Sequence[Row], columns: Columns, path: Path, units: Mapping[str, float]
) -> Points:
    if not rows:
        raise DataError(f"{path}: every run is excluded; a fit needs some")
    names = tuple(_name(row, columns) for row in rows)
    loss_P, notes = _losses(rows, columns.loss, path, units)
    parameters_P, tokens_P, flops_P, assumed, unusual = _sizes(rows, columns, path, units)
    notes += assumed
    factor = _bits_per_nat(rows, columns, loss_P)
    notes += [bits_note(factor)] * math.isfinite(factor)
    has_budget = any(row.get(columns.budget) not in (None, "") for row in rows)
    budget_P = (
        numbers(rows, columns.budget, "budget", path) if has_budget else grouped_budgets(flops_P)
    )
    return Points(
        names=names,
        parameters_P=parameters_P,
        tokens_P=tokens_P,
        flops_P=flops_P,
        loss_P=loss_P,
        budget_P=budget_P,
        progress_P=_progress(rows, columns.progress, path),
        holdout_P=_holdout(rows, columns.holdout, path),
        notes=tuple(notes),
        warnings=(unusual,) if unusual else (),
        bits_per_nat=factor,
        source=str(path),
    )


def _losses(
    rows: Sequence[Row], column: str, path: Path, units: Mapping[str, float]
) -> tuple[Array, list[str]]:
    """Losses in nats per token, and a note if they are the logarithms of perplexities."""
    values_P = scaled(numbers(rows, column, "loss", path), units, "loss")
    if not is_perplexity(column):
        if "loss" not in units:
            refuse_perplexities(values_P, column, path)
        return values_P, []
    refuse_where((values_P <= 1).tolist(), rows, column, "a perplexity above 1", path)
    return np.log(values_P), [f"loss = ln {column}"]


def _bits_per_nat(rows: Sequence[Row], columns: Columns, loss_P: Array) -> float:
    """Bits per byte of a nat per token; NaN if the table has none, or those of other losses."""
    if columns.loss != Columns.loss and columns.bits == Columns.bits:
        return math.nan
    return bits_per_nat(np.array([number(row.get(columns.bits)) for row in rows]), loss_P)


def _sizes(
    rows: Sequence[Row], columns: Columns, path: Path, units: Mapping[str, float]
) -> tuple[Array, Array, Array, list[str], str]:
    """N, D and C, one of which may follow from the others, notes on that, and what is unusual."""
    has = {
        role: any(row.get(getattr(columns, role)) not in (None, "") for row in rows)
        for role in ("parameters", "tokens", "flops")
    }
    # A column that is there but empty is an error of its rows, not an assumption.
    has["tokens"] |= columns.tokens in rows[0]
    has["parameters"] |= columns.parameters in rows[0]
    needed = ["parameters", "tokens"] if not has["flops"] else []
    if has["flops"]:
        needed = [role for role in ("parameters", "tokens") if has[role]] or ["parameters"]
    found = {
        role: scaled(numbers(rows, getattr(columns, role), role, path), units, role)
        for role in (*needed, *(["flops"] if has["flops"] else []))
    }
    notes = []
    if "flops" not in found:
        found["flops"] = 6 * found["parameters"] * found["tokens"]
        notes = [f"no column {columns.flops!r}: C = 6ND"]
    elif "tokens" not in found:
        found["tokens"] = found["flops"] / (6 * found["parameters"])
        notes = [f"no column {columns.tokens!r}: D = C / 6N"]
    elif "parameters" not in found:
        found["parameters"] = found["flops"] / (6 * found["tokens"])
        notes = [f"no column {columns.parameters!r}: N = C / 6D"]
    parameters_P, tokens_P, flops_P = (found[role] for role in ("parameters", "tokens", "flops"))
    unusual = flops_note(parameters_P, tokens_P, flops_P, path)
    unusual = unusual or sizes_note(parameters_P, tokens_P)
    return parameters_P, tokens_P, flops_P, notes, unusual


def _refuse_absent(rows: Sequence[Row], columns: Columns, path: Path) -> None:
    """Raise DataError for a missing column that was named by hand, not ignore it silently."""
    present = column_names(rows[0]) if rows else []
    for field in fields(columns):
        column = getattr(columns, field.name)
        if rows and column != field.default and not any(column in row for row in rows):
            raise DataError(
                f"{path}: no column {column!r} for --column "
                f"{field.name}={column}{did_you_mean(column, present)}"
            )


def _progress(rows: Sequence[Row], column: str, path: Path) -> Array:
    values = [1.0 if row.get(column) in (None, "") else number(row[column]) for row in rows]
    refuse_where(
        [not 0 <= value <= 1 for value in values],
        rows,
        column,
        "a fraction of the schedule from 0 to 1 (0.4 for 40%), or nothing for all of it",
        path,
    )
    return np.array(values)


def _holdout(rows: Sequence[Row], column: str, path: Path) -> Array:
    values = [flag(row.get(column)) for row in rows]
    refuse_where(
        [value is None for value in values],
        rows,
        column,
        "1, true or yes for a run to predict, 0, false, no or nothing for one to fit",
        path,
    )
    return np.array(values, bool)


def _reason_in(row: Row, column: str) -> str:
    """The reason that the file gives for excluding the row; empty if there is none."""
    said = flag(row.get(column))
    return str(row[column]) if said is None else "excluded in the file" if said else ""


def _name(row: Row, columns: Columns) -> str:
    return str(row.get(columns.name) or row.get("run") or f"row {row['_line']}")
