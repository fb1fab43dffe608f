"""The runs of a sweep as a table: a row per cell, with its loss or why it has none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from foundation.errors import ConfigError, DataError
from foundation.files import read_value
from foundation.tables import write_csv
from foundation.typed_values import Count, Finite, Positive, json_text, parse_json
from pretrain.costs.device_memory import lane_bytes
from pretrain.costs.flops import run_cost
from pretrain.rundir.evaluated_text import PARTS, EvaluatedText
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.history import find_events
from pretrain.rundir.metric_names import set_losses, task_columns
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.intervals import amount
from pretrain.scaling.table import csv_rows
from pretrain.sweeps.cell_runs import PlacedCell
from pretrain.terminal.text import flops_text

MISTUNED = 0.005  # of the loss: what another rate may gain
ORIGIN = "expected a table that 'pretrain scale collect' writes"
SET_LOSSES, TASKS = "set_losses", "tasks"
PROBES = "probes.json"
PROBED = "probes/"  # begins the names of columns
_LATER_COLUMNS = ("loss_error", "loss_tokens", "loss_documents", "loss_parts", "baseline")
FEWEST = 100  # tokens behind the loss of a stretch of positions
FAR = 512  # tokens: beyond it much of a document may be out of a short memory


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell. N counts all parameters, C is exact; the loss is the last evaluation's."""

    name: str
    N: int | str = ""
    N_body: int | str = ""
    D: int | str = ""
    C: float | str = ""
    loss: float | str = ""  # infinite if it diverged
    bits_per_byte: float | str = ""  # the same loss, per byte of the text
    loss_error: float | str = ""  # its standard error, over documents
    loss_tokens: int | str = ""  # that it rests on
    loss_documents: int | str = ""
    loss_parts: str = ""  # of the split: [loss, tokens] of each, as JSON
    budget: float | str = ""
    seed: int | str = ""
    progress: float | str = ""
    holdout: str = ""
    learning_rate: float | str = ""
    rate_factor: float | str = ""  # of the plan's rate, where the cell checks it
    tokens_per_step: int | str = ""
    seconds: float | str = ""  # of training, without evaluations and saves
    segment_length: int | str = ""
    memory_length: int | str = ""  # in training
    base_width: int | str = ""  # whose rates transfer to other widths; 0: they do not
    lane_bytes: int | str = ""  # that a lane carries
    varies: str = ""  # what the sweep's plan varied
    baseline: str = ""  # yes: of a comparison's member that differences are from
    code: str = ""  # versions of the code that trained it, where the run noted them
    excluded: str = ""  # why the cell takes no part
    set_losses: Mapping[str, float] = field(default_factory=dict)  # a column `loss/NAME` each
    tasks: Mapping[str, float] = field(default_factory=dict)  # a column `tasks/TASK/METRIC` each

    @property
    def text(self) -> EvaluatedText:
        """What the loss rests on."""
        parts = parse_json(self.loss_parts or "[]")
        return EvaluatedText.of_line({"documents": self.loss_documents, PARTS: parts})


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Write dataclasses as CSV, whole or not at all; losses of sets and tasks are columns."""
    trees = [asdict(row) for row in rows]
    for tree in trees:
        losses = tree.pop(SET_LOSSES, {})
        tree |= {f"loss/{name}": loss for name, loss in losses.items()}
        tree |= tree.pop(TASKS, {})
    write_csv(path, list(dict.fromkeys(name for tree in trees for name in tree)), trees)


def read_rows(path: Path) -> list[Row]:
    """The rows of a table that `collect` wrote; DataError for any other."""
    kinds = {
        column.name: column.type for column in fields(Row) if column.name not in (SET_LOSSES, TASKS)
    }
    read = []
    for line, row in csv_rows(path, ORIGIN):
        row |= {name: "" for name in _LATER_COLUMNS if row.get(name) is None}
        if missing := [name for name in kinds if row.get(name) is None]:
            raise DataError(f"{path}: no column {missing[0]!r}; {ORIGIN}")
        values: dict[str, Any] = {name: row[name] for name in kinds}
        for name, kind in kinds.items():
            try:
                if kind != "str" and row[name]:
                    values[name] = (int if "int" in str(kind) else float)(row[name])
            except ValueError:
                raise DataError(
                    f"{path}: row {line}: {name}={row[name]!r}, expected a number; collect again"
                ) from None
        probes = {name: row[name] for name in row if name.startswith(PROBED) and row[name]}
        read.append(Row(**values, tasks={name: float(text) for name, text in probes.items()}))
    if not read:
        raise DataError(f"{path} contains no runs; {ORIGIN}")
    return read


def shown_rows(rows: Sequence[Row]) -> list[list[str]]:
    """The rows that have a loss as a table for the terminal, heads first."""
    cells = [
        [row.name, amount(float(row.N)), amount(float(row.D)), flops_text(float(row.C))]
        + [f"{float(row.loss):.4f}", *row.text.cells]
        for row in rows
        if not row.excluded
    ]
    heads = ["cell", "N", "D", "C", "loss", "standard error", "validated on"]
    return [heads, *cells]


def row_of(placed: PlacedCell) -> Row:
    """Return the row of a cell from its run; a bad run never raises."""
    cell, steps, run_dir = placed.cell, placed.config.optim.steps, RunDir(placed.path)
    row = Row(
        name=cell.name,
        budget=cell.facts.get("budget", ""),
        holdout="yes" if cell.holdout else "",
        rate_factor=cell.facts.get("rate_factor", ""),
        varies=placed.varies,
        baseline="yes" if cell.facts.get("baseline") else "",
    )
    if not run_dir.exists():
        return replace(row, excluded="not started: there is no run directory")
    measured = run_dir.read_metrics()
    step = max((item["step"] for item in measured), default=0)
    try:
        config = run_dir.config
        cost = run_cost(config, step)
    except ConfigError as error:
        return replace(row, excluded=f"config.yaml cannot be read: {error}")
    ends = [item for item in measured if item.get("kind") == "evaluation" and item["step"] == step]
    last = ends[-1] if ends else {}
    text = EvaluatedText.of_line(last)
    loss, bits = last.get("loss"), last.get("bits_per_byte")
    seconds = sum(item.get("seconds") or 0 for item in measured if item["kind"] == "train")
    code = [event.code for event in find_events(run_dir.ledger.read(), TrainingBegan) if event.code]
    if step < steps:
        excluded = f"not finished: at step {step} of {steps}"
    elif not last:
        excluded = "all steps are made, but there is no last evaluation yet"
    elif not _is_finite(loss):
        excluded = "diverged: its last evaluation's loss is NaN or infinite"
    else:
        factor = row.rate_factor
        excluded = f"checks the rate: x{factor:g} of the plan's" if factor else ""
    return replace(
        row,
        N=cost.parameters,
        N_body=cost.body_parameters,
        D=cost.tokens,
        C=cost.flops,
        loss="" if not last else float(loss) if _is_finite(loss) else math.inf,
        bits_per_byte=float(bits) if _is_finite(loss) and _is_finite(bits) else "",
        loss_error="" if (error := text.standard_error) is None else error,
        loss_tokens=text.tokens,
        loss_documents=text.documents,
        loss_parts=json_text(text.parts),
        seed=config.seed,
        progress=step / steps,
        learning_rate=config.optim.learning_rate,
        tokens_per_step=cost.tokens_per_step,
        segment_length=config.data.segment_length,
        memory_length=config.model.longest_memory,
        base_width=config.model.base_width,
        lane_bytes=lane_bytes(config),
        seconds=seconds or "",
        code=" ".join(dict.fromkeys(code)),
        excluded=excluded,
        set_losses=set_losses(last),
        tasks=task_columns(last) | ({} if excluded else probe_columns(placed.path, step)),
    )


def with_one_text(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows; exclude the ones whose loss rests on another text than most losses do."""
    usual = Counter(row.text.part_tokens for row in rows if not row.excluded).most_common(1)
    other = "validated on {}, most runs on another text; set one evaluation.max_tokens for all"
    for row in rows:
        is_other = not row.excluded and row.text.part_tokens != usual[0][0]
        yield replace(row, excluded=other.format(row.text.description)) if is_other else row


