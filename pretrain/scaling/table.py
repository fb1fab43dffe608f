"""Tables of finished runs: CSV, JSON and JSONL files as columns, with units checked once.

A run is excluded only with a reason, and a mistake in a file is one DataError that says what to do.
Legend: P points, the runs. N parameters, D training tokens, C training FLOPs.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from foundation.errors import LONGEST_LIST, ConfigError, DataError, did_you_mean, shown
from foundation.files import LARGEST_LIST_BYTES, read_text
from foundation.tables import read_csv
from foundation.typed_values import parse_json
from pretrain.terminal.text import counted

Array = np.ndarray
Row = Mapping[str, Any]

SAME_BUDGET = 1.1  # without a budget column, runs whose FLOPs lie within this factor share a budget
FINISHED = 0.999  # a run counts as finished from this fraction of its schedule on
HELD_OUT = "held out: predicted, not fitted"  # why a run is not among those fitted
LARGEST_LOSS = 13.0  # nats per token: guessing among 440,000 tokens; a larger one is a perplexity
PLAIN_RATIO = (0.3, 4.0)  # of C/6ND: for a Transformer-XL it is 0.65 to 2.4
TOKENS_PER_PARAMETER = (0.03, 5e3)
FEWEST_PARAMETERS, FEWEST_TOKENS = 1e3, 1e4  # of a model that anyone trains to fit a law
NEAR = 4.0  # a ratio within this factor of 1000^k is a matter of units
SMALLEST, LARGEST = 1e-9, 1e40  # of any number in a table; powers of more overflow
ORIGIN = "expected a CSV or JSON file with one run per row"
EXCLUDE = "correct it, or give a reason in the column 'excluded'"
YES = ("1", "1.0", "true", "yes")
NO = ("", "0", "0.0", "false", "no")
# Names that published tables have, without case and punctuation.
USUAL = {
    "parameters": ("params", "parameters", "modelsize", "numparams", "nparams", "numparameters"),
    "tokens": ("tokens", "trainingtokens", "numtokens", "ntokens", "traintokens"),
    "flops": ("flops", "flop", "trainingflop", "trainingflops", "compute", "computebudget"),
    "loss": ("finalloss", "valloss", "evalloss", "validationloss", "trainloss"),
}


@dataclass(frozen=True)
class Exclusion:
    """A run that takes no part in a fit, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Points:
    """Runs as columns of equal length P, with the excluded ones and notes for the reader."""

    names: tuple[str, ...]
    parameters_P: Array
    tokens_P: Array
    flops_P: Array
    loss_P: Array
    budget_P: Array
    progress_P: Array
    holdout_P: Array
    excluded: tuple[Exclusion, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    source: str = "points"

    def __len__(self) -> int:
        return len(self.names)

    def take(self, chosen_P: Array) -> Points:
        """The points of a mask or of indices."""
        indices = np.flatnonzero(chosen_P) if chosen_P.dtype == bool else chosen_P
        columns = {name: array[indices] for name, array in vars(self).items() if name[-2:] == "_P"}
        return replace(self, names=tuple(self.names[i] for i in indices), **columns)

    def without(self, bad_P: Array, reason_of: Callable[[int], str]) -> Points:
        """The points outside the mask; those inside are excluded with their reasons."""
        left_out = tuple(Exclusion(self.names[i], reason_of(int(i))) for i in np.flatnonzero(bad_P))
        return replace(self.take(~bad_P), excluded=self.excluded + left_out)

    @property
    def budgets(self) -> Array:
        """The distinct budgets, ascending."""
        return np.unique(self.budget_P)


def usable(points: Points) -> Points:
    """The points to fit: finished and not held out. The others are excluded with a reason."""
    points = points.without(points.holdout_P, lambda _: HELD_OUT)
    return points.without(
        points.progress_P < FINISHED,
        lambda i: (
            f"mid-schedule: {points.progress_P[i]:.0%} of its schedule done, learning rate not "
            "yet decayed"
        ),
    )


def grouped_budgets(flops_P: Array) -> Array:
    """Each run's budget: the geometric mean of a group that spans at most SAME_BUDGET."""
    # A group starts at its smallest run, so that a chain of close runs does not merge budgets.
    budget_P, is_left_P = np.empty_like(flops_P), np.ones(len(flops_P), bool)
    while is_left_P.any():
        group_P = is_left_P & (flops_P <= SAME_BUDGET * flops_P[is_left_P].min())
        # Of equal FLOPs exactly those, not the rounded exponential of their logarithm.
        equal = np.ptp(flops_P[group_P]) == 0
        mean = np.exp(np.mean(np.log(flops_P[group_P])))
        budget_P[group_P], is_left_P[group_P] = flops_P[group_P][0] if equal else mean, False
    return budget_P


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Column names in a file of runs. Required: loss, and two of parameters, tokens and FLOPs."""

    parameters: str = "N"
    tokens: str = "D"
    loss: str = "loss"
    flops: str = "C"  # training FLOPs of the whole run
    budget: str = "budget"  # the FLOPs that a group of runs was planned for
    name: str = "name"
    progress: str = "progress"  # fraction of the learning-rate schedule; absent: all of it
    holdout: str = "holdout"  # true: predicted, never fitted
    excluded: str = "excluded"  # not empty: why the run takes no part

    @classmethod
    def parse(cls, items: Sequence[str]) -> Columns:
        """Column names from items such as `loss=c4`; ConfigError for an unknown role."""
        roles = [field.name for field in fields(cls)]
        pairs = [item.partition("=") for item in items]
        for role, equals, name in pairs:
            if not equals or role not in roles:
                raise ConfigError(
                    f"--column {role}{equals}{name}: expected ROLE=NAME with one of the roles "
                    f"{', '.join(roles)}"
                )
        return cls(**{role: name for role, _, name in pairs})

    def run_name(self, row: Row) -> str:
        """Return the name that the row's run has in all output."""
        return str(row.get(self.name) or row.get("run") or f"row {row['_line']}")


def as_number(value: Any) -> float:
    """Return the value as a number; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def flag(value: object) -> bool | None:
    """Parse a yes-or-no cell (true or false, 1 or 0, nothing for no); None for anything else."""
    word = "" if value is None else str(value).strip().lower()
    return True if word in YES else False if word in NO else None


def text_of(path: Path, origin: str = ORIGIN) -> str:
    """Read a text file in UTF-8; DataError if it is absent or has another encoding."""
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {problem}; name a file: {origin}")
    try:
        text = read_text(path, LARGEST_LIST_BYTES)
        return text.removeprefix("\ufeff")  # spreadsheets put a byte-order mark in front
    except ValueError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error}); save it as CSV or JSON in UTF-8"
        ) from None


def csv_rows(path: Path, origin: str = ORIGIN) -> list[tuple[int, dict[str, str]]]:
    """Return each row with its line number; DataError for a row longer than the header."""
    text = text_of(path, origin)
    first = text.partition("\n")[0]
    separator = next((mark for mark in ",;\t" if mark in first), ",")
    try:
        rows = list(enumerate(read_csv(text, separator), 2))
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file ({error}); {origin}") from None
    for line, row in rows:
        if None in row:
            raise DataError(
                f"{path}: row {line} has more cells than the header names; check for a stray comma"
            )
    return cast("list[tuple[int, dict[str, str]]]", rows)


def rows_of(path: Path) -> list[Row]:
    """Read a file's rows, each with its number as `_line`; DataError for any other content."""
    if path.suffix in (".json", ".jsonl"):
        text = text_of(path)
        try:
            lines = [line for line in text.splitlines() if line.strip()]
            tree = [*map(parse_json, lines)] if path.suffix == ".jsonl" else parse_json(text)
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}") from None
        if not (isinstance(tree, list) and all(isinstance(row, dict) for row in tree)):
            raise DataError(f"{path}: expected a list of objects, one per run")
        numbered: Sequence[tuple[int, Row]] = list(enumerate(tree, 1))
    else:
        numbered = csv_rows(path)
    # Hand-written tables are padded with blanks.
    return [
        {key.strip(): cell.strip() if isinstance(cell, str) else cell for key, cell in row.items()}
        | {"_line": line}
        for line, row in numbered
    ]


