"""Approach 3: L(N, D) = E + A/N^alpha + B/D^beta, its Huber fit, and the optimum it implies.

The objective is the sum over runs of Huber_delta(ln L(N, D) - ln loss): relative errors, and a run
that went wrong pulls with bounded force. It is no mean: at values so small a solver with default
tolerances stops far from the optimum. There are several minima, so L-BFGS starts from the best
cells of a grid over the exponents, where the best E, A, B >= 0 are a linear problem.

Legend: P points; G estimates, each without one group. Inside a fit a law is theta = (ln E, ln A,
ln B, alpha, beta), since A and B span many orders of magnitude. Sources: Hoffmann et al. 2022,
sections 3.3 and D.3; Besiroglu et al. 2024 for what can go wrong.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from foundation.errors import DataError
from pretrain.scaling.intervals import MOST_GROUPS, groups_of
from pretrain.scaling.table import Array, Points

FEWEST_GROUPS = 4
FEWEST_FREE = 3  # degrees of freedom
NAMES = ("E", "A", "B", "alpha", "beta")
HUBER_DELTA = 1e-3
FEWEST_POINTS = 6  # five numbers and one point to contradict them
EXPONENTS = np.geomspace(0.03, 1.5, 14)  # of the grid
STARTS = 3
MOST_STARTING = 1000  # runs that the grid is evaluated on
SMALLEST_TERM = 1e-6  # of the mean loss: replaces a term of 0, which has no logarithm
DETERMINED = 1e-3  # of a loss: a term below this in every run is not determined
TIED = np.vstack([np.eye(4), [0, 0, 0, 1]])  # from (ln E, ln A, ln B, alpha) to theta
FREE = np.eye(5)
# If the exponents differ, its 95% interval held the true loss in 85% of 105 sweeps (make coverage).
WHY_NO_INTERVAL = "it assumes equal exponents, and does not know how far they differ"
MOST_FITTED = 60_000  # runs of all fits that leave out a group, added up: some seconds
CLUSTERED = 0.05  # p-value of an F-test, below which runs of a budget err alike
TOLERATED = 2.5  # standard deviations: a larger error counts as this large
STEEPEST = 8.0  # exponent: for runs that follow no law it would grow without bound
SMALLEST_LOGARITHM = -50.0  # of a term where a fit starts


@dataclass(frozen=True)
class Law:
    """One law with its five numbers."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    @property
    def theta(self) -> Array:
        """The law as a row of logarithms and exponents."""
        with np.errstate(divide="ignore"):  # E = 0, no floor, is a law too
            return np.array([*np.log([self.E, self.A, self.B]), self.alpha, self.beta])

    @classmethod
    def of(cls, theta: Array) -> Law:
        """The law of such a row."""
        return cls(*(float(value) for value in (*np.exp(theta[:3]), *theta[3:])))

    def loss(self, parameters: float | Array, tokens: float | Array) -> Array:
        """L(N, D) in nats per token."""
        return np.exp(log_loss(self.theta, np.log(parameters), np.log(tokens)))


@dataclass(frozen=True)
class FlopsLaw:
    """Training FLOPs per token as a power of the size, C/D = scale * N^power; 6ND is 6 and 1.

    Attention and the output layer differ from 6N by a factor that changes slowly with the size.
    """

    scale: float = 6.0
    power: float = 1.0
    largest_error: float = 0.0  # of ln(C/D) over the points it was fitted to

    def log_tokens(self, log_flops: Array, log_parameters: Array) -> Array:
        """ln D of a run of size N that costs C."""
        return log_flops - np.log(self.scale) - self.power * log_parameters

    def flops(self, parameters: float, tokens: float) -> float:
        """C of a run of size N over D tokens."""
        return float(np.exp(self.log_flops(np.log(parameters), np.log(tokens))))

    def log_flops(self, log_parameters: Array, log_tokens: float | Array) -> Array:
        """ln C of a run of size N over D tokens."""
        return np.log(self.scale) + self.power * log_parameters + log_tokens


def fit_flops_law(parameters_P: Array, tokens_P: Array, flops_P: Array) -> FlopsLaw:
    """FLOPs per token as a power of the size; exactly 6N if these runs have 6N to 1e-6."""
    log_ratio_P = np.log(flops_P / tokens_P)
    n_P = np.log(parameters_P)
    if np.allclose(log_ratio_P, np.log(6) + n_P, rtol=0, atol=1e-6):
        return FlopsLaw()
    if np.ptp(n_P) < 1e-9:
        return FlopsLaw(scale=float(np.exp(np.mean(log_ratio_P - n_P))))
    power, log_scale = np.polyfit(n_P, log_ratio_P, 1)
    error = np.abs(log_scale + power * n_P - log_ratio_P).max()
    return FlopsLaw(scale=float(np.exp(log_scale)), power=float(power), largest_error=float(error))


def log_loss(theta: Array, n: float | Array, d: float | Array) -> Array:
    """ln L of a law at ln N and ln D."""
    e, a, b, alpha, beta = theta
    return np.logaddexp(np.logaddexp(e, a - alpha * n), b - beta * d)


