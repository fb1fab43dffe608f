"""How a run is derived from a size and a budget: its shape, rate, batch and steps. Torch-free.

Shapes are models of nearly one ratio of width to depth. Sizes of one family differ in little but
their size. So a width is a whole number of the base's heads, and a round one: odd numbers of heads
and widths such as 3456 divide badly over tiles and ranks. Depth follows the width, and gives way a
little to come nearer to a size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foundation.errors import ConfigError
from foundation.settings import MOST
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.flops import parameter_counts, run_cost
from pretrain.terminal.text import counted

# layers may differ from the base's ratio to the width by this factor, to come nearer to a size
DEPTH_FREEDOM = 1.4
DEPTH_WEIGHT = 0.3  # how much a wrong depth counts against a wrong size, both as logarithms
HEADS_PER_KEY_FREEDOM = 1.51  # where the base's number of heads per key head does not divide
MOST_HEADS = 512
FAR_SIZE = 0.5  # how far, as a logarithm, a shape may be from the size it is for
INNER_MULTIPLE = 8
WIDTH_MULTIPLE = 128  # of widths from 4 times it on
STEPS_PER_DOUBLING = 8  # widths between a power of two and the next, at most
# From a run and its tokens: the peak learning rate, and the tokens per step that are wanted (0: as
# many lanes as the run has).
Rule = Callable[[RunConfig, float], tuple[float, float]]

# The runs that Step Law was fitted to (Li et al. 2025): N without embeddings, and D.
STEP_LAW_PARAMETERS = (60e6, 1.07e9)
STEP_LAW_TOKENS = (2e9, 100e9)
WARMUP = 0.05  # of the steps
FEWEST_STEPS = 50  # so that whole steps miss the budget by at most 1%
BATCHES = 100  # of a rule's batch, that the tokens are at least
SAVES = 4  # per run, so that a killed cell repeats at most a quarter of its steps
DECAYED = 0.2  # the highest final fraction of the peak rate that still counts as decayed


@dataclass(frozen=True, kw_only=True)
class Family:
    """The shapes that may stand in for the base's."""

    base: RunConfig
    keep_layers: bool = False  # every shape has the base's depth

    def nearest(self, parameters: float, tolerance: float = math.inf) -> RunConfig:
        """Return the base in the shape with the nearest number of parameters.

        ConfigError if their logarithms differ by more than the tolerance.
        """
        run = self._nearest_shape(parameters)
        size = parameter_counts(run.model).total
        if abs(math.log(size / parameters)) > tolerance:
            raise ConfigError(
                f"the nearest shape to {parameters:.3g} parameters has {size:.3g} (heads of "
                f"{run.model.head_width}, vocabulary {run.model.vocab_size}); use a base with "
                "smaller heads or another vocabulary"
            )
        return run

    def _nearest_shape(self, parameters: float) -> RunConfig:
        model, period = self.base.model, self.base.model.period
        best = (math.inf, model.num_heads, model.num_layers)
        for num_heads in filter(self._allows, range(1, MOST_HEADS + 1)):
            one, two = (
                parameter_counts(with_shape(self.base, num_heads, depth).model).total
                for depth in (period, 2 * period)
            )
            ideal = max(1.0, model.num_layers * num_heads / model.num_heads)
            fewest = max(1, math.ceil(ideal / DEPTH_FREEDOM / period))
            most = max(fewest, math.floor(ideal * DEPTH_FREEDOM / period))
            depths = [period * count for count in range(fewest, most + 1)]
            if self.keep_layers:
                depths, ideal = [model.num_layers], model.num_layers
            for depth in depths:
                size = one + (depth - period) * (two - one) / period
                distance = abs(math.log(size / parameters))
                distance += DEPTH_WEIGHT * abs(math.log(depth / ideal))
                best = min(best, (distance, num_heads, depth))
            if one + (depths[0] - period) * (two - one) / period > 2 * parameters:
                break
        return with_shape(self.base, *best[1:])

    @property
    def description(self) -> str:
        """What the shapes have in common, in one line."""
        model = self.base.model
        depth = f"width / depth within {DEPTH_FREEDOM}x of {model.d_model / model.num_layers:.3g}"
        depth = f"{model.num_layers} layers" if self.keep_layers else depth
        return f"shapes: {depth}, heads of {model.head_width}"

    def _allows(self, num_heads: int) -> bool:
        """Return whether these heads make a round width and share key heads as in the base."""
        model = self.base.model
        if num_heads == model.num_heads:
            return True
        multiple = max(1, power_of_two(num_heads) // STEPS_PER_DOUBLING)
        if num_heads % multiple or _key_heads(model, num_heads) is None:
            return False
        step, rest = divmod(model.d_model, model.num_heads)
        width = num_heads * step
        can_be_round = not rest and not (WIDTH_MULTIPLE % step and step % WIDTH_MULTIPLE)
        return not can_be_round or width < 4 * WIDTH_MULTIPLE or width % WIDTH_MULTIPLE == 0


def with_shape(base: RunConfig, num_heads: int, num_layers: int) -> RunConfig:
    """Return the base with other numbers of heads and layers, its widths in proportion."""
    model = base.model
    growth = num_heads / model.num_heads
    inner = max(1, round(model.d_inner * growth / INNER_MULTIPLE)) * INNER_MULTIPLE
    shaped = replace(
        model,
        num_heads=num_heads,
        num_key_heads=grouped_key_heads(model, num_heads),
        num_layers=num_layers,
        d_model=2 * round(model.d_model * growth / 2),
        d_head=model.head_width,
        d_inner=inner if model.d_inner else 0,
    )
    return replace(base, model=shaped)


def grouped_key_heads(model: ModelConfig, num_heads: int) -> int:
    """Return the setting of these heads' key heads, grouped about as in the base."""
    return (_key_heads(model, num_heads) or 0) if model.num_key_heads else 0


def _key_heads(model: ModelConfig, num_heads: int) -> int | None:
    """Return the key heads of these heads, grouped as in the base; None if that cannot be.

    Groups of three, which divide few round widths, may become groups of two or four.
    """
    group = model.num_heads // model.key_heads
    most = math.log(HEADS_PER_KEY_FREEDOM) if group & (group - 1) else 0.0
    divisors = (count for count in range(1, num_heads + 1) if num_heads % count == 0)
    error, best = min((abs(math.log(num_heads / count / group)), count) for count in divisors)
    return best if error <= most else None


def power_of_two(most: float) -> int:
    """The largest power of two that is at most this, or 1."""
    return 1 << (max(1, int(most)).bit_length() - 1)


def step_law(body_parameters: float, tokens: float) -> tuple[float, float]:
    """Return (peak learning rate, tokens per batch).

    Outside the runs it was fitted to, each is at most the value at the nearest point inside: a rate
    that is too high costs more than one that is too low.
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
    return step_law(run_cost(run).body_parameters, tokens)


def base_rule(run: RunConfig, _: float) -> tuple[float, float]:
    """The experiment's own rate and lanes."""
    return run.optim.learning_rate, 0.0


RULES: dict[str, Rule] = {"step-law": step_law_rule, "base": base_rule}


def outside_step_law(runs: Sequence[RunConfig]) -> list[str]:
    """Which of the runs Step Law was not measured for, in one line; none if it was for all."""
    outside = []
    for run in runs:
        size, tokens = (cost := run_cost(run)).body_parameters, cost.tokens
        inside = _clipped(size, STEP_LAW_PARAMETERS), _clipped(tokens, STEP_LAW_TOKENS)
        outside += [] if (size, tokens) == inside else [run.name]
    if not outside:
        return []
    return [
        f"clipped: {len(outside)} of {counted(len(runs), 'cell')}, such as {outside[0]}, are "
        "outside the runs that Step Law was fitted to (bodies of 60M to 1.07G over 2G to 100G "
        "tokens); rate and batch are at most those at its edge: tune a few sizes and give --tuned"
    ]


def _clipped(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def refuse_unsuited(base: RunConfig) -> None:
    """Raise ConfigError for phases, which start at fixed steps, and for undecayed schedules."""
    if base.data.phases:
        raise ConfigError(
            f"{base.name} has {counted(len(base.data.phases), 'phase')} (data.phases), and a plan "
            "counts all steps as equal; take them out of the base"
        )
    schedule = base.optim.schedule
    if schedule.shape in ("constant", "inverse_sqrt") or schedule.final_fraction > DECAYED:
        raise ConfigError(
            f"optim.schedule.shape={schedule.shape} final_fraction={schedule.final_fraction} does "
            "not decay the learning rate; scaling runs need linear, cosine or wsd with "
            f"final_fraction of at most {DECAYED}"
        )


def with_budget(run: RunConfig, budget: float, rule: Rule, lanes_multiple: int = 1) -> RunConfig:
    """Return the run with the rule's batch and the whole steps that `budget` FLOPs allow."""
    rate, _ = rule(run, budget / run_cost(run).flops_per_token)
    if wanted := wanted_lanes(run, budget, rule):
        lanes = lanes_multiple * max(1, round(wanted / lanes_multiple))
        run = replace(run, data=replace(run.data, lanes=lanes))
    run = replace(run, optim=replace(run.optim, learning_rate=float(f"{rate:.4g}")))
    # After the lanes: positions are projected once per batch, so FLOPs depend on their number.
    cost = run_cost(run)
    return at_flops(run, budget, cost.flops_per_token * cost.tokens_per_step)


def run_of_size(family: Family, parameters: float, budget: float, rule: Rule) -> RunConfig:
    """Return the family's run nearest to a size, named after its budget."""
    run = with_budget(family.nearest(parameters, FAR_SIZE), budget, rule)
    return replace(run, name=f"{family.base.name}-c{budget:.3g}".replace("+", ""))


def wanted_lanes(run: RunConfig, budget: float, rule: Rule) -> float:
    """Return the lanes of the rule's batch, not whole; 0 where it keeps the run's."""
    tokens = budget / run_cost(run).flops_per_token
    _, batch = rule(run, tokens)
    return min(batch, tokens / BATCHES) / run.lane_tokens_per_step


def at_flops(run: RunConfig, flops: float, of_step: float) -> RunConfig:
    """Return the run with the steps that these FLOPs pay for; ConfigError for too few or many."""
    steps = flops / of_step
    if not FEWEST_STEPS - 0.5 <= steps <= MOST:
        raise ConfigError(
            f"{run.name}: {flops:.3g} FLOPs pay for {steps:.3g} steps of {run.tokens_per_step:,} "
            f"tokens at {parameter_counts(run.model).total:.3g} parameters, expected "
            f"{FEWEST_STEPS} to {MOST:g}; change the FLOPs or the lanes"
        )
    return with_steps(run, round(steps))


def with_steps(run: RunConfig, steps: int) -> RunConfig:
    """Return the run with that many steps, and warm-up and checkpoints in proportion."""
    warmup = max(1, round(WARMUP * steps))
    schedule = replace(run.optim.schedule, warmup_steps=warmup, decay_steps=0)
    return replace(
        run,
        optim=replace(run.optim, steps=steps, schedule=schedule),
        # What shall be kept has to be saved.
        checkpoint=replace(
            run.checkpoint, interval=run.checkpoint.keep_every or max(1, steps // SAVES)
        ),
    )
