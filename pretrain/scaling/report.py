"""A fit as one self-contained HTML file, its pictures beside it as PNG, and its numbers as JSON."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_pipeline.files import replacing, write_json, write_text
from pretrain.report import Card, chart_html, page, paragraph, section, table
from pretrain.scaling import charts
from pretrain.scaling.fit import BEYOND, Fit, disagreement
from pretrain.scaling.lines import LEVEL
from pretrain.scaling.predict import BAND, near_optimal_band, preferred
from pretrain.scaling.summary import approach_table, fit_tree, law_intervals, number, shown

PNG_DPI = 150
MOST_ROWS = 60


def write_report(fit: Fit, directory: Path, title: str) -> Path:
    """Write report.html, fit.json and the PNGs into `directory`; returns the HTML's path."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, str] = {}
    for name, (chart, caption) in _charts(fit).items():
        drawn[name] = chart_html(chart(fit, charts.PAGE), caption) + paragraph(caption + ".")
        with replacing(directory / f"{name}.png") as file:
            chart(fit, charts.PRINT).savefig(file, format="png", dpi=PNG_DPI, metadata={"Software": None})
    path = directory / "report.html"
    write_text(path, render(fit, title, drawn))
    write_json(directory / "fit.json", fit_tree(fit))
    return path


def render(fit: Fit, title: str, drawn: dict[str, str]) -> str:
    """The whole page; `drawn` holds the pictures by name."""
    points = fit.points
    lead = (
        f"{len(points)} runs at {len(points.budgets)} budgets from {points.flops_P.min():.3g} to "
        f"{points.flops_P.max():.3g} training FLOPs. Every interval holds {LEVEL}% of {fit.num_draws} bootstrap draws."
    )
    sections = [
        _approaches(fit),
        _pictures("Valleys of equal FLOPs", drawn, "isoflop"),
        _pictures("The frontier", drawn, "frontier", "sizes", "tokens"),
        _law(fit, drawn),
        _checks(fit),
        _pictures("What the bootstrap says", drawn, "exponents", "optimum"),
        _pictures("Approach 1's curves", drawn, "envelope"),
        _costs(fit),
        _warnings(fit),
        _left_out(fit),
        _runs(fit),
    ]
    footer = (
        "Written by 'pretrain scale report'. Losses in nats per token; fit.json beside this file has all the numbers."
    )
    return page(title, "Scaling laws", lead, _cards(fit), [part for part in sections if part], footer)


def _charts(fit: Fit) -> dict[str, tuple[charts.Chart, str]]:
    """Name -> (drawing, what it shows in words); only those that these runs allow."""
    found: dict[str, tuple[charts.Chart, str]] = {
        "isoflop": (
            charts.valleys,
            "Loss over parameters, one colour per budget; stars are the parabolas' lowest points",
        ),
        "frontier": (charts.frontier, "Loss over FLOPs: every run, and the least loss by each approach with its band"),
        "sizes": (charts.optimal_sizes, "Optimal parameters over FLOPs by each approach with its band"),
        "tokens": (charts.optimal_tokens, "Optimal tokens over FLOPs by each approach with its band"),
        "optimum": (charts.optimum_cloud, f"Bootstrap draws of the optimum at {BEYOND:.0f} times the largest budget"),
    }
    if fit.approach("parametric"):
        found["residuals"] = (charts.residuals, "Relative error of approach 3 for every run")
        found["exponents"] = (charts.exponent_cloud, "Bootstrap draws of the two exponents of approach 3")
    if fit.estimates.envelope and fit.estimates.envelope.kind != "minimum":
        found["envelope"] = (charts.envelope_curves, "Loss curves over FLOPs and their lower envelope")
    return found


def _pictures(title: str, drawn: dict[str, str], *names: str) -> str:
    present = [drawn[name] for name in names if name in drawn]
    return section(title, *present) if present else ""


def _cards(fit: Fit) -> list[Card]:
    approach = preferred(fit)
    beyond = float(np.log(fit.points.budgets[-1])) + float(np.log(BEYOND))
    a, _ = approach.powers(fit.flops_law)
    size, tokens = approach.parameters(beyond), approach.tokens(beyond, fit.flops_law)
    low, high = (number(value, prefix=True) for value in (size.low, size.high))
    cards = [
        Card(
            number(size.value, prefix=True),
            f"parameters ({low} to {high}) over {number(tokens.value, prefix=True)} tokens are optimal at "
            f"{np.exp(beyond):.2g} FLOPs, {BEYOND:.0f} times the largest budget, by approach {approach.title}",
        ),
        Card(f"{a.value:.3f}", f"is the exponent a of N* ~ C^a ({a.low:.3f} to {a.high:.3f})"),
    ]
    if fit.left_out and fit.left_out.law_error is not None:
        words = (
            f"is how far the law of the smaller budgets misses the runs at {fit.left_out.budget:.3g} FLOPs, on average"
        )
        cards.append(Card(f"{fit.left_out.law_error:.2%}", words))
    if fit.holdouts:
        furthest = max(fit.holdouts, key=lambda item: item.flops)
        words = f"is by how much the run held out at {furthest.flops:.3g} FLOPs ended above (-: below) its prediction"
        cards.append(Card(f"{furthest.error:+.2%}", words))
    return cards


