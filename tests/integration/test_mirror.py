"""Checkpoints in a real S3 server: uploaded while a run trains, and resumed from elsewhere."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from launcher.cli import main as launcher
from launcher.run_state import read_state
from pretrain.checkpoint import mirror
from pretrain.cli import main as pretrain
from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.compare_runs import differing_losses
from pretrain.rundir.events import Mirrored, Restored, TrainingBegan
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.forked_ranks import ForkedRanks
from tests.helpers.stores import client, make_bucket

STEPS, INTERVAL = 24, 4
SETTINGS = """name: tiny
model: {{num_layers: 2, d_model: 16, num_heads: 2, memory_length: 8, dropout: 0.1}}
data: {{path: {corpus}, lanes: 4, segment_length: 16}}
optim: {{steps: 24}}
engine: {{kind: torch}}
checkpoint: {{interval: 4, keep_last: 2}}
evaluation: {{interval: 10, lanes: 2, max_tokens: 500}}
metrics: {{interval: 1, tensorboard: false}}
"""


@pytest.fixture(scope="module")
def experiment(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mirror") / "tiny.yaml"
    path.write_text(SETTINGS.format(corpus=tiny_corpus))
    return path


@pytest.fixture(scope="module")
def undisturbed(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = RunDir(tmp_path_factory.mktemp("undisturbed") / "run")
    assert pretrain(["train", str(experiment), f"--run-dir={run_dir.path}"]) == 0
    return run_dir


def folders(endpoint: str, bucket: str) -> set[int]:
    """The steps of which the store has any object."""
    found = client(endpoint).list_objects_v2(Bucket=bucket.removeprefix("s3://"))
    keys = (item["Key"] for item in found.get("Contents", []))
    return {int(key.split("/")[-2].split("-")[1]) for key in keys if "/step-" in key}


def steps_listed(endpoint: str, bucket: str) -> list[int]:
    name = bucket.removeprefix("s3://")
    answer = client(endpoint).get_object(Bucket=name, Key="runs/tiny/mirror.json")
    return [each["step"] for each in json.loads(answer["Body"].read())["checkpoints"]]


@pytest.mark.slow
def test_a_run_whose_disk_is_gone_resumes_from_the_store(
    experiment, undisturbed, tmp_path, bucket, s3_endpoint
):
    mirror = f"checkpoint.mirror={bucket}/runs"
    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    # Ranks share the upload; a request to stop waits until the last checkpoint is there.
    program = partial(pretrain, ["train", str(experiment), mirror, f"--run-dir={first.path}"])
    ranks = ForkedRanks(2, program, tmp_path, **{VARIABLE: "sigterm-in-evaluation@10"})
    assert ranks.wait() == [75, 75]
    assert find_events(first.ledger.read(), Mirrored)[-1].step == 10
    assert not any(event.problem for event in find_events(first.ledger.read(), Mirrored))
    assert steps_listed(s3_endpoint, bucket)[-1] == 10
    assert read_state(first.path).mirrored == 10
    shutil.rmtree(first.path)

    url = f"{bucket}/runs/tiny"
    assert pretrain(["checkpoint", "fetch", url, str(second.path)]) == 0
    assert pretrain(["train", str(experiment), f"--run-dir={second.path}", mirror]) == 0
    assert differing_losses(undisturbed, second, 1e-5) == []
    events = second.ledger.read()
    assert find_events(events, Restored) == [Restored(step=10, url=url)]
    assert find_events(events, TrainingBegan)[-1].step == 10
    steps = [line["step"] for line in second.read_metrics() if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    # The store keeps what the run's retention keeps, and nothing else.
    assert steps_listed(s3_endpoint, bucket)[-1] == STEPS
    assert folders(s3_endpoint, bucket) == set(steps_listed(s3_endpoint, bucket))
    assert len(folders(s3_endpoint, bucket)) == 2


def test_a_store_that_is_away_costs_nothing_and_gets_the_checkpoint_later(
    experiment, undisturbed, tmp_path, bucket, s3_endpoint, caplog, capsys, monkeypatch
):
    run_dir = RunDir(tmp_path / "run")
    away = f"checkpoint.mirror={bucket}-away/runs"
    command = ["train", str(experiment), f"--run-dir={run_dir.path}", away]
    with monkeypatch.context() as patch:
        patch.setattr(mirror, "FINISH_SECONDS", 0.5)
        assert pretrain(command) == 0
    assert differing_losses(undisturbed, run_dir) == []
    failed = [each for each in find_events(run_dir.ledger.read(), Mirrored) if each.problem]
    assert (failed[-1].step, failed[-1].url) == (STEPS, f"{bucket}-away/runs/tiny")
    assert len(failed) <= 2, "one for the failure that lasts, one for the end"
    assert caplog.text.count("training continues") <= 1
    assert launcher(["status", str(run_dir.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mirror_problem"]

    make_bucket(s3_endpoint, f"{bucket}-away".removeprefix("s3://"))
    monkeypatch.setattr(mirror, "FINISH_SECONDS", 600.0)  # a busy machine takes its time
    assert pretrain([*command, "optim.steps=26", "optim.schedule.shape=constant"]) == 0
    assert steps_listed(s3_endpoint, f"{bucket}-away")[-1] == 26
    back = read_state(run_dir.path)
    assert (back.mirrored, back.mirror_problem) == (26, "")