def column_names(rows: Sequence[Row]) -> list[str]:
    """The names of the columns in the file."""
    return [name for name in (rows[0] if rows else ()) if name != "_line"]


def read_points(path: Path, columns: Columns | None = None) -> Points:
    """Read the runs of a file; DataError for mistakes."""
    path, rows = Path(path), rows_of(Path(path))
    if not rows:
        raise DataError(f"{path} contains no runs; check the file")
    columns, notes = _known(columns or Columns(), rows, path)
    kept: list[Row] = []
    excluded: list[Exclusion] = []
    for row in rows:
        mark = flag(row.get(columns.excluded))
        if mark is False:
            kept.append(row)
        else:
            reason = "excluded in the file" if mark else str(row[columns.excluded])
            excluded.append(Exclusion(columns.run_name(row), reason))
    if not kept:
        raise DataError(f"{path}: every run is excluded; a fit needs some")
    points = _Table(path, kept, columns).points(notes)
    # Later copies of a run would count double.
    keys = [*zip(points.parameters_P, points.tokens_P, points.loss_P, points.progress_P)]  # noqa: B905
    first = {key: index for index, key in reversed([*enumerate(keys)])}
    repeats_P = np.array([first[key] != index for index, key in enumerate(keys)])
    points = replace(points, excluded=tuple(excluded))
    return points.without(repeats_P, lambda _: "repeats an earlier row with the same N, D and loss")