def _approaches(fit: Fit) -> str:
    heads, rows = approach_table(fit)
    transposed = [[head, *(row[index] for row in rows)] for index, head in enumerate(heads)]
    parts = [table(transposed[0], transposed[1:], "named")]
    parts += [paragraph(f"Approach {key} is not available: {why}") for key, why in fit.estimates.unavailable.items()]
    flops = float(fit.points.budgets[-1])
    if len(fit.approaches) > 1:
        ratio = disagreement(fit.approaches, float(np.log(flops)) + float(np.log(BEYOND)))
        parts.append(paragraph(f"At {BEYOND * flops:.3g} FLOPs their optimal sizes differ {ratio:.2f}x."))
    if band := near_optimal_band(fit, flops):
        low, high = (number(size, prefix=True) for size in band)
        parts.append(
            paragraph(f"At {flops:.3g} FLOPs every size from {low} to {high} loses at most {BAND:.0%} of the loss.")
        )
    return section("Three approaches side by side", *parts)


def _law(fit: Fit, drawn: dict[str, str]) -> str:
    law = law_intervals(fit)
    if not law:
        return ""
    assert fit.estimates.parametric
    words = f"L(N, D) = E + A/N^alpha + B/D^beta; mean error on its own runs {fit.estimates.parametric.mean_error:.3%}."
    rows = [[name, f"{value.value:.4g}", f"{value.low:.4g}", f"{value.high:.4g}"] for name, value in law.items()]
    return section(
        "Approach 3's law", paragraph(words), table(["", "estimate", "low", "high"], rows, "named"), drawn["residuals"]
    )


def _checks(fit: Fit) -> str:
    parts = []
    if (left := fit.left_out) and left.measured:
        size, loss = left.measured
        rows = [["measured", number(size, prefix=True), f"{loss:.4f}", "", ""]]
        rows += [
            [key, number(n, prefix=True), f"{least:.4f}", f"{n / size - 1:+.0%}", f"{least / loss - 1:+.2%}"]
            for key, (n, least) in left.optimum.items()
        ]
        parts.append(paragraph(f"The optimum at {left.budget:.3g} FLOPs, predicted without the runs of that budget:"))
        parts.append(table(["", "N*", "loss", "error of N*", "error of the loss"], rows, "named"))
    if fit.holdouts:
        rows = [
            [item.name, number(item.parameters, prefix=True), number(item.tokens, prefix=True), f"{item.measured:.4f}",
             shown(item.predicted, 5), f"{item.error:+.2%}"]
            for item in fit.holdouts
        ]  # fmt: skip
        parts.append(
            paragraph("Runs that were held out; the interval is the law's and holds no noise of a single run:")
        )
        parts.append(table(["run", "N", "D", "measured", "predicted", "error"], rows, "named"))
    return section("Runs the fit did not see", *parts) if parts else ""


def _costs(fit: Fit) -> str:
    points, rows = fit.points, []
    for budget in points.budgets[:MOST_ROWS]:
        mine = points.take(points.budget_P == budget)
        sizes, tokens = (
            f"{number(values.min(), prefix=True)} to {number(values.max(), prefix=True)}"
            for values in (mine.parameters_P, mine.tokens_P)
        )
        share = mine.flops_P.sum() / points.flops_P.sum()
        rows.append([f"{budget:.3g}", str(len(mine)), sizes, tokens, f"{mine.flops_P.sum():.3g}", f"{share:.0%}"])
    tokens = number(points.tokens_P.sum(), prefix=True)
    rows.append(["all", str(len(points)), "", f"{tokens} in all", f"{points.flops_P.sum():.3g}", "100%"])
    law = f"FLOPs per token of these runs: {fit.flops_law.scale:.4g} N^{fit.flops_law.power:.4g}."
    heads = ["budget", "runs", "parameters", "tokens", "FLOPs", "share"]
    return section("What it cost", paragraph(law), table(heads, rows, "named"))


def _warnings(fit: Fit) -> str:
    rows = [["the runs", warning] for warning in fit.warnings]
    rows += [[approach.title, warning] for approach in fit.approaches for warning in approach.warnings]
    return section("Warnings", table(["about", "warning"], rows, "words")) if rows else ""


def _left_out(fit: Fit) -> str:
    rows = [[item.name, item.reason] for item in fit.points.excluded]
    return section("Left out", table(["run", "reason"], rows, "words")) if rows else ""


def _runs(fit: Fit) -> str:
    points = fit.points
    order = np.lexsort((points.parameters_P, points.budget_P))[:MOST_ROWS]
    rows = [
        [
            points.names[i],
            *(number(float(values[i]), prefix=True) for values in (points.parameters_P, points.tokens_P)),
            f"{points.flops_P[i]:.3g}",
            f"{points.loss_P[i]:.4f}",
        ]
        for i in order
    ]
    more = f"The first {MOST_ROWS} of {len(points)}." if len(points) > MOST_ROWS else f"All {len(points)}."
    return section("The runs", paragraph(more), table(["run", "N", "D", "C", "loss"], rows, "named"))
