"""What `launcher status` learns from accounting about jobs whose own words were lost with their
hosts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.corpora import make_tiny_corpus
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import Runs, SlurmRun


@pytest.fixture
def lab() -> Iterator[SlurmLab]:
    with SlurmLab(num_nodes=2, accounting=True) as lab:
        yield lab


def status(run: SlurmRun) -> dict[str, Any]:
    command = [sys.executable, "-m", "launcher", "status", str(run.dir.path), "--json"]
    return json.loads(run.lab.run(*command).stdout)


def test_jobs_that_could_not_say_how_they_ended_are_asked_for_in_accounting(lab: SlurmLab):
    runs = Runs(lab, make_tiny_corpus(lab.path / "corpus"))
    requeued = runs.submit("requeued", nodes="1", options={"nodelist": "n1"})
    lost = runs.submit("lost", nodes="1", options={"nodelist": "n2", "no-requeue": ""})
    for run in (requeued, lost):
        run.wait_for_step(20)
    lab.power_off("n1")
    lab.power_off("n2")

    requeued.until(lambda: requeued.state() == "PENDING")
    requeued.until(
        lambda: status(requeued)["reason"].startswith("a node failed; "), seconds=20
    )  # accounting lags
    assert status(requeued)["state"] == "requeued"
    lost.until(lambda: not lost.state(), seconds=60)
    assert (status(lost)["state"], status(lost)["reason"]) == (
        "failed",
        "a node failed and its job was not requeued",
    )

    lab.boot("n1")
    requeued.wait_until_finished()
    requeued.until(lambda: status(requeued)["state"] == "done", seconds=20)
    assert len([line for line in requeued.dir.read_metrics() if line["kind"] == "train"]) == 300