def log_optimum(theta: Array, log_flops: float | Array, flops_law: FlopsLaw) -> tuple[Array, Array]:
    """Return (ln N*, ln D*) that minimize the loss at C FLOPs, in closed form.

    With C = s N^p D the loss is least where N^(alpha + p beta) = alpha A / (p beta B) (C/s)^beta;
    with s = 6, p = 1 this is equation 4 of Hoffmann et al. 2022.
    """
    _, a, b, alpha, beta = theta
    with np.errstate(
        invalid="ignore", divide="ignore"
    ):  # a law without a term has its optimum at 0 or infinity
        scaled = np.log(alpha) + a - np.log(flops_law.power * beta) - b
    n = (scaled + beta * (log_flops - np.log(flops_law.scale))) / (alpha + flops_law.power * beta)
    return n, flops_law.log_tokens(np.asarray(log_flops), n)


@dataclass(frozen=True)
class LawLine:
    """The optimal line that a law implies."""

    law: Law
    flops_law: FlopsLaw

    @property
    def power(self) -> float:
        """The power a of C in N* ~ C^a."""
        return self.law.beta / (self.law.alpha + self.flops_law.power * self.law.beta)

    def log_parameters(self, log_flops: float | Array) -> Array:
        """ln N* at C FLOPs."""
        return log_optimum(self.law.theta, log_flops, self.flops_law)[0]

    def loss(self, log_flops: float | Array) -> Array:
        """L(N*, D*) at C FLOPs."""
        theta = self.law.theta
        return np.exp(log_loss(theta, *log_optimum(theta, log_flops, self.flops_law)))


