"""What a size and a budget imply for a run: its shape, rate, batch and steps.

Shapes are models of nearly one ratio of width to depth. Sizes of one family differ in little but
their size. So a width is a whole number of the base's heads, and a round one: odd numbers of heads
and widths such as 3456 divide badly over tiles and ranks. Depth follows the width, and gives way a
little to come nearer to a size.

The loss over ln(rate) is flat at the bottom, rises slowly towards lower rates and steeply towards
higher ones. So a parabola is fitted only to rates near the lowest loss, and the answer is a range
of rates rather than one. Over several sizes (rungs) the rate is a power of N without embeddings.
Legend: S runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from foundation.errors import ConfigError, DataError
from foundation.settings import MOST
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of, parameters_of
from pretrain.scaling.collect import Row, read_rows
from pretrain.scaling.frontier import parabola
from pretrain.scaling.law import Interval, amount, as_loss, as_size, students
from pretrain.scaling.table import Array
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


@dataclass(frozen=True, kw_only=True)
class Family:
    """The shapes that may stand in for the base's."""

    base: RunConfig
    keep_layers: bool = False  # every shape has the base's depth

    def nearest(self, parameters: float, tolerance: float = math.inf) -> RunConfig:
        """The base in the shape whose parameters come nearest to the wanted number.

        ConfigError if their logarithms differ by more than the tolerance.
        """
        run = self._nearest_shape(parameters)
        found = parameters_of(run.model).total
        if abs(math.log(found / parameters)) > tolerance:
            raise ConfigError(
                f"the nearest shape to {parameters:.3g} parameters has {found:.3g} (heads of "
                f"{run.model.head_width}, vocabulary {run.model.vocab_size}); use a base with "
                "smaller heads or another vocabulary"
            )
        return run

    def _nearest_shape(self, parameters: float) -> RunConfig:
        model, period = self.base.model, self.base.model.period
        best = (math.inf, model.num_heads, model.num_layers)
        for num_heads in filter(self._allows, range(1, MOST_HEADS + 1)):
            one, two = (
                parameters_of(with_shape(self.base, num_heads, depth).model).total
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
        """Whether so many heads make a round width, group as the base's, and can be shared so."""
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
        num_key_heads=(_key_heads(model, num_heads) or 0) if model.num_key_heads else 0,
        num_layers=num_layers,
        d_model=2 * round(model.d_model * growth / 2),
        d_head=model.head_width,
        d_inner=inner if model.d_inner else 0,
    )
    return replace(base, model=shaped)


def _key_heads(model: ModelConfig, num_heads: int) -> int | None:
    """Key heads for so many heads: as many heads share one as in the base. None if they cannot.

    Groups of three, which few round widths divide into, may become those of two or four.
    """
    group = model.num_heads // model.key_heads
    most = math.log(HEADS_PER_KEY_FREEDOM) if group & (group - 1) else 0.0
    divisors = (count for count in range(1, num_heads + 1) if num_heads % count == 0)
    error, found = min((abs(math.log(num_heads / each / group)), each) for each in divisors)
    return found if error <= most else None


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
FEWEST_STEPS = 50  # so that whole steps miss the budget by at most 1%
BATCHES = 100  # of a rule's batch, that the tokens are at least
SAVES = 4  # per run, so that a killed cell repeats at most a quarter of its steps
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


def base_rule(run: RunConfig, _: float) -> tuple[float, float]:
    """The experiment's own rate and lanes."""
    return run.optim.learning_rate, 0.0


RULES: dict[str, Rule] = {"step-law": step_law_rule, "base": base_rule}


def outside_step_law(runs: Sequence[RunConfig]) -> list[str]:
    """Which of the runs Step Law was not measured for, in one line; none if it was for all."""
    outside = []
    for run in runs:
        size, tokens = (cost := cost_of(run)).body_parameters, cost.tokens
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
    rate, _ = rule(run, budget / cost_of(run).flops_per_token)
    if wanted := wanted_lanes(run, budget, rule):
        lanes = lanes_multiple * max(1, round(wanted / lanes_multiple))
        run = replace(run, data=replace(run.data, lanes=lanes))
    run = replace(run, optim=replace(run.optim, learning_rate=float(f"{rate:.4g}")))
    # After the lanes: positions are projected once per batch, so FLOPs depend on their number.
    cost = cost_of(run)
    return at_flops(run, budget, cost.flops_per_token * cost.tokens_per_step)


