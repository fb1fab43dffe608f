import datetime
import html
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretrain.cli import main
from pretrain.config.run import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PhaseConfig,
    RunConfig,
    ScheduleConfig,
)
from pretrain.reporting import charts
from pretrain.reporting.charts import run_panels
from pretrain.reporting.rate_warnings import rate_warnings
from pretrain.reporting.run_history import MOST_BUCKETS, History, read_history
from pretrain.rundir.events import (
    Event,
    JobEnded,
    JobEndReason,
    Outcome,
    Rewind,
    SettingsChanged,
    Spike,
    TrainingBegan,
    TrainingEnded,
)
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.jobs import attempt_ended, write_ledger
from tests.helpers.metrics import train_line

START = datetime.datetime(2026, 11, 18, 6, 40, tzinfo=datetime.timezone.utc)
STEPS = 40


SPIKE = Spike(13, 15, 9.0, 3.0)


def at(second: float, event: Event) -> Event:
    return replace(event, time=START.timestamp() + second)


KILLED = attempt_ended(attempt_number=7, step=15)


def make_run(directory: Path, name: str = "small", learning_rate: float = 1e-3) -> Path:
    """40 steps of 1 s in intervals of 5; step 20 skipped; a rewind, a crash of 20 s, and an
    evaluation every 10.
    """
    data, optim = DataConfig(lanes=2, segment_length=4), OptimConfig(steps=80)
    config = RunConfig(name=name, data=data, optim=replace(optim, learning_rate=learning_rate))
    run_dir = RunDir.create(directory, config)
    lines: list[dict] = []
    for step in range(1, STEPS + 1):
        loss, norm = (None, None) if step == 20 else (4.0 - step / 40, 1.0)
        line = train_line(step, loss, grad_norm=norm, skipped=loss is None)
        if step % 5 == 0:
            line |= {"seconds": 5.0, "train_loss": 4.0 - step / 40, "tokens_per_second": 8.0}
            line |= {"time": START.timestamp() + step + (40 if step > 10 else 0)}
        if step % 10 == 0:
            layers = ("embedding", "layer.0", "layer.1", "output")
            line |= {f"grad_norm/{layer}": 0.1 for layer in layers}
            line |= {f"update_ratio/{layer}": 0.1 for layer in layers}
        lines.append(line)
        if step % 10 == 0:
            measured = {"loss": 3.0, "loss_without_memory": 3.2, "bits_per_byte": 1.5}
            lines.append({"kind": "evaluation", "step": step, "seconds": 0.5, **measured})
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_ledger(
        run_dir,
        at(0, TrainingBegan(step=0, world_size=2)),
        at(15, Rewind(spike=SPIKE, to_step=10, segments=(12, 25))),
        at(16, TrainingBegan(step=10, world_size=2)),
        at(36, KILLED),
        at(56, TrainingBegan(step=15, world_size=1)),
        at(91, TrainingEnded(outcome=Outcome.FINISHED, step=40)),
    )
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "small")


def test_goodput_is_the_share_of_the_time_under_way_that_went_into_steps_that_count(run):
    history = read_history(run)
    spent = history.time_spent
    assert spent.total == pytest.approx(91)  # what was waited after the crash included
    assert (spent.training, spent.evaluation, spent.restarts) == pytest.approx((40, 2, 49))
    assert spent.goodput == history.results.goodput == pytest.approx(40 / 91)
    assert (len(history.failures), history.measured.num_skipped, history.tokens) == (1, 1, 320)


def scored(step: int, loss: float, tokens: int, **more: float) -> dict:
    measured = {"loss": loss, "documents": 1, "parts": [[loss, tokens], [loss, tokens]], **more}
    return {"kind": "evaluation", "step": step, "time": 5.0, **measured}


def evaluated(run: Path, own: dict, of_checkpoints: Sequence[dict]) -> Path:
    with RunDir.open(run).metrics.open("a") as file:
        file.write(json.dumps(own) + "\n")
    lines = [json.dumps(line) + "\n" for line in of_checkpoints]
    RunDir.open(run).evaluations.write_text("".join(lines))
    return run


def test_losses_of_different_texts_are_neither_subtracted_nor_joined(run):
    own = scored(40, 2.8, 50, loss_without_memory=2.9)
    evaluated(run, own, [scored(20, 2.7, 90), scored(30, 2.85, 50), scored(40, 2.5, 90)])
    history = read_history(run)
    assert history.results.memory_gain == pytest.approx(0.1)
    assert (history.results.validation_loss, history.results.validation_step) == (2.8, None)
    assert [line["loss"] for line in history.evaluations] == [2.85, 2.8]
    memory, loss = (chart_lines(history, title) for title in ("Value of the memory", "Loss"))
    assert memory["with memory"] == [2.8]
    assert memory["without memory"] == [2.9]
    assert loss["validation loss"] == [2.85, 2.8]
    assert loss["validation loss, 180 tokens of 1 document"] == [2.7, 2.5]


