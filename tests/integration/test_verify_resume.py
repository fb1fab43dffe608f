"""`verify-resume` with other ranks, and that the comparison can fail."""

import json
import re
from pathlib import Path

import pytest

from pretrain.cli import main
from pretrain.rundir import compare_runs
from pretrain.rundir.compare_runs import differing_losses
from pretrain.rundir.run_dir import RunDir
from tests.helpers.metrics import train_line
from tests.integration.test_checkpoint_failures import SETTINGS


@pytest.mark.slow
def test_a_run_resumes_with_more_ranks_within_rounding(tiny_corpus, tmp_path, capsys, monkeypatch):
    experiment, work = tmp_path / "tiny.yaml", tmp_path / "work"
    warmup = "optim: {schedule: {warmup_steps: 100}, learning_rate: 0.1}\n"  # longer than the run
    experiment.write_text(f"data: {{path: {tiny_corpus}}}\n{warmup}")
    settings = [each for each in SETTINGS if not each.startswith("optim.steps")]
    settings += ["model.layer_kinds=[deltanet, attention]", "model.memory_tokens=1"]
    settings += ["optim.gradient_segments=2", "model.isolate_documents=true"]
    options = ["--steps=6", "--kill-at=4", "--ranks=1", "--resume-ranks=2", f"--work-dir={work}"]
    assert main(["verify-resume", str(experiment), *options, *settings]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert re.search(r"(?s)checkpoint \S+ step 3\b.*agree: 6 .* 1e-05", said)
    runs = [RunDir(work / name) for name in ("uninterrupted", "killed")]
    rates = [line["learning_rate"] for line in runs[0].read_metrics() if line["kind"] == "train"]
    assert rates[:3] == pytest.approx([0.001, 0.002, 0.003]), "as in the run's own first steps"
    scored = [line["tokens"] for run in runs for line in run.read_metrics() if "parts" in line]
    assert set(scored) == {200}, "in the last evaluation, too"
    monkeypatch.setattr(compare_runs, "STATE_TOLERANCE", 1e-12)
    problems = "\n".join(compare_runs.run_differences(*runs, step=6, tolerance=1e-5))
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert f" ({kind}): " in problems, "rounding, if nothing else"


def test_settings_that_the_other_zero_stage_refuses_are_refused_at_once(
    tiny_corpus, tmp_path, capsys
):
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(f"data: {{path: {tiny_corpus}}}\n")
    options = ["--ranks=1", "--resume-zero=3", "optim.gradient_segments=2", "engine.compile=true"]
    assert main(["verify-resume", str(experiment), *options]) == 2
    output, error = capsys.readouterr()
    assert (output, "gradient_segments" in error) == ("", True)


def written(path: Path, losses: list[float | None]) -> RunDir:
    path.mkdir()
    run_dir = RunDir(path)
    lines = [train_line(step, loss) for step, loss in enumerate(losses, 1)]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


@pytest.mark.parametrize(
    ("losses", "difference"),
    [
        ([5.00001, None, 3.0], []),
        ([5.001, None, 3.0], ["step 1: loss 5.0 against 5.001"]),
        ([5.0, 4.0, 3.0], ["step 2: loss None against 4.0"]),
        ([5.0, None], ["step 3: only in left"]),
    ],
)
def test_differences_beyond_rounding_are_named(tmp_path, losses, difference):
    left = written(tmp_path / "left", [5.0, None, 3.0])
    assert differing_losses(left, written(tmp_path / "right", losses), 1e-5) == difference
