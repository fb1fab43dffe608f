"""How a run is derived from a size and a budget: its shape, rate, batch and steps. Torch-free.

Shapes are models of nearly one ratio of width to depth, or the rungs of a ladder. Sizes of one
family differ in little but their size. So a width is a whole number of the base's
heads, and a round one: odd numbers of heads and widths such as 3456 divide badly over tiles and
ranks. Depth follows the width, and gives way a little to come nearer to a size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.errors import ConfigError
from foundation.settings import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of, parameters_of
from pretrain.terminal.text import counted

# layers may differ from the base's ratio to the width by this factor, to come nearer to a size
DEPTH_FREEDOM = 1.4
DEPTH_WEIGHT = 0.3  # how much a wrong depth counts against a wrong size, both as logarithms
HEADS_PER_KEY_FREEDOM = 1.51  # where the base's number of heads per key head does not divide
MOST_HEADS = 512
INNER_MULTIPLE = 8
WIDTH_MULTIPLE = 128  # of widths from 4 times it on
STEPS_PER_DOUBLING = 8  # widths between a power of two and the next, at most
SHAPE = ("layer_kinds", "num_layers", "d_model", "num_heads", "num_key_heads", "d_head", "d_inner")


@dataclass(frozen=True, order=True)
class Shape:
    num_heads: int
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """The shapes that may stand in for the base's."""

    base: RunConfig
    keep_layers: bool = False  # every shape has the base's depth
    width_multiple: int = 0  # of every width; 0: WIDTH_MULTIPLE, where the base's heads allow it
    rungs: tuple[ModelConfig, ...] = ()  # of a ladder; if there are any, only their shapes

    def __post_init__(self) -> None:
        if self.width_multiple < 0:
            raise ConfigError(f"--width-multiple {self.width_multiple} must be 1 or more")
        if self.width_multiple and self.base.model.d_model % self.base.model.num_heads:
            raise ConfigError(
                f"--width-multiple needs a base whose d_model ({self.base.model.d_model}) is a "
                f"multiple of its {self.base.model.num_heads} heads"
            )

    def nearest(self, parameters: float) -> RunConfig:
        """The base in the shape whose parameters come nearest to the wanted number."""
        if self.rungs:
            return min(
                (
                    replace(self.base, model=_shaped_as(self.base.model, each))
                    for each in self.rungs
                ),
                key=lambda run: abs(math.log(parameters_of(run.model).total / parameters)),
            )
        best = (math.inf, Shape(self.base.model.num_heads, self.base.model.num_layers))
        for num_heads in range(1, MOST_HEADS + 1):
            if not self._allows(num_heads):
                continue
            closest, smallest = self._closest_depth(num_heads, parameters)
            best = min(best, closest)
            if smallest > 2 * parameters:
                break
        return with_shape(self.base, best[1])

    def refuse_far(self, run: RunConfig, parameters: float, tolerance: float = 0.5) -> None:
        """Raise ConfigError if the nearest shape is far off; the family does not allow it."""
        found, model = parameters_of(run.model).total, self.base.model
        if abs(math.log(found / parameters)) <= tolerance:
            return
        if self.rungs:
            raise ConfigError(
                f"the nearest rung to {parameters:.3g} parameters has {found:.3g} (vocabulary "
                f"{model.vocab_size}); add a rung to --ladder, or change budgets and --spread"
            )
        raise ConfigError(
            f"the nearest legal shape to {parameters:.3g} parameters has {found:.3g} (heads of "
            f"{model.head_width}, "
            f"vocabulary {model.vocab_size}); use a base experiment with smaller heads or "
            "another vocabulary"
        )

    @property
    def description(self) -> str:
        """What the shapes have in common, in one line."""
        model = self.base.model
        if self.rungs:
            return f"shapes of {len(self.rungs)} rungs: " + ", ".join(
                f"{each.num_layers}x{each.d_model}" for each in self.rungs
            )
        if self.keep_layers:
            return f"shapes: {model.num_layers} layers, heads of {model.head_width}"
        ratio = model.d_model / model.num_layers
        return (
            f"shapes: width / depth within {DEPTH_FREEDOM}x of {ratio:.3g}, heads of "
            f"{model.head_width}"
        )

    def _allows(self, num_heads: int) -> bool:
        """Whether so many heads make a round width, group as the base's, and can be shared so."""
        model = self.base.model
        if num_heads == model.num_heads:
            return True
        multiple = max(1, power_of_two(num_heads) // STEPS_PER_DOUBLING)
        key_heads = _key_heads(model, num_heads)
        if num_heads % multiple or key_heads is None:
            return False
        if model.d_model % model.num_heads:
            return True
        step = model.d_model // model.num_heads
        width = num_heads * step
        if self.width_multiple:
            return width % self.width_multiple == 0
        is_narrow = width < 4 * WIDTH_MULTIPLE
        is_odd = WIDTH_MULTIPLE % step and step % WIDTH_MULTIPLE
        return bool(is_narrow or is_odd or width % WIDTH_MULTIPLE == 0)

    def _closest_depth(
        self, num_heads: int, parameters: float
    ) -> tuple[tuple[float, Shape], float]:
        """The best depth of a width with its distance, and the fewest parameters of that width."""
        model = self.base.model
        period = model.period
        one, two = (
            parameters_of(with_shape(self.base, Shape(num_heads, depth)).model).total
            for depth in (period, 2 * period)
        )

        def parameters_at(depth: int) -> float:
            return one + (depth - period) * (two - one) / period

        ideal = model.num_layers * num_heads / model.num_heads
        fewest = max(1, math.ceil(ideal / DEPTH_FREEDOM / period))
        most = max(fewest, math.floor(ideal * DEPTH_FREEDOM / period))
        depths = [period * count for count in range(fewest, most + 1)]
        if self.keep_layers:
            depths, ideal = [model.num_layers], model.num_layers
        scores = [
            (
                abs(math.log(parameters_at(depth) / parameters))
                + DEPTH_WEIGHT * abs(math.log(depth / max(1.0, ideal))),
                Shape(num_heads, depth),
            )
            for depth in depths
        ]
        return min(scores), parameters_at(depths[0])


def with_shape(base: RunConfig, shape: Shape) -> RunConfig:
    """Return the base with other numbers of heads and layers, its widths in proportion."""
    model = base.model
    growth = shape.num_heads / model.num_heads
    inner = (
        INNER_MULTIPLE * max(1, round(model.d_inner * growth / INNER_MULTIPLE))
        if model.d_inner
        else 0
    )
    shaped = replace(
        model,
        num_heads=shape.num_heads,
        num_key_heads=(_key_heads(model, shape.num_heads) or 0) if model.num_key_heads else 0,
        num_layers=shape.num_layers,
        d_model=2 * round(model.d_model * growth / 2),
        d_head=model.head_width,
        d_inner=inner,
    )
    return replace(base, model=shaped)


def read_ladder(paths: Sequence[Path]) -> tuple[ModelConfig, ...]:
    """The models of experiment or model files, smallest first."""
    rungs = [load_config(RunConfig, path).model for path in paths]
    return tuple(sorted(rungs, key=lambda model: (model.d_model, model.num_layers)))


def _shaped_as(model: ModelConfig, rung: ModelConfig) -> ModelConfig:
    return replace(model, **{name: getattr(rung, name) for name in SHAPE})


def _key_heads(model: ModelConfig, num_heads: int) -> int | None:
    """Key heads for so many heads: as many heads share one as in the base. None if they cannot.

    Groups of three, which few round widths divide into, may become those of two or four.
    """
    group = model.num_heads // model.key_heads
    if num_heads % group == 0:
        return num_heads // group
    if group & (group - 1) == 0:
        return None
    divisors = (count for count in range(1, num_heads + 1) if num_heads % count == 0)
    error, found = min((abs(math.log(num_heads / each / group)), each) for each in divisors)
    return found if error <= math.log(HEADS_PER_KEY_FREEDOM) else None


def power_of_two(most: float) -> int:
    """The largest power of two that is at most this, or 1."""
    return 1 << (max(1, int(most)).bit_length() - 1)


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
    if schedule.shape in ("constant", "inverse_sqrt") or schedule.final_fraction > DECAYED:
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