def chart_lines(history: History, title: str) -> dict[str, list[float]]:
    axes = Figure().subplots()
    next(panel for panel in run_panels(history) if panel.title == title).draw(axes)
    return {str(line.get_label()): [*np.asarray(line.get_ydata())] for line in axes.lines}


def test_an_attempt_that_was_killed_with_its_supervisor_is_a_failed_one(run):
    began = [at(30 * step, TrainingBegan(step=step, world_size=2)) for step in (0, 20)]
    run_dir, ended = RunDir.open(run), TrainingEnded(outcome=Outcome.FINISHED, step=40)
    write_ledger(run_dir, *began, at(700, ended))
    assert [failure.step for failure in read_history(run).failures] == [20]
    write_ledger(run_dir, *began)
    assert [failure.step for failure in read_history(run).failures] == [20, 20]
    with run_dir.locked("launcher"):
        assert len(read_history(run).failures) == 1


def long_run(directory: Path, steps: int) -> tuple[Path, list[dict]]:
    """A run with two skipped steps, a peak of the loss and one of the norm, and layers' norms."""
    run_dir = RunDir.create(directory, RunConfig(name="long", optim=OptimConfig(steps=steps)))
    lines = [train_line(step, 3.0 + step % 2) for step in range(1, steps + 1)]
    lines[777]["loss"], lines[888]["grad_norm"] = 9.0, 50.0
    for index in (5, 3333):
        lines[index] |= {"loss": None, "grad_norm": None, "skipped": True}
    for index in range(9, steps, 10):
        lines[index] |= {"seconds": 1.0, "tokens_per_second": 8.0, "grad_norm/output": 0.1}
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_ledger(run_dir, at(0, TrainingBegan(step=0, world_size=1)))
    return directory, lines


