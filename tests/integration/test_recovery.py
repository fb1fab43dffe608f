"""Runs that recover from a poisoned document and restart in their process; and a slow rank."""

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.cli import main as data_pipeline
from pretrain.cli import main
from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.events import Rewind, Slowdown, TrainingBegan, TrainingEnded
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers import live_models
from tests.helpers.corpora import config_of, make_text
from tests.helpers.forked_ranks import ForkedRanks

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
    corpus = config_of(directory, texts, validation_fraction=0.1, shard_bytes=6000)
    build_corpus(corpus)
    path = directory / "poisoned.yaml"
    path.write_text(
        f"""name: poisoned
seed: {SEED}
model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 16, dropout: 0.1}}
data: {{path: {corpus.output}, lanes: {LANES}, segment_length: {LENGTH}}}
optim: {{steps: {STEPS}, learning_rate: 3.0e-3, clip_norm: 1.0}}
engine: {{kind: torch}}
checkpoint: {{interval: 20, keep_last: 1}}
evaluation: {{interval: 0, max_tokens: 500}}
metrics: {{interval: 10, tensorboard: false}}
recovery: {{spike_threshold: 5.0}}
"""
    )
    return path


def train(experiment: Path, run_dir: RunDir, *more: str, fault: str) -> list[int | None]:
    """The exit statuses of two ranks under ZeRO-2, with nobody looking."""
    settings = ("engine.kind=deepspeed", "engine.zero_stage=2")
    command = ["train", str(experiment), f"--run-dir={run_dir.path}", *settings, *more]
    logs = run_dir.path.parent
    return ForkedRanks(2, partial(main, command), logs, **{VARIABLE: fault}).wait()


@pytest.fixture(scope="module")
def killed(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Rewound, and killed 10 steps after a later checkpoint."""
    run_dir = RunDir(tmp_path_factory.mktemp("killed") / "run")
    assert train(experiment, run_dir, fault="sigkill@210") == [-9, -9]
    return run_dir


@pytest.fixture(scope="module")
def recovered(experiment: Path, killed: RunDir, tmp_path_factory) -> RunDir:
    """The same run, resumed to its end, with a slow rank."""
    run_dir = RunDir(shutil.copytree(killed.path, tmp_path_factory.mktemp("recovered") / "run"))
    assert train(experiment, run_dir, "metrics.interval=4", fault="slow:0.15@201") == [0, 0]
    return run_dir


def steps_of(run_dir: RunDir) -> list[dict[str, Any]]:
    names = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    lines = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
    return [{name: line[name] for name in names} for line in lines]


def audited(experiment: Path, steps: range, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The documents that `data-pipeline audit` names for these steps."""
    lanes = [f"--lanes={LANES}", f"--seed={SEED}", f"--segment-length={LENGTH}"]
    settings = [*lanes, f"--steps={steps[0]}:{steps[-1]}", "--json"]
    assert data_pipeline(["audit", str(experiment.parent / "out" / "train"), *settings]) == 0
    return {json.loads(line)["document"] for line in capsys.readouterr().out.splitlines()}


@pytest.mark.slow
def test_a_poisoned_document_makes_the_run_rewind_and_is_skipped(recovered, experiment, capsys):
    rewinds = find_events(recovered.ledger.read(), Rewind)
    assert [rewind.to_step for rewind in rewinds] == [160], "keep_last=1 kept it beside 180"
    assert (rewinds[0].spike.loss or 0.0) > (rewinds[0].spike.usual or 0.0) + 0.5
    begin, end = rewinds[0].segments
    assert begin <= 163 < 195 < end, "the whole document, in segments counted from 0"
    assert POISONED in audited(experiment, range(begin, end), capsys)
    assert [line["step"] for line in steps_of(recovered)] == list(range(1, STEPS + 1))
    assert max(line["loss"] for line in steps_of(recovered)[150:]) < 2.9


@pytest.mark.slow
def test_a_recovered_run_killed_afterwards_resumes_bitwise(killed, recovered):
    events = find_events(recovered.ledger.read(), TrainingBegan, TrainingEnded)
    assert [event.step for event in events] == [0, 160, 200, STEPS]
    assert steps_of(recovered)[:210] == steps_of(killed)


@pytest.mark.slow
def test_a_rank_that_is_slower_than_the_others_is_named(recovered):
    slowdowns = find_events(recovered.ledger.read(), Slowdown)
    since = [event for event in slowdowns if event.ratio is not None and event.step > 200]
    assert 1 in {event.rank for event in since if (event.ratio or 0.0) > 1.5}


@pytest.mark.slow
def test_a_restart_in_the_process_frees_the_model_before(experiment, tmp_path):
    """At the end of a phase, when memory runs out and at a rewind, also compiled."""
    live = tmp_path / "live.yaml"
    live.write_text(
        f"""extends: {experiment}
model: {{dropout: 0.0}}
data: {{segment_length: 8, phases: [{{from_step: 4, segment_length: {LENGTH}}}]}}
engine: {{kind: deepspeed}}
checkpoint: {{interval: 5}}
metrics: {{interval: 1}}
recovery: {{skip_grad_norm: 1.0e-9, max_rewinds: 1}}
"""
    )
    program = partial(live_models.write_counts, live, tmp_path)
    ranks = ForkedRanks(1, program, tmp_path, **{VARIABLE: "oom:2@8"})
    assert ranks.wait() == [0], (tmp_path / "rank-0.log").read_text()
    found = json.loads((tmp_path / "live.json").read_text())
    assert found == dict.fromkeys(found, [0] * 4)
    assert len(found) == len(live_models.CELLS)
