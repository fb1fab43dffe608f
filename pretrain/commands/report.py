"""`pretrain report`: one run's past as a self-contained page and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.config_loader import to_tree
from data_pipeline.files import write_text
from data_pipeline.yaml_files import dump_yaml
from pretrain.reporting import events
from pretrain.reporting import run_charts as charts
from pretrain.reporting.figures import Panel, save_panels
from pretrain.reporting.html import (
    Card,
    chart_html,
    legend,
    new_chart,
    page,
    paragraph,
    section,
    table,
    text,
)
from pretrain.reporting.run_history import History, read_history
from pretrain.terminal.text import duration, si
from pretrain.terminal.train_lines import perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_EVENTS = 60
Draw = Callable[["Axes", History, charts.Colours], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain report`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run, finished or not")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where report.html and report.png go (default: RUN)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    history = read_history(arguments.run)
    directory = arguments.output or arguments.run
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "report.html", render(history))
    panels = [Panel(title, x, y, _bound(draw, history)) for title, x, y, draw in _drawings(history)]
    save_panels(directory / "report.png", history.name, panels)
    print(f"{directory / 'report.html'} and report.png: {summary(history)}")
    return 0


def summary(history: History) -> str:
    """The run in a line."""
    steps = history.config.optim.steps
    parts = [f"step {history.step:,} of {steps:,}", f"loss {history.loss:.4f}"]
    if history.goodput is not None:
        parts.append(f"goodput {history.goodput:.0%}")
    parts.append(
        f"failed attempts: {len(history.failures)}, rewinds: {len(history.events('rewind'))}"
    )
    parts.append(f"skipped steps: {history.num_skipped}")
    return ", ".join(parts)


def render(history: History) -> str:
    """The whole page."""
    model, data, engine = history.config.model, history.config.data, history.config.engine
    lead = (
        f"{model.num_layers} layers of width {model.d_model}, {model.memory_length} tokens of memory; "
        f"{data.lanes} lanes in segments of {data.segment_length}; ZeRO-{engine.zero_stage} in {engine.precision}. "
        f"Step {history.step:,} of {history.config.optim.steps:,}."
    )
    pictures = [
        section(title, _picture(x, y, draw, history, title))
        for title, x, y, draw in _drawings(history)
    ]
    footer = "Written by 'pretrain report' from metrics.jsonl and ledger.jsonl. Losses in nats per token."
    sections = [*pictures, _happenings(history), _settings(history)]
    return page(history.name, "Training run", lead, _cards(history), sections, footer)


def _drawings(history: History) -> list[tuple[str, str, str, Draw]]:
    """Title, axes and drawing of every picture that this run has numbers for."""
    found: list[tuple[str, str, str, Draw]] = [
        ("Loss", "step", "loss, nats per token", charts.loss)
    ]
    if any(line.get("loss_without_memory") is not None for line in history.evaluations):
        found.append(("What memory is worth", "step", "validation loss", charts.value_of_memory))
    if any("tokens_per_second" in line for line in history.train):
        found.append(("Speed", "step", "tokens per second", charts.speed))
    if any(line.get("grad_norm") is not None for line in history.train):
        found.append(("Gradients", "step", "norm before clipping", charts.gradient_norm))
    if history.layers("grad_norm"):
        found.append(("Gradients by layer", "step", "norm before clipping", charts.norms_by_layer))
        found.append(("Updates by layer", "step", "update / weights", charts.updates_by_layer))
    if any("time" in line for line in history.train):
        found.append(("Progress", "seconds since the first start", "step", charts.progress))
    return found


def _picture(x_label: str, y_label: str, draw: Draw, history: History, title: str) -> str:
    figure, axes = new_chart(2.7, x_label, y_label)
    draw(axes, history, charts.PAGE)
    if axes.get_legend_handles_labels()[1]:
        legend(axes, loc="best")
    return chart_html(figure, f"{title}: {y_label} over {x_label}")


def _bound(draw: Draw, history: History) -> Callable[[Axes, charts.Colours], None]:
    return lambda axes, colours: draw(axes, history, colours)


def _cards(history: History) -> list[Card]:
    cards = [
        Card(
            f"{history.loss:.3f}",
            f"is the training loss, a perplexity of {perplexity(history.loss):,.1f}",
        )
    ]
    if history.evaluations:
        last = history.evaluations[-1]
        words = f"is the validation loss after step {last['step']:,}"
        if last.get("loss_without_memory") is not None:
            words += f", {last['loss_without_memory']:.3f} without memory"
        cards.append(Card(f"{last['loss']:.3f}", words))
    speed = (
        f"at {history.tokens_per_second:,.0f} a second" if history.tokens_per_second else "so far"
    )
    cards.append(Card(si(history.tokens).strip(), f"tokens read, {speed}"))
    if history.goodput is not None:
        spent = duration(history.seconds_under_way)
        cards.append(
            Card(f"{history.goodput:.0%}", f"of {spent} under way went into steps that count")
        )
    rewinds = len(history.events("rewind"))
    words = f"failed attempts; {rewinds} times it went back by itself, {history.num_skipped} of its steps were skipped"
    cards.append(
        Card(str(len(history.failures)), words, "bad" if history.events("gave_up") else "")
    )
    return cards


def _happenings(history: History) -> str:
    shown = list(history.ledger)[-MOST_EVENTS:]
    rows = [
        [str(event.get("time", ""))[:19].replace("T", " "), events.describe(event)]
        for event in shown
    ]
    left_out = len(history.ledger) - len(shown)
    more = [paragraph(f"{left_out} earlier events are in ledger.jsonl.")] if left_out else []
    return section("What happened", *more, table([], rows, "words"))


def _settings(history: History) -> str:
    return section("Settings", f"<pre>{text(dump_yaml(to_tree(history.config)))}</pre>")
