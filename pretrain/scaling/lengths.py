"""Segment and memory lengths: runs of one model that differ in nothing else.

Every run has the base experiment's tokens per step, in more lanes of shorter segments or fewer of
longer ones. At equal tokens a longer context costs more FLOPs; at equal FLOPs it reads fewer
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foundation.errors import ConfigError
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.plan import PlannedRun, planned_run
from pretrain.scaling.recipe import refuse_unsuited, with_steps


def plan_lengths(
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
        return [_run(run, context, at_tokens)]
    return [
        _run(run, f"{context}-same-tokens", at_tokens),
        _run(run, f"{context}-same-flops", at_flops),
    ]


def _run(run: RunConfig, name: str, steps: int) -> PlannedRun:
    facts = {
        "segment_length": run.data.segment_length,
        "memory_length": run.model.longest_memory,
    }
    return planned_run(replace(with_steps(run, steps), name=name), facts)
