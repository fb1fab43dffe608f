"""The page of a run, and the page of several runs side by side with its tables. Torch-free."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.cli import Answer, value_text
from foundation.errors import printable
from foundation.progress import duration
from foundation.tables import write_csv
from foundation.typed_values import to_tree
from foundation.yaml_files import dump_yaml
from pretrain.config.run import RunConfig
from pretrain.costs.flops import model_in_words
from pretrain.reporting.charts import comparison_panels, panel_html, run_panels
from pretrain.reporting.html import Card, page, paragraph, preformatted, section, table, write_page
from pretrain.reporting.members import (
    NO_EFFECT,
    NOTE,
    Member,
    beside,
    member_names,
    member_rows,
    without_shared,
    write_table,
)
from pretrain.reporting.rate_warnings import rate_warnings
from pretrain.reporting.results import differing_settings
from pretrain.reporting.run_history import History
from pretrain.rundir.evaluated_text import PARTS, EvaluatedText
from pretrain.rundir.events import GaveUp, Published
from pretrain.rundir.history import find_events
from pretrain.rundir.metric_names import (
    MEMORY_GAIN,
    RUN_SPEED,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    latest_with_tasks,
    set_loss_name,
    set_losses,
    task_columns,
)
from pretrain.rundir.run_paths import RUNS
from pretrain.terminal.text import counted, fitted_table, format_number, perplexity, si

MOST_EVENTS = 60
FIGURES = "figures"  # the directory beside a page
CHART_INCHES = 2.3
# Fields of an evaluation's line that are no results, or that RunResults has by another name.
_NOT_RESULTS = ("kind", "step", "seconds", "loss", "bits_per_byte", PARTS)


def write_report(history: History, directory: Path) -> Answer:
    """Write report.html about a run, and its figures; return a summary and warnings."""
    write_page(directory / "report.html", run_page(history, directory / FIGURES))
    warnings = rate_warnings(history)
    lines = [printable(f"{directory / 'report.html'} and {FIGURES}/: {summary(history)}")]
    lines += [f"warning: {warning}" for warning in warnings]
    return Answer("\n".join(lines), {**_results(history), "warnings": warnings})


def write_comparison(histories: Sequence[History], directory: Path) -> Answer:
    """Write compare.html with curves, its figures and compare.csv; return a row per run."""
    differing = differing_settings([history.config for history in histories])
    changed = dict(sorted(differing.items(), key=lambda item: item[0].startswith(NO_EFFECT)))
    settings = [
        {name: values[index] for name, values in changed.items()} for index in range(len(histories))
    ]
    names = [printable(history.path.name) for history in histories]
    tables: list[Sequence[Sequence[str]]] = [
        _table(names, [{key: value_text(own[key]) for key in own} for own in settings]),
        _table(names, list(map(_numbers, histories))),
    ]
    members, seeds = member_names(names, changed), [history.config.seed for history in histories]
    if len({*zip(members, seeds, strict=True)}) < len(members):  # RUN@STEP of one run, say
        members = names
    if len({*members}) < len(members) and (scored := members_of(histories, members)):
        numbers = beside(scored)
        tables.insert(0, member_rows(numbers))
        heads, *cells = tables[0]
        notes = [NOTE.format(cells[0][0]), *(f"{row[0]}: {heads[-1]} {row[-1]}" for row in cells)]
        write_table(directory / "members.csv", [row[:-1] for row in tables[0]], numbers, notes)
    document = render_comparison(histories, members, directory / FIGURES, tables)
    write_page(directory / "compare.html", document)
    values = [
        {**own, **_results(history)} for own, history in zip(settings, histories, strict=True)
    ]
    heads = ["run", *dict.fromkeys(name for line in values for name in line)]
    lines = [
        {**line, **{key: value_text(line[key]) for key in own}}
        for line, own in zip(values, settings, strict=True)
    ]
    write_csv(directory / "compare.csv", list(dict.fromkeys(heads)), lines)
    texts = [fitted_table(rows) for rows in tables if len(rows[0]) > 1]
    texts.append(printable(f"{directory / 'compare.html'}, compare.csv and {FIGURES}/"))
    return Answer("\n\n".join(texts), values)


def members_of(histories: Sequence[History], members: Sequence[str]) -> list[Member]:
    """Return the members whose runs have a validation loss, with the losses by seed."""
    by_name: dict[str, Member] = {}
    for history, name in zip(histories, members, strict=True):
        line, seed = history.summary.evaluation or {}, history.config.seed
        if line.get("loss") is not None:
            member = by_name.setdefault(name, Member(name, {}, {}))
            member.losses[seed], member.texts[seed] = line["loss"], EvaluatedText.of_line(line)
    return list(by_name.values())


def _table(names: Sequence[str], cells: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Return a row per run, heads first."""
    heads = list(dict.fromkeys(head for values in cells for head in values))
    rows = [
        (name, *(values.get(head, "-") for head in heads))
        for name, values in zip(names, cells, strict=True)
    ]
    return [("run", *heads), *rows]


