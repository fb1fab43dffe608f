"""Tasks of lm-eval while a run trains, from local files."""

import json
from functools import partial
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from foundation.settings import load_config
from pretrain.cli import main
from pretrain.config.run import RunConfig
from pretrain.rundir.compare_runs import run_differences
from pretrain.rundir.run_dir import RunDir
from tests.helpers.corpora import some_texts
from tests.helpers.forked_ranks import run_ranks

STEPS = 4


@pytest.fixture(scope="module")
def experiment(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    lines = [{"text": text[:60], "answer": number % 2} for number, text in enumerate(some_texts(6))]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"data_files": f"{folder}/data.jsonl"}
    task = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "train"}
    choices = {
        "task": "choices", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
        "doc_to_choice": ["a river", "the road"], "doc_to_target": "{{answer}}", "num_fewshot": 1,
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    whole = {
        "task": "whole", "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "{{text}}", "metric_list": [{"metric": "bits_per_byte"}],
    }  # fmt: skip
    for settings in (choices, whole):
        (folder / f"{settings['task']}.yaml").write_text(json.dumps({**task, **settings}))
    path = folder / "tiny.yaml"
    path.write_text(
        f"""name: tiny
model: {{num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8, dropout: 0.1}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: {STEPS}}}
engine: {{kind: torch}}
checkpoint: {{interval: 4}}
evaluation:
  interval: 3
  max_tokens: 200
  lanes: 2
  tasks: [{folder}/choices.yaml, {folder}/whole.yaml]
metrics: {{interval: 2, tensorboard: false}}
"""
    )
    return path


def train(experiment: Path, run_dir: RunDir, *more: str) -> int:
    return main(["train", str(experiment), "--run-dir", str(run_dir.path), *more])


@pytest.fixture(scope="module")
def trained(experiment: Path) -> RunDir:
    run_dir = RunDir(experiment.with_name("run"))
    assert train(experiment, run_dir) == 0
    return run_dir


def tasks_of(run_dir: RunDir) -> dict[int, dict[str, float]]:
    found = {}
    for line in (line for line in run_dir.read_metrics() if line["kind"] == "evaluation"):
        found[line["step"]] = {name: line[name] for name in line if name.startswith("tasks/")}
    return found


def test_every_kth_evaluation_and_the_last_have_task_scores(experiment, trained, tmp_path, capsys):
    found = tasks_of(trained)
    assert [step for step in found if found[step]] == [3, 4]
    assert list(found[4]) == ["tasks/choices/acc", "tasks/whole/bits_per_byte"]
    files = load_config(RunConfig, experiment).evaluation.tasks
    assert main(["evaluate", str(trained.path), "--tasks", *files, "--lanes", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    expected = [results["choices"]["acc,none"], results["whole"]["bits_per_byte,none"]]
    assert [*found[4].values()] == pytest.approx(expected, rel=1e-5)
    assert found[3]["tasks/whole/bits_per_byte"] != found[4]["tasks/whole/bits_per_byte"]
    assert main(["report", str(trained.path), "--output", str(tmp_path)]) == 0
    row = f"<td>tasks/whole/bits_per_byte</td><td>{found[4]['tasks/whole/bits_per_byte']:.4f}</td>"
    assert row in (tmp_path / "report.html").read_text()


def test_training_is_bitwise_the_same_with_and_without_tasks(experiment, trained, tmp_path):
    without = RunDir(tmp_path / "run")
    assert train(experiment, without, "evaluation.tasks=[]") == 0
    assert not any(tasks_of(without).values())
    problems = run_differences(trained, without, STEPS)
    assert not problems, "losses, weights, moments, memories and random numbers"


def test_ranks_wait_for_the_one_that_runs_the_tasks(experiment, trained, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    command = ["train", str(experiment), f"--run-dir={run_dir.path}", "evaluation.interval=0"]
    run_ranks(2, partial(main, command), tmp_path)
    found = tasks_of(run_dir)
    assert [step for step in found if found[step]] == [STEPS]
    assert found[STEPS] == pytest.approx(tasks_of(trained)[STEPS], rel=1e-3)


@pytest.mark.parametrize("name", ["missing.yaml", "broken.yaml"])
def test_unloadable_tasks_are_refused_at_the_start(experiment, tmp_path, capsys, name):
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": "/nowhere.jsonl"}}
    broken = json.dumps({"task": "broken", "test_split": "train", **data})
    experiment.with_name("broken.yaml").write_text(broken)
    tasks = f"evaluation.tasks=[{experiment.parent}/{name}]"
    assert train(experiment, RunDir(tmp_path / "run"), tasks) == 2
    assert name in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_whose_weights_are_sharded_has_no_tasks(experiment):
    overrides = ["engine.kind=deepspeed", "engine.zero_stage=3"]
    with pytest.raises(ConfigError, match="zero_stage=3"):
        load_config(RunConfig, experiment, overrides)