def wanted_lanes(run: RunConfig, budget: float, rule: Rule) -> float:
    """Return the lanes of the rule's batch, not whole; 0 where it keeps those of the run."""
    tokens = budget / cost_of(run).flops_per_token
    _, batch = rule(run, tokens)
    return min(batch, tokens / BATCHES) / run.lane_tokens_per_step


def at_flops(run: RunConfig, flops: float, of_step: float) -> RunConfig:
    """Return the run with the steps that these FLOPs pay for; ConfigError for too few or many."""
    steps = flops / of_step
    if not FEWEST_STEPS - 0.5 <= steps <= MOST:
        raise ConfigError(
            f"{run.name}: {flops:.3g} FLOPs pay for {steps:.3g} steps of {run.tokens_per_step:,} "
            f"tokens at {parameters_of(run.model).total:.3g} parameters, expected {FEWEST_STEPS} "
            f"to {MOST:g}; change the FLOPs or the lanes"
        )
    return with_steps(run, round(steps))


def with_steps(run: RunConfig, steps: int) -> RunConfig:
    """Return the run with that many steps, and warm-up and checkpoints in proportion."""
    warmup = max(1, round(WARMUP * steps))
    schedule = replace(run.optim.schedule, warmup_steps=warmup, decay_steps=0)
    return replace(
        run,
        optim=replace(run.optim, steps=steps, schedule=schedule),
        checkpoint=replace(run.checkpoint, interval=max(1, steps // SAVES)),
    )


FAR = 4.0  # times the smallest or largest rung: beyond, a rate is extrapolated
FAR_TOKENS = 10.0  # times the fewest or most tokens of a rung: the best rate depends on them, too
NEAR = 4.0  # rates within this factor of the one with the lowest loss shape the parabola
FEWEST_RATES = 3
DIVERGED = 1.5  # times the lowest loss: a higher rate whose run ends above has diverged
TOLERABLE = 0.005  # of the loss: what a rate in the reported range may lose


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The lowest point of a valley of losses over rates; NaN where nothing can be estimated."""

    rate: Interval
    loss: float  # at that rate
    low: float  # from here...
    high: float  # ...to here a rate loses at most TOLERABLE
    doubt: str = ""  # why there is no optimum, or no interval

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.rate.value)


_NONE = Optimum(rate=Interval(*[math.nan] * 3), loss=math.nan, low=math.nan, high=math.nan)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The runs of one number of tokens per step, and the best rate among them."""

    tokens_per_step: int
    rates_S: Array  # of every run that ended well, seeds included
    loss_S: Array
    diverged: tuple[float, ...]  # rates of runs without a loss, or with a far higher one
    lowest: tuple[float, float]  # the rate whose mean loss over the seeds is lowest, and that loss
    near_S: Array  # which runs shaped the parabola
    optimum: Optimum


def fit_rates(tokens_per_step: int, rates: Sequence[float], losses: Sequence[float]) -> Tuned:
    """The valley of the losses over the rates, without those of runs that diverged.

    Their loss is not finite, or far above the lowest one at a higher rate than that of the lowest,
    which would bend the parabola. A far lower rate that ends as high only learns slowly.
    Raises DataError if fewer than three rates ended with a loss.
    """
    order = np.argsort(rates, kind="stable")
    rates_S, loss_S = np.array(rates, float)[order], np.array(losses, float)[order]
    finite_S = np.where(np.isfinite(loss_S), loss_S, math.inf)
    usable_S = np.isfinite(loss_S)
    if usable_S.any():
        is_slower_S = rates_S <= rates_S[finite_S.argmin()]
        usable_S &= is_slower_S | (loss_S <= DIVERGED * finite_S.min())
    diverged = tuple(sorted({float(rate) for rate in rates_S[~usable_S]}))
    rates_S, loss_S = rates_S[usable_S], loss_S[usable_S]
    if (count := len({*rates_S})) < FEWEST_RATES:
        raise DataError(
            f"{tokens_per_step:,} tokens per step: {counted(count, 'rate')} ended with a loss, a "
            f"valley needs {FEWEST_RATES}; let the sweep finish, or add lower rates"
        )
    loss, best = min((float(loss_S[rates_S == rate].mean()), float(rate)) for rate in rates_S)
    near_S = (rates_S <= best * NEAR * 1.001) & (rates_S >= best / NEAR / 1.001)
    doubt = _missing_rates(rates_S[near_S], best, diverged)
    return Tuned(
        tokens_per_step=tokens_per_step,
        rates_S=rates_S,
        loss_S=loss_S,
        diverged=diverged,
        lowest=(best, loss),
        near_S=near_S,
        optimum=replace(_NONE, doubt=doubt) if doubt else _optimum(rates_S[near_S], loss_S[near_S]),
    )


def _missing_rates(near: Array, best: float, diverged: Sequence[float]) -> str:
    """Which rates to add for the lowest loss to have some on both sides; empty if it has."""
    add = [best / 2] if near.min() == best else []
    if near.max() == best:
        too_high = min((rate for rate in diverged if rate > best), default=math.inf)
        add.append(math.sqrt(best * too_high) if too_high < 2.01 * best else 2 * best)
    rates = " and ".join(f"{rate:.2g}" for rate in add)
    return f"no loss on either side of that at {best:g}: add {rates}" if add else ""


def _optimum(rates_S: Array, loss_S: Array) -> Optimum:
    """The lowest point of the parabola through these runs, with its interval by its scatter."""
    x_S, num_runs = np.log(rates_S), len(rates_S)
    vertex, bottom, bend, apart = parabola(x_S, loss_S)
    if not (bend > 0 and bottom > 0) or apart > 1:
        return replace(_NONE, doubt="the losses have no valley: train longer, or use more seeds")
    reach, value, doubt = math.sqrt(2 * TOLERABLE * bottom / bend), math.exp(vertex), ""
    error = math.nan
    if num_runs <= FEWEST_RATES:
        doubt = f"no interval: three runs determine a parabola; add rates near {value:.2g} or seeds"
    else:  # the vertex moves by the slope there over the second derivative
        covariance = np.polyfit(x_S - vertex, loss_S, 2, cov=True)[1]
        error = math.sqrt(covariance[1, 1]) / bend
    rate = students(value, error, num_runs - 3)
    low, high = value * math.exp(-reach), value * math.exp(reach)
    return Optimum(rate=rate, loss=bottom, low=low, high=high, doubt=doubt)


def tuned_rates(rows: Sequence[Row]) -> Tuned:
    """The valley of a table. DataError if too few runs have ended, or batch sizes differ."""
    batches = sorted({int(row.tokens_per_step) for row in rows if row.tokens_per_step}) or [0]
    if len(batches) > 1:
        found = " and ".join(f"{batch:,}" for batch in batches)
        raise DataError(f"rates at {found} tokens per step, expected one number: plan each alone")
    ended = [row for row in rows if row.progress == 1.0 and row.loss != ""]
    rates = [float(row.learning_rate) for row in ended]
    return fit_rates(batches[0], rates, [float(row.loss) for row in ended])


def tuned_table(found: Tuned) -> list[list[str]]:
    """Heads and rows: the mean loss over the seeds at each rate."""
    rows = [["rate", f"{amount(found.tokens_per_step)} tokens a step"]]
    for rate in sorted({*found.rates_S.tolist(), *found.diverged}):
        loss_S = found.loss_S[found.rates_S == rate]
        gone = rate in found.diverged
        rows.append([f"{rate:.3g}", "diverged" if gone else as_loss(float(loss_S.mean()))])
    return rows


def verdicts(found: Tuned) -> list[str]:
    """The best rate, or why there is none; and a warning if the losses contradict it."""
    best, (rate, loss) = found.optimum, found.lowest
    start = f"{amount(found.tokens_per_step)} tokens a step: "
    if not best.is_known:
        return [f"{start}no best rate: {best.doubt} (plan again; finished runs are kept)"]
    text = f"{start}optim.learning_rate={best.rate.value:.2g}"
    if math.isfinite(best.rate.low):
        text += f" [{best.rate.low:.2g}, {best.rate.high:.2g}]"
    text += f", loss {as_loss(best.loss)}; {best.low:.2g} to {best.high:.2g} lose at most "
    lines = [f"{text}{TOLERABLE:.1%}" + (f" ({best.doubt})" if best.doubt else "")]
    if not best.low <= rate <= best.high or best.loss < loss * (1 - TOLERABLE):
        lines.append(
            f"warning: the lowest measured loss is {as_loss(loss)}, at {rate:.3g}: the losses do "
            f"not follow the parabola, so prefer {rate:.3g}, or add seeds and rates near it"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The optimum of one sweep of rates."""

    body_parameters: float
    tokens: float
    rate: Interval
    base_width: int = 0  # from which its rates transfer to other widths; 0: they do not


def read_rungs(tables: Sequence[Path]) -> tuple[Rung, ...]:
    """The rungs of tables that `collect` wrote of sweeps of rates, by size.

    ConfigError for a table whose best rate is not known yet.
    """
    rungs = []
    for path in tables:
        rows = read_rows(path)
        if {row.varies for row in rows} != {"rates"}:
            raise ConfigError(f"--tuned {path}: expected the table of a sweep that varies rates")
        best = tuned_rates(rows).optimum
        if not best.is_known:
            raise ConfigError(
                f"--tuned {path}: has no best rate: {best.doubt}; "
                f"'pretrain scale report {path}' shows the losses"
            )
        ended = next(row for row in rows if row.progress == 1.0)
        size, tokens, width = float(ended.N_body), float(ended.D), int(ended.base_width)
        rungs.append(Rung(body_parameters=size, tokens=tokens, rate=best.rate, base_width=width))
    return tuple(sorted(rungs, key=lambda rung: rung.body_parameters))


@dataclass(frozen=True, kw_only=True)
class TunedRule:
    """A rule for `with_budget`: the rungs' rate at any size, with the run's own lanes.

    The rate is a power of N without embeddings, or that of the rungs at any size if rates transfer
    between widths.
    """

    rungs: tuple[Rung, ...]
    base_width: int = 0  # of the runs

    @property
    def transfers(self) -> bool:
        """Whether one rung's rate holds at every width."""
        return self.base_width > 0 and {rung.base_width for rung in self.rungs} == {self.base_width}

    @property
    def rate(self) -> np.poly1d:
        """ln rate over ln N: a line, or a constant if all rungs have one size."""
        sizes = [1.0 if self.transfers else rung.body_parameters for rung in self.rungs]
        rates = [rung.rate.value for rung in self.rungs]
        return np.poly1d(np.polyfit(np.log(sizes), np.log(rates), int(len({*sizes}) > 1)))

    def __call__(self, run: RunConfig, tokens: float) -> tuple[float, float]:
        return math.exp(self.rate(math.log(cost_of(run).body_parameters))), 0.0

    def describe(self, runs: Sequence[RunConfig]) -> list[str]:
        """The rungs, the rule, and which of the runs it is extrapolated to; a line each."""
        rungs = ", ".join(
            f"{rung.rate.value:.1e} at {as_size(rung.body_parameters)}" for rung in self.rungs
        )
        words = f"N^{self.rate.coef[0]:.3f} between and beyond"
        if self.rate.order == 0:
            words = "the same at every size, as of one rung: add a second"
        words = "the same at every width (model.base_width)" if self.transfers else words
        lines = [f"rate: tuned on {rungs} (N without embeddings); {words}"]
        far = [run.name for run in runs if self._is_far(run)]
        if far:
            lines.append(
                f"warning: {len(far)} of {counted(len(runs), 'cell')}, such as {far[0]}, are over "
                f"{FAR:g}x from the rungs in size or {FAR_TOKENS:g}x in tokens, so that their "
                "rates are extrapolated: tune a rung nearer to them"
            )
        return lines

    def _is_far(self, run: RunConfig) -> bool:
        cost = cost_of(run)
        sizes = [cost.body_parameters / rung.body_parameters for rung in self.rungs]
        tokens = [cost.tokens / rung.tokens for rung in self.rungs]
        far = [(tokens, FAR_TOKENS)] + ([] if self.transfers else [(sizes, FAR)])
        return any(min(ratios) > factor or max(ratios) < 1 / factor for ratios, factor in far)
