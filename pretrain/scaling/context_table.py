"""The losses of a context sweep as a table: every run with every memory it was evaluated with, or why it was not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError, UserError
from pretrain.scaling.collect import row_of
from pretrain.scaling.csv_files import csv_rows, flag
from pretrain.scaling.sweep_file import Cell, Sweep

TIMES = (
    0.0,
    0.5,
    1.0,
    2.0,
    4.0,
    8.0,
)  # of the memory in training; of the segment for runs trained without memory
NUMBERS = ("segment_length", "memory_length", "N", "D", "C", "evaluated_memory", "times", "loss")

# A run's directory and memory lengths -> the loss with each
Evaluate = Callable[[Path, Sequence[int]], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class ContextRow:
    """One run evaluated with one memory length."""

    name: str
    same_tokens: str = ""  # yes: comparable with the others of equal tokens
    same_flops: str = ""
    segment_length: int
    memory_length: int  # in training
    N: int | str = ""
    D: int | str = ""
    C: float | str = ""
    evaluated_memory: int | str = ""
    times: float | str = ""
    loss: float | str = ""
    excluded: str = ""  # why the run takes no part


def context_rows(sweep: Sweep, runs: Path, evaluate: Evaluate) -> list[ContextRow]:
    """Rows of every cell of a sweep that `scale context plan` wrote; DataError for another sweep."""
    foreign = next((cell.name for cell in sweep.cells if "same_tokens" not in cell.facts), None)
    if foreign is not None:
        raise DataError(
            f"cell {foreign} belongs to no context sweep; give one that 'scale context plan' wrote"
        )
    return [row for cell in sweep.cells for row in _rows(cell, runs / cell.name, evaluate)]


def read_context(path: Path) -> list[ContextRow]:
    """The evaluated rows of a table; DataError, in one line, for one that is damaged or holds none."""
    found = []
    for line, row in csv_rows(path, "'pretrain scale context collect' writes it"):
        missing = [
            name
            for name in ("name", "same_tokens", "same_flops", "excluded", *NUMBERS)
            if row.get(name) is None
        ]
        if missing:
            raise DataError(
                f"{path}: no column {missing[0]!r}; expected what 'scale context collect' writes"
            )
        if not row["excluded"]:
            found.append(_parsed(row, f"{path}: row {line}"))
    if not found:
        raise DataError(f"{path} holds no evaluated run; let the sweep finish and collect again")
    return found


def _rows(cell: Cell, directory: Path, evaluate: Evaluate) -> list[ContextRow]:
    facts = cell.facts
    segment, memory = int(facts["segment_length"]), int(facts["memory_length"])
    row = row_of(cell, directory)

    def made(**values) -> ContextRow:
        return ContextRow(
            name=cell.name,
            same_tokens="yes" if facts["same_tokens"] else "",
            same_flops="yes" if facts["same_flops"] else "",
            segment_length=segment,
            memory_length=memory,
            N=row.N,
            D=row.D,
            C=row.C,
            **values,
        )

    if row.excluded:
        return [made(excluded=row.excluded)]
    lengths = {round(times * (memory or segment)): times for times in TIMES}
    try:
        losses = evaluate(directory, tuple(lengths))
    except UserError as error:
        return [made(excluded=f"cannot be evaluated: {error}")]
    return [
        made(evaluated_memory=length, times=times, loss=loss)
        for (length, times), loss in zip(lengths.items(), losses, strict=True)
    ]


def _parsed(row: dict[str, str], where: str) -> ContextRow:
    values: dict[str, float] = {}
    for name in NUMBERS:
        try:
            values[name] = float(row[name])
        except ValueError:
            values[name] = math.nan
        if not math.isfinite(values[name]) or values[name] < 0:
            raise DataError(
                f"{where}: {name}={row[name]!r}, expected a number of 0 or more; collect again"
            )
    for name in ("same_tokens", "same_flops"):
        if flag(row[name]) is None:
            raise DataError(
                f"{where}: {name}={row[name]!r}, expected yes or nothing; collect again"
            )
    return ContextRow(
        name=row["name"],
        same_tokens="yes" if flag(row["same_tokens"]) else "",
        same_flops="yes" if flag(row["same_flops"]) else "",
        segment_length=int(values["segment_length"]),
        memory_length=int(values["memory_length"]),
        N=int(values["N"]),
        D=int(values["D"]),
        C=values["C"],
        evaluated_memory=int(values["evaluated_memory"]),
        times=values["times"],
        loss=values["loss"],
    )
