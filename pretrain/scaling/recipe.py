"""How a run is derived from the base: its shape, learning rate, batch and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from data_pipeline.errors import ConfigError
from data_pipeline.setting_fields import assert_never
from pretrain.config.choices import schedule_traits
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of

# layers may differ from the base's ratio to the width by this factor, to come nearer to a size
DEPTH_FREEDOM = 1.4
DEPTH_WEIGHT = 0.1  # how much a wrong depth counts against a wrong size, both as logarithms
MOST_HEADS = 256
INNER_MULTIPLE = 8


@dataclass(frozen=True, order=True)
class Shape:
    num_heads: int
    num_layers: int


def with_shape(base: RunConfig, shape: Shape) -> RunConfig:
    """Return the base with other numbers of heads and layers, its widths in proportion."""
    model = base.model
    growth = shape.num_heads / model.num_heads
    width = 2 * round(model.d_model * growth / 2)
    inner = (
        INNER_MULTIPLE * max(1, round(model.d_inner * growth / INNER_MULTIPLE))
        if model.d_inner
        else 0
    )
    shaped = replace(
        model,
        num_heads=shape.num_heads,
        num_key_heads=shape.num_heads // _heads_per_key(base) if model.num_key_heads else 0,
        num_layers=shape.num_layers,
        d_model=width,
        d_head=model.head_width,
        d_inner=inner,
    )
    return replace(base, model=shaped)


def nearest_shape(base: RunConfig, parameters: float, keep_layers: bool = False) -> RunConfig:
    """The legal shape whose parameters come nearest to the wanted number, at about the base's
    depth-to-width ratio.

    With `keep_layers` every shape has the base's depth: where few layers are wanted, whole ones
    jump too far.
    """
    best: tuple[float, RunConfig] | None = None
    group = _heads_per_key(base)
    for num_heads in range(group, MOST_HEADS + 1, group):
        candidates = [
            _scored(base, shape, parameters)
            for shape in _shapes_of_width(base, num_heads, keep_layers)
        ]
        closest = min(candidates, key=lambda item: item[0])
        if best is None or closest[0] < best[0]:
            best = closest
        if all(cost_of(run).parameters > 2 * parameters for _, run in candidates):
            break
    assert best is not None
    return best[1]


def refuse_far_shape(run: RunConfig, parameters: float, tolerance: float = 0.5) -> None:
    """Raise ConfigError if the nearest legal shape is far off; the base does not allow it."""
    found = cost_of(run).parameters
    if abs(math.log(found / parameters)) > tolerance:
        raise ConfigError(
            f"the nearest legal shape to {parameters:.3g} parameters has {found:.3g} (heads of "
            f"{run.model.head_width}, "
            f"vocabulary {run.model.vocab_size}); use a base experiment with smaller heads or "
            "another vocabulary"
        )


def _shapes_of_width(base: RunConfig, num_heads: int, keep_layers: bool) -> list[Shape]:
    if keep_layers:
        return [Shape(num_heads, base.model.num_layers)]
    ideal = _ideal_layers(base, num_heads)
    fewest, most = (
        max(1, math.ceil(ideal / DEPTH_FREEDOM)),
        max(1, math.floor(ideal * DEPTH_FREEDOM)),
    )
    return [Shape(num_heads, num_layers) for num_layers in range(fewest, max(fewest, most) + 1)]


def _ideal_layers(base: RunConfig, num_heads: int) -> float:
    return base.model.num_layers * num_heads / base.model.num_heads


def _heads_per_key(base: RunConfig) -> int:
    return base.model.num_heads // base.model.key_heads


def _scored(base: RunConfig, shape: Shape, parameters: float) -> tuple[float, RunConfig]:
    run = with_shape(base, shape)
    size_error = abs(math.log(cost_of(run).parameters / parameters))
    depth_error = abs(math.log(shape.num_layers / max(1.0, _ideal_layers(base, shape.num_heads))))
    return size_error + DEPTH_WEIGHT * depth_error, run


Rule = Literal["step-law", "base"]
RULES: tuple[Rule, ...] = get_args(Rule)
HIGHEST_LEARNING_RATE = (
    1e-2  # Step Law was measured from 60M parameters on; below, its rates outgrow what trains
)
WARMUP = 0.05  # of the steps
FEWEST_STEPS = 100  # so that whole steps miss the budget by at most 0.5%
SAVES = 4  # per run, so that a killed cell repeats at most a quarter of its steps
TOLERANCE = 0.01  # of the budget's FLOPs
DECAYED = 0.2  # the highest final fraction of the peak rate that still counts as decayed


def step_law(body_parameters: float, tokens: float) -> tuple[float, float]:
    """Return (peak learning rate, tokens per batch)."""
    rate = 1.79 * body_parameters**-0.713 * tokens**0.307
    return min(rate, HIGHEST_LEARNING_RATE), 0.58 * tokens**0.571


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
    rate, lanes = run.optim.learning_rate, run.data.lanes
    match rule:
        case "base":
            pass
        case "step-law":
            rate, batch = step_law(cost_of(run).body_parameters, tokens)
            most = tokens / (FEWEST_STEPS * run.data.segment_length)
            wanted = min(batch / run.data.segment_length, most)
            lanes = lanes_multiple * max(1, round(wanted / lanes_multiple))
        case _:
            assert_never(rule)
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


def replaced_settings(base: RunConfig) -> str:
    """What `with_steps` gives every run in place of the base's settings, in one line."""
    schedule = base.optim.schedule
    return (
        f"every run: optim.schedule.warmup_steps is {WARMUP:.0%} of its steps (the experiment: "
        f"{schedule.warmup_steps} of {base.optim.steps}), checkpoint.interval a quarter of them"
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
