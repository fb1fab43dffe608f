"""Loss against segment and memory length: runs of one model that differ in nothing else, and their
losses as a table.

Every run has the base experiment's tokens per step, in more lanes of shorter segments or fewer of
longer ones. At equal tokens a longer context costs more FLOPs; at equal FLOPs it reads fewer
tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.errors import ConfigError, DataError, UserError
from data_pipeline.progress import duration
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.collect import Row, row_of
from pretrain.scaling.context_cells import (
    Earlier,
    TrainedCell,
    differences_of,
    read_cell,
    recipe_id,
)
from pretrain.scaling.plan import PlannedRun, planned_run
from pretrain.scaling.recipe import refuse_unsuited, with_steps
from pretrain.scaling.run_tables import csv_rows, flag
from pretrain.scaling.sweep_file import Cell
from pretrain.scaling.which_runs import PlacedCell
from pretrain.terminal.text import counted

# Memory lengths of evaluation, as multiples of training's; of the segment for runs trained without
# memory
TIMES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
NUMBERS = ("segment_length", "memory_length", "N", "D", "C", "evaluated_memory", "times", "loss")

TEXTS = ("recipe", "differs")

# A run directory and memory lengths -> the loss with each
Evaluate = Callable[[Path, Sequence[int]], Sequence[float]]


def plan_contexts(
    base: RunConfig, segments: Sequence[int], memories: Sequence[int]
) -> list[PlannedRun]:
    """Every segment length with every memory length, at the tokens and at the FLOPs of the base
    experiment.

    Raises ConfigError where a segment does not divide the tokens of a step, or a budget pays for
    too few steps.
    """
    refuse_unsuited(base)
    if not segments or not memories or min(segments) < 1 or min(memories) < 0:
        raise ConfigError("--segments must be positive and --memories 0 or more")
    if len({*segments}) * len({*memories}) < 2:
        raise ConfigError(
            "one segment with one memory length leaves nothing to compare; give at least two of "
            "either"
        )
    runs: list[PlannedRun] = []
    for segment in sorted({*segments}):
        for memory in sorted({*memories}):
            runs += _runs_of(base, _with_context(base, segment, memory), f"t{segment}-m{memory}")
    return runs


def _with_context(base: RunConfig, segment: int, memory: int) -> RunConfig:
    lanes, rest = divmod(base.tokens_per_step, segment * base.optim.gradient_segments)
    if rest:
        raise ConfigError(
            f"segments of {segment} do not divide the {base.tokens_per_step} tokens of a step "
            "(data.lanes="
            f"{base.data.lanes} x data.segment_length={base.data.segment_length}); use divisors "
            "of it"
        )
    return replace(
        base,
        model=base.model.with_memory(memory),
        data=replace(base.data, segment_length=segment, lanes=lanes),
    )


def _runs_of(base: RunConfig, run: RunConfig, context: str) -> list[PlannedRun]:
    """The run at the base's tokens and at its FLOPs; one run if the steps are the same."""
    budget, cost = cost_of(base).flops, cost_of(run)
    at_tokens = base.optim.steps
    at_flops = round(budget / (cost.flops_per_token * cost.tokens_per_step))
    if at_tokens == at_flops:
        return [_run(run, context, at_tokens, same_tokens=1, same_flops=1)]
    return [
        _run(run, f"{context}-same-tokens", at_tokens, same_tokens=1, same_flops=0),
        _run(run, f"{context}-same-flops", at_flops, same_tokens=0, same_flops=1),
    ]


def _run(run: RunConfig, name: str, steps: int, *, same_tokens: int, same_flops: int) -> PlannedRun:
    facts = {
        "segment_length": run.data.segment_length,
        "memory_length": run.model.longest_memory,
        "same_tokens": same_tokens,
        "same_flops": same_flops,
    }
    return planned_run(replace(with_steps(run, steps), name=name), facts)


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
    evaluated_tokens: int | str = ""
    run: str = ""  # the run's own id: a run that was started again has another
    recipe: str = ""  # equal for runs that differ in segment, memory, length and seed alone
    seed: int | str = ""  # nothing: a table of an earlier version, whose recipes contain it
    differs: str = ""  # settings besides those in which it differs from others of the sweep
    excluded: str = ""  # why the run takes no part

    @property
    def series(self) -> str:
        """What runs that a line may join have in common."""
        return f"{self.recipe} {self.seed}"


@dataclass(frozen=True)
class CellPlan:
    """A cell before its evaluation."""

    cell: Cell
    row: Row
    trained: TrainedCell | None  # None: it takes no part
    excluded: str
    lengths: Mapping[int, float]  # memory lengths to evaluate with -> multiple of training's


