"""Which segment and memory length: runs of one model that differ in nothing else, at equal tokens and at equal FLOPs.

Every run takes the base experiment's tokens per step, in more lanes of shorter segments or fewer of longer ones. At
equal tokens a longer context costs more FLOPs; at equal FLOPs it reads fewer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_pipeline.errors import ConfigError
from pretrain.config.run import RunConfig
from pretrain.costs.flops import RunCost, cost_of
from pretrain.scaling.recipe import refuse_unsuited, with_steps


@dataclass(frozen=True, kw_only=True)
class ContextRun:
    """A cell's run, and which of the two comparisons it is part of; the base's own context is part of both."""

    name: str
    run: RunConfig
    cost: RunCost
    same_tokens: bool
    same_flops: bool
    holdout: bool = False  # every context is compared

    @property
    def facts(self) -> dict[str, float]:
        """What is noted beside the cell."""
        return {
            "segment_length": self.run.data.segment_length,
            "memory_length": self.run.model.memory_length,
            "same_tokens": int(self.same_tokens),
            "same_flops": int(self.same_flops),
            "tokens": self.cost.tokens,
            "flops": self.cost.flops,
        }


def plan_contexts(
    base: RunConfig, segments: Sequence[int], memories: Sequence[int]
) -> list[ContextRun]:
    """Every segment length with every memory length, at the tokens and at the FLOPs of the base experiment.

    Raises ConfigError where a segment does not divide the tokens of a step, or a budget pays for too few steps.
    """
    refuse_unsuited(base)
    if not segments or not memories or min(segments) < 1 or min(memories) < 0:
        raise ConfigError("--segments must be positive and --memories 0 or more")
    if len({*segments}) * len({*memories}) < 2:
        raise ConfigError(
            "one segment with one memory length compares nothing; give at least two of either"
        )
    runs: list[ContextRun] = []
    for segment in sorted({*segments}):
        for memory in sorted({*memories}):
            runs += _runs_of(base, _with_context(base, segment, memory), f"t{segment}-m{memory}")
    return runs


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
    steps = {
        "tokens": base.optim.steps,
        "flops": round(budget / (cost.flops_per_token * cost.tokens_per_step)),
    }
    if steps["tokens"] == steps["flops"]:
        return [_run(run, context, base.optim.steps, same_tokens=True, same_flops=True)]
    return [
        _run(
            run,
            f"{context}-same-{kind}",
            count,
            same_tokens=kind == "tokens",
            same_flops=kind == "flops",
        )
        for kind, count in steps.items()
    ]


def _run(
    run: RunConfig, name: str, steps: int, *, same_tokens: bool, same_flops: bool
) -> ContextRun:
    run = replace(with_steps(run, steps), name=name, evaluation=replace(run.evaluation, interval=0))
    return ContextRun(
        name=name, run=run, cost=cost_of(run), same_tokens=same_tokens, same_flops=same_flops
    )
