"""A comparison of variants as one table and one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.csv_files import write_csv
from data_pipeline.files import write_json, write_text
from pretrain.reporting.charts import SERIES, Palette, Panel, plain_ticks, save_panels
from pretrain.scaling.charts import LOSS
from pretrain.scaling.intervals import amount, as_loss
from pretrain.scaling.variants.results import FAR, MemberResult
from pretrain.terminal.text import counted, flops_text, markdown_table, number, si

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "variants"
_COLUMNS = ("member", "loss", "spread", "far_loss", "needle_accuracy", "needle_chance", "rate")
_COLUMNS += ("is_edge", "lane_bytes", "tokens_per_second", "parameters", "tokens", "flops")


def variant_table(results: Sequence[MemberResult]) -> list[list[str]]:
    """Heads and rows, lowest loss first; a star marks a rate at the edge of those tried."""
    heads = ["member", "loss", "+-", f"loss from token {FAR}", "needle", "rate"]
    heads += ["state of a lane", "tokens/s", "parameters", "tokens"]
    rows = [
        [
            each.member,
            as_loss(each.loss),
            number(each.spread, ".4f"),
            number(each.far_loss, ".4f"),
            number(each.needle_accuracy, ".1%"),
            f"{each.rate:g}{'*' * each.is_edge}",
            f"{si(each.lane_bytes)}B",
            number(each.tokens_per_second, ",.0f"),
            amount(each.parameters),
            amount(each.tokens),
        ]
        for each in sorted(results, key=lambda each: each.loss)
    ]
    return [heads, *rows]


def variant_notes(results: Sequence[MemberResult]) -> list[str]:
    """Say what the columns are, and what they rest on."""
    seeds = max(len(each.losses_S) for each in results)
    first = results[0]
    distances = ", ".join(map(str, first.needle)) or "none"
    notes = [
        f"Every run trained for {flops_text(first.flops)} FLOPs.",
        "Losses are of the validation split in nats per token,",
        f"means of {counted(seeds, 'seed')} at the member's best rate; +- is half their range.",
        f"Needle is the mean accuracy over distances of {distances} tokens;",
        f"chance is {first.needle_chance:.1%}. tokens/s is the median of the member's runs.",
    ]
    if any(each.is_edge for each in results):
        notes.append(
            "A star marks the lowest or highest rate tried: a better one may lie beyond it."
        )
    return notes


def write_variant_report(
    results: Sequence[MemberResult], directory: Path, title: str
) -> dict[str, Path]:
    """Write variants.md, .csv, .json and .png; return their paths by suffix."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {suffix: directory / f"{NAME}.{suffix}" for suffix in ("md", "csv", "json", "png")}
    trees = [asdict(each) | {name: getattr(each, name) for name in _COLUMNS} for each in results]
    write_json(paths["json"], trees)
    write_csv(paths["csv"], _COLUMNS, [{name: tree[name] for name in _COLUMNS} for tree in trees])
    save_panels(paths["png"], title, variant_panels(results))
    table = markdown_table(variant_table(results))
    notes = "\n".join(variant_notes(results))
    picture = f"![Loss, loss by position, needle and state of each member]({NAME}.png)"
    write_text(paths["md"], f"{table}\n\n{notes}\n\n{picture}\n")
    return paths


def variant_panels(results: Sequence[MemberResult]) -> list[Panel]:
    """Return the parts of the picture; a member has one color in all of them."""
    first = results[0].member
    return [
        Panel("Loss at equal training FLOPs, a dot per seed", LOSS, "", _losses(results)),
        Panel(
            "Loss by position in the document",
            "position (tokens)",
            f"loss minus that of {first}",
            _positions(results),
        ),
        Panel("Needle", "distance (tokens)", "accuracy", _needles(results)),
        Panel("Loss and state", "bytes that a lane carries", LOSS, _states(results)),
    ]


def _color(index: int) -> str:
    return SERIES[index % len(SERIES)]


def _losses(results: Sequence[MemberResult]):
    def draw(axes: Axes, palette: Palette) -> None:
        for index, each in enumerate(results):
            at = [index] * len(each.losses_S)
            axes.plot(each.losses_S, at, "o", color=_color(index), markersize=5, alpha=0.6)
            axes.plot([each.loss], [index], "|", color=palette.ink, markersize=14)
        axes.set_yticks(range(len(results)), [each.member for each in results])
        axes.invert_yaxis()

    return draw


def _positions(results: Sequence[MemberResult]):
    def draw(axes: Axes, palette: Palette) -> None:
        base = results[0].position_losses_X
        num_bins = min(len(each.position_losses_X) for each in results)
        shown = [index for index in range(num_bins) if results[0].position_tokens_X[index]]
        for number_, each in enumerate(results):
            values = [each.position_losses_X[index] - base[index] for index in shown]
            axes.plot(shown, values, "o-", color=_color(number_), markersize=3, linewidth=1.3,
                      label=each.member)  # fmt: skip
        firsts = results[0].first_positions_X
        axes.set_xticks(shown[::2], [str(firsts[index]) for index in shown[::2]])
        axes.axhline(0, color=palette.faint, linewidth=0.8)

    return draw


def _needles(results: Sequence[MemberResult]):
    def draw(axes: Axes, palette: Palette) -> None:
        for index, each in enumerate(results):
            axes.plot(list(each.needle), list(each.needle.values()), "o-", color=_color(index),
                      markersize=3, linewidth=1.3, label=each.member)  # fmt: skip
        axes.axhline(results[0].needle_chance, color=palette.faint, label="chance")
        axes.set_xscale("log", base=2)
        distances = list(results[0].needle)
        axes.set_xticks(distances, list(map(str, distances)))
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:.0%}")

    return draw


def _states(results: Sequence[MemberResult]):
    def draw(axes: Axes, palette: Palette) -> None:
        del palette
        for index, each in enumerate(results):
            axes.plot([each.lane_bytes], [each.loss], "o", color=_color(index), markersize=6,
                      label=each.member)  # fmt: skip
        axes.xaxis.set_major_formatter(lambda value, _: f"{si(value)}B")
        plain_ticks(axes.yaxis)

    return draw
