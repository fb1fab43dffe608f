"""One fit: every law on the same runs, with intervals, which of them to rely on, and how far.

docs/scaling.md says how the law that comes first is chosen. Legend: P points.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from foundation.errors import ConfigError, DataError
from pretrain.scaling.backtest import Backtest, backtests, estimate, left_out_errors
from pretrain.scaling.frontier import (
    FEWEST_SIZES,
    Approach,
    Fitted,
    Frontier,
    FrontierFit,
    Valley,
    law_of,
)
from pretrain.scaling.intervals import Interval, as_loss, as_size, shown, widened
from pretrain.scaling.law import (
    FEWEST_FREE,
    TOLERATED,
    FlopsLaw,
    LawLine,
    ParametricFit,
    fit_flops_law,
)
from pretrain.scaling.table import Array, Points, usable
from pretrain.terminal.text import counted

TITLES = {
    "parametric": "3 parametric",
    "tied": "3 tied",
    "isoflop": "2 IsoFLOP",
    "lowest": "1 lowest runs",
}
NUMBERS = {"lowest": 4, "tied": 4, "parametric": 5, "isoflop": 6}  # that a law fits
MOST_NAMED = 3  # outliers in a warning
# What laws missed on published sweeps, as logarithms, at x times the largest budget fitted: five
# of six were within SIZE_OFF sqrt(ln x) of N* and LOSS_OFF ln x of the loss (docs/scaling.md).
SIZE_OFF, LOSS_OFF = 0.3, 0.03


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a fit is warned of, doubted or refused; ratios unless they say otherwise."""

    # The ranking of laws by the left-out budget.
    same_error: float = 2e-4  # of the loss: seeds differ by more
    hopeless: float = 0.1  # error of the loss: no law of the four describes such runs
    # Outliers and trends of a law's errors on its own runs.
    far: float = 4.5  # standard deviations: of 1,000 sweeps of 240 runs two go so far by chance
    gross: float = 0.5  # error of an outlier, however few runs there are to measure the noise by
    most_outliers: float = 0.1  # of the runs: more are not a few that went wrong
    smallest_error: float = 1e-3  # below it nothing is an outlier, a trend, or a loss that falls
    trend: float = 1e-3  # chance of a trend without a cause
    untied: float = 0.05  # chance that equal exponents seem to differ
    rounding: float = 1e-6  # errors of the solver
    # Predictions beyond the runs.
    beyond: float = 10.0  # the multiple of the largest budget that is answered unless another is
    differing_losses: float = 0.01  # of the laws, at the budget that is asked for
    jump: float = 0.01  # of a law's mean error, between neighboring budgets
    disagreement: float = 1.5  # of the laws' N* there, which is worth a warning
    largest_disagreement: float = 3.0  # ... and which is a reason not to answer
    furthest: float = 100.0  # times the largest budget, or below the smallest
    furthest_unchecked: float = 10.0  # the same with two budgets: none is left to check a law on
    furthest_axis: float = 30.0  # times the largest N or D, for the loss of one run
    widest: float = 10.0  # high over low end of the interval of N*
    widest_loss: float = 1.2  # the same of one run's loss
    rough_flops_law: float = 0.03  # of FLOPs per token about their power law


LIMITS = Limits()