def _results(history: History) -> dict[str, Any]:
    """Return the columns of compare.csv other than the settings, for one run."""
    evaluation = history.summary.evaluation or {}
    measured = {name: value for name, value in evaluation.items() if name not in _NOT_RESULTS}
    return {
        "run": printable(history.path.name),
        "step": history.step,
        **vars(history.results),
        **{f"evaluation_{name}": value for name, value in measured.items()},
    }


def summary(history: History) -> str:
    """Return the run's state and results in one line."""
    steps = history.config.optim.steps
    results = history.results
    parts = [
        f"step {history.step:,} of {steps:,}",
        f"{TRAIN_LOSS} {format_number(results.train_loss, '.4f')}",
        f"{VALIDATION_LOSS} {results.cells[VALIDATION_LOSS]}",
    ]
    if history.time_spent is not None:
        parts.append(f"goodput {history.time_spent.goodput:.0%}")
    parts.append(f"failed attempts: {len(history.failures)}, rewinds: {len(history.rewinds)}")
    parts.append(f"skipped steps: {history.measured.num_skipped}")
    parts += filter(None, [history.unsaved])
    return ", ".join(parts)


def run_page(history: History, figures: Path) -> str:
    """Return the page of a run; write its figures to files in `figures` as well."""
    step = f"Step {history.step:,} of {history.config.optim.steps:,}"
    step = "; ".join(filter(None, (step, history.unsaved)))
    lead = f"{setup_of(history.config)}. {step}."
    charts = [
        section(panel.title, panel_html(panel, CHART_INCHES, figures, history.about))
        for panel in run_panels(history)
    ]
    footer = (
        "Written by 'pretrain report' from metrics.jsonl and ledger.jsonl. "
        "Losses are in nats per token, unless they say bits per byte."
    )
    sections = [
        *_warnings(history),
        *charts,
        _sets(history),
        _tasks(history),
        _time(history),
        _events(history),
        section("Settings", preformatted(dump_yaml(to_tree(history.config)))),
    ]
    return page(history.name, "Training run", lead, _cards(history), sections, footer)


def setup_of(config: RunConfig) -> str:
    """Describe model, batch and engine in a line."""
    model, data, engine = config.model, config.data, config.engine
    return (
        f"{model_in_words(config)}; width {model.d_model}, "
        f"{value_text(model.memory_length)} tokens of memory; "
        f"{data.lanes} lanes in segments of {data.segment_length}; "
        f"{engine.sharding} in {engine.precision}"
    )


def _cards(history: History) -> list[Card]:
    results, loss = history.results, history.results.train_loss
    words = f"{TRAIN_LOSS}: mean of the latest interval"
    if loss is not None:
        words += f", a perplexity of {perplexity(loss):,.1f}"
    cards = [Card(format_number(loss, ".4f"), words)]
    if results.validation_loss is not None:
        words = f"{VALIDATION_LOSS} after step {history.evaluations[-1]['step']:,}"
        words += f", on {results.validation_text}"
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
    mood = "bad" if find_events(history.ledger, GaveUp) else ""
    return [*cards, Card(str(len(history.failures)), words, mood)]


