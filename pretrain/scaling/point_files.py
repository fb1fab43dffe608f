"""Tables of runs (CSV, JSON, JSONL) as points: rows, units, columns. A mistake in a file is one
DataError that says what to do.

Legend: P points.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from foundation.csv_files import read_csv
from foundation.errors import ConfigError, DataError
from foundation.files import parse_json
from foundation.records import shown
from foundation.yaml_files import did_you_mean
from pretrain.scaling.points import Array, Exclusion, Points, grouped_budgets, without_repeats
from pretrain.terminal.text import counted

LARGEST_LOSS = 13.0  # nats per token: guessing among 440,000 tokens; a larger one is a perplexity
PLAIN_RATIO = (0.3, 4.0)  # of C/6ND: for a Transformer-XL it is 0.65 to 2.4
TOKENS_PER_PARAMETER = (0.03, 5e3)
FEWEST_PARAMETERS, FEWEST_TOKENS = 1e3, 1e4  # of a model that anyone trains to fit a law
NEAR = 4.0  # a ratio within this factor of 1000^k is a matter of units
SAME_TEXT = 0.01  # relative spread of bits per nat: what is scored differs a little in its length
SCALABLE = ("parameters", "tokens", "flops", "loss")


def units_of(items: list[str]) -> dict[str, float]:
    """Factors from items such as `parameters=1e6`; ConfigError for anything else."""
    found = {}
    for item in items:
        role, equals, text = item.partition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not (equals and role in SCALABLE and 0 < factor < np.inf):
            raise ConfigError(
                f"--unit {item}: expected ROLE=FACTOR, a positive factor for one of the roles "
                f"{', '.join(SCALABLE)}, such as parameters=1e6"
            )
        found[role] = factor
    return found


def is_perplexity(column: str) -> bool:
    """Whether a column of losses contains perplexities by its name."""
    return re.search(r"ppl|perplexit", column, re.IGNORECASE) is not None


def refuse_perplexities(loss_P: Array, column: str, path: Path) -> None:
    """Raise DataError if the losses are too large to be any, as a whole."""
    if np.median(loss_P) > LARGEST_LOSS:
        raise DataError(
            f"{path}: {column} is {loss_P.min():.3g} to {loss_P.max():.3g}, expected losses in "
            "nats per token; perplexities are read from a column with 'perplexity' or 'ppl' in its "
            "name (--column loss=NAME), other units with --unit loss=FACTOR"
        )


def flops_note(parameters_P: Array, tokens_P: Array, flops_P: Array, path: Path) -> str:
    """What is unusual about C/6ND, empty if nothing; DataError if it is a matter of units."""
    ratio_P = flops_P / (6 * parameters_P * tokens_P)
    middle = float(np.median(ratio_P))
    thousands = round(np.log(middle) / np.log(1000))
    if thousands and max(middle / 1000.0**thousands, 1000.0**thousands / middle) < NEAR:
        raise DataError(
            f"{path}: C is {middle:.3g} times 6ND, a matter of units; if N is in millions, say "
            "--unit parameters=1e6, and likewise for tokens and flops"
        )
    low, high = PLAIN_RATIO
    if low <= middle <= high:
        return ""
    return (
        f"C/6ND is {ratio_P.min():.3g} to {ratio_P.max():.3g}: check that C is the training FLOPs "
        "of the whole run, and N all parameters"
    )


def sizes_note(parameters_P: Array, tokens_P: Array) -> str:
    """What is unusual about N, D and D/N, empty if nothing."""
    size, tokens = float(np.median(parameters_P)), float(np.median(tokens_P))
    low, high = TOKENS_PER_PARAMETER
    plain = low < tokens / size < high
    if plain and size >= FEWEST_PARAMETERS and tokens >= FEWEST_TOKENS:
        return ""
    return (
        f"the median run has {size:.3g} parameters and {tokens:.3g} tokens: is N, D or C in other "
        "units? Say so with --unit parameters=1e6, tokens=1e9 or flops=1e15"
    )


def bits_per_nat(bits_P: Array, loss_P: Array) -> float:
    """Bits per byte of a loss of 1 nat per token; NaN unless it is the same in all runs."""
    known_P = (bits_P > 0) & (bits_P < LARGEST_LOSS)  # not NaN
    ratio_P = bits_P[known_P] / loss_P[known_P]
    if not len(ratio_P) or np.ptp(ratio_P) > SAME_TEXT * ratio_P.min():
        return np.nan
    return float(np.median(ratio_P))


def bits_note(factor: float) -> str:
    """What a loss in nats per token is in bits per byte."""
    bytes_per_token = 1 / (np.log(2) * factor)
    return f"1 nat per token is {factor:.4g} bits per byte ({bytes_per_token:.3g} bytes per token)"


def scaled(values_P: Array, units: Mapping[str, float], role: str) -> Array:
    """The column in parameters, tokens, FLOPs or nats."""
    return values_P * units.get(role, 1.0)


YES = ("1", "1.0", "true", "yes")
NO = ("", "0", "0.0", "false", "no")
SMALLEST, LARGEST = 1e-9, 1e40  # of any number in a table; powers of more overflow
Row = Mapping[str, Any]


def text_of(path: Path, origin: str) -> str:
    """Read a text file in UTF-8; DataError if it is absent or has another encoding."""
    if path.is_dir():
        raise DataError(f"{path} is a directory; name a file: {origin}")
    if not path.is_file():
        raise DataError(f"{path} does not exist; {origin}")
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets put a byte-order mark in front
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error}); save it as CSV or JSON in UTF-8"
        ) from None


def flag(value: object) -> bool | None:
    """Parse a yes-or-no cell (true or false, 1 or 0, nothing for no); None for anything else."""
    word = "" if value is None else str(value).strip().lower()
    return True if word in YES else False if word in NO else None


def csv_rows(path: Path, origin: str) -> list[tuple[int, dict[str, str]]]:
    """Return each row with its line number; DataError for a row longer than the header."""
    try:
        text = text_of(path, origin)
        first = text.partition("\n")[0]
        separator = next((mark for mark in ",;\t" if mark in first), ",")
        rows = list(enumerate(read_csv(text, separator), 2))
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file ({error}); {origin}") from None
    for number, row in rows:
        if None in row:
            raise DataError(
                f"{path}: row {number} has more cells than the header names; check for a stray "
                "comma"
            )
    return cast("list[tuple[int, dict[str, str]]]", rows)


def _stripped(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without blanks around names and values, which hand-written tables are padded with."""
    return {
        name.strip(): value.strip() if isinstance(value, str) else value
        for name, value in row.items()
    }