@dataclass(frozen=True)
class Prediction:
    """A run's loss as measured and as predicted by a law; the interval excludes run noise."""

    name: str
    parameters: float
    tokens: float
    flops: float
    measured: float
    predicted: Interval

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, as everywhere: positive if too high."""
        return self.predicted.value / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The result of a fit."""

    points: Points  # those fitted, with the exclusions
    flops_law: FlopsLaw
    approaches: tuple[Approach, ...]  # from the one to rely on
    doubts: Mapping[str, str]  # law -> why it is not relied on, whatever its error
    unavailable: Mapping[str, str]  # law -> why these runs do not allow it
    left_out: Mapping[str, float]  # law -> error of the largest budgets, see `left_out_errors`
    num_left_out: Mapping[str, int]  # law -> runs that its error is the mean of
    backtests: Mapping[str, list[Backtest]]  # by law
    holdouts: tuple[Prediction, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """FLOPs of the largest budget."""
        return float(self.points.budgets[-1])

    @property
    def beyond(self) -> float:
        """FLOPs that are answered unless others are asked for."""
        return LIMITS.beyond * self.largest

    def optimum(self, approach: Approach, flops: float) -> tuple[Interval, Interval, Interval]:
        """Return N*, D* and the loss at C FLOPs by a law.

        Beyond the largest budget their intervals are widened by what laws have missed on published
        sweeps at such a distance.
        """
        at, (off, _) = float(np.log(flops)), self.missed(flops)
        size, tokens = approach.parameters(at), approach.tokens(at, self.flops_law)
        loss = approach.loss(at)
        if isinstance(approach.line, Frontier) and off and math.isfinite(loss.value):
            loss = approach.line.loss_interval(at)
        if approach.no_interval:
            return size, tokens, loss
        return widened(size, off), widened(tokens, off), self.beyond_runs(loss, flops)

    def beyond_runs(self, loss: Interval, flops: float) -> Interval:
        """Return a loss at C FLOPs with its interval, widened as in `optimum`."""
        return widened(loss, self.missed(flops)[1])

    def missed(self, flops: float) -> tuple[float, float]:
        """Return what laws missed on published sweeps so far beyond the runs, as logarithms: of N*
        and of the loss.
        """
        far = math.log(max(flops / self.largest, 1.0))
        return SIZE_OFF * math.sqrt(far), LOSS_OFF * far

    @property
    def valleys(self) -> tuple[Valley, ...]:
        """Approach 2's parabolas, if these runs allow them."""
        isoflop = self.approach("isoflop")
        return isoflop.fit.valleys if isoflop and isinstance(isoflop.fit, FrontierFit) else ()

    @property
    def none_because(self) -> str:
        """Why no law describes these runs; empty if one does."""
        first = self.approaches[0]
        if doubt := self.doubts.get(first.key):
            return doubt
        if first.key not in self.left_out and self.doubts:  # nothing checks the only one left
            return next(iter(self.doubts.values()))
        error = self.left_out.get(first.key, 0.0)
        return f"the best one's left-out error is {error:.1%}" if error > LIMITS.hopeless else ""

    def approach(self, key: str) -> Approach | None:
        """The approach of that key, if these runs allow it."""
        return next((approach for approach in self.approaches if approach.key == key), None)

    @property
    def drawn(self) -> Approach:
        """The first approach that predicts runs of all sizes: approach 1 predicts the lowest."""
        return next((item for item in self.approaches if item.key != "lowest"), self.approaches[0])

    @property
    def law(self) -> Approach | None:
        """The law of N and D to rely on, of approach 3: tied or not."""
        return next(
            (approach for approach in self.approaches if isinstance(approach.line, LawLine)), None
        )


def fit_all(runs: Points) -> Fit:
    """Fit every law; DataError if the runs allow none, or all have the same budget."""
    points = usable(runs)
    _refuse_unfit(points)
    flops_law = fit_flops_law(points.parameters_P, points.tokens_P, points.flops_P)
    if flops_law.power <= 0:
        raise DataError(
            f"{points.source}: FLOPs per token go as N^{flops_law.power:.3g}, so larger models "
            "cost no more; check which columns are N, D and C (--column ROLE=NAME)"
        )
    laws, unavailable = estimate(points)
    if not laws:
        reasons = [f"{TITLES[key]}: {reason}" for key, reason in unavailable.items()]
        raise DataError(f"{points.source}: no law fits these runs ({'; '.join(reasons)})")
    left_out, doubts = left_out_errors(points, laws), _doubts(points, laws)
    errors = {key: error for key, (error, _) in left_out.items()}
    least = min(errors.values(), default=0.0)

    def place(key: str) -> tuple[bool, float, int]:
        worse = math.floor((errors[key] - least) / LIMITS.same_error) if key in errors else math.inf
        return key in doubts, worse, NUMBERS[key] if errors else key == "lowest"

    fit = Fit(
        points=points,
        flops_law=flops_law,
        approaches=tuple(
            approach_of(key, laws[key], points, flops_law) for key in sorted(laws, key=place)
        ),
        doubts=doubts,
        unavailable=unavailable,
        left_out=errors,
        num_left_out={key: count for key, (_, count) in left_out.items()},
        backtests=backtests(points, laws),
    )
    if fit.law:
        fit = replace(fit, holdouts=predict_holdouts(runs, fit))
    return replace(fit, warnings=tuple(_warnings(fit)))


def approach_of(key: str, law: Fitted, points: Points, flops_law: FlopsLaw) -> Approach:
    """Return a law of these runs with its intervals, or why it has none."""
    approach = Approach(key, TITLES[key], law, law.line(flops_law))
    if isinstance(law, FrontierFit):
        return replace(approach, no_interval=law.no_interval)
    try:
        return replace(approach, left_out=law.left_out(points, flops_law))
    except DataError as error:
        return replace(approach, no_interval=str(error))


def predict_holdouts(runs: Points, fit: Fit) -> tuple[Prediction, ...]:
    """Return the predictions of the runs that were held out, with their measured losses."""
    law, held = law_of_runs(fit), runs.take(runs.holdout_P)
    columns_P4 = np.stack([held.parameters_P, held.tokens_P, held.flops_P, held.loss_P], axis=1)
    return tuple(
        Prediction(
            name, *numbers, predicted=fit.beyond_runs(loss_interval(law, *numbers[:2]), numbers[2])
        )
        for name, numbers in zip(held.names, columns_P4.tolist(), strict=True)
    )


def loss_interval(law: Approach, parameters: float, tokens: float) -> Interval:
    """Return L(N, D) by a law, with its interval if it has one: of the scatter of the runs alone,
    as of `Fit.beyond_runs` before it is widened.
    """
    return law.loss_of(lambda line: law_of(line).law.loss(parameters, tokens))


def disagreement(fit: Fit, flops: float) -> float:
    """Return the largest N* over the smallest at C FLOPs, by the laws to rely on; 1 of one."""
    rivals = [law for law in fit.approaches if law.key not in (*fit.doubts, "lowest")]
    sizes = np.array([float(law.line.log_parameters(np.log(flops))) for law in rivals])
    finite = sizes[np.isfinite(sizes)]
    return float(np.exp(np.ptp(finite))) if len(finite) else 1.0


def loss_disagreement(fit: Fit, flops: float) -> str:
    """Return how the laws' losses at C FLOPs differ, also of laws in doubt; empty up to 1%."""
    rivals = [law for law in fit.approaches if law.key != "lowest"]  # its losses are of single runs
    losses = {law.title: fit.optimum(law, flops)[2].value for law in rivals}
    losses = {title: loss for title, loss in losses.items() if math.isfinite(loss)}
    low, high = (pick(losses, key=losses.__getitem__, default="") for pick in (min, max))
    if not low or losses[high] <= (1 + LIMITS.differing_losses) * losses[low]:
        return ""
    return (
        f"the laws' losses differ by {losses[high] / losses[low] - 1:.1%}: {as_loss(losses[low])} "
        f"by {low}, {as_loss(losses[high])} by {high}"
    )


def noise_of(error_P: Array, numbers: int = NUMBERS["parametric"]) -> float:
    """Return the standard deviation of relative errors, each counted as TOLERATED of it at most."""
    free = max(len(error_P) - numbers, 1)
    scale = float(np.sqrt((error_P**2).sum() / free))
    for _ in range(30):
        bounded = np.minimum(np.abs(error_P), TOLERATED * scale)
        scale = max(float(np.sqrt((bounded**2).sum() / free)), 1e-12)
    return scale


def _doubts(points: Points, laws: Mapping[str, Fitted]) -> dict[str, str]:
    """Return why a law of approach 3 is not relied on: errors with a trend, unequal exponents."""
    from scipy.special import fdtrc

    doubts = {}
    fitted = {key: law for key, law in laws.items() if isinstance(law, ParametricFit)}
    errors = {key: law.losses(points) / points.loss_P - 1 for key, law in fitted.items()}
    for key, error_P in errors.items():
        far_P = _outliers(error_P)
        if trend := _trend(points.take(~far_P), error_P[~far_P], NUMBERS[key]):
            doubts[key] = trend
    if len(errors) == 2 and "tied" not in doubts:
        free = len(points) - NUMBERS["parametric"]
        scale = noise_of(errors["parametric"])
        limit, least = TOLERATED * scale, len(points) * LIMITS.rounding**2
        bounded = (np.clip(errors[key], -limit, limit) for key in ("tied", "parametric"))
        tied, untied = (float((error_P**2).sum()) for error_P in bounded)
        ratio = max(tied - untied, 0.0) * free / max(untied, least)
        if free > 0 and (chance := float(fdtrc(1, free, ratio))) < LIMITS.untied:
            doubts["tied"] = f"its exponents differ (p = {chance:.1g})"
    return doubts


def _outliers(error_P: Array) -> Array:
    """Return which errors are far from the scatter of the others; if many are, no error is."""
    is_gross_P = np.abs(error_P) > LIMITS.gross
    noise = noise_of(error_P[~is_gross_P])
    far_P = is_gross_P | (np.abs(error_P) > max(LIMITS.far * noise, LIMITS.smallest_error))
    return (
        far_P if far_P.sum() <= max(1, LIMITS.most_outliers * len(far_P)) else np.zeros_like(far_P)
    )


def _trend(points: Points, error_P: Array, numbers: int) -> str:
    """Return how the errors change with budget and shape, if noise alone is unlikely to."""
    from scipy.special import fdtrc

    axes = [np.log(points.flops_P), np.log(points.tokens_P / points.parameters_P)]
    if min(np.ptp(axis) for axis in axes) < LIMITS.smallest_error:
        return ""
    c_P, r_P = (2 * (axis - axis.min()) / np.ptp(axis) - 1 for axis in axes)
    powers = ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (3, 0), (1, 2))
    terms = np.stack([c_P**i * r_P**j for i, j in powers], axis=1)
    smooth_P = terms @ np.linalg.lstsq(terms, error_P, rcond=None)[0]
    free = len(error_P) - numbers - len(powers) + 1
    if free < FEWEST_FREE or np.abs(smooth_P).max() < LIMITS.smallest_error:
        return ""
    within = ((error_P - smooth_P) ** 2).sum() / free
    between = ((smooth_P - error_P.mean()) ** 2).sum() / (len(powers) - 1)
    chance = float(fdtrc(len(powers) - 1, free, between / max(within, 1e-300)))
    if chance > LIMITS.trend:
        return ""
    return f"trend of up to {np.abs(smooth_P).max():.1%} (p = {chance:.0e})"


