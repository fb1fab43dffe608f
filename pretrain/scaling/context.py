"""Which segment and memory length: runs of one model that differ in nothing else, at equal tokens and at equal FLOPs.

Every run takes the base experiment's tokens per step, in more lanes of shorter segments or fewer of longer ones. At
equal tokens a longer context costs more FLOPs; at equal FLOPs it reads fewer tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.errors import ConfigError
from pretrain.config import RunConfig
from pretrain.scaling.costs import RunCost, cost_of
from pretrain.scaling.plan import overrides_between
from pretrain.scaling.recipe import refuse_unsuited, with_steps
from pretrain.scaling.sweep_file import FORMAT, Cell, Sweep


@dataclass(frozen=True, kw_only=True)
class ContextRun:
    """A cell's run, and which of the two comparisons it is part of; the base's own context is part of both."""

    name: str
    run: RunConfig
    cost: RunCost
    same_tokens: bool
    same_flops: bool


def plan_contexts(base: RunConfig, segments: Sequence[int], memories: Sequence[int]) -> list[ContextRun]:
    """Every segment length with every memory length, at the tokens and at the FLOPs of the base experiment.

    Raises ConfigError where a segment does not divide the tokens of a step, or a budget pays for too few steps.
    """
    refuse_unsuited(base)
    if not segments or not memories or min(segments) < 1 or min(memories) < 0:
        raise ConfigError("--segments must be positive and --memories 0 or more")
    if len({*segments}) * len({*memories}) < 2:
        raise ConfigError("one segment with one memory length compares nothing; give at least two of either")
    runs: list[ContextRun] = []
    for segment in sorted({*segments}):
        for memory in sorted({*memories}):
            runs += _runs_of(base, _with_context(base, segment, memory), f"t{segment}-m{memory}")
    return runs


def context_sweep(
    name: str, experiment: Path, plain: RunConfig, runs: Sequence[ContextRun], directory: Path, notes: Sequence[str]
) -> Sweep:
    """The runs as a sweep whose file will lie in `directory`; `plain` is what `experiment` says."""
    relative = Path(os.path.relpath(experiment.resolve(), directory.resolve()))
    cells = tuple(
        Cell(
            name=item.name,
            experiment=relative,
            overrides=tuple(overrides_between(plain, item.run)),
            facts={
                "segment_length": item.run.data.segment_length,
                "memory_length": item.run.model.memory_length,
                "same_tokens": int(item.same_tokens),
                "same_flops": int(item.same_flops),
                "tokens": item.cost.tokens,
                "flops": item.cost.flops,
            },
        )
        for item in runs
    )
    return Sweep(format=FORMAT, name=name, notes=tuple(notes), cells=cells)


def _with_context(base: RunConfig, segment: int, memory: int) -> RunConfig:
    lanes, rest = divmod(base.tokens_per_step, segment)
    if rest:
        raise ConfigError(
            f"segments of {segment} do not divide the {base.tokens_per_step} tokens of a step (data.lanes="
            f"{base.data.lanes} x data.segment_length={base.data.segment_length}); use divisors of it"
        )
    return replace(
        base,
        model=replace(base.model, memory_length=memory),
        data=replace(base.data, segment_length=segment, lanes=lanes),
    )


def _runs_of(base: RunConfig, run: RunConfig, context: str) -> list[ContextRun]:
    """The run at the base's tokens and at its FLOPs; one for both where that is the same number of steps."""
    budget, cost = cost_of(base).flops, cost_of(run)
    steps = {"tokens": base.optim.steps, "flops": round(budget / (cost.flops_per_token * cost.tokens_per_step))}
    if steps["tokens"] == steps["flops"]:
        return [_run(run, context, base.optim.steps, same_tokens=True, same_flops=True)]
    return [
        _run(run, f"{context}-same-{kind}", count, same_tokens=kind == "tokens", same_flops=kind == "flops")
        for kind, count in steps.items()
    ]


def _run(run: RunConfig, name: str, steps: int, *, same_tokens: bool, same_flops: bool) -> ContextRun:
    run = replace(with_steps(run, steps), name=name, evaluation=replace(run.evaluation, interval=0))
    return ContextRun(name=name, run=run, cost=cost_of(run), same_tokens=same_tokens, same_flops=same_flops)
