"""Runs that recover: from a poisoned document, from a rank out of memory; and a slow rank."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from pretrain.commands.same_run import differing_losses, summary
from pretrain.processes.local_ranks import RankGroup, describe_failure, train_command
from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.events import GaveUp, OutOfMemory, Rewind, Slowdown
from pretrain.rundir.ledger import events_of
from pretrain.rundir.run_dir import RunDir
from tests.helpers.corpora import make_text, write_jsonl

POISONED = "d70"
SEED = 4
LANES = 4
LENGTH = 16
STEPS = 220


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a corpus with one document of random characters, which lane 3 reads from step 164 to
    195.
    """
    directory = tmp_path_factory.mktemp("healing")
    generator = random.Random(0)
    texts = [make_text(generator, generator.randint(2, 20)) for _ in range(120)]
    texts[int(POISONED[1:])] = "".join(chr(generator.randrange(33, 127)) for _ in range(500))
    config = CorpusConfig(
        input=(write_jsonl(directory / "text" / "text.jsonl", texts),),
        output=directory / "corpus",
        validation_fraction=0.1,
        shard_bytes=6000,
        threads=1,
        tokenizer=TokenizerConfig(kind="bytes"),
    )
    build_corpus(config)
    path = directory / "poisoned.yaml"
    path.write_text(
        f"""name: poisoned
seed: {SEED}
model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 16, dropout: 0.1}}
data: {{path: {directory / "corpus"}, lanes: {LANES}, segment_length: {LENGTH}}}
optim: {{steps: {STEPS}, learning_rate: 3.0e-3, clip_norm: 1.0}}
engine: {{kind: torch}}
checkpoint: {{interval: 20, keep_last: 1}}
evaluation: {{interval: 0, max_tokens: 500}}
metrics: {{interval: 10, tensorboard: false}}
recovery: {{spike_threshold: 5.0}}
"""
    )
    return path


def train(
    experiment: Path, run_dir: RunDir, *more: str, fault: str = ""
) -> subprocess.CompletedProcess[str]:
    command = train_command(experiment, run_dir.path, *more)
    environment = {**os.environ, VARIABLE: fault}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def slow_ranks(run_dir: RunDir) -> list[Slowdown]:
    events = events_of(run_dir.ledger.read(), Slowdown)
    return [event for event in events if event.ratio is not None]


def losses_of(run_dir: RunDir) -> list[float]:
    return [line["loss"] for line in run_dir.read_metrics() if line["kind"] == "train"]


