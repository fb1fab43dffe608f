"""`pretrain report`: a run as one self-contained page and a PNG."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from foundation.cli import value_text
from foundation.errors import printable
from foundation.progress import duration
from foundation.settings import to_tree
from foundation.yaml_files import dump_yaml
from pretrain.commands.output_paths import check_output_directory
from pretrain.config.run import RunConfig
from pretrain.reporting.charts import panel_html, save_panels
from pretrain.reporting.html import Card, page, paragraph, preformatted, section, table, write_page
from pretrain.reporting.run_charts import run_panels
from pretrain.reporting.run_history import History, read_histories
from pretrain.reporting.run_warnings import warnings_of
from pretrain.rundir.events import GaveUp
from pretrain.rundir.ledger import events_of
from pretrain.rundir.metric_names import (
    MEMORY_GAIN,
    RUN_SPEED,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    latest_with_tasks,
    set_loss_name,
    set_losses,
    task_metrics,
)
from pretrain.rundir.run_paths import run_path
from pretrain.scaling.which_runs import runs_of
from pretrain.terminal.text import counted, number, perplexity, si

MOST_EVENTS = 60
CHART_INCHES = 2.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain report`."""
    parser.add_argument(
        "runs",
        type=run_path,
        nargs="+",
        metavar="RUN",
        help="runs, finished or not, their names in runs/, a sweep file, or a folder of runs",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="directory for report.html and report.png (default: the run's); with several runs, a "
        "folder there for each",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write a report for each run and print where it is."""
    if arguments.output:
        check_output_directory("--output", arguments.output)
    paths = runs_of(arguments.runs)
    for history in read_histories(paths, at_least=1):
        directory = arguments.output or history.path
        if arguments.output and len(paths) > 1:
            directory /= history.path.name
        _write(history, directory)
    return 0


def _write(history: History, directory: Path) -> None:
    write_page(directory / "report.html", render(history))
    save_panels(directory / "report.png", history.name, run_panels(history))
    print(printable(f"{directory / 'report.html'} and report.png: {summary(history)}"))
    for warning in warnings_of(history):
        print(f"warning: {warning}")


def summary(history: History) -> str:
    """The run in a line."""
    steps = history.config.optim.steps
    results = history.results
    parts = [
        f"step {history.step:,} of {steps:,}",
        f"{TRAIN_LOSS} {number(results.train_loss, '.4f')}",
        f"{VALIDATION_LOSS} {results.cells[VALIDATION_LOSS]}",
    ]
    if history.time_spent is not None:
        parts.append(f"goodput {history.time_spent.goodput:.0%}")
    parts.append(f"failed attempts: {len(history.failures)}, rewinds: {len(history.rewinds)}")
    parts.append(f"skipped steps: {history.measured.num_skipped}")
    parts += filter(None, [history.unsaved])
    return ", ".join(parts)


def render(history: History) -> str:
    """The whole page."""
    step = f"Step {history.step:,} of {history.config.optim.steps:,}"
    step = "; ".join(filter(None, (step, history.unsaved)))
    lead = f"{setup_of(history.config)}. {step}."
    charts = [
        section(
            panel.title,
            panel_html(panel, CHART_INCHES, f"{panel.title}: {panel.y_label} over {panel.x_label}"),
        )
        for panel in run_panels(history)
    ]
    footer = (
        "Written by 'pretrain report' from metrics.jsonl and ledger.jsonl. "
        "Losses in nats per token, but for bits per byte."
    )
    sections = [
        *_warnings(history),
        *charts,
        _sets(history),
        _tasks(history),
        _time(history),
        _events(history),
        _settings(history),
    ]
    return page(history.name, "Training run", lead, _cards(history), sections, footer)


def setup_of(config: RunConfig) -> str:
    """Describe model, batch and engine in a line."""
    model, data, engine = config.model, config.data, config.engine
    return (
        f"{model.num_layers} layers of width {model.d_model}, "
        f"{value_text(model.memory_length)} tokens of memory; "
        f"{data.lanes} lanes in segments of {data.segment_length}; "
        f"ZeRO-{engine.zero_stage} in {engine.precision}"
    )


def _cards(history: History) -> list[Card]:
    results, loss = history.results, history.results.train_loss
    words = f"{TRAIN_LOSS}: mean of the latest interval"
    if loss is not None:
        words += f", a perplexity of {perplexity(loss):,.1f}"
    cards = [Card(number(loss, ".4f"), words)]
    if results.validation_loss is not None:
        words = f"{VALIDATION_LOSS} after step {history.evaluations[-1]['step']:,}"
        if results.bits_per_byte is not None:
            words += f", {results.bits_per_byte:.4f} bits per byte"
        cards.append(Card(f"{results.validation_loss:.4f}", words))
    if results.memory_gain is not None:
        words = f"{MEMORY_GAIN}: how much higher the {VALIDATION_LOSS} is without memory"
        cards.append(Card(f"{results.memory_gain:+.4f}", words))
    speed = results.run_tokens_per_second
    speed = "so far" if speed is None else f"at {speed:,.0f} {RUN_SPEED}"
    cards.append(Card(si(history.tokens).strip(), f"tokens read, {speed}"))
    if (spent := history.time_spent) is not None:
        words = f"goodput: of {duration(spent.total)}, in productive steps"
        cards.append(Card(f"{spent.goodput:.0%}", words))
    rewinds = counted(len(history.rewinds), "automatic rewind")
    words = f"failed attempts; {rewinds}, {counted(history.measured.num_skipped, 'skipped step')}"
    mood = "bad" if events_of(history.ledger, GaveUp) else ""
    return [*cards, Card(str(len(history.failures)), words, mood)]


def _warnings(history: History) -> list[str]:
    found = warnings_of(history)
    return [section("Warnings", *(paragraph(each, "alarm") for each in found))] if found else []


def _sets(history: History) -> str:
    """The latest loss of each set, if there are any."""
    line = history.summary.evaluation or {}
    if not (losses := set_losses(line)):
        return ""
    rows = [
        [set_loss_name(printable(name)), number(loss, ".4f"), f"{perplexity(loss):,.2f}"]
        for name, loss in losses.items()
    ]
    words = f"After step {line['step']:,}, with the memory that the run trains with."
    heads = ["", "loss", "perplexity"]
    return section("Losses by corpus", paragraph(words), table(heads, rows, "named"))


def _tasks(history: History) -> str:
    """The latest metrics of tasks, if there are any."""
    if (line := latest_with_tasks(history.evaluations)) is None:
        return ""
    rows = [[printable(name), f"{value:.4f}"] for name, value in task_metrics(line).items()]
    words = f"After step {line['step']:,}."
    return section("Tasks", paragraph(words), table(["", "value"], rows, "named"))


def _time(history: History) -> str:
    spent = history.time_spent
    if spent is None:
        return ""
    rows = [
        [name.replace("_", " "), duration(seconds), f"{seconds / spent.total:.1%}"]
        for name, seconds in vars(spent).items()
    ]
    words = (
        "Goodput is the part of training. Restarts are all that has no line of its own: starts, "
        "waiting after failures, steps made again."
    )
    return section("Time", paragraph(words), table(["", "time", "part"], rows, "named"))


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
    return section("Settings", preformatted(dump_yaml(to_tree(history.config))))
