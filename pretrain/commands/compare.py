"""`pretrain compare`: several runs side by side, as a table here and as a page and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from foundation.cli import value_text
from foundation.errors import ConfigError, printable
from pretrain.reporting.charts import TITLE_CHARACTERS, panel_html, save_panels
from pretrain.reporting.html import page, paragraph, section, table, write_page
from pretrain.reporting.results import differing_settings
from pretrain.reporting.run_charts import comparison_panels
from pretrain.reporting.run_history import History, read_histories
from pretrain.rundir.metric_names import (
    SPEED,
    latest_with_tasks,
    set_loss_name,
    set_losses,
    task_metrics,
)
from pretrain.rundir.run_paths import run_path
from pretrain.scaling.which_runs import runs_of
from pretrain.terminal.text import distinguished, fitted_table, number, si


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain compare`."""
    parser.add_argument(
        "runs",
        type=run_path,
        nargs="+",
        metavar="RUN",
        help="two runs or more, their names in runs/, a sweep file, or a folder of runs",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="also write compare.html and compare.png there"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a column per run: its numbers, and the settings in which the runs differ."""
    paths = runs_of(arguments.runs)
    if len(paths) < 2:
        raise ConfigError(
            "'pretrain compare' needs two runs or more; 'pretrain report' shows a single one"
        )
    return compare(read_histories(paths, at_least=2), arguments.output)


def compare(histories: Sequence[History], output: Path | None, title: str = "") -> int:
    """Print the tables, and write page and picture, with this title, to `output`; 0."""
    rows, changed = numbers_of(histories), _differing_settings(histories)
    print(fitted_table([heads_of(histories), *rows]))
    if changed:
        print("\n" + fitted_table([("setting", *heads_of(histories)[1:]), *changed]))
    if left_out := _left_out(histories):
        print(f"\n{left_out}")
    if output:
        write_page(output / "compare.html", render(histories, rows, changed))
        title = title or title_of([history.name for history in histories])
        save_panels(output / "compare.png", title, comparison_panels(histories))
        print(printable(f"\n{output / 'compare.html'} and compare.png"))
    return 0


def title_of(names: Sequence[str]) -> str:
    """The title of a picture of these runs: their names while they fit on a line."""
    title = " / ".join(names)
    return title if len(title) <= TITLE_CHARACTERS else f"{len(names)} runs"


def render(
    histories: Sequence[History], rows: Sequence[Sequence[str]], changed: Sequence[Sequence[str]]
) -> str:
    """The whole page."""
    losses, speeds = comparison_panels(histories)
    heads = heads_of(histories)
    settings = (
        table(["setting", *heads[1:]], changed, "named")
        if changed
        else paragraph("All settings are the same.")
    )
    caption = "Smoothed loss of every run over its tokens"
    sections = [
        section("Loss", panel_html(losses, 2.8, f"{caption}; dots are validation")),
        section("Numbers", table(heads, rows, "named")),
        section("Different settings", settings),
        section("Speed", panel_html(speeds, 2.2, f"{SPEED} of every interval of each run")),
    ]
    lead = f"{len(histories)} runs over the tokens they have read; dots are validation losses. "
    lead += _left_out(histories)
    return page(
        "Runs side by side", "Comparison", lead, [], sections, "Written by 'pretrain compare'."
    )


def numbers_of(histories: Sequence[History]) -> list[tuple[str, ...]]:
    """Return a row per quantity: its name, and its value in each run."""
    columns = list(map(_numbers, histories))
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, "-") for column in columns)) for name in names]


def _numbers(history: History) -> dict[str, str]:
    results = history.results
    return {
        "step": f"{history.step:,}",
        "tokens": si(history.tokens).strip(),
        **results.cells,
        **{
            set_loss_name(printable(name)): number(loss, ".4f") + results.when_validated
            for name, loss in set_losses(history.summary.evaluation).items()
        },
        **{
            printable(name): f"{value:.4f}"
            for name, value in task_metrics(latest_with_tasks(history.evaluations)).items()
        },
    }


def heads_of(histories: Sequence[History]) -> tuple[str, ...]:
    """Return the heads of a table with a column per run."""
    return ("run", *distinguished([printable(history.path.name) for history in histories]))


def _left_out(histories: Sequence[History]) -> str:
    """Say what all names start with, if the heads leave it out; else ""."""
    name, shown = printable(histories[0].path.name), heads_of(histories)[1]
    return f"All names start with {name.removesuffix(shown)!r}." if name != shown else ""


def _differing_settings(histories: Sequence[History]) -> list[tuple[str, ...]]:
    """A row per setting that is not the same everywhere, with every run's value."""
    found = differing_settings([history.config for history in histories])
    return [(key, *map(value_text, values)) for key, values in found.items()]
