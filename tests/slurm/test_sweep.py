"""A sweep as an array job, cancel and resume, and a preflight, on a real Slurm of four hosts."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from pretrain.rundir.events import JobEnded, JobStarted, SupervisorKilled, TrainingBegan
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.jobs import until
from tests.slurm.lab import SlurmLab

STEPS = 200
CELLS = {"a": 1, "b": 2, "c": 3, "a-again": 1, "b-again": 2, "c-again": 3}  # name -> seed
# What is killed: the whole batch script, or the supervisor that it starts.
SCRIPT, SUPERVISOR = "(batch_process|launcher batch)", "launcher batch"
KILLED = {"a": SCRIPT, "b": SCRIPT, "c": SUPERVISOR}


@pytest.fixture
def folder(lab: SlurmLab) -> Path:
    """Sweep, experiment and cluster file, where all hosts see them."""
    folder = lab.path / "sweep"
    corpus = make_tiny_corpus(folder / "corpus")
    (folder / "tiny.yaml").write_text(
        f"""model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 8, dropout: 0.1}}
data: {{path: {corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: {STEPS}}}
engine: {{kind: torch}}
checkpoint: {{interval: 50}}
evaluation: {{interval: 0, max_tokens: 200}}
metrics: {{interval: 1, tensorboard: false}}
"""
    )
    seeds = {name: [f"seed={seed}"] for name, seed in CELLS.items()}
    cells = [{"name": name, "experiment": "tiny.yaml", "overrides": seeds[name]} for name in CELLS]
    tree = {"format": 1, "name": "six", "cells": cells}
    (folder / "sweep.yaml").write_text(json.dumps(tree))  # JSON is YAML
    cluster = "ranks_per_node: 1\nenvironment: {GLOO_SOCKET_IFNAME: eth0}\n"
    (folder / "cluster.yaml").write_text(cluster)
    return folder


def losses(folder: Path, cell: str) -> list[float]:
    lines = RunDir(folder / "runs" / cell).read_metrics()
    return [line["loss"] for line in lines if line["kind"] == "train"]


def sweep(lab: SlurmLab, folder: Path, action: str, *more: str) -> str:
    command = [sys.executable, "-m", "launcher", "sweep", action, str(folder / "sweep.yaml")]
    result = lab.run(*command, f"--runs-dir={folder / 'runs'}", *more)
    assert result.returncode == 0, result.stderr
    return result.stdout


def submit(lab: SlurmLab, folder: Path) -> str:
    return sweep(lab, folder, "submit", f"--cluster={folder / 'cluster.yaml'}", "--jobs=3")


def test_six_cells_of_an_array_are_completed_though_three_were_killed(lab: SlurmLab, folder: Path):
    assert re.search("6 cells on 1 .* 3 at ", submit(lab, folder))
    assert "6 active" in submit(lab, folder)  # nothing is submitted twice
    waiting = set(KILLED)
    while waiting:
        for cell in [cell for cell in waiting if len(losses(folder, cell)) >= 20]:
            pattern = f"{KILLED[cell]} {folder}/runs/{cell} "
            lab.run("kill", "-9", *lab.run("pgrep", "-f", pattern).stdout.split())
            waiting.remove(cell)
        time.sleep(0.05)
    until(lambda: " active" not in sweep(lab, folder, "status"))
    assert re.search("4 of 6 .*, 2 failed", sweep(lab, folder, "status"))

    assert "2 cells on 1 " in submit(lab, folder)
    until(lambda: "6 of 6 cells" in sweep(lab, folder, "status"))
    assert submit(lab, folder).startswith("6 of 6 cells")
    for cell in CELLS:
        assert len(losses(folder, cell)) == STEPS
    for cell in KILLED:
        assert losses(folder, cell) == losses(folder, f"{cell}-again")
        ledger = RunDir(folder / "runs" / cell).ledger.read()
        assert len(find_events(ledger, TrainingBegan)) == 2
        assert len(find_events(ledger, SupervisorKilled)) == (KILLED[cell] == SUPERVISOR)


def test_a_canceled_and_an_unrequeuable_run_wait_until_they_are_resumed(lab, folder):
    run = folder / "runs" / "alone"
    cluster = folder / "alone.yaml"
    cluster.write_text((folder / "cluster.yaml").read_text() + "options: {no-requeue: }\n")

    def launcher(command: str, *more: str) -> str:
        result = lab.run(sys.executable, "-m", "launcher", command, *more)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def state() -> str:
        return json.loads(launcher("status", str(run), "--json"))["state"]

    options = [f"--cluster={cluster}", f"--run-dir={run}", f"optim.steps={5 * STEPS}"]
    launcher("submit", str(folder / "tiny.yaml"), *options)
    until(lambda: len(losses(folder, "alone")) >= 20)
    assert "is canceled" in launcher("cancel", str(run))
    until(lambda: state() == "canceled")
    assert lab.run(sys.executable, "-m", "launcher", "cancel", str(run)).returncode == 2
    assert " continues " in launcher("resume", str(run))
    steps = len(losses(folder, "alone"))
    until(lambda: len(losses(folder, "alone")) >= steps + 20)
    lab.run("scontrol", "update", "PartitionName=main", "PreemptMode=CANCEL", "GraceTime=0")
    (node,) = find_events(RunDir(run).ledger.read(), JobStarted)[-1].nodes
    urgent = ["-p", "urgent", "-w", node, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"]
    assert lab.run("sbatch", *urgent).returncode == 0
    until(lambda: state() == "preempted")
    lab.run("scontrol", "update", "PartitionName=main", "PreemptMode=REQUEUE", "GraceTime=30")
    assert find_events(RunDir(run).ledger.read(), JobEnded)[-1].is_final
    assert " continues " in launcher("resume", str(run))
    until(lambda: state() == "done")
    assert len(losses(folder, "alone")) == 5 * STEPS
    assert "rank 0: finished; " in launcher("logs", str(run), "--lines=1")


def test_preflight_names_the_slow_node(lab: SlurmLab, folder: Path):
    pid = (lab.path / "n3.pid").read_text().strip()
    inside = ["nsenter", "-t", pid, "-n", "tc", "qdisc"]
    slow = ["tbf", "rate", "80mbit", "burst", "32kbit", "latency", "400ms"]
    assert lab.run(*inside, "add", "dev", "eth0", "root", *slow).returncode == 0
    try:
        where = [f"--cluster={folder / 'cluster.yaml'}", f"--directory={folder}"]
        command = [sys.executable, "-m", "launcher", "preflight", *where, "--nodes=3", "--json"]
        result = lab.run(*command, timeout=200)
    finally:
        lab.run(*inside, "del", "dev", "eth0", "root")
    assert result.returncode == 1, result.stderr
    nodes = {node["node"]: node for node in json.loads(result.stdout)["nodes"]}
    assert nodes["n3"]["verdict"] == "slow"
    slow_links = [name for name in nodes if "rate at best" in " ".join(nodes[name]["problems"])]
    assert (sorted(nodes), slow_links) == (["n1", "n2", "n3"], ["n3"])
    assert not list(folder.glob(".preflight-*"))
