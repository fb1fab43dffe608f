"""Mirrors for tests: runs whose checkpoints verify, their uploads, and what is restored."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from data_pipeline.corpora.web_requests import RetryPolicy
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.mirror import Publication, Upload
from pretrain.checkpoint.object_store import ObjectStore
from pretrain.checkpoint.transfer import RankReports
from pretrain.checkpoint.verify import latest_valid
from pretrain.config.run import CheckpointConfig, ModelConfig, RunConfig
from pretrain.rundir.events import JobStarted, Submitted, TrainingBegan
from pretrain.rundir.restore import SCRATCH, restore_run
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.metrics import train_line
from tests.helpers.stores import client

RANKS = 2
FAST = RetryPolicy(attempts=2, timeout=3.0, pause=0.01)


def run_in(directory: Path, steps: list[int]) -> RunDir:
    """A run with checkpoints of these steps, and of the ledger and metrics that go along."""
    run_dir = RunDir.create(directory, RunConfig(name="tiny", model=ModelConfig(vocab_size=300)))
    run_dir.ledger.append(Submitted(job="17", job_name="tiny"))
    run_dir.ledger.append(JobStarted(job="17", restart=0, nodes=("n1",), step=0))
    run_dir.ledger.append(TrainingBegan(step=0, world_size=RANKS, attempt="17.0.0.ab"))
    for step in steps:
        save(run_dir, step)
    return run_dir


def save(run_dir: RunDir, step: int) -> Path:
    with open(run_dir.metrics, "a") as file:
        file.write(json.dumps(train_line(step)) + "\n")
    root, run = run_dir.checkpoints, run_dir.identity.id
    return publish_step(root, step, RANKS, run=run)


def upload(
    run_dir: RunDir,
    url: str,
    step: int,
    scratch: Path,
    keep_last: int = 3,
    may_write: Callable[[], None] = lambda: None,
) -> None:
    """What all ranks do for one checkpoint, one after the other."""
    scratch.mkdir(exist_ok=True)
    store, ranks = ObjectStore(url, scratch, FAST), HashStore()
    directory = run_dir.checkpoints / f"step-{step:08d}"
    kept = CheckpointConfig(keep_last=keep_last)
    disk = Disk(run_dir.checkpoints, "", run_dir.identity.id, may_write)
    publication = Publication(store, disk, step, kept)
    for rank in reversed(range(RANKS)):
        upload = Upload(directory, RankReports("", rank, RANKS, ranks), store, publication)
        upload.run()
        assert upload.problem is None, upload.problem


def restored(url: str, directory: Path, policy: RetryPolicy = FAST, step: int | None = None) -> int:
    """The step that arrives: whole, and with the run's files."""
    step = restore_run(url, directory, policy, step)
    run_dir = RunDir.open(directory)
    found = latest_valid(run_dir.checkpoints, pytest.fail, run_dir.identity.id)
    assert found is not None
    assert found.step == step
    assert run_dir.config.name == "tiny"
    assert run_dir.read_metrics()[-1]["step"] >= step
    assert not (directory / SCRATCH).exists()
    return step


def names_in(url: str, endpoint: str) -> set[str]:
    """The objects under the URL."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    found = client(endpoint).list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    return {each["Key"].removeprefix(f"{prefix}/") for each in found}


def over_http(url: str, endpoint: str) -> str:
    """The same objects without an SDK, which takes half a second to start.

    The server wants to be asked with a name, and does not look at it.
    """
    host = endpoint.removeprefix("http://")
    os.environ["MIRROR_PASSWORD"] = f"any@{host}"
    return url.replace("s3://", f"http://me:env:MIRROR_PASSWORD@{host}/")
