"""How a run is derived from a shape and a budget: learning rate, batch and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from foundation.errors import ConfigError
from pretrain.config.choices import schedule_traits
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.terminal.text import counted

# From a run and its tokens: the peak learning rate, and the tokens per step that are wanted (0: as
# many lanes as the run has).
Rule = Callable[[RunConfig, float], tuple[float, float]]

# The runs that Step Law was fitted to (Li et al. 2025): N without embeddings, and D.
STEP_LAW_PARAMETERS = (60e6, 1.07e9)
STEP_LAW_TOKENS = (2e9, 100e9)
WARMUP = 0.05  # of the steps
FEWEST_STEPS = 100  # so that whole steps miss the budget by at most 0.5%
SAVES = 4  # per run, so that a killed cell repeats at most a quarter of its steps
TOLERANCE = 0.01  # of the budget's FLOPs
DECAYED = 0.2  # the highest final fraction of the peak rate that still counts as decayed


def step_law(body_parameters: float, tokens: float) -> tuple[float, float]:
    """Return (peak learning rate, tokens per batch).

    Outside the runs it was fitted to, each is the lower one of the law's value and of that at the
    nearest point inside: a rate that is too high costs more than one that is too low.
    """
    inside = (_clipped(body_parameters, STEP_LAW_PARAMETERS), _clipped(tokens, STEP_LAW_TOKENS))
    values = [
        (1.79 * size**-0.713 * count**0.307, 0.58 * count**0.571)
        for size, count in ((body_parameters, tokens), inside)
    ]
    rates, batches = zip(*values, strict=True)
    return min(rates), min(batches)


def step_law_rule(run: RunConfig, tokens: float) -> tuple[float, float]:
    """Rate and batch by Step Law."""
    return step_law(cost_of(run).body_parameters, tokens)


def base_rule(run: RunConfig, tokens: float) -> tuple[float, float]:
    """The experiment's own rate and lanes."""
    del tokens
    return run.optim.learning_rate, 0.0


RULES: dict[str, Rule] = {"step-law": step_law_rule, "base": base_rule}


def outside_step_law(runs: Sequence[RunConfig]) -> str:
    """Which of the runs Step Law was not measured for, in one line; empty if none."""
    costs = {run.name: cost_of(run) for run in runs}
    outside = [
        name
        for name, cost in costs.items()
        if _clipped(cost.body_parameters, STEP_LAW_PARAMETERS) != cost.body_parameters
        or _clipped(cost.tokens, STEP_LAW_TOKENS) != cost.tokens
    ]
    if not outside:
        return ""
    return (
        f"clipped: {len(outside)} of {counted(len(runs), 'cell')} are outside the runs that Step "
        f"Law was fitted to (body of {_range(STEP_LAW_PARAMETERS)}, D of "
        f"{_range(STEP_LAW_TOKENS)}), such as {outside[0]}; rate and batch are at most those at "
        "its edge: tune a few sizes and give --tuned"
    )


def _clipped(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _range(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:.3g} to {bounds[1]:.3g}"


def refuse_unsuited(base: RunConfig) -> None:
    """Raise ConfigError for phases, which start at fixed steps, and for undecayed schedules."""
    if base.data.phases:
        raise ConfigError(
            f"{base.name} has {len(base.data.phases)} phases (data.phases), and a plan counts all "
            "steps as equal; "
            "take them out of the base"
        )
    schedule = base.optim.schedule
    if not schedule_traits(schedule.shape).decays or schedule.final_fraction > DECAYED:
        raise ConfigError(
            f"optim.schedule.shape={schedule.shape} final_fraction={schedule.final_fraction} does "
            "not decay the "
            "learning rate; scaling runs need linear, cosine or wsd with final_fraction of at "
            f"most {DECAYED}"
        )


def with_budget(run: RunConfig, budget: float, rule: Rule, lanes_multiple: int = 1) -> RunConfig:
    """Return the run with the rule's batch and the whole steps that `budget` FLOPs allow."""
    tokens = budget / cost_of(run).flops_per_token
    rate, _ = rule(run, tokens)
    if wanted := wanted_lanes(run, budget, rule):
        lanes = lanes_multiple * max(1, round(wanted / lanes_multiple))
        run = replace(run, data=replace(run.data, lanes=lanes))
    cost = cost_of(
        run
    )  # again: positions are projected once per batch, so FLOPs per token depend on the lanes
    steps = round(budget / (cost.flops_per_token * cost.tokens_per_step))
    if steps < FEWEST_STEPS // 2:
        raise ConfigError(
            f"{budget:.3g} FLOPs pay for {steps} steps of {cost.tokens_per_step} tokens at "
            f"{cost.parameters:.3g} "
            f"parameters; a run needs at least {FEWEST_STEPS // 2}: use a larger budget or fewer "
            "lanes"
        )
    run = with_steps(
        replace(run, optim=replace(run.optim, learning_rate=float(f"{rate:.4g}"))), steps
    )
    error = cost_of(run).flops / budget - 1
    assert abs(error) <= TOLERANCE, f"{steps} steps miss the budget by {error:.2%}"
    return run


def wanted_lanes(run: RunConfig, budget: float, rule: Rule) -> float:
    """Return the lanes of the rule's batch, not whole; 0 where it keeps those of the run."""
    tokens = budget / cost_of(run).flops_per_token
    _, batch = rule(run, tokens)
    segment = run.lane_tokens_per_step
    return min(batch / segment, tokens / (FEWEST_STEPS * segment))


def replaced_settings(base: RunConfig) -> str:
    """What `with_steps` gives every run in place of the base's settings, in one line."""
    schedule = base.optim.schedule
    return (
        f"every run: optim.schedule.warmup_steps is {WARMUP:.0%} of its steps (the experiment: "
        f"{schedule.warmup_steps} of {base.optim.steps}), "
        "checkpoint.interval a quarter of them, of which one is kept"
    )


def with_steps(run: RunConfig, steps: int) -> RunConfig:
    """Return the run with that many steps, and warm-up and checkpoints in proportion."""
    schedule = replace(
        run.optim.schedule, warmup_steps=max(1, round(WARMUP * steps)), decay_steps=0
    )
    return replace(
        run,
        optim=replace(run.optim, steps=steps, schedule=schedule),
        checkpoint=replace(run.checkpoint, interval=max(1, steps // SAVES)),
    )