def _warnings(history: History) -> list[str]:
    warnings = rate_warnings(history)
    return (
        [section("Warnings", *(paragraph(warning, "alarm") for warning in warnings))]
        if warnings
        else []
    )


def _sets(history: History) -> str:
    """The latest loss of each set, if there are any."""
    line = history.summary.evaluation or {}
    if not (losses := set_losses(line)):
        return ""
    rows = [
        [set_loss_name(printable(name)), format_number(loss, ".4f"), f"{perplexity(loss):,.2f}"]
        for name, loss in losses.items()
    ]
    words = f"After step {line['step']:,}, with the memory that the run trains with."
    heads = ["", "loss", "perplexity"]
    return section("Losses by corpus", paragraph(words), table(heads, rows, "named"))


def _tasks(history: History) -> str:
    """The latest metrics of tasks, if there are any."""
    if (line := latest_with_tasks(history.measured.evaluations)) is None:
        return ""
    rows = [[printable(name), f"{value:.4f}"] for name, value in task_columns(line).items()]
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
        "Goodput is the part of productive steps. Restarts are the time that no other line has: "
        "starts, waiting after failures, steps made again. From a stop to the next start no time "
        "counts."
    )
    return section("Time", paragraph(words), table(["", "time", "part"], rows, "named"))


def _events(history: History) -> str:
    events = [event for event in history.ledger if not isinstance(event, Published)]
    shown = events[-MOST_EVENTS:]
    rows = [
        [time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.time)), event.description]
        for event in shown
    ]
    left_out = len(events) - len(shown)
    more = [paragraph(f"{left_out} earlier events are in ledger.jsonl.")] if left_out else []
    return section("Events", *more, table([], rows, "words"))


def render_comparison(
    histories: Sequence[History],
    members: Sequence[str],
    figures: Path,
    tables: Sequence[Sequence[Sequence[str]]],
) -> str:
    """Return the page of several runs; write its figures to files in `figures` as well."""
    about = " / ".join(history.about for history in histories)
    losses, over_flops, over_time, speeds = (
        panel_html(panel, 2.8, figures, about) for panel in comparison_panels(histories, members)
    )
    *of_members, settings, numbers = tables
    differing = (
        table(settings[0], settings[1:], "named")
        if len(settings[0]) > 1
        else paragraph("All settings are the same.")
    )
    sections = [
        *(
            section("Members", *_unshared(t, "All members"), paragraph(NOTE.format(t[1][0])))
            for t in of_members
        ),
        section("Loss", losses),
        section("Loss over FLOPs", over_flops),
        section("Loss over time", paragraph("Without evaluations and saves."), over_time),
        section("Numbers", *_unshared(numbers, "All runs")),
        section("Different settings", differing),
        section("Speed", speeds),
    ]
    texts = {history.text: history.results.validation_text for history in histories}
    dots = [f"dots are validation losses on {text}" for text in texts.values()]
    dots = dots if len(dots) == 1 else ["validated on different texts, so without dots"]
    lead = f"{len(histories)} runs over the tokens they have read; {dots[0]}."
    lead += " Lines are means over seeds, bands their range." if of_members else ""
    words = {model_in_words(history.config) for history in histories}
    lead += f" {words.pop()}." if len(words) == 1 else ""
    folder = printable(histories[0].path.absolute().parent.name)
    title = "Runs" if folder == RUNS.name else f"Runs of {folder}"
    return page(title, "Comparison", lead, [], sections, "Written by 'pretrain report'.")


def _unshared(rows: Sequence[Sequence[str]], of: str) -> list[str]:
    (heads, *shown), shared = without_shared(rows, of)
    return [*(paragraph(f"{line}.") for line in shared), table(heads, shown, "named")]


def _numbers(history: History) -> dict[str, str]:
    results = history.results
    return {
        "step": f"{history.step:,}",
        "tokens": si(history.tokens).strip(),
        **results.cells,
        **{
            set_loss_name(printable(name)): format_number(loss, ".4f") + results.when_validated
            for name, loss in set_losses(history.summary.evaluation).items()
        },
        **{
            printable(name): f"{value:.4f}"
            for name, value in task_columns(latest_with_tasks(history.measured.evaluations)).items()
        },
    }