def _refuse_unfit(points: Points) -> None:
    """Raise DataError unless there are two budgets, as at one size and data change together, and
    losses that differ.
    """
    if not len(points):
        reasons = [f"{item.name}: {item.reason}" for item in points.excluded[:3]]
        raise DataError(f"{points.source}: no usable runs; {'; '.join(reasons)}")
    if len(points.budgets) < 2:
        raise DataError(
            f"{points.source}: all {len(points)} usable runs share one budget "
            f"({points.budgets[0]:.3g} FLOPs); a law needs at least two, and a third to check it; "
            "add runs at other budgets"
        )
    if np.ptp(points.loss_P) < LIMITS.smallest_error * points.loss_P.min():
        raise DataError(
            f"{points.source}: all losses are {as_loss(float(points.loss_P.min()))} within "
            f"{LIMITS.smallest_error:.1%}: none of these laws describes runs whose loss does not "
            "fall with size and data; check the column of the loss, or add other budgets"
        )


def _warnings(fit: Fit) -> list[str]:
    """Return what changes the answer."""
    points, lines = fit.points, list(fit.points.warnings)
    repeated = len(points) - len(set(points.names))
    if repeated:
        lines.append(
            f"{counted(repeated, 'row')} with the name of an earlier run: if they are points along "
            "one run, all but the last are mid-schedule"
        )
    if fit.flops_law.largest_error > LIMITS.rough_flops_law:
        lines.append(
            f"FLOPs per token differ from a power of N by up to {fit.flops_law.largest_error:.0%} "
            "(shapes or memories differ): D* carries that error"
        )
    if len(points.budgets) < 3:
        lines.append("two budgets: none is left to check the laws on")
    if free := fit.approach("parametric"):
        assert isinstance(free.fit, ParametricFit)
        error_P = free.fit.losses(points) / points.loss_P - 1
        lines += [*_named_outliers(fit, error_P), *_jump(points, error_P)]
        if free.fit.undetermined:
            lines.append(f"these runs do not determine the {' and '.join(free.fit.undetermined)}")
    flops = fit.beyond
    if (ratio := disagreement(fit, flops)) > LIMITS.disagreement:
        lines.append(f"at {flops:.3g} FLOPs the laws' optimal sizes differ {ratio:.2f}x")
    isoflop = fit.approach("isoflop")
    unused = isoflop.fit.warnings if isoflop and isinstance(isoflop.fit, FrontierFit) else ()
    return lines + [f"{TITLES['isoflop']}: {line}" for line in unused]