def audited(experiment: Path, steps: range) -> list[dict[str, Any]]:
    """What `data-pipeline audit` says about these steps."""
    command = [
        sys.executable,
        "-m",
        "data_pipeline",
        "audit",
        str(experiment.parent / "corpus" / "train"),
        "--json",
    ]
    settings = [
        f"--lanes={LANES}",
        f"--seed={SEED}",
        f"--segment-length={LENGTH}",
        f"--steps={steps[0]}:{steps[-1]}",
    ]
    ended = subprocess.run([*command, *settings], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def recovered(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Trained to the end by two ranks under ZeRO-2, with nobody looking."""
    run_dir = RunDir(tmp_path_factory.mktemp("recovered") / "run")
    settings = [
        str(experiment),
        "--run-dir",
        str(run_dir.path),
        "engine.kind=deepspeed",
        "engine.zero_stage=2",
    ]
    with RankGroup(
        [sys.executable, "-m", "pretrain", "train", *settings], 2, run_dir.path.parent / "logs"
    ) as group:
        statuses = group.wait()
    assert not any(statuses), describe_failure(statuses, group.logs)
    return run_dir


@pytest.mark.slow
def test_a_poisoned_document_makes_the_run_rewind_and_is_skipped(recovered, experiment):
    rewinds = events_of(recovered.ledger.read(), Rewind)
    assert [rewind.to_step for rewind in rewinds] == [160], "keep_last=1 kept it beside 180"
    assert (rewinds[0].spike.loss or 0.0) > (rewinds[0].spike.usual or 0.0) + 0.5
    begin, end = rewinds[0].segments
    assert begin <= 163 < 195 < end, "the whole document, in segments counted from 0"
    assert POISONED in {piece["document"] for piece in audited(experiment, range(begin, end))}


@pytest.mark.slow
def test_a_recovered_run_has_every_step_once_and_no_spike(recovered):
    lines = [line for line in recovered.read_metrics() if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert max(line["loss"] for line in lines[150:]) < 2.9


@pytest.mark.slow
def test_a_recovered_run_killed_afterwards_resumes_bitwise(experiment, tmp_path):
    uninterrupted, killed = RunDir(tmp_path / "uninterrupted"), RunDir(tmp_path / "killed")
    assert train(experiment, uninterrupted).returncode == 0
    assert train(experiment, killed, fault="sigkill@210").returncode == -9
    assert events_of(killed.ledger.read(), Rewind)
    assert train(experiment, killed).returncode == 0
    problems = differing_losses(uninterrupted, killed)
    assert not problems, summary(problems)


@pytest.mark.slow
def test_a_run_that_may_not_rewind_again_stops_with_a_report(experiment, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    ended = train(experiment, run_dir, "recovery.max_rewinds=0")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ": steps 164 to 190 had losses up to" in ended.stderr
    assert "after 0 rewinds (recovery.max_rewinds=0);" in ended.stderr
    assert events_of(run_dir.ledger.read(), GaveUp)


SHORT = ("optim.steps=30", "checkpoint.interval=10")


@pytest.fixture(scope="module")
def short(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = RunDir(tmp_path_factory.mktemp("short") / "run")
    assert train(experiment, run_dir, *SHORT).returncode == 0
    return run_dir


@pytest.mark.slow
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_losses(short, experiment, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    ended = train(experiment, run_dir, *SHORT, fault="oom:1@15")
    assert ended.returncode == 0, ended.stderr
    assert "rank 0: recovery: out of memory (OOM) with 4 lanes per forward pass" in ended.stderr
    assert [event.micro_batch_lanes for event in events_of(run_dir.ledger.read(), OutOfMemory)] == [
        4,
        2,
    ]
    assert losses_of(run_dir) == pytest.approx(losses_of(short), abs=1e-5)


@pytest.mark.slow
def test_a_restart_in_the_process_frees_the_model_before(experiment, tmp_path):
    """At the end of a phase, when memory runs out and at a rewind, in every cell, also compiled."""
    live = tmp_path / "live.yaml"
    live.write_text(
        f"""extends: {experiment}
model: {{dropout: 0.0}}
data: {{segment_length: 8, phases: [{{from_step: 4, segment_length: {LENGTH}}}]}}
engine: {{kind: deepspeed}}
"""
    )
    command = [sys.executable, "-m", "tests.helpers.live_models", str(live), str(tmp_path)]
    done = subprocess.run(
        command,
        env={**os.environ, VARIABLE: "oom:2@13"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "live.json").read_text())
    assert found == dict.fromkeys(found, [0] * 4)
    assert len(found) == 8


@pytest.mark.slow
def test_ranks_restart_together_when_one_is_out_of_memory_and_a_slow_one_is_named(
    short, experiment, tmp_path
):
    run_dir = RunDir(tmp_path / "run")
    command = [
        sys.executable,
        "-m",
        "launcher",
        "local",
        str(experiment),
        "--ranks=2",
        f"--run-dir={run_dir.path}",
    ]
    oom = subprocess.run(
        [*command, *SHORT],
        env={**os.environ, VARIABLE: "oom:1@15"},
        capture_output=True,
        text=True,
    )
    assert oom.returncode == 0, oom.stdout + oom.stderr
    assert (
        "out of memory; continuing with half the lanes per forward pass" in oom.stdout + oom.stderr
    )
    assert [
        (event.rank, event.micro_batch_lanes)
        for event in events_of(run_dir.ledger.read(), OutOfMemory)
    ] == [(1, 2)]
    assert losses_of(run_dir) == pytest.approx(losses_of(short), abs=1e-5)

    slow = subprocess.run(
        [*command, "optim.steps=50", "metrics.interval=4"],
        env={**os.environ, VARIABLE: "slow:0.15@31"},
        capture_output=True,
        text=True,
    )
    assert slow.returncode == 0, slow.stdout + slow.stderr
    assert "straggler: rank 1 needs" in slow.stdout + slow.stderr
    named = slow_ranks(run_dir)
    assert [event.rank for event in named] == [1]
    assert (named[0].ratio or 0.0) > 1.5