def rate_checks(rows: Sequence[Row]) -> list[str]:
    """For each budget what half and twice the plan's rate change, and a warning where one gains."""
    lines, gains = [], []
    losses = {row.name: float(row.loss) for row in rows if not row.excluded}
    for check in (row for row in rows if row.rate_factor != "" and row.loss != ""):
        name = check.name.rpartition("-rate")[0]
        if name in losses:
            change = float(check.loss) / losses[name] - 1
            lines.append(f"rate x{check.rate_factor:g} of {name}: loss {change:+.2%}")
            gains += [name] if change < -MISTUNED else []
    if gains:
        lines.append(
            f"warning: another rate is over {MISTUNED:.1%} better at {', '.join(gains)}, and rates "
            "that are off by more at one end than at the other tilt the law: tune two sizes "
            "('scale plan --rates') and plan with --tuned"
        )
    return lines


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


@dataclass(frozen=True)
class _Positions:
    first_positions: tuple[Count, ...]
    tokens: tuple[Count, ...]
    losses: tuple[Finite, ...]


@dataclass(frozen=True)
class _Needle:
    distance: Positive
    accuracy: Finite
    chance: Finite


@dataclass(frozen=True)
class _Probes:
    position: tuple[_Positions, ...] | None = None
    needle: tuple[_Needle, ...] | None = None


@dataclass(frozen=True)
class _Probed:
    step: Count
    probes: _Probes


def probe_columns(run: Path, step: int | None = None) -> dict[str, float]:
    """Return the probes of a run as columns of its table; {} without probes of this step.

    `far_loss` is over tokens with at least FAR tokens of their document before them. DataError for
    a damaged file.
    """
    path = run / PROBES
    if not path.exists():
        return {}
    columns: dict[str, float] = {}
    bins: list[tuple[int, float, int]] = []
    try:
        probed = read_value(_Probed, path, is_open=True)
        positions, needles = probed.probes.position, probed.probes.needle
        if step not in (None, probed.step):
            return {}
        if () in (positions, needles):
            raise ValueError("position or needle is empty")
        if positions:
            first, tokens, losses = vars(positions[0]).values()
            if not len(first) == len(tokens) == len(losses) > 0:
                raise ValueError("position has lists of different lengths")
            bins = [each for each in zip(first, losses, tokens, strict=True) if each[2]]
        for needle in needles or ():
            if not needle.distance & (needle.distance - 1):
                columns[f"needle/{needle.distance}"] = needle.accuracy
            columns["chance"] = needle.chance
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({error}); remove it: 'pretrain evaluate RUN --probe needle "
            "position' writes it"
        ) from None
    columns |= {f"position/{start}": loss for start, loss, count in bins if count >= FEWEST}
    if bins:
        columns["position_tokens"] = sum(count for *_, count in bins)
    if far := [(loss, count) for start, loss, count in bins if start >= FAR]:
        count = sum(count for _, count in far)
        columns["far_loss"] = sum(loss * count for loss, count in far) / count
    return {PROBED + name: value for name, value in columns.items()}
