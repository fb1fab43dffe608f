"""Runs in three phases: another mixture, then more lanes; longer segments. Also killed."""

import contextlib
import io
import re
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import Mixture
from data_pipeline.lanes.segment_batch import LaneCursor
from foundation.settings import load_config
from pretrain.checkpoint.verify import verify
from pretrain.cli import main
from pretrain.config.resolve import resolve
from pretrain.config.run import RunConfig
from pretrain.model.memory import Memory
from pretrain.optim.schedule import learning_rate_at
from pretrain.recovery.faults import VARIABLE
from pretrain.run import build_engine
from pretrain.rundir.compare_runs import differing_losses
from pretrain.rundir.events import TrainingEnded
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.forked_ranks import ForkedRanks

SEED, LENGTH = 4, 16


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("phases")
    return make_tiny_corpus(directory / "a", seed=1), make_tiny_corpus(directory / "b", seed=2)


@pytest.fixture(scope="module")
def experiment(corpora: tuple[Path, Path]) -> Path:
    a, b = corpora
    path = a.with_name("phases.yaml")
    path.write_text(
        f"""name: phases
seed: {SEED}
model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 16, dropout: 0.1}}
data:
  path: {a}
  lanes: 4
  segment_length: {LENGTH}
  phases:
    - {{from_step: 6, mixture: [{{path: {a}}}, {{path: {b}, repeat: 2}}]}}
    - {{from_step: 12, lanes: 8}}
optim: {{steps: 18, learning_rate: 3.0e-3}}
engine: {{kind: torch}}
checkpoint: {{interval: 5}}
evaluation: {{interval: 0, max_tokens: 500}}
metrics: {{interval: 3, tensorboard: false}}
"""
    )
    return path


def train_killed(experiment: Path, run_dir: RunDir, step: int, *more: str) -> None:
    program = partial(main, ["train", str(experiment), f"--run-dir={run_dir.path}", *more])
    ranks = ForkedRanks(1, program, experiment.parent, **{VARIABLE: f"sigkill@{step}"})
    assert ranks.wait() == [-9]


@pytest.fixture(scope="module")
def uninterrupted(experiment: Path) -> tuple[RunDir, str]:
    run_dir, said = RunDir(experiment.with_name("uninterrupted")), io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(["train", str(experiment), f"--run-dir={run_dir.path}"]) == 0
    return run_dir, said.getvalue()


def test_each_phase_reads_its_own_data_in_its_own_lanes(corpora, uninterrupted):
    run_dir, said = uninterrupted
    assert re.search("phase 1 .* 6: 4 lanes", said)
    assert re.search("phase 2 .* 12: 8 lanes", said)
    alone, *mixed = (Corpus.open(path / "train") for path in (corpora[0], *corpora))
    mixture = Mixture(mixed, [Fraction(1), Fraction(2)])
    ends = find_events(run_dir.ledger.read(), TrainingEnded)
    phases = zip(ends, (alone, mixture, mixture), (4, 4, 8), strict=True)
    for number, (event, data, lanes) in enumerate(phases):
        assert (event.step, event.lanes) == (6 * (number + 1), lanes)
        assert event.lane_seed == SEED + number
        stream = LaneStream(data, lanes, SEED + number, LENGTH, range(lanes))
        batches = [next(stream) for _ in range(6)]
        assert event.tokens_of_corpora == stream.tokens_read(batches[-1].cursor)
    measured = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
    tokens = [line["tokens"] for line in measured]
    assert [line["step"] for line in measured] == list(range(1, 19))
    assert all(line["memory_norm/layer.1"] > 0 for line in measured if "seconds" in line)
    assert sum("seconds" in line for line in measured) == 8, "at intervals, saves and borders"
    steps_of_lanes = [6 * 4, 12 * 4, 12 * 4 + 6 * 8]
    assert [tokens[5], tokens[11], tokens[17]] == [each * LENGTH for each in steps_of_lanes]


def test_a_run_killed_in_a_phase_resumes_to_the_same_losses(experiment, uninterrupted, capsys):
    run_dir = RunDir(experiment.with_name("killed"))
    train_killed(experiment, run_dir, 14)
    assert main(["train", str(experiment), f"--run-dir={run_dir.path}"]) == 0
    said = capsys.readouterr().err
    assert "step-00000012, verified" in said, "the border was saved"
    assert said.count("verified in") == 1, "read once, also to find the phase"
    assert not differing_losses(uninterrupted[0], run_dir)


def test_lanes_of_a_phase_that_do_not_divide_are_an_early_error(experiment, tmp_path, capsys):
    settings = ["data.phases=[{from_step: 6, lanes: 6}]", "engine.micro_batch_lanes=4"]
    assert main(["train", str(experiment), f"--run-dir={tmp_path / 'run'}", *settings]) == 2
    assert "engine.micro_batch_lanes=4" in capsys.readouterr().err


LENGTHS = (16, 32, 64)
WARM_UP = (
    f"data.phases=[{{from_step: 6, segment_length: {LENGTHS[1]}}}, "
    f"{{from_step: 12, segment_length: {LENGTHS[2]}}}]",
    "engine.micro_batch_lanes=2",
    "model.layer_kinds=[attention, deltanet]",
    "engine.offload_memories=true",  # the loop that never stops leaves them where they are
    "checkpoint.asynchronous=false",  # so that step 10 is there when the kill comes
)


def test_a_killed_run_of_longer_segments_equals_a_plain_loop(corpora, experiment, world, capsys):
    """The loop reads on and hands each slot's memory on; the run is killed and resumed, and crosses
    two borders.
    """
    run_dir = RunDir(experiment.with_name("warm-up"))
    train_killed(experiment, run_dir, 11, *WARM_UP)
    assert main(["train", str(experiment), f"--run-dir={run_dir.path}", *WARM_UP]) == 0
    said = capsys.readouterr().err
    assert "step-00000010, verified" in said
    assert re.search("phase 2 .* 12: 4 lanes .* 64; ", said)

    config = resolve(load_config(RunConfig, experiment, WARM_UP))
    engine, corpus = build_engine(config, world), Corpus.open(corpora[0] / "train")
    memories: list[Memory | None] = [None, None]
    losses, cursor, stream = [], None, None
    for step in range(config.optim.steps):
        if step % 6 == 0:
            stream = LaneStream(corpus, 4, SEED, LENGTHS[step // 6], range(4), cursor)
        assert stream is not None
        batch = next(stream)
        found = []
        for slot, part in enumerate(batch.split(2)):
            loss, memories[slot] = engine.forward_backward(part, memories[slot], step)
            found.append(loss.item())
        engine.step(learning_rate_at(config.optim, step))
        losses.append(sum(found) / 2)
        cursor = batch.cursor
    measured = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
    assert [line["loss"] for line in measured] == losses
    assert measured[-1]["tokens"] == 6 * 4 * sum(LENGTHS)
    report = verify(run_dir.checkpoints / "step-00000018").rank_reports[0]
    assert LaneCursor.from_tree(report["cursor"]) == cursor
    assert next(memory for memory in memories if memory)[0].shape[1] == config.model.memory_length