@dataclass(frozen=True, kw_only=True)
class ParametricFit:
    """A law of N and D, with what is needed to judge it."""

    law: Law
    objective: float  # sum of Huber over the points
    is_tied: bool
    mean_error: float  # mean |L - loss| / loss over the fitted points
    undetermined: tuple[str, ...]  # terms that no run shows

    def line(self, flops_law: FlopsLaw) -> LawLine:
        """Its compute-optimal line."""
        return LawLine(self.law, flops_law)

    def losses(self, points: Points) -> Array:
        """The losses [P] that it predicts for runs."""
        return self.law.loss(points.parameters_P, points.tokens_P)

    def left_out(
        self, points: Points, flops_law: FlopsLaw, *, by_budget: bool = False
    ) -> list[LawLine]:
        """The lines of refits, each without one group of budgets, or of runs where the runs of a
        budget do not err alike, unless `by_budget`. DataError where that gives no interval.
        """
        if self.is_tied:
            raise DataError(WHY_NO_INTERVAL)
        if len(points.budgets) < FEWEST_GROUPS:
            raise DataError(f"{len(points.budgets)} budgets; an interval needs {FEWEST_GROUPS}")
        group_P = groups_of(points.budget_P)
        if not by_budget and not self._do_budgets_differ(points):
            count = max(MOST_GROUPS + 1, min(len(points), MOST_FITTED // len(points)))
            group_P = np.arange(len(points)) % count
        rests = (points.take(group_P != group) for group in range(group_P.max() + 1))
        return [LawLine(refit(self.law, rest), flops_law) for rest in rests]

    def _do_budgets_differ(self, points: Points) -> bool:
        """Whether runs of one budget err alike, by an F-test; True with too few budgets for it."""
        from scipy.special import fdtrc

        _, budget_P, count_B = np.unique(points.budget_P, return_inverse=True, return_counts=True)
        free = len(count_B) - 1, len(points) - len(count_B)
        if min(free) < MOST_GROUPS:
            return True
        error_P = np.log(self.losses(points) / points.loss_P)
        limit = TOLERATED * np.median(np.abs(error_P)) / 0.67  # of a run that went wrong
        error_P = np.clip(error_P, -limit, limit)
        mean_B = np.bincount(budget_P, error_P) / count_B
        between = (count_B * (mean_B - error_P.mean()) ** 2).sum() / free[0]
        within = ((error_P - mean_B[budget_P]) ** 2).sum() / free[1]
        return bool(fdtrc(*free, between / max(within, 1e-300)) < CLUSTERED)


def fit_parametric(points: Points, *, tied: bool = False) -> ParametricFit:
    """Fit the law; DataError for too few points, or if the best law does not fall with N and D."""
    if len(points) < FEWEST_POINTS:
        raise DataError(
            f"{points.source}: {len(points)} usable points, a law of N and D needs at least "
            f"{FEWEST_POINTS}; add runs"
        )
    for values_P, name in ((points.parameters_P, "N"), (points.tokens_P, "D")):
        if len(np.unique(values_P)) < 3:
            raise DataError(
                f"{points.source}: fewer than 3 distinct {name}; an exponent needs at least 3"
            )
    center, data = _centered(points)
    ends = [minimize(start, *data, HUBER_DELTA, tied) for start in _starts(*data, tied)]
    theta, objective = min(ends, key=lambda end: end[1])
    if not min(theta[3:]) > 0:
        raise DataError(
            f"{points.source}: the best law has alpha={theta[3]:.3g} and beta={theta[4]:.3g}; the "
            "loss must fall with N and with D (are all runs tuned and finished?)"
        )
    law = Law.of(uncenter(theta, center))
    predicted_P = law.loss(points.parameters_P, points.tokens_P)
    terms = {
        "floor E": law.E,
        "size term A": law.A * points.parameters_P**-law.alpha,
        "data term B": law.B * points.tokens_P**-law.beta,
    }
    return ParametricFit(
        law=law,
        objective=objective,
        is_tied=tied,
        mean_error=float(np.abs(predicted_P / points.loss_P - 1).mean()),
        undetermined=tuple(
            name for name, term in terms.items() if (term / predicted_P).max() < DETERMINED
        ),
    )


def refit(start: Law, points: Points) -> Law:
    """The law of these runs at the minimum nearest to `start`."""
    center, data = _centered(points)
    theta = np.maximum(uncenter(start.theta, -center), SMALLEST_LOGARITHM)
    return Law.of(uncenter(minimize(theta, *data, HUBER_DELTA)[0], center))


def _centered(points: Points) -> tuple[Array, tuple[Array, Array, Array]]:
    """Return the means of ln N and ln D; then ln N and ln D minus these means, and ln loss. Then A
    and B are near 1 and hardly depend on the exponents.
    """
    logs = np.log([points.parameters_P, points.tokens_P, points.loss_P])
    center = logs[:2].mean(axis=1)
    return center, (logs[0] - center[0], logs[1] - center[1], logs[2])


def uncenter(theta: Array, center: Array) -> Array:
    """Return a law fitted to logarithms minus `center` as a law of N and D themselves."""
    e, a, b, alpha, beta = theta
    return np.array([e, a + alpha * center[0], b + beta * center[1], alpha, beta])


def _starts(n_P: Array, d_P: Array, l_P: Array, tied: bool) -> list[Array]:
    """The laws of least squared relative error in the best cells of a grid over the exponents."""
    from scipy.optimize import nnls

    every = -(-len(l_P) // MOST_STARTING)
    n_P, d_P, loss_P = n_P[::every], d_P[::every], np.exp(l_P[::every])
    pairs = (
        zip(EXPONENTS, EXPONENTS, strict=True) if tied else itertools.product(EXPONENTS, repeat=2)
    )
    cells = []
    for alpha, beta in pairs:
        terms = np.stack([np.ones_like(n_P), np.exp(-alpha * n_P), np.exp(-beta * d_P)], axis=1)
        # Dividing by the loss makes least squares relative, close to the objective in ln loss.
        sizes, error = nnls(terms / loss_P[:, None], np.ones_like(loss_P))
        logs = np.log(np.maximum(sizes, SMALLEST_TERM * loss_P.mean()))
        cells.append((float(error), np.array([*logs, alpha, beta])))
    return [theta for _, theta in sorted(cells, key=lambda cell: cell[0])[:STARTS]]


def minimize(
    start: Array, n_P: Array, d_P: Array, l_P: Array, delta: float, tied: bool = False
) -> tuple[Array, float]:
    """Return (law, objective) of L-BFGS from `start`, restarted until it gains nothing."""
    from scipy.optimize import minimize

    place = TIED if tied else FREE
    numbers, objective = start[: place.shape[1]], huber_sum(start, n_P, d_P, l_P, delta)[0]
    bounds = [(None, None)] * 3 + [(None, STEEPEST)] * (len(numbers) - 3)
    options = {"maxiter": 20_000, "maxfun": 100_000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 30}
    for _ in range(20):
        scale = 1 / max(objective, 1e-30)  # the solver's tolerances are absolute

        def scaled(numbers: Array, scale: float = scale) -> tuple[float, Array]:
            value, gradient = huber_sum(place @ numbers, n_P, d_P, l_P, delta)
            return value * scale, gradient @ place * scale

        end = minimize(scaled, numbers, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        gain = objective - end.fun / scale
        if gain > 0:
            numbers, objective = end.x, float(end.fun / scale)
        if gain <= 1e-12 * objective:
            break
    return place @ numbers, objective


def huber_sum(
    theta: Array, n_P: Array, d_P: Array, l_P: Array, delta: float
) -> tuple[float, Array]:
    """Return the sum over points of Huber_delta(ln L - ln loss), and its gradient by theta."""
    e, a, b, alpha, beta = theta
    terms = np.stack([np.full_like(n_P, e), a - alpha * n_P, b - beta * d_P])
    log_P = np.logaddexp(np.logaddexp(terms[0], terms[1]), terms[2])
    residual_P = log_P - l_P
    pull_P = np.clip(residual_P, -delta, delta)  # Huber's derivative
    shares = np.exp(terms - log_P)
    slopes = -(shares[1] * n_P) @ pull_P, -(shares[2] * d_P) @ pull_P
    return float(pull_P @ (residual_P - pull_P / 2)), np.array([*shares @ pull_P, *slopes])
