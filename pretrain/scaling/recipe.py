"""Learning rate, batch and length of a planned run, by rules that are stated.

step-law: learning rate 1.79 N^-0.713 D^0.307 and batch 0.58 D^0.571 tokens, N without embeddings (Step Law,
    2025), the rate capped.
base: the base experiment's own learning rate and batch for every cell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from data_pipeline.errors import ConfigError
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of

Rule = Literal["step-law", "base"]
RULES: tuple[Rule, ...] = ("step-law", "base")
HIGHEST_LEARNING_RATE = (
    1e-2  # Step Law was measured from 60M parameters on; below, its rates outgrow what trains
)
WARMUP = 0.05  # of the steps
FEWEST_STEPS = 100  # so that whole steps miss the budget by at most half a per cent
SAVES = 4  # per run, so that a killed cell repeats at most a quarter
TOLERANCE = 0.01  # of the budget's FLOPs
DECAYED = 0.2  # the highest final fraction of the peak rate that still counts as decayed


def step_law(body_parameters: float, tokens: float) -> tuple[float, float]:
    """(peak learning rate, tokens per batch)."""
    rate = 1.79 * body_parameters**-0.713 * tokens**0.307
    return min(rate, HIGHEST_LEARNING_RATE), 0.58 * tokens**0.571


def refuse_unsuited(base: RunConfig) -> None:
    """ConfigError for a schedule that leaves the rate high, since such losses are mid-schedule points; and for phases,
    which begin at steps of their own whatever the length of a run."""
    if base.data.phases:
        raise ConfigError(
            f"{base.name} has {len(base.data.phases)} phases (data.phases), and a plan counts every step alike; "
            "take them out of the base"
        )
    schedule = base.optim.schedule
    if schedule.shape in ("constant", "inverse_sqrt") or schedule.final_fraction > DECAYED:
        raise ConfigError(
            f"optim.schedule.shape={schedule.shape} final_fraction={schedule.final_fraction} does not decay the "
            f"learning rate; scaling runs need linear, cosine or wsd with final_fraction of at most {DECAYED}"
        )


def with_budget(run: RunConfig, budget: float, rule: Rule, lanes_multiple: int = 1) -> RunConfig:
    """The run with a batch by the rule and as many whole steps as `budget` FLOPs pay for, exact within 1 %."""
    tokens = budget / cost_of(run).flops_per_token
    rate, lanes = run.optim.learning_rate, run.data.lanes
    if rule == "step-law":
        rate, batch = step_law(cost_of(run).body_parameters, tokens)
        most = tokens / (FEWEST_STEPS * run.data.segment_length)
        wanted = min(batch / run.data.segment_length, most)
        lanes = lanes_multiple * max(1, round(wanted / lanes_multiple))
    run = replace(run, data=replace(run.data, lanes=lanes))
    cost = cost_of(
        run
    )  # again: positions are projected once per batch, so FLOPs per token depend on the lanes
    steps = round(budget / (cost.flops_per_token * cost.tokens_per_step))
    if steps < FEWEST_STEPS // 2:
        raise ConfigError(
            f"{budget:.3g} FLOPs pay for {steps} steps of {cost.tokens_per_step} tokens at {cost.parameters:.3g} "
            f"parameters; a run needs at least {FEWEST_STEPS // 2}: use a larger budget or fewer lanes"
        )
    run = with_steps(
        replace(run, optim=replace(run.optim, learning_rate=float(f"{rate:.4g}"))), steps
    )
    error = cost_of(run).flops / budget - 1
    assert abs(error) <= TOLERANCE, f"{steps} steps miss the budget by {error:.2%}"
    return run


def with_steps(run: RunConfig, steps: int) -> RunConfig:
    """The run with so many steps; warm-up and checkpoints at their share of them."""
    schedule = replace(
        run.optim.schedule, warmup_steps=max(1, round(WARMUP * steps)), decay_steps=0
    )
    return replace(
        run,
        optim=replace(run.optim, steps=steps, schedule=schedule),
        checkpoint=replace(run.checkpoint, interval=max(1, steps // SAVES)),
    )