def _jump(points: Points, error_P: Array) -> list[str]:
    """Return a warning where the mean error of a law jumps between neighboring budgets, as where a
    recipe changes.
    """
    groups = {budget: error_P[points.budget_P == budget] for budget in points.budgets.tolist()}
    groups = {budget: group for budget, group in groups.items() if len(group) >= FEWEST_SIZES}
    if len(groups) < 3:
        return []
    noise = math.sqrt(float(np.mean([group.var(ddof=1) / len(group) for group in groups.values()])))
    steps = np.diff([group.mean() for group in groups.values()])
    largest, usual = int(np.abs(steps).argmax()), float(np.median(np.abs(steps)))
    if abs(steps[largest]) < max(LIMITS.jump, 3 * math.sqrt(2) * noise, usual):
        return []
    low, high = list(groups)[largest : largest + 2]
    return [
        f"between {low:.3g} and {high:.3g} FLOPs the errors of the law jump by "
        f"{steps[largest]:+.1%}: did the recipe, the data or the evaluation change there?"
    ]


def _named_outliers(fit: Fit, error_P: Array) -> list[str]:
    points, far_P = fit.points, _outliers(error_P)
    if not far_P.any():
        return []
    order = np.argsort(-np.abs(np.where(far_P, error_P, 0)))[: int(far_P.sum())]
    first, columns = order[:MOST_NAMED], (points.parameters_P, points.tokens_P, points.loss_P)
    named = [
        f"{points.names[i]} (N {as_size(size)}, D {as_size(tokens)}, loss {as_loss(loss)})"
        for i in first
        for size, tokens, loss in [[float(column[i]) for column in columns]]
    ]
    more = f" and {len(order) - MOST_NAMED} more" if len(order) > MOST_NAMED else ""
    return [
        f"{counted(len(order), 'run')} over {LIMITS.far:g} standard deviations off the law: "
        f"{', '.join(named)}{more}; a reason in the column 'excluded' leaves a run out"
    ]