def plan_evaluations(
    cells: Sequence[PlacedCell], table: Path, max_tokens: int, own_memory: bool = False
) -> list[CellPlan]:
    """What to evaluate of the cells of a context sweep.

    `table` is what an earlier collection wrote, if it exists. With `own_memory` losses with other
    memories than in training are taken where they are there, and none is measured.
    """
    earlier = _losses_in(table)
    plans = [_planned(cell, earlier, max_tokens) for cell in cells]
    return [_own_or_known(plan) for plan in plans] if own_memory else plans


def _own_or_known(plan: CellPlan) -> CellPlan:
    known = plan.trained.known if plan.trained else {}
    own = int(plan.cell.facts["memory_length"])
    lengths = {
        length: times for length, times in plan.lengths.items() if length == own or length in known
    }
    return replace(plan, lengths=lengths)


def cost_line(plans: Sequence[CellPlan]) -> str:
    """Return what the evaluations take, as a line to print before they start."""
    work = [
        (plan.trained, length)
        for plan in plans
        if plan.trained
        for length in plan.trained.missing(list(plan.lengths))
    ]
    known = sum(len(plan.lengths) for plan in plans if plan.trained) - len(work)
    line = f"{counted(len(work), 'evaluation')} to make, {known} made already"
    if not work:
        return line
    seconds = sum(trained.seconds(length) for trained, length in work)
    return f"{line}: about {duration(seconds)} at the speed of the runs' training"


def evaluated_rows(plans: Sequence[CellPlan], evaluate: Evaluate) -> Iterator[list[ContextRow]]:
    """Yield the rows of each cell; only losses that are missing are measured."""
    configs = {plan.cell.name: plan.trained.config for plan in plans if plan.trained}
    differs = differences_of(configs)
    for plan in plans:
        yield _rows(plan, evaluate, differs.get(plan.cell.name, ""))


def read_context(path: Path) -> list[ContextRow]:
    """The evaluated rows of a table; DataError if it is corrupted or has none."""
    found = []
    for line, row in csv_rows(path, "'pretrain scale context collect' writes it"):
        missing = [
            name
            for name in ("name", *("same_tokens", "same_flops", "excluded"), *TEXTS, *NUMBERS)
            if row.get(name) is None
        ]
        if missing:
            raise DataError(
                f"{path}: no column {missing[0]!r}; expected what 'scale context collect' writes"
            )
        if not row["excluded"]:
            found.append(_parsed(row, f"{path}: row {line}"))
    if not found:
        raise DataError(f"{path} contains no evaluated run; let the sweep finish and collect again")
    return found


def _planned(placed: PlacedCell, earlier: Earlier, max_tokens: int) -> CellPlan:
    cell = placed.cell
    segment, memory = int(cell.facts["segment_length"]), int(cell.facts["memory_length"])
    lengths = {round(times * (memory or segment)): times for times in TIMES}
    row = row_of(placed)
    if row.excluded:
        return CellPlan(cell, row, None, row.excluded, lengths)
    try:
        trained = read_cell(placed.path, earlier, cell.name, int(row.D), max_tokens)
    except UserError as error:
        return CellPlan(cell, row, None, f"cannot be evaluated: {error}", lengths)
    return CellPlan(cell, row, trained, "", lengths)


def _losses_in(table: Path) -> Earlier:
    """Return the losses that an earlier collection wrote; none of a table that is not one."""
    found: dict[tuple[str, str, int, int], dict[int, float]] = {}
    with contextlib.suppress(DataError, KeyError, ValueError):
        for _, row in csv_rows(table, "") if table.is_file() else ():
            if not row["excluded"]:
                key = (row["name"], row["run"], int(row["D"]), int(row["evaluated_tokens"]))
                found.setdefault(key, {})[int(row["evaluated_memory"])] = float(row["loss"])
    return found


def _rows(plan: CellPlan, evaluate: Evaluate, differs: str) -> list[ContextRow]:
    cell, row, facts, trained = plan.cell, plan.row, plan.cell.facts, plan.trained
    segment, memory = int(facts["segment_length"]), int(facts["memory_length"])

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

    if trained is None:
        return [made(excluded=plan.excluded)]
    missing = trained.missing(list(plan.lengths))
    try:
        measured = evaluate(trained.directory, missing) if missing else ()
    except UserError as error:
        return [made(excluded=f"cannot be evaluated: {error}")]
    losses = {**trained.known, **dict(zip(missing, measured, strict=True))}
    return [
        made(
            evaluated_memory=length,
            times=times,
            loss=losses[length],
            evaluated_tokens=trained.max_tokens,
            run=trained.run_id,
            recipe=recipe_id(trained.config),
            seed=trained.config.seed,
            differs=differs,
        )
        for length, times in plan.lengths.items()
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
        recipe=row["recipe"],
        seed=row.get("seed") or "",
        differs=row["differs"],
    )
