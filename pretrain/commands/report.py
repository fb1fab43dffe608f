"""`pretrain report`: a run as one self-contained page and a PNG."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from data_pipeline.config_loader import to_tree
from data_pipeline.files import write_text
from data_pipeline.progress import duration
from data_pipeline.yaml_files import dump_yaml
from pretrain.config.run import RunConfig
from pretrain.reporting.charts import panel_html, save_panels
from pretrain.reporting.html import Card, page, paragraph, section, table, text
from pretrain.reporting.run_charts import run_panels
from pretrain.reporting.run_history import History, read_history
from pretrain.rundir.ledger import events_of
from pretrain.rundir.training_events import GaveUp
from pretrain.terminal.text import counted, si
from pretrain.terminal.train_lines import perplexity

MOST_EVENTS = 60
CHART_INCHES = 2.7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain report`."""
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="run directory, of a finished or unfinished run"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="output directory of report.html and report.png (default: RUN)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print where it is."""
    history = read_history(arguments.run)
    directory = arguments.output or arguments.run
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "report.html", render(history))
    save_panels(directory / "report.png", history.name, run_panels(history))
    print(f"{directory / 'report.html'} and report.png: {summary(history)}")
    return 0


def summary(history: History) -> str:
    """The run in a line."""
    steps = history.config.optim.steps
    parts = [f"step {history.step:,} of {steps:,}", f"loss {history.loss:.4f}"]
    if history.goodput is not None:
        parts.append(f"goodput {history.goodput:.0%}")
    parts.append(f"failed attempts: {len(history.failures)}, rewinds: {len(history.rewinds)}")
    parts.append(f"skipped steps: {history.num_skipped}")
    return ", ".join(parts)


def render(history: History) -> str:
    """The whole page."""
    lead = f"{setup_of(history.config)}. Step {history.step:,} of {history.config.optim.steps:,}."
    charts = [
        section(
            panel.title,
            panel_html(panel, CHART_INCHES, f"{panel.title}: {panel.y_label} over {panel.x_label}"),
        )
        for panel in run_panels(history)
    ]
    footer = (
        "Written by 'pretrain report' from metrics.jsonl and ledger.jsonl. "
        "Losses in nats per token."
    )
    sections = [*charts, _events(history), _settings(history)]
    return page(history.name, "Training run", lead, _cards(history), sections, footer)


def setup_of(config: RunConfig) -> str:
    """Describe model, batch and engine in a line."""
    model, data, engine = config.model, config.data, config.engine
    return (
        f"{model.num_layers} layers of width {model.d_model}, {model.memory_length} tokens of "
        "memory; "
        f"{data.lanes} lanes in segments of {data.segment_length}; "
        f"ZeRO-{engine.zero_stage} in {engine.precision}"
    )


def _cards(history: History) -> list[Card]:
    cards = [
        Card(
            f"{history.loss:.3f}",
            f"training loss, a perplexity of {perplexity(history.loss):,.1f}",
        )
    ]
    if history.evaluations:
        last = history.evaluations[-1]
        words = f"validation loss after step {last['step']:,}"
        if last.get("loss_without_memory") is not None:
            words += f", {last['loss_without_memory']:.3f} without memory"
        cards.append(Card(f"{last['loss']:.3f}", words))
    speed = (
        f"at {history.tokens_per_second:,.0f} per second" if history.tokens_per_second else "so far"
    )
    cards.append(Card(si(history.tokens).strip(), f"tokens read, {speed}"))
    if history.goodput is not None:
        elapsed = duration(history.seconds_under_way)
        cards.append(Card(f"{history.goodput:.0%}", f"goodput: of {elapsed}, in productive steps"))
    rewinds = counted(len(history.rewinds), "automatic rewind")
    words = f"failed attempts; {rewinds}, {counted(history.num_skipped, 'skipped step')}"
    mood = "bad" if events_of(history.ledger, GaveUp) else ""
    return [*cards, Card(str(len(history.failures)), words, mood)]


def _events(history: History) -> str:
    shown = list(history.ledger)[-MOST_EVENTS:]
    rows = [
        [time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.time)), event.description]
        for event in shown
    ]
    left_out = len(history.ledger) - len(shown)
    more = [paragraph(f"{left_out} earlier events are in ledger.jsonl.")] if left_out else []
    return section("Events", *more, table([], rows, "words"))


def _settings(history: History) -> str:
    return section("Settings", f"<pre>{text(dump_yaml(to_tree(history.config)))}</pre>")
