"""The demo's report: what was claimed, the evidence, and the commands to go on."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from typing import Any

from data_pipeline.files import write_text
from pretrain.demo import charts, training
from pretrain.demo.screen import Screen
from pretrain.demo.settings import CONFIG, RANKS, Settings
from pretrain.reporting import html as report
from pretrain.reporting.html import Card, paragraph, section, table, text

Results = dict[str, dict[str, Any]]


def write_report(screen: Screen, settings: Settings, results: Results) -> dict[str, Any]:
    """Write RUN/report.html from the stages' results and the runs' measurements."""
    losses = {
        run_dir.path.name: dict(training.losses(run_dir))
        for run_dir in (settings.undisturbed, settings.killed)
    }
    validation = [
        (line["step"], line["loss"])
        for line in settings.undisturbed.read_metrics()
        if line["kind"] == "evaluation"
    ]
    write_text(settings.report, render(settings, results, losses, validation))
    return {"path": str(settings.report)}


def render(
    settings: Settings,
    results: Results,
    losses: dict[str, dict[int, float]],
    validation: list[tuple[int, float]],
) -> str:
    """The report as HTML. `losses` by step of the runs `undisturbed` and `killed`."""
    identical = not results["resume"]["problems"]
    sections = [
        _loss_section(settings, results, losses, validation),
        _bits_section(results, losses, identical),
        _memory_section(settings, results),
        _sample_section(results["sample"]),
        _speed_section(results),
        _what_ran_section(settings, results),
        _go_on_section(settings),
    ]
    return report.page(
        "Killed, resumed, identical" if identical else "Killed, resumed, different",
        "xl-pretrain demo",
        "A Transformer-XL trained with DeepSpeed on real text; all ranks were killed without warning in the middle, "
        "the run resumed from its last checkpoint, and what the memory is worth was measured on text it never saw.",
        _cards(settings, results, identical),
        sections,
        f"Made by pretrain demo from measurements of this run; {_machine()}.",
    )


def _cards(settings: Settings, results: Results, identical: bool) -> list[Card]:
    rows = {row["times"]: row for row in results["memory"]["rows"]}
    gain = rows[0]["loss"] - rows[1]["loss"]
    speed = results["undisturbed"]
    return [
        Card(
            f"{settings.steps} of {settings.steps}" if identical else "different",
            "losses equal those of an undisturbed run in every bit, after SIGKILL and resume; so does the final state"
            if identical
            else "the resumed run differs from the undisturbed one; see below",
            "good" if identical else "bad",
        ),
        Card(
            f"{-gain:+.2f} nats".replace("-", "\u2212"),
            f"per token with a memory of {rows[1]['memory_length']} tokens: perplexity "
            f"{rows[0]['perplexity']:.0f} without it, {rows[1]['perplexity']:.0f} with it",
            "good" if gain > 0 else "bad",
        ),
        Card(
            f"{speed['tokens_per_second']:,.0f}",
            f"tokens per second on {RANKS} ranks with DeepSpeed ZeRO-{settings.run.engine.zero_stage}, "
            f"{speed['mfu']:.0%} of the measured matrix-product peak, data wait {speed['data_wait']:.1%}",
        ),
    ]


def _loss_section(
    settings: Settings,
    results: Results,
    losses: dict[str, dict[int, float]],
    validation: list[tuple[int, float]],
) -> str:
    kill = results["kill"]
    return section(
        "One curve, drawn twice",
        paragraph(
            f"The pale line is a run nobody touched. The dark line is the same run again: after step "
            f"{kill['killed_after']} all {RANKS} ranks got SIGKILL, and it went on from the checkpoint of step "
            f"{kill['checkpoint']}."
        ),
        charts.loss_curves(
            losses["undisturbed"],
            losses["killed"],
            validation,
            kill["checkpoint"],
            kill["killed_after"],
        ),
    )


def _bits_section(results: Results, losses: dict[str, dict[int, float]], identical: bool) -> str:
    kill = results["kill"]
    lost = dict(map(tuple, kill["lost"]))
    words = (
        "Losses as the numbers they are, in hexadecimal: equal to the last bit. Steps between the checkpoint and the "
        "kill were made twice. Also equal: weights, optimizer moments, every lane's memory and cursor, random state."
    )
    if not identical:
        words = "The runs differ: " + "; ".join(results["resume"]["problems"][:5])
    head = "".join(
        f"<th>{name}</th>"
        for name in ("step", "loss", "undisturbed", "before the kill", "after resuming", "")
    )
    shown = _steps_shown(kill["checkpoint"], kill["killed_after"], max(losses["killed"]))
    body = ""
    for before, step in zip((shown[0], *shown), shown, strict=False):
        if step > before + 1:
            body += '<tr><td colspan="6" class="gap">...</td></tr>'
        resumed = losses["killed"].get(step)
        # Up to the checkpoint the resumed run's record is what was measured before the kill.
        before_after = (resumed, None) if step <= kill["checkpoint"] else (lost.get(step), resumed)
        body += _bits_row(step, losses["undisturbed"].get(step), *before_after)
        if step == kill["checkpoint"]:
            body += f'<tr class="mark calm"><td colspan="6">checkpoint of step {step}: '
            body += "the run resumed from here</td></tr>"
        if step == kill["killed_after"]:
            body += f'<tr class="mark"><td colspan="6">SIGKILL to all {RANKS} ranks</td></tr>'
    return section(
        "Around the kill, bit by bit",
        paragraph(words),
        report.wrapped_table(f"<tr>{head}</tr>", body),
    )


def _steps_shown(checkpoint: int, killed_after: int, last: int) -> list[int]:
    """A few steps around the checkpoint and around the kill."""
    near = {*range(checkpoint - 1, checkpoint + 4), *range(killed_after - 2, killed_after + 4)}
    return sorted(step for step in near if 1 <= step <= last)


def _bits_row(
    step: int, undisturbed: float | None, lost: float | None, resumed: float | None
) -> str:
    present = [value for value in (undisturbed, lost, resumed) if value is not None]
    same = len(present) > 1 and len(set(present)) == 1
    cells = "".join(
        f'<td class="bits">{value.hex() if value is not None else ""}</td>'
        for value in (undisturbed, lost, resumed)
    )
    loss = f"{undisturbed:.6f}" if undisturbed is not None else ""
    verdict = '<td class="same">equal</td>' if same else "<td>different</td>"
    return f"<tr><td>{step}</td><td>{loss}</td>{cells}{verdict}</tr>"


def _memory_section(settings: Settings, results: Results) -> str:
    rows = results["memory"]["rows"]
    trained = settings.run.model.memory_length
    cells = [
        (
            f"{row['memory_length']:,}",
            "none" if row["times"] == 0 else f"{row['times']}x",
            f"{row['loss']:.4f}",
            f"{row['perplexity']:.2f}",
            f"{row['bits_per_byte']:.3f}",
            f"{row['tokens'] / row['seconds']:,.0f}",
        )
        for row in rows
    ]
    return section(
        "What the memory is worth",
        paragraph(
            f"The same weights, {rows[0]['tokens']:,} tokens of held-out text, in segments of "
            f"{rows[0]['segment_length']}; only the number of remembered tokens changes (in training: {trained})."
        ),
        charts.loss_by_memory(rows),
        table(("memory", "of training", "loss", "perplexity", "bits/byte", "tokens/s"), cells),
        paragraph(
            "Where it helps: without memory the first tokens of every segment are guessed with nothing before them; "
            "with memory every token is predicted with a past."
        ),
        charts.loss_by_position(rows),
    )


def _sample_section(result: dict[str, Any]) -> str:
    return section(
        "What it writes",
        paragraph(
            "A sample after these few minutes of training. The prompt is grey; the model carries its memory along."
        ),
        f'<pre class="prose"><i>{text(result["prompt"])}</i>{text(result["text"])}</pre>',
    )


def _speed_section(results: Results) -> str:
    undisturbed, resumed = results["undisturbed"], results["resume"]
    rows = [
        (
            "training speed",
            f"{undisturbed['tokens_per_second']:,.0f} tokens/s",
            f"{resumed['tokens_per_second']:,.0f} tokens/s",
        ),
        ("share of the measured peak (MFU)", f"{undisturbed['mfu']:.1%}", f"{resumed['mfu']:.1%}"),
        ("waiting for data", f"{undisturbed['data_wait']:.2%}", f"{resumed['data_wait']:.2%}"),
        (
            "memory of a rank",
            f"{undisturbed['used_memory_gib']:.2f} GiB",
            f"{resumed['used_memory_gib']:.2f} GiB",
        ),
        (
            "from start to first step",
            f"{undisturbed['seconds_to_first_step']:.0f} s",
            f"{resumed['seconds_to_first_step']:.0f} s",
        ),
        ("loss at the end", f"{undisturbed['final_loss']:.4f}", f"{resumed['final_loss']:.4f}"),
    ]
    return section("Speed", table(("", "undisturbed", "killed and resumed"), rows, style="named"))


def _what_ran_section(settings: Settings, results: Results) -> str:
    run, shards, corpus = settings.run, results["shards"], results["corpus"]
    model = run.model
    rows = [
        (
            "model",
            f"Transformer-XL: {model.num_layers} layers, width {model.d_model}, {model.num_heads} heads, "
            f"memory {model.memory_length}",
        ),
        (
            "vocabulary",
            f"{results['tokenizer']['vocab_size']:,} tokens, SentencePiece {results['tokenizer']['kind']}",
        ),
        (
            "text",
            f"{corpus['documents']:,} documents, {corpus['bytes'] / 1e6:.1f} MB, {corpus['source']}",
        ),
        (
            "training split",
            f"{shards['train']['tokens']:,} tokens in {shards['train']['shards']} MDS shards",
        ),
        (
            "validation split",
            f"{shards['validation']['tokens']:,} tokens, chosen by a hash of each document's name",
        ),
        (
            "batch",
            f"{run.data.lanes} lanes of {run.data.segment_length} tokens over {RANKS} ranks, {settings.steps} steps",
        ),
        (
            "engine",
            f"DeepSpeed {version('deepspeed')}, ZeRO-{run.engine.zero_stage}, {run.engine.precision}",
        ),
        ("machine", _machine()),
    ]
    return section("What ran", table((), rows, style="words"))


def _go_on_section(settings: Settings) -> str:
    place, config = (
        settings.directory,
        f"{CONFIG.parent.parent.name}/{CONFIG.parent.name}/{CONFIG.name}",
    )
    commands = f"""# sample from the model you just trained
pretrain generate {place}/killed --prompt 'def ' --tokens 300

# how far does its memory reach?
pretrain evaluate {place}/killed --data {place}/data --memory-length 0 64 128 256 512

# train longer on the same shards; kill it whenever you like, it goes on
launcher local {config} --ranks {RANKS} --run-dir runs/longer data.path={place}/data optim.steps=5000

# prove the resume on your own settings
pretrain verify-resume {config} --ranks {RANKS} --steps 20 --kill-at 7 data.path={place}/data

# the same story on your own text
pretrain demo --corpus DIR --run-dir runs/mine

tensorboard --logdir {place}"""
    return section(
        "Go on",
        paragraph("Each of these works as it stands, from the folder where the demo was started."),
        f"<pre>{text(commands)}</pre>",
    )


def _machine() -> str:
    """The machine in words: nothing that names it."""
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{cores} cores ({platform.machine()}), {gib:.0f} GiB memory, Python {python}, torch {version('torch')}"
