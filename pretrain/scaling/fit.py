"""One fit: every law on the same runs, with intervals, which of them to rely on, and how far.

docs/scaling.md says how the law that comes first is chosen. Legend: P points.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from foundation.errors import ConfigError, DataError
from pretrain.scaling.frontier import (
    Approach,
    Fitted,
    FrontierFit,
    Valley,
    fit_isoflop,
    fit_lowest_runs,
    law_of,
)
from pretrain.scaling.intervals import Interval, as_loss, as_size, shown
from pretrain.scaling.law import (
    FEWEST_FREE,
    TOLERATED,
    FlopsLaw,
    LawLine,
    ParametricFit,
    fit_flops_law,
    fit_parametric,
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a fit is warned of, doubted or refused; ratios unless they say otherwise."""

    # The ranking of laws by the left-out budget.
    near: float = 3.0  # of size: the lowest run's neighbors, which decide what N* is
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
    disagreement: float = 1.5  # of the laws' N* there, which is worth a warning
    largest_disagreement: float = 3.0  # ... and which is a reason not to answer
    furthest: float = 100.0  # times the largest budget, or below the smallest
    furthest_unchecked: float = 10.0  # the same with two budgets: none is left to check a law on
    furthest_axis: float = 30.0  # times the largest N or D, for the loss of one run
    widest: float = 10.0  # high over low end of the interval of N*
    widest_loss: float = 1.2  # the same of one run's loss
    rough_flops_law: float = 0.03  # of FLOPs per token about their power law


LIMITS = Limits()


def estimate(points: Points) -> tuple[dict[str, Fitted], dict[str, str]]:
    """Return every law fitted, and the reason for each that these runs do not allow."""
    fits: dict[str, Callable[[], Fitted]] = {
        "parametric": lambda: fit_parametric(points),
        "tied": lambda: fit_parametric(points, tied=True),
        "isoflop": lambda: fit_isoflop(points),
        "lowest": lambda: fit_lowest_runs(points),
    }
    laws, unavailable = {}, {}
    for key, fit in fits.items():
        try:
            laws[key] = fit()
        except DataError as error:
            unavailable[key] = str(error).removeprefix(f"{points.source}: ")
    return laws, unavailable


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
    left_out: Mapping[str, float]  # law -> error of the largest budget, see `left_out_errors`
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
        if first.key == "lowest" and self.doubts:  # it ranks nothing: every other law is in doubt
            return next(iter(self.doubts.values()))
        error = self.left_out.get(first.key, 0.0)
        return f"the best one's left-out error is {error:.1%}" if error > LIMITS.hopeless else ""

    def approach(self, key: str) -> Approach | None:
        """The approach of that key, if these runs allow it."""
        return next((approach for approach in self.approaches if approach.key == key), None)

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
    errors, doubts = left_out_errors(points, laws), _doubts(points, laws)
    least = min(errors.values(), default=0.0)

    def place(key: str) -> tuple[bool, bool, float, int]:
        worse = math.floor((errors[key] - least) / LIMITS.same_error) if key in errors else math.inf
        return key in doubts, key == "lowest", worse, NUMBERS[key] if errors else 0

    fit = Fit(
        points=points,
        flops_law=flops_law,
        approaches=tuple(
            approach_of(key, laws[key], points, flops_law) for key in sorted(laws, key=place)
        ),
        doubts=doubts,
        unavailable=unavailable,
        left_out=errors,
    )
    if fit.law:
        fit = replace(fit, holdouts=predict_holdouts(runs, fit.law))
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


def left_out_errors(points: Points, laws: Mapping[str, Fitted]) -> dict[str, float]:
    """Return each law's mean |relative error| of the largest budget's losses, fitted to the others;
    {} with fewer than three budgets.

    `laws` are fitted to all budgets. Only runs near N* count that all laws predict.
    """
    budgets = points.budgets
    if len(budgets) < 3:
        return {}
    last = points.take(points.budget_P == budgets[-1])
    below, _ = estimate(points.take(points.budget_P < budgets[-1]))
    predicted = {key: law.losses(last) for key, law in below.items() if key != "lowest"}
    isoflop, size = laws.get("isoflop"), float(last.parameters_P[last.loss_P.argmin()])
    for valley in isoflop.used if isinstance(isoflop, FrontierFit) else ():
        size = valley.parameters if valley.budget == budgets[-1] else size
    near_P = np.abs(np.log(last.parameters_P / size)) <= np.log(LIMITS.near)
    near_P &= np.all([np.isfinite(loss_P) for loss_P in predicted.values()] or [near_P], axis=0)
    if not near_P.any():
        near_P[last.loss_P.argmin()] = True
    errors = {
        key: float(np.abs(loss_P / last.loss_P - 1)[near_P].mean())
        for key, loss_P in predicted.items()
    }
    return {key: error for key, error in errors.items() if math.isfinite(error)}


def predict_holdouts(runs: Points, law: Approach) -> tuple[Prediction, ...]:
    """Return the law's predictions of the runs that were held out, with their measured losses."""
    held = runs.take(runs.holdout_P)
    columns_P4 = np.stack([held.parameters_P, held.tokens_P, held.flops_P, held.loss_P], axis=1)
    return tuple(
        Prediction(name, *numbers, predicted=loss_interval(law, *numbers[:2]))
        for name, numbers in zip(held.names, columns_P4.tolist(), strict=True)
    )


def loss_interval(law: Approach, parameters: float, tokens: float) -> Interval:
    """Return L(N, D) by a law, with its interval if it has one."""
    return law.loss_of(lambda line: law_of(line).law.loss(parameters, tokens))


def disagreement(fit: Fit, flops: float) -> float:
    """Return the largest N* over the smallest at C FLOPs, by the laws to rely on; 1 of one."""
    rivals = [law for law in fit.approaches if law.key not in (*fit.doubts, "lowest")]
    sizes = np.array([float(law.line.log_parameters(np.log(flops))) for law in rivals])
    finite = sizes[np.isfinite(sizes)]
    return float(np.exp(np.ptp(finite))) if len(finite) else 1.0


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
        lines += _named_outliers(fit, free.fit.losses(points) / points.loss_P - 1)
        if free.fit.undetermined:
            lines.append(f"these runs do not determine the {' and '.join(free.fit.undetermined)}")
    flops = fit.beyond
    if (ratio := disagreement(fit, flops)) > LIMITS.disagreement:
        lines.append(f"at {flops:.3g} FLOPs the laws' optimal sizes differ {ratio:.2f}x")
    isoflop = fit.approach("isoflop")
    unused = isoflop.fit.warnings if isoflop and isinstance(isoflop.fit, FrontierFit) else ()
    return lines + [f"{TITLES['isoflop']}: {line}" for line in unused]


def _named_outliers(fit: Fit, error_P: Array) -> list[str]:
    points, far_P = fit.points, _outliers(error_P)
    if not far_P.any():
        return []
    order = np.argsort(-np.abs(np.where(far_P, error_P, 0)))[: int(far_P.sum())]
    first = order[:MOST_NAMED]
    named = [f"{points.names[i]} (loss {as_loss(float(points.loss_P[i]))})" for i in first]
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
    flops = float(np.exp(fit.flops_law.log_flops(np.log(parameters), np.log(tokens))))
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
