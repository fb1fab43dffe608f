"""Losses of several corpora while a run trains: in its metrics and in whatever shows them."""

import json
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_pipeline.config import MixturePart
from data_pipeline.corpora.manifest import read_manifest
from foundation.errors import ConfigError, DataError
from pretrain.cli import main
from pretrain.config.evaluation_sets import check_same_sets, evaluation_sets
from pretrain.config.run import DataConfig, EvaluationConfig, RunConfig
from pretrain.evaluation.checkpoint_curve import unscored_steps
from pretrain.reporting.run_history import read_history
from pretrain.rundir.compare_runs import differing_losses
from pretrain.rundir.events import Outcome, TrainingBegan, TrainingEnded
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.corpora import make_tiny_corpus

STEPS = 4


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Corpora a and b of a mixture, c beside it, d of another tokenizer, and the experiment."""
    folder = tmp_path_factory.mktemp("sets")
    found = {name: make_tiny_corpus(folder / name, seed=n) for n, name in enumerate("abc")}
    found["d"] = make_tiny_corpus(folder / "d", vocabulary="unigram")
    found["experiment"] = folder / "tiny.yaml"
    found["experiment"].write_text(
        f"""name: tiny
model: {{num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8, dropout: 0.1}}
data:
  path: {found["a"]}
  lanes: 4
  segment_length: 8
  mixture: [{{path: {found["a"]}}}, {{path: {found["b"]}}}]