def law_of_runs(fit: Fit) -> Approach:
    """Return the law of N and D that comes first; ConfigError if these runs allow none."""
    if fit.law is None:
        reason = fit.unavailable["parametric"]
        raise ConfigError(f"this needs a law of N and D, and there is none: {reason}")
    return fit.law


def doubts(fit: Fit, flops: float, approach: Approach) -> list[str]:
    """Return reasons not to rely on this fit at these FLOPs."""
    budgets = len(fit.points.budgets)
    furthest = LIMITS.furthest if budgets > 2 else LIMITS.furthest_unchecked
    reasons = _outside("FLOPs", flops, fit.points.flops_P, furthest, f", with {budgets} budgets")
    size = approach.parameters(float(np.log(flops)))
    if size.width > LIMITS.widest:
        reasons.append(
            f"the interval of N* by {approach.title} is {shown(size, as_size)}, over "
            f"{LIMITS.widest:.0f}x wide"
        )
    if (ratio := disagreement(fit, flops)) > LIMITS.largest_disagreement:
        reasons.append(f"the laws' optimal sizes differ {ratio:.1f}x there")
    return reasons


def run_doubts(fit: Fit, parameters: float, tokens: float) -> list[str]:
    """Return reasons not to rely on this fit for the loss of one run."""
    points = fit.points
    flops = fit.flops_law.flops(parameters, tokens)
    reasons = [
        *_outside("FLOPs", flops, points.flops_P, LIMITS.furthest),
        *_outside("parameters", parameters, points.parameters_P, LIMITS.furthest_axis),
        *_outside("tokens", tokens, points.tokens_P, LIMITS.furthest_axis),
    ]
    law = law_of_runs(fit)
    if why := fit.doubts.get(law.key):
        reasons.append(f"{law.title} is not relied on: {why}")
    loss = loss_interval(law, parameters, tokens)
    if loss.width > LIMITS.widest_loss:
        wide = f"over {LIMITS.widest_loss - 1:.0%} wide"
        reasons.append(f"the interval of the loss is {shown(loss, as_loss)}, {wide}")
    return reasons


def _outside(name: str, value: float, fitted_P: Array, furthest: float, why: str = "") -> list[str]:
    low, high = float(fitted_P.min()), float(fitted_P.max())
    if low / furthest <= value <= high * furthest:
        return []
    return [
        f"{value:.3g} {name} are over {furthest:.0f} times outside the fitted range "
        f"({low:.3g} to {high:.3g}){why}"
    ]


def refuse_wild(doubts: list[str], is_forced: bool) -> list[str]:
    """Return the doubts as lines if the answer is forced; else raise ConfigError for any."""
    if doubts and not is_forced:
        raise ConfigError(
            f"prediction rejected as extrapolation: {'; '.join(doubts)}. Add runs nearer to it, "
            "or use --force"
        )
    return [f"doubt: {doubt}" for doubt in doubts]
