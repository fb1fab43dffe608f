"""The demo's report: what the demo claims, the measurements that show it, and what to try next."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

from pretrain.commands import compare
from pretrain.commands.report import setup_of
from pretrain.demo.stages import RANKS, Demo, losses_of, median_of, memory_table
from pretrain.reporting import html
from pretrain.reporting.charts import PAGE, SMALL, canvas, chart_html, legend
from pretrain.reporting.html import Card, paragraph, section, table, text
from pretrain.reporting.run_history import History, read_history
from pretrain.rundir.losses import STEP_LOSS, VALIDATION_LOSS
from pretrain.rundir.speeds import RUN_SPEED
from pretrain.terminal.text import number


def render(demo: Demo) -> str:
    """Return the page, made from the stages' results and both runs' measurements."""
    runs = [read_history(run_dir.path) for run_dir in (demo.uninterrupted, demo.killed)]
    return html.page(
        f"Killed, resumed, {'different' if demo.problems else 'identical'}",
        "xl-pretrain demo",
        "A Transformer-XL, trained with DeepSpeed on real text. Midway all ranks were killed "
        "without warning, and the run resumed from its latest checkpoint. The value of the memory "
        "was measured on text that the model was not trained on.",
        _cards(demo, runs[0]),
        [
            section("Loss", *_losses(demo, runs[0])),
            section("Losses around the kill", *_bits(demo)),
            section("Value of the memory", *_memory(demo, demo.results["memory"]["rows"])),
            section("Sample", *_sample(demo.results["sample"])),
            section("Both runs", table(compare.heads_of(runs), compare.numbers_of(runs), "named")),
            section("Setup", table((), _setup(demo), "words")),
            section("Next steps", *_next_steps(demo)),
        ],
        f"Written by 'pretrain demo' from measurements of this run on {_machine()}.",
    )


def _cards(demo: Demo, history: History) -> list[Card]:
    memory = demo.results["memory"]
    without, with_memory = memory["rows"][:2]
    mfu, wait = (median_of(history, name) for name in ("mfu", "data_wait"))
    identical = Card(
        f"{demo.steps} of {demo.steps}",
        "losses are bitwise equal to those of an uninterrupted run, after SIGKILL and resume; "
        "so is the final state",
        "good",
    )
    different = Card("different", "the resumed run is not the uninterrupted one; see below", "bad")
    return [
        different if demo.problems else identical,
        Card(
            f"{-memory['gain']:+.2f} nats".replace("-", "\u2212"),
            f"of loss per token with a memory of {with_memory['memory_length']} tokens: perplexity "
            f"{with_memory['perplexity']:.0f}, without memory {without['perplexity']:.0f}",
            "good" if memory["gain"] > 0 else "bad",
        ),
        Card(
            number(history.results.run_tokens_per_second, ",.0f"),
            f"{RUN_SPEED} on {RANKS} ranks with DeepSpeed ZeRO-{demo.run.engine.zero_stage}, "
            f"{mfu:.0%} of the measured matrix-product peak, data wait {wait:.1%}",
        ),
    ]


def _losses(demo: Demo, uninterrupted: History) -> tuple[str, str]:
    kill, resumed = demo.results["killed"], losses_of(demo.killed)
    checkpoint, killed_after = kill["checkpoint"], kill["killed_after"]
    figure, axes = canvas(PAGE, 3.0, "step", f"{STEP_LOSS}, nats per token")
    axes.plot(*uninterrupted.series("loss"), color=PAGE.first, linewidth=5, label="uninterrupted")
    steps, losses = list(resumed), list(resumed.values())
    axes.plot(steps, losses, color=PAGE.second, linewidth=1.1, label="killed and resumed")
    validated = uninterrupted.series("loss", uninterrupted.evaluations)
    axes.plot(*validated, "o", color=PAGE.ink, markersize=4, label=VALIDATION_LOSS)
    axes.axvspan(checkpoint, killed_after, color=PAGE.alarm, alpha=0.12, linewidth=0)
    # The loss falls, so the upper right is free. The labels are left and right of the lost steps.
    for step, label, color, dashes, side in (
        (killed_after, "SIGKILL", PAGE.alarm, (4, 3), "left"),
        (checkpoint, "resumed from here", PAGE.second, (1, 2), "right"),
    ):
        axes.axvline(step, color=color, linewidth=1.1, linestyle=(0, dashes))
        axes.annotate(
            label, (step, 0.62), (6 if side == "left" else -6, 0), color=color, ha=side,
            fontsize=SMALL, xycoords=("data", "axes fraction"), textcoords="offset points",
        )  # fmt: skip
    axes.set_xlim(0, demo.steps * 1.01)
    legend(axes, PAGE, loc="upper right")
    words = (
        "The wide, pale line is an uninterrupted run. The thin, dark line is the same run again: "
        f"after step {killed_after} SIGKILL ended every rank, and it resumed from the checkpoint "
        f"of step {checkpoint}."
    )
    return paragraph(words), chart_html(figure, "Training losses of both runs: one curve")


def _bits(demo: Demo) -> tuple[str, str]:
    """Return a table of losses in hexadecimal, around the checkpoint and around the kill."""
    kill, losses, resumed = (
        demo.results["killed"],
        losses_of(demo.uninterrupted),
        losses_of(demo.killed),
    )
    checkpoint, killed_after, lost = kill["checkpoint"], kill["killed_after"], dict(kill["lost"])
    near = {*range(checkpoint - 1, checkpoint + 4), *range(killed_after - 2, killed_after + 4)}
    marks = {checkpoint: ("checkpoint", "resumed"), killed_after: ("SIGKILL", "")}
    rows: list[tuple[str, ...]] = []
    for step in sorted(near & losses.keys()):
        if rows and step - 1 not in near:
            rows.append(("...", "", "", "", "", ""))
        # Up to the checkpoint the resumed run's record was measured before the kill.
        is_lost = step > checkpoint
        attempts = (lost.get(step), resumed.get(step)) if is_lost else (resumed.get(step), None)
        bits = ["" if each is None else each.hex() for each in (losses[step], *attempts)]
        equality = "equal" if {*attempts} - {None} == {losses[step]} else "DIFFERENT"
        rows.append((str(step), f"{losses[step]:.6f}", *bits, equality))
        if step in marks:
            rows.append(("", "", "", *marks[step], ""))
    heads = ("step", STEP_LOSS, "uninterrupted", "before the kill", "after resuming", "")
    words = (
        "Losses in hexadecimal, equal to the last bit. The steps between the checkpoint and the "
        "kill were repeated. Also equal: weights, optimizer moments, each lane's memory and "
        "cursor, and the random state."
    )
    if demo.problems:
        words = "The runs differ: " + "; ".join(demo.problems[:5])
    return paragraph(words), table(heads, rows, "bits")


def _memory(demo: Demo, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    lengths, losses = [f"{row['memory_length']:,}" for row in rows], [row["loss"] for row in rows]
    by_length, axes = canvas(PAGE, 2.4, "tokens of memory", VALIDATION_LOSS)
    axes.plot(lengths, losses, color=PAGE.first, linewidth=2.5, zorder=1)
    colors = [PAGE.faint] + [PAGE.second] * (len(rows) - 1)
    axes.scatter(lengths, losses, s=52, color=colors, zorder=2)
    for length, loss in zip(lengths, losses, strict=True):
        axes.annotate(f"{loss:.3f}\n", (length, loss), color=PAGE.ink, ha="center", fontsize=SMALL)
    axes.margins(x=0.12, y=0.2)
    by_position, axes = canvas(PAGE, 2.4, "position in the segment", VALIDATION_LOSS)
    for row, color, label in (
        (rows[0], PAGE.faint, "without memory"),
        (rows[1], PAGE.second, "with memory"),
    ):
        losses = row["loss_by_position"]
        axes.plot(range(1, len(losses) + 1), losses, color=color, linewidth=1.6, label=label)
    legend(axes, PAGE, loc="upper right")
    heads, *cells = memory_table(rows)
    return (
        paragraph(
            f"The same weights on {rows[0]['tokens']:,} tokens of validation text, in segments of "
            f"{rows[0]['segment_length']}. Only the memory length changes; in training it was "
            f"{demo.run.model.longest_memory}."
        ),
        chart_html(by_length, "Validation loss for each memory length"),
        table(heads, cells),
        paragraph(
            "Without memory, the first tokens of each segment are predicted with little or no "
            "context. With memory, every token has a past."
        ),
        chart_html(by_position, "Validation loss by position in the segment"),
    )


def _sample(result: dict[str, Any]) -> tuple[str, str]:
    prompt, written = text(result["prompt"]), text(result["text"])
    return (
        paragraph("Text from the model after these minutes of training. The prompt is gray."),
        f'<pre class="prose"><i>{prompt}</i>{written}</pre>',
    )


def _setup(demo: Demo) -> list[tuple[str, str]]:
    library = f"DeepSpeed {version('deepspeed')}, torch {version('torch')}"
    return [
        ("text", demo.results["text"]["summary"]),
        ("tokens", demo.results["data"]["summary"]),
        ("run", f"Transformer-XL, {setup_of(demo.run)}; {demo.steps} steps on {RANKS} ranks"),
        ("software", f"{library}, Python {platform.python_version()}"),
    ]


def _next_steps(demo: Demo) -> tuple[str, str]:
    folder, config = demo.directory, "configs/experiments/demo.yaml"
    commands = f"""# sample from the model
pretrain generate {folder}/killed --prompt 'def ' --tokens 300

# measure how the loss depends on the memory length
pretrain evaluate {folder}/killed --data {folder}/data --memory-length 0 64 128 256 512

# train longer on the same shards; after a kill it resumes from its latest checkpoint
launcher local {config} --ranks {RANKS} --run-dir runs/longer \\
    data.path={folder}/data optim.steps=5000

# kill, resume and compare with your own settings
pretrain verify-resume {config} --steps 20 --kill-at 7 data.path={folder}/data

# run this demo on your own text
pretrain demo --corpus DIR --run-dir runs/mine

# see the loss, speed and events of a run, or its curves while it trains
pretrain report {folder}/killed
tensorboard --logdir {folder}"""
    return (
        paragraph("Run these from the folder in which you started the demo."),
        f"<pre>{text(commands)}</pre>",
    )


def _machine() -> str:
    """Describe the machine without naming it."""
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cores} cores ({platform.machine()}) with {gib:.0f} GiB of host memory"