def test_a_long_run_is_thinned_but_keeps_what_stands_out_and_exact_sums(tmp_path):
    steps = 6 * MOST_BUCKETS
    path, lines = long_run(tmp_path / "long", steps)
    history = read_history(path)
    kept = {line["step"] for line in history.train}
    assert len(kept) < 0.6 * steps
    assert {6, 778, 889, 3334, steps} < kept
    assert history.series("tokens_per_second")[0].size >= MOST_BUCKETS // 20
    assert history.layers("grad_norm") == ["output"]
    assert (history.step, history.measured.num_skipped) == (steps, 2)
    assert history.summary.spent.steps == steps / 10
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    assert history.smooth_loss[1][steps // 8] == pytest.approx(3.5, abs=0.01)
    assert history.measured.loss_sums_B.sum() == pytest.approx(sum(losses))
    assert history.measured.num_losses_B.sum() == len(losses)
    peaks = history.series("loss")[1]
    assert peaks.max() == 9.0


def test_progress_falls_where_the_run_went_back_and_setbacks_are_marked(run):
    line = {"kind": "evaluation", "step": 20, "time": 9e9, "loss": 3.0, "parts": [[3.0, 100]]}
    RunDir(run).evaluations.write_text(json.dumps(line) + "\n")  # by another job, afterwards
    history = read_history(run)
    assert history.measured.evaluations
    seconds_X, steps_X = history.progress
    assert (np.diff(seconds_X) >= 0).all()
    assert steps_X[np.flatnonzero(np.diff(steps_X) < 0)].tolist() == [15]
    assert steps_X[-1] == 40
    assert history.setbacks[0].tolist() == [15, 36]


HOSTILE = "<script>alert(1)<&amp;>"


def test_the_report_is_one_page_without_the_network_and_figures(run, capsys):
    """Also of a directory that no text can name, and of messages like markup."""
    run = run.rename(run.with_name(f"caf\udce9\x1b[31m{HOSTILE}"))
    reason = JobEndReason.ERROR
    ended = JobEnded(job="17", restart=0, reason=reason, requeued=False, message=HOSTILE)
    RunDir.open(run).ledger.append(ended)
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "step 40 of 80" in printed
    assert "caf\\udce9\\x1b[31m" in printed
    page = (run / "report.html").read_text()
    text = html.unescape(re.sub("<[^>]*>", "", page))
    assert all(link.startswith("#") for link in re.findall(r'(?:src|href)="([^"]*)', page))
    assert not re.search(r"url\((?!#)|<script|@import", page)
    assert text.count(HOSTILE) >= 2, "nothing is lost"
    for words in ("step 10", "segments 12 to 24", "44%", "attempt 7 ", "SIGKILL", "job 17 "):
        assert words in text
    assert page.count("<svg") == 8
    assert not re.search(r'<svg[^>]* (width|height)="', page), "charts fit the page"
    assert "var(--second)" in page, "charts have the page's colors"
    assert all(f">{name}</text>" in page for name in ("layer 0", "layer 1", "embedding", "output"))
    for suffix in ("pdf", "png", "svg", "csv"):
        assert len(list((run / "figures").glob(f"*.{suffix}"))) == 8
    assert (run / "figures" / "loss.csv").read_text().count("\n") > 8
    assert "4 layers, AdamW" in (run / "figures" / "gradients-by-layer.svg").read_text()


@pytest.mark.parametrize(("saved", "said"), [([], "no step of 40"), ([10, 20], "step 20 of 40")])
def test_what_a_restart_would_repeat_is_said(run, capsys, saved, said):
    file = RunDir.open(run).config_file
    file.write_text(file.read_text().replace("interval: 200", "interval: 10"))
    for step in saved:
        publish_step(RunDir.open(run).checkpoints, step)
    assert main(["report", str(run)]) == 0
    assert said in capsys.readouterr().out


def test_a_comparison_is_a_row_per_run_with_the_settings_that_differ(run, tmp_path, capsys):
    other = make_run(tmp_path / "other\udce9\x1b", learning_rate=2e-3)
    config = (other / "config.yaml").read_text()
    assert "tensorboard: true" in config
    (other / "config.yaml").write_text(config.replace("tensorboard: true", "tensorboard: false"))
    command = ["report", str(run), str(other), "--output", str(tmp_path / "out")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["run", "optim.learning_rate", "metrics.tensorboard"] in rows
    assert ["small", "0.001", "true"] in rows
    assert [r"other\udce9\x1b", "0.002", "false"] in rows
    assert "optim.steps" not in printed
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "<td>small</td><td>0.001</td><td>true</td>" in page
    assert (tmp_path / "out" / "figures" / "loss.pdf").stat().st_size > 1000
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["optim.learning_rate"] for row in rows] == [0.001, 0.002]
    assert {(row["train_loss"], row["skipped_windows"]) for row in rows} == {(3.0, 1)}
    assert rows[0]["memory_gain"] == pytest.approx(0.2)
    assert rows[0]["goodput"] == pytest.approx(40 / 91)


def test_a_report_leaves_out_a_damaged_line_and_numbers_that_no_run_measures(run, caplog):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    damaged = json.loads(lines[2])["step"]
    lines[2] = lines[2].replace('"step"', '"stdp"')
    for number, value in ((3, -1e308), (10, 1e49)):
        lines[number] = json.dumps({**json.loads(lines[number]), "loss": value}) + "\n"
    (run / "metrics.jsonl").write_text("".join(lines))
    history = read_history(run)
    assert "line 3" in caplog.text
    steps = [line["step"] for line in history.train]
    assert damaged not in steps
    assert len(steps) > 10


def test_the_loss_chart_hides_the_first_losses_and_shows_the_peak_of_a_later_spike(run):
    steps = [train_line(step, 9.0 - step) for step in range(1, 5)]
    steps += [{**steps[-1], "step": step, "loss": 4.0} for step in range(5, 400)]
    steps[200] = {**steps[200], "loss": 7.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    axes = Figure().add_subplot()
    run_panels(read_history(run))[0].draw(axes)
    assert 7.0 < axes.get_ylim()[1] < 8.0
    assert axes.get_ylim()[0] < 4.0


def test_a_legend_is_outside_of_the_curves_however_many_there_are(monkeypatch, tmp_path):
    def draw(axes: Axes) -> None:
        for number in range(12):
            axes.plot([1, 2], [number, number], label=f"a run of a rather long name {number}")

    drawn: list[Figure] = []
    monkeypatch.setattr(charts, "chart_html", lambda figure, words: drawn.append(figure) or "")
    charts.panel_html(charts.Panel("Speed", "step", "rate", draw), 2.0, tmp_path, "speed")
    (figure,) = drawn
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert not box.shrunk(0.99, 0.99).overlaps(figure.axes[0].bbox)
    assert box.x1 <= figure.bbox.x1
    assert figure.axes[0].bbox.height > 100


WARMUP, LONG, RATE = 20, 320, 1e-3
RUN = RunConfig(
    model=ModelConfig(vocab_size=320),
    optim=OptimConfig(steps=LONG, learning_rate=RATE, clip_norm=0.25,
                      schedule=ScheduleConfig(warmup_steps=WARMUP)),
)  # fmt: skip
FALLING = [5.0 - 0.005 * step for step in range(LONG)]


def warned(
    directory: Path,
    run: RunConfig = RUN,
    losses: Sequence[float | None] = FALLING,
    updates: float = 3e-3,
    validated: Sequence[float] = (),
) -> list[str]:
    """What the report of a run with these measurements warns of."""
    run_dir = RunDir.create(directory / "run", run)
    lines = []
    for step, loss in enumerate(losses, 1):
        line = train_line(step, loss, skipped=loss is None)
        line["learning_rate"] = RATE
        if step % 10 == 0:
            line |= {"tokens_per_second": 1.0, "seconds": 1.0, "update_ratio/layer.0": updates}
            line |= {"update_ratio/output": 1e-6}
        lines.append(line)
    for number, loss in enumerate(validated, 1):
        lines.append({"kind": "evaluation", "step": 100 * number, "loss": loss})
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_dir.ledger.append(TrainingBegan(step=0, world_size=1))
    return rate_warnings(read_history(run_dir.path))


def test_nothing_is_warned_of_where_all_is_as_usual(tmp_path):
    assert warned(tmp_path) == []


def test_tiny_updates_are_a_rate_that_is_too_low_except_of_trained_weights(tmp_path, capsys):
    (found,) = warned(tmp_path / "new", updates=5e-5)
    assert "optim.learning_rate=0.001" in found
    assert main(["report", str(tmp_path / "new" / "run")]) == 0
    assert f"warning: {found}" in capsys.readouterr().out
    assert "optim.learning_rate=0.001" in (tmp_path / "new/run/report.html").read_text()
    tuned = replace(RUN, initial_weights=tmp_path)
    assert warned(tmp_path / "tuned", tuned, updates=5e-5) == []


RISING = [*FALLING[:160], *(4.2 + 0.01 * step for step in range(160))]


def test_losses_that_end_above_their_lowest_are_a_rate_that_is_too_high(tmp_path):
    (found,) = warned(tmp_path / "rises", losses=RISING)
    assert " 26% " in found
    assert warned(tmp_path / "also", losses=RISING, validated=[4.5, 5.0])
    # The training data got harder, the model did not get worse.
    assert warned(tmp_path / "harder", losses=RISING, validated=[5.0, 4.5]) == []
    phase = PhaseConfig(from_step=160, segment_length=32)
    later = replace(RUN, data=DataConfig(phases=(phase,)))
    flat = [*FALLING[:160], *[6.0] * 160]
    assert warned(tmp_path / "flat", losses=flat)
    assert warned(tmp_path / "phase", later, losses=flat) == [], "a phase has other data"


RECORDED = json.loads((Path(__file__).parents[3] / "data/recovery/losses.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_of_excessive_rates_alone_are_warned_of(tmp_path, name):
    """Rates 4 to 25 times a good one, and the 200 steps before runs of good rates were damaged."""
    schedule = ScheduleConfig(warmup_steps=RECORDED[name]["warmup_steps"])
    run = replace(RUN, optim=replace(RUN.optim, schedule=schedule))
    found = warned(tmp_path, run, losses=RECORDED[name]["losses"][:200])
    assert ["too high" in warning for warning in found] == [True] * (": rate" in name)


def test_figures_do_not_obey_the_working_directory(tmp_path):
    Path("matplotlibrc").write_text("text.usetex: True\nbackend: module://x\n")
    code = (
        "from pretrain.reporting.charts import canvas\nimport io, matplotlib\n"
        "figure, _ = canvas(2.0, 'x', 'y')\nfigure.savefig(io.BytesIO(), format='svg')\n"
        "assert not matplotlib.rcParams['text.usetex']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_report_of_an_older_step_is_of_the_run_as_it_was(run):
    run_dir = RunDir.open(run)
    for step in (10, 30):
        publish_step(run_dir.checkpoints, step)
    changed = SettingsChanged(changes={"optim.learning_rate": (2e-3, 1e-3)}, step=20)
    write_ledger(run_dir, *run_dir.ledger.read()[:-1], at(70, changed))
    history = read_history(Path(f"{run}@10"))
    assert (history.step, history.saved_step, history.name) == (10, 10, "small (small@10)")
    assert [line["step"] for line in history.evaluations] == [10]
    assert (history.failures, history.rewinds, history.unsaved) == ([], [], "")
    assert history.config.optim.learning_rate == 2e-3
    assert read_history(Path(f"{run}@30")).failures, "of step 15"


def test_the_rate_has_a_chart_with_a_line_where_a_resume_has_changed_it(run):
    changed = SettingsChanged(changes={"optim.learning_rate": (1e-3, 5e-4)}, step=20)
    run_dir = RunDir.open(run)
    write_ledger(run_dir, *run_dir.ledger.read(), at(70, changed))
    (panel,) = [each for each in run_panels(read_history(run)) if each.title == "Learning rate"]
    axes = Figure().add_subplot()
    panel.draw(axes)
    rate, line = axes.lines
    assert len(rate.get_xdata()) == STEPS
    assert [*line.get_xdata()] == [20, 20]
