"""Which charts a scaling report has, with their captions."""

from __future__ import annotations

from pretrain.scaling import charts, region_charts
from pretrain.scaling.checks import beyond
from pretrain.scaling.contours import equal_losses
from pretrain.scaling.fit import Fit
from pretrain.scaling.intervals import LEVEL


def charts_of(fit: Fit) -> dict[str, tuple[charts.Chart, str]]:
    """Name -> (chart, caption); only those that these runs allow."""
    _, where = beyond(float(fit.points.budgets[-1]))
    bands = f"Bands are {LEVEL}% intervals; right of the dashed line is extrapolation"
    held = ". A diamond is a run that was held out" if fit.holdouts else ""
    dash = ", a dash what approach 3 predicts for it, with its interval" if held else ""
    found: dict[str, tuple[charts.Chart, str]] = {
        "isoflop": (
            charts.valleys,
            "Final loss over parameters N, a color and a marker per budget of training FLOPs: a "
            "mark is a run, a curve approach 2's parabola in ln N, a star its lowest point if that "
            "is inside the sizes",
        ),
        "frontier": (
            charts.frontier,
            f"The least loss that C training FLOPs can buy, by each approach. {bands}{held}{dash}",
        ),
        "sizes": (
            charts.optimal_sizes,
            f"The compute-optimal number of parameters N* at C FLOPs. {bands}",
        ),
        "tokens": (
            charts.optimal_tokens,
            f"The compute-optimal number of training tokens D* at C FLOPs. {bands}",
        ),
    }
    law = fit.approach("parametric")
    if law:
        found["residuals"] = (
            charts.residuals,
            "Prediction of approach 3's law minus measured loss of every fitted run, in percent of "
            "the measured loss. A trend with FLOPs or color is an effect that the law does not "
            f"describe{held}",
        )
        found["contours"] = (
            equal_losses,
            "Lines of equal loss by approach 3's law, in nats per token; dotted lines of equal "
            "training FLOPs, with the runs of that budget; and the compute-optimal line",
        )
    if law and law.region:
        found["exponents"] = (
            region_charts.exponent_cloud,
            "The exponents of approach 3's law L(N, D) = E + A/N^alpha + B/D^beta, and those of "
            "its fits to resampled budgets",
        )
        found["optimum"] = (
            region_charts.optimum_cloud,
            f"The optimum at {where}: its size and loss (stars with the approach's number), and "
            "those of approach 3's fits to resampled budgets",
        )
    if fit.estimates.envelope and fit.estimates.envelope.kind != "minimum":
        found["envelope"] = (
            charts.envelope_curves,
            "The loss curves of approach 1 over FLOPs, and where the lowest one lies between "
            "smaller and larger sizes",
        )
    return found