optim: {{steps: {STEPS}}}
engine: {{kind: torch}}
checkpoint: {{interval: 2}}
evaluation: {{interval: 2, max_tokens: 600, lanes: 2, sets: {{beside: {found["c"]}}}}}
metrics: {{interval: 2, tensorboard: false}}
"""
    )
    return found


def train(places: dict[str, Path], run_dir: RunDir, *more: str) -> int:
    command = ["train", str(places["experiment"]), "--run-dir", str(run_dir.path)]
    return main([*command, *more])


@pytest.fixture(scope="module")
def trained(places: dict[str, Path]) -> RunDir:
    run_dir = RunDir(places["a"].with_name("run"))
    assert train(places, run_dir) == 0
    return run_dir


def evaluations_of(run_dir: RunDir) -> list[dict[str, float]]:
    return [line for line in run_dir.read_metrics() if line["kind"] == "evaluation"]


def set_losses(line: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("loss/"): line[name] for name in line if name.startswith("loss/")}


def test_the_last_evaluation_is_of_more_text_than_those_before(places, trained, capsys):
    first, last = evaluations_of(trained)
    split = read_manifest(places["a"] / "validation")
    assert (first["tokens"], last["tokens"]) == (600, split.tokens)
    assert (last["documents"], sum(tokens for _, tokens in last["parts"])) == (
        split.documents, split.tokens,
    )  # fmt: skip
    assert 0 < last["standard_error"] < 0.1
    assert main(["describe", str(trained.path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    text = f"{split.tokens:,} tokens of {split.documents} documents in 2 lanes"
    assert f"(2 times: the last {text}, the others 600, each with memory and without" in said


def test_every_set_has_the_loss_that_evaluate_measures_of_validation(places, trained, capsys):
    lines = evaluations_of(trained)
    assert [line["step"] for line in lines] == [2, 4]
    assert [list(set_losses(line)) for line in lines] == [["a", "b", "beside"]] * 2
    assert lines[-1]["loss/a"] == lines[-1]["loss"], "data.path is a part of its mixture"
    assert len(set(set_losses(lines[-1]).values())) == 3
    limits = ["--max-tokens", "100k", "--json"]
    for name, corpus in (("a", "a"), ("b", "b"), ("beside", "c")):
        assert main(["evaluate", str(trained.path), "--data", str(places[corpus]), *limits]) == 0
        alone = json.loads(capsys.readouterr().out)["results"][0]
        assert lines[-1][f"loss/{name}"] == pytest.approx(alone["loss"], rel=1e-5)
        assert lines[-1][f"bits_per_byte/{name}"] == pytest.approx(alone["bits_per_byte"], rel=1e-5)


def test_an_older_checkpoint_is_evaluated_and_exported_by_its_step(trained, tmp_path, capsys):
    measured, run = evaluations_of(trained), str(trained.path)
    for name, line in ((f"{run}@2", measured[0]), (f"{run}@last", measured[1])):
        limit = ["--max-tokens", str(int(line["tokens"])), "--json"]
        assert main(["evaluate", name, *limit]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["step"], answer["results"][0]["loss"]) == (
            line["step"], pytest.approx(line["loss"], rel=1e-5),
        )  # fmt: skip
    assert main(["export", f"{run}@2", "--output", str(tmp_path / "export")]) == 0
    assert "after step 2" in capsys.readouterr().out
    assert main(["generate", f"{run}@3"]) == 2
    assert "name one of its steps: 2, 4" in capsys.readouterr().err


@pytest.fixture(scope="module")
def resumed(places: dict[str, Path]) -> RunDir:
    """A run with one set more to step 2, resumed with another one instead."""
    run_dir = RunDir(places["a"].with_name("resumed"))
    early = [f"evaluation.sets.early={places['b']}", "checkpoint.keep_last=9"]
    assert train(places, run_dir, *early) == 0
    assert train(places, run_dir, f"evaluation.sets.late={places['b']}", "--from-step=2") == 0
    return run_dir


def test_reports_and_tables_have_the_losses_of_sets(places, trained, resumed, tmp_path, capsys):
    losses = {name: f"{loss:.4f}" for name, loss in set_losses(evaluations_of(trained)[-1]).items()}
    runs = [str(trained.path), str(resumed.path), "--output", str(tmp_path)]
    assert main(["report", *runs, "--json"]) == 0
    assert (
        f"validation loss of beside: {losses['beside']}" in (tmp_path / "compare.html").read_text()
    )
    first, second = json.loads(capsys.readouterr().out)
    assert "evaluation_loss/late" not in first
    assert second["evaluation_loss/late"] == second["evaluation_loss/b"]
    assert first["evaluation_loss/beside"] == second["evaluation_loss/beside"]
    found = differing_losses(trained, resumed)
    assert not found, "what is measured besides does not change what is trained"
    assert first["validation_loss"] == evaluations_of(trained)[-1]["loss"]
    cells = [{"name": trained.path.name, "experiment": str(places["experiment"])}]
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(json.dumps({"format": 1, "name": "sets", "cells": cells}))
    where = [f"--runs-dir={trained.path.parent}", f"--output={tmp_path / 'runs.csv'}"]
    assert main(["scale", "collect", str(sweep), *where]) == 0
    heads = (tmp_path / "runs.csv").read_text().splitlines()[0].split(",")
    assert heads[-3:] == ["loss/a", "loss/b", "loss/beside"]
    assert main(["report", str(trained.path), "--output", str(tmp_path)]) == 0
    assert "by corpus" in (tmp_path / "report.html").read_text()


def test_kept_checkpoints_are_scored_by_another_job(places, tmp_path, capsys):
    run_dir = RunDir(tmp_path / "kept")
    assert train(places, run_dir, "checkpoint.keep_last=9", "metrics.tensorboard=true") == 0
    measured = {line["step"]: line for line in evaluations_of(run_dir)}
    run = str(run_dir.path)
    assert main(["evaluate", f"{run}@2", f"{run}@best", "--max-tokens", "600", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["results"]
    assert [point["step"] for point in points] == [2, 4]
    assert points[0]["loss"] == pytest.approx(measured[2]["loss"], rel=1e-5)
    assert points[0]["loss/beside"] == pytest.approx(measured[2]["loss/beside"], rel=1e-5)
    run_dir.evaluations.unlink()
    assert main(["evaluate", run, "--follow", "--json"]) == 0, "the run has ended"
    out, err = capsys.readouterr()
    points = json.loads(out)["results"]
    assert err == "".join(f"step {x['step']}: loss {x['loss']:.4f}\n" for x in points)
    assert [point["step"] for point in points] == [2, 4]
    assert points[1]["loss"] == pytest.approx(measured[4]["loss"], rel=1e-5)
    assert points[0]["tokens"] == measured[4]["tokens"] > measured[2]["tokens"]
    assert (run_dir.path / "evaluations.csv").read_text().count("\n") == 3
    assert [line["loss"] for line in read_history(run_dir.path).evaluations] == pytest.approx(
        [point["loss"] for point in points]
    )
    files = sorted(run_dir.path.glob("tensorboard-checkpoints-*-tokens/*"))
    assert len(files) == 2, "one per text"
    capsys.readouterr()
    assert main(["evaluate", f"{run}@4", f"{run}@4", "--json"]) == 0
    assert [x["step"] for x in json.loads(capsys.readouterr().out)["results"]] == [4], "as named"
    (curve,) = {path.parent for path in files if "-600-" not in path.parent.name}
    events = EventAccumulator(str(curve)).Reload()
    tags = events.Tags()["scalars"]
    assert tags
    for tag in tags:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == [2, 4], "an earlier step does not take back a later one"
    capsys.readouterr()
    written = run_dir.evaluations.read_bytes()
    assert main(["evaluate", run, "--follow"]) == 0
    assert run_dir.evaluations.read_bytes() == written, "nothing is scored twice"
    settings = ("checkpoint.keep_last=9", "metrics.tensorboard=true", "optim.learning_rate=1e-2")
    assert train(places, run_dir, *settings, "--from-step=2") == 0
    assert [line["step"] for line in run_dir.read_evaluations()] == [2], "4 has other weights now"
    capsys.readouterr()
    assert main(["evaluate", run, "--follow", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["results"]
    assert again[0] == points[0]
    assert again[1]["loss"] == pytest.approx(evaluations_of(run_dir)[-1]["loss"], rel=1e-5)
    assert again[1]["loss"] != pytest.approx(points[1]["loss"], rel=1e-5)
    assert main(["evaluate", run, "--follow", "--memory-length", "0"]) == 2
    assert "--memory-length" in capsys.readouterr().err
    assert main(["export", f"{run}@2", "--output", str(tmp_path / "export")]) == 0
    assert "after step 2" in capsys.readouterr().out
    assert main(["evaluate", f"{run}@3"]) == 2
    assert "name one of its steps: 2, 4" in capsys.readouterr().err


def test_a_watcher_waits_for_a_run_that_is_starting(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run"):
        next(unscored_steps(run_dir))
    with ThreadPoolExecutor() as pool:
        with run_dir.locked():
            steps = pool.submit(list, unscored_steps(run_dir, 0.01))
            assert wait([steps], 0.1).not_done
            RunDir.create(run_dir.path, RunConfig())
            run_dir.ledger.append(TrainingEnded(outcome=Outcome.FINISHED, step=4))
            assert wait([steps], 0.1).not_done, "it may be resumed with more steps"
            run_dir.ledger.append(TrainingBegan(world_size=1, step=4))
        assert wait([steps], 0.1).not_done, "on another host, whose locks cannot be seen"
        run_dir.ledger.append(TrainingEnded(outcome=Outcome.FINISHED, step=6))
        assert steps.result() == []


def test_a_resume_may_add_and_remove_sets_but_not_change_a_sets_text(places, resumed, capsys):
    names = [["a", "b", "beside", "early"], ["a", "b", "beside", "late"]]
    assert [list(set_losses(line)) for line in evaluations_of(resumed)] == names
    first, last = find_events(resumed.ledger.read(), TrainingBegan)
    assert [list(first.sets), list(last.sets)] == names
    assert first.sets["b"] == first.sets["early"] == last.sets["late"] != last.sets["beside"]
    assert train(places, resumed, f"evaluation.sets.b={places['c']}") == 2
    assert "evaluation.sets.b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("evaluation.sets.gone=/nowhere", "evaluation.sets.gone: /nowhere/validation"),
        ("evaluation.sets.other={d}", "evaluation.sets.other"),
        ("evaluation.sets.a/b={c}", "'a/b'"),
    ],
)
def test_unmeasurable_sets_are_rejected_before_training(places, tmp_path, capsys, setting, words):
    run_dir = RunDir(tmp_path / "run")
    assert train(places, run_dir, setting.format_map(places)) == 2
    assert words in capsys.readouterr().err
    assert not run_dir.path.exists()


def test_ranks_with_other_sets_are_an_error_before_they_wait_for_each_other():
    first = {"a": "1", "b": "2"}
    check_same_sets([first, dict(first)])
    with pytest.raises(DataError, match=r"rank 1 .* b .*rank 0"):
        check_same_sets([first, {"a": "1"}, first])
    with pytest.raises(DataError, match=r"rank 2 .* a, c "):
        check_same_sets([first, first, {"a": "2", "b": "2", "c": "3"}])


def test_parts_are_named_by_their_directories_and_by_their_parents_where_these_are_alike():
    paths = ("x/wiki", "y/wiki", "books", "s3://bucket/my web", "/", "x/wiki")
    parts = tuple(MixturePart(path=Path(path)) for path in paths)
    named = EvaluationConfig(sets={"books": Path("own")})
    found = evaluation_sets(RunConfig(data=DataConfig(mixture=parts), evaluation=named))
    expected = {"x-wiki": "x/wiki", "y-wiki": "y/wiki", "books": "own", "part": "/"}
    expected["my-web"] = "s3:/bucket/my web"
    assert {each.name: str(each.path) for each in found} == expected