def _known(columns: Columns, rows: Sequence[Row], path: Path) -> tuple[Columns, list[str]]:
    """Return the columns with usual names for absent ones, and a note for each.

    DataError for a missing column that was named by hand.
    """
    present = column_names(rows)
    for field in fields(columns):
        column = getattr(columns, field.name)
        if rows and column != field.default and not any(column in row for row in rows):
            raise DataError(
                f"{path}: no column {column!r} for --column "
                f"{field.name}={column}{did_you_mean(column, present)}"
            )
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in present}
    notes = []
    for role, names in USUAL.items():
        usual = [plain[name] for name in names if name in plain]
        is_absent = getattr(columns, role) == getattr(Columns, role) not in present
        if is_absent and len(usual) == 1:
            columns = replace(columns, **{role: usual[0]})
            notes.append(f"{role}: column {usual[0]!r}")
    return columns, notes


@dataclass(frozen=True)
class _Table:
    """Rows of a file as columns of numbers, each checked."""

    path: Path
    rows: Sequence[Row]
    columns: Columns

    def points(self, notes: list[str]) -> Points:
        loss_P, sizes = self.numbers("loss"), self._sizes(notes)
        if np.median(loss_P) > LARGEST_LOSS:
            raise DataError(
                f"{self.path}: {self.columns.loss} is {loss_P.min():.3g} to {loss_P.max():.3g}, "
                "expected losses in nats per token: take the logarithm of perplexities"
            )
        warning = self._units_warning(**sizes)
        done = [row.get(self.columns.progress) for row in self.rows]
        progress_P = np.array([1.0 if cell in (None, "") else as_number(cell) for cell in done])
        self.check(
            (progress_P >= 0) & (progress_P <= 1),
            self.columns.progress,
            "a fraction of the schedule from 0 to 1 (0.4 for 40%), or nothing for all of it",
        )
        holdouts = [flag(row.get(self.columns.holdout)) for row in self.rows]
        self.check(
            np.array([holdout is not None for holdout in holdouts]),
            self.columns.holdout,
            "1, true or yes for a run to predict, 0, false, no or nothing for one to fit",
        )
        has_budget = self._has("budget")
        return Points(
            names=tuple(map(self.columns.run_name, self.rows)),
            parameters_P=sizes["parameters"],
            tokens_P=sizes["tokens"],
            flops_P=sizes["flops"],
            loss_P=loss_P,
            budget_P=self.numbers("budget") if has_budget else grouped_budgets(sizes["flops"]),
            progress_P=progress_P,
            holdout_P=np.array(holdouts, bool),
            notes=tuple(notes),
            warnings=(warning,) if warning else (),
            source=str(self.path),
        )

    def numbers(self, role: str) -> Array:
        """Return a column as positive finite numbers; DataError counts the bad rows, shows one."""
        column, present = getattr(self.columns, role), column_names(self.rows)
        if column not in present:
            raise DataError(
                f"{self.path}: no column {column!r} (found: {', '.join(present)[:LONGEST_LIST]}); "
                f"name it with --column {role}=NAME"
            )
        values_P = self._values(column)
        is_sane_P = (values_P >= SMALLEST) & (values_P <= LARGEST)
        self.check(is_sane_P, column, f"a number from {SMALLEST:g} to {LARGEST:g}")
        return values_P

    def check(self, is_good_P: Array, column: str, wish: str) -> None:
        """Raise DataError that counts the bad rows and shows the first, if there are any."""
        bad = [self.rows[index] for index in np.flatnonzero(~is_good_P)]
        if bad:
            others = f" (and {counted(len(bad) - 1, 'more such row')})" if len(bad) > 1 else ""
            raise DataError(
                f"{self.path}: row {bad[0]['_line']}: {column}={shown(bad[0].get(column))}{others},"
                f" expected {wish}; {EXCLUDE}"
            )

    def _values(self, column: str) -> Array:
        return np.array([as_number(row.get(column)) for row in self.rows])

    def _has(self, role: str) -> bool:
        return any(row.get(getattr(self.columns, role)) not in (None, "") for row in self.rows)

    def _sizes(self, notes: list[str]) -> dict[str, Array]:
        """Return N, D and C, where one may follow from the others."""
        # A column of N or D that is there but empty is an error of its rows, not an assumption.
        present = column_names(self.rows)
        absent = [r for r in ("tokens", "parameters") if getattr(self.columns, r) not in present]
        missing = [*absent, ""][0] if self._has("flops") else "flops"
        roles = ("parameters", "tokens", "flops")
        sizes = {role: self.numbers(role) for role in roles if role != missing}
        if missing:
            n, d, c = (sizes.get(role, np.ones(1)) for role in roles)
            sizes[missing], formula = {
                "flops": (6 * n * d, "C = 6ND"),
                "tokens": (c / (6 * n), "D = C / 6N"),
                "parameters": (c / (6 * d), "N = C / 6D"),
            }[missing]
            notes.append(f"no column {getattr(self.columns, missing)!r}: {formula}")
        return sizes

    def _units_warning(self, *, parameters: Array, tokens: Array, flops: Array) -> str:
        """Return what is unusual about N, D and C; DataError if C shows a matter of units."""
        ratio_P = flops / (6 * parameters * tokens)
        middle = float(np.median(ratio_P))
        thousands = round(np.log(middle) / np.log(1000))
        if thousands and max(middle / 1000.0**thousands, 1000.0**thousands / middle) < NEAR:
            raise DataError(
                f"{self.path}: C is {middle:.3g} times 6ND, a matter of units; if N is in "
                "millions, multiply its column by 1e6, and likewise those of tokens and flops"
            )
        if not PLAIN_RATIO[0] <= middle <= PLAIN_RATIO[1]:
            return (
                f"C/6ND is {ratio_P.min():.3g} to {ratio_P.max():.3g}: check that C is the "
                "training FLOPs of the whole run, and N all parameters"
            )
        size, read = float(np.median(parameters)), float(np.median(tokens))
        is_plain = TOKENS_PER_PARAMETER[0] < read / size < TOKENS_PER_PARAMETER[1]
        if is_plain and size >= FEWEST_PARAMETERS and read >= FEWEST_TOKENS:
            return ""
        return (
            f"the median run has {size:.3g} parameters and {read:.3g} tokens: is N, D or C in "
            "other units, such as millions?"
        )
