"""`pretrain compare`: several runs side by side, as a table here and as a page and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.config_loader import differences, to_tree
from data_pipeline.errors import ConfigError
from data_pipeline.files import write_text
from pretrain.reporting.charts import panel_html, save_panels
from pretrain.reporting.html import page, paragraph, section, table
from pretrain.reporting.run_charts import comparison_panels
from pretrain.reporting.run_history import History, read_history
from pretrain.terminal.text import si, text_table
from pretrain.terminal.train_lines import perplexity

HEADS = ("run", "step", "tokens", "loss", "perplexity", "validation", "tokens/s", "goodput")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain compare`."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="directories of two runs or more"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="also write compare.html and compare.png there"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a row per run and the settings in which they differ."""
    if len(arguments.runs) < 2:
        raise ConfigError(
            "'pretrain compare' needs two runs or more; 'pretrain report' shows a single one"
        )
    histories = [read_history(path) for path in arguments.runs]
    rows, changed = [row(history) for history in histories], _differing_settings(histories)
    print(text_table([HEADS, *rows]))
    if changed:
        print(
            "\n"
            + text_table([("setting", *(history.path.name for history in histories)), *changed])
        )
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output / "compare.html", render(histories, rows, changed))
        title = " / ".join(history.name for history in histories)
        save_panels(arguments.output / "compare.png", title, comparison_panels(histories))
        print(f"\n{arguments.output / 'compare.html'} and compare.png")
    return 0


def render(
    histories: Sequence[History], rows: Sequence[Sequence[str]], changed: Sequence[Sequence[str]]
) -> str:
    """The whole page."""
    losses, speeds = comparison_panels(histories)
    settings = (
        table(["setting", *(history.path.name for history in histories)], changed, "named")
        if changed
        else paragraph("All settings are the same.")
    )
    caption = "Smoothed training loss of every run over its tokens"
    sections = [
        section("Loss", panel_html(losses, 3.4, f"{caption}; dots are validation")),
        section("Numbers", table(HEADS, rows, "named")),
        section("Different settings", settings),
        section("Speed", panel_html(speeds, 2.4, "Tokens per second of every run")),
    ]
    lead = f"{len(histories)} runs over the tokens they have read; dots are validation losses."
    return page(
        "Runs side by side", "Comparison", lead, [], sections, "Written by 'pretrain compare'."
    )


def row(history: History) -> tuple[str, ...]:
    """Return a run's numbers under HEADS."""
    validation = [line["loss"] for line in history.evaluations]
    speed, goodput = history.tokens_per_second, history.goodput
    return (
        history.name,
        f"{history.step:,}",
        si(history.tokens).strip(),
        f"{history.loss:.4f}",
        f"{perplexity(history.loss):,.2f}",
        f"{validation[-1]:.4f}" if validation else "-",
        f"{speed:,.0f}" if speed else "-",
        f"{goodput:.0%}" if goodput is not None else "-",
    )


def _differing_settings(histories: Sequence[History]) -> list[tuple[str, ...]]:
    """A row per setting that is not the same everywhere, with every run's value."""
    first, *others = [to_tree(history.config) for history in histories]
    keys = sorted({key for other in others for key in differences(first, other)})
    return [(key, *(str(_value_at(tree, key)) for tree in (first, *others))) for key in keys]


def _value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