def rows_of(path: Path) -> list[Row]:
    """Read a file's rows, each with its number as `_line`; DataError for any other content."""
    origin = "expected a CSV or JSON file with one run per row"
    if path.suffix not in (".json", ".jsonl"):
        return [{**_stripped(row), "_line": number} for number, row in csv_rows(path, origin)]
    text = text_of(path, origin)
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        tree = [*map(parse_json, lines)] if path.suffix == ".jsonl" else parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    tree = tree.get("runs") if isinstance(tree, dict) else tree
    if not (isinstance(tree, list) and all(isinstance(row, dict) for row in tree)):
        raise DataError(
            f"{path}: expected a list of objects, one per run, or an object whose 'runs' is such "
            "a list"
        )
    return [{**_stripped(row), "_line": number} for number, row in enumerate(tree, 1)]


def matches(row: Row, condition: str, path: Path, name: str) -> bool:
    """Whether the row of the run `name` meets a condition COLUMN=VALUE; DataError if it is none.

    `name=VALUE` holds for the name that the run has in all output, also without such a column.
    """
    column, equals, value = condition.partition("=")
    if not equals:
        raise DataError(f"{condition!r} is not a condition; write COLUMN=VALUE")
    if column not in row and column != "name":
        raise DataError(f"{path}: no column {column!r}{did_you_mean(column, column_names(row))}")
    return str(row.get(column, name)) == value


def numbers(rows: Sequence[Row], column: str, role: str, path: Path) -> Array:
    """A column as positive finite numbers; DataError counts the bad rows and shows the first."""
    present = [name for name in column_names(rows[0]) if name is not None]
    if column not in present:
        raise DataError(
            f"{path}: no column {column!r} (found: {', '.join(present)}); name it with --column "
            f"{role}=NAME"
        )
    values = [number(row.get(column)) for row in rows]
    for is_bad, wish in (
        (lambda v: not math.isfinite(v), "a finite number"),
        (lambda v: v <= 0, "a positive number"),
        (lambda v: not SMALLEST <= v <= LARGEST, f"a number from {SMALLEST:g} to {LARGEST:g}"),
    ):
        refuse_where([is_bad(value) for value in values], rows, column, wish, path)
    return np.array(values)


def refuse_where(
    is_bad_P: Sequence[bool], rows: Sequence[Row], column: str, wish: str, path: Path
) -> None:
    """Raise DataError that counts the bad rows and shows the first, if there are any."""
    bad = [row for row, is_bad in zip(rows, is_bad_P, strict=True) if is_bad]
    if bad:
        others = f" (and {counted(len(bad) - 1, 'more such row')})" if len(bad) > 1 else ""
        raise DataError(
            f"{path}: row {bad[0]['_line']}: {column}={shown(bad[0].get(column))}{others}, "
            f"expected {wish}; "
            "correct it or exclude it with --exclude 'COLUMN=VALUE: reason'"
        )


def number(value: Any) -> float:
    """The value as a number; NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def column_names(row: Row) -> list[str]:
    """The names of the columns in the file."""
    return [name for name in row if name != "_line"]


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
