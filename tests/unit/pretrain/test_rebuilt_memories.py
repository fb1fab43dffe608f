"""Checkpoints without memories, and the memories that a start rebuilds for them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from foundation.errors import CheckpointError, ConfigError
from pretrain.checkpoint import marker
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.destinations import Disk
from pretrain.checkpoint.directory import remove, step_directory
from pretrain.checkpoint.elastic_reader import load_memory
from pretrain.config.data import DataConfig, PhaseConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.lane_parts import segments_remembered
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.resolve import resolve
from pretrain.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    MetricsConfig,
    RunConfig,
    lanes_of_rank,
)
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine
from pretrain.model.lane_state import LaneState, Memory, joined_lanes
from pretrain.recovery.rebuilt_memories import Rebuild, rebuild_memories, rebuild_of
from pretrain.run import build_engine, run_training
from pretrain.rundir.events import Resumed, Rewind
from pretrain.rundir.ledger import events_of
from pretrain.rundir.run_dir import RunDir
from pretrain.state import Past, TrainState, memories_without
from tests.helpers.corpora import make_tiny_corpus

# Layers of unlike reach, with dropout; a lane's memory depends on 2 + 1 + 2 segments.
MODEL = ModelConfig(
    num_layers=3, d_model=16, num_heads=2, memory_length=(12, 5, 12), dropout=0.1
)  # fmt: skip
REACH = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    corpus = make_tiny_corpus(tmp_path_factory.mktemp("rebuilt") / "corpus", documents=30)
    return resolve(
        RunConfig(
            model=MODEL,
            data=DataConfig(path=corpus, lanes=4, segment_length=8),
            optim=OptimConfig(steps=24),
            engine=EngineConfig(kind="torch", micro_batch_lanes=2),
            checkpoint=CheckpointConfig(interval=6, memories_interval=0, asynchronous=False),
            evaluation=EvaluationConfig(interval=0, max_tokens=100),
            metrics=MetricsConfig(interval=1, tensorboard=False),
        )
    )


# As one step of two segments each: three steps are the first to have five segments.
TWO_SEGMENTS = 3
TWICE = OptimConfig(gradient_segments=2)


def lanes_from(run: RunConfig, state: TrainState, rebuild: Rebuild, world: World) -> LaneStream:
    corpus, data = Corpus.open(run.data.directory() / "train"), run.data
    lanes = lanes_of_rank(run, world.rank, world.world_size)
    return LaneStream(corpus, data.lanes, run.seed, run.lane_tokens_per_step, lanes, rebuild.before)


def train(
    run: RunConfig, engine: Engine, world: World, steps: int, rate: float, skipped: int = 0
) -> TrainState:
    """Train from the start; the memories forget the segment of the step `skipped`."""
    state = TrainState.fresh(2)
    state.past = Past(REACH if run.optim.gradient_segments == 1 else TWO_SEGMENTS)
    stream = lanes_from(run, state, Rebuild(0, None), world)
    for step in range(1, steps + 1):
        batch, before = next(stream), list(state.memories)
        for slot, part in enumerate(batch.split(2)):
            _, state.memories[slot] = engine.forward_backward(part, before[slot], state.step)
        engine.step(rate)
        if step == skipped:
            state.memories = memories_without(LaneState(run.model), batch, before)
        state.advance(batch, run.tokens_per_step, step == skipped)
    return state


def rebuilt(
    run: RunConfig, root: Path, state: TrainState, world: World, short_by: int = 0
) -> TrainState:
    """What a start on `world` has, reading so many segments less again."""
    found = marker.verify(step_directory(root, state.step))
    engine = build_engine(run, world)
    restored = Checkpointer(run, Disk(root, "again", "a-run"), world).restore(engine, found)
    rebuild = rebuild_of(run, world.rank, world.world_size, found, restored)
    stream = lanes_from(run, restored, rebuild, world)
    assert restored.memories == [None] * len(restored.memories)
    for _ in range(short_by):
        next(stream)
    rebuild = replace(rebuild, steps=rebuild.steps - short_by)
    rebuild_memories(run, engine, restored, rebuild, iter(stream))
    return restored


def saved(run: RunConfig, root: Path, world: World, rate: float, skipped: int = 0) -> TrainState:
    engine = build_engine(run, world)
    state = train(run, engine, world, 12, rate, skipped)
    assert Checkpointer(run, Disk(root, "attempt", "a-run"), world).save(engine, state)
    return state


def joined(*states: TrainState) -> Memory:
    return joined_lanes([memory for state in states for memory in state.memories if memory])


def difference(ours: Memory, theirs: Memory) -> float:
    """The largest relative difference of a part; documents have to be equal."""
    assert torch.equal(ours[-1], theirs[-1])
    pairs = zip(ours[:-1], theirs[:-1], strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("skipped", [0, 9])
def test_with_weights_that_stand_still_rebuilt_memories_have_every_bit(
    run, world, tmp_path, skipped
):
    state = saved(run, tmp_path, world, rate=0.0, skipped=skipped)
    assert len(state.past.steps) == REACH + bool(skipped), "a forgotten one counts for none"
    assert load_memory(marker.verify(step_directory(tmp_path, 12)), range(4)) is None
    again = rebuilt(run, tmp_path, state, world)
    assert all(torch.equal(*pair) for pair in zip(joined(again), joined(state), strict=True))
    assert again.past == state.past
    assert again.cursor == state.cursor


def test_a_step_of_two_segments_is_read_again_as_one(run, world, tmp_path):
    run = replace(run, optim=replace(run.optim, gradient_segments=2))
    state = saved(run, tmp_path, world, rate=0.0)
    again = rebuilt(run, tmp_path, state, world)
    assert len(again.past.steps) == TWO_SEGMENTS
    assert all(torch.equal(*pair) for pair in zip(joined(again), joined(state), strict=True))


def test_one_segment_less_than_their_reach_is_not_enough(run, world, tmp_path):
    state = saved(run, tmp_path, world, rate=0.0)
    short = rebuilt(run, tmp_path, state, world, short_by=1)
    assert 1e-6 < difference(joined(short), joined(state)) < 0.1


def test_other_ranks_rebuild_the_same_lanes_to_rounding(run, world, tmp_path):
    state = saved(run, tmp_path, world, rate=0.0)
    halves = [rebuilt(run, tmp_path, state, replace(world, rank=r, world_size=2)) for r in (0, 1)]
    assert difference(joined(*halves), joined(state)) < 1e-6


def test_weights_that_have_moved_since_are_the_only_difference(run, world, tmp_path):
    state = saved(run, tmp_path, world, rate=1e-3)
    found = difference(joined(rebuilt(run, tmp_path, state, world)), joined(state))
    assert 1e-6 < found < 0.2


def test_segments_that_lead_elsewhere_are_an_error(run, world, tmp_path):
    state = saved(run, tmp_path, world, rate=0.0)
    found = marker.verify(step_directory(tmp_path, 12))
    engine = build_engine(run, world)
    rebuild = replace(rebuild_of(run, 0, 1, found, state), steps=REACH - 1)
    stream = lanes_from(run, state, rebuild, world)
    with pytest.raises(
        CheckpointError, match="segments of the 4 steps before step 12 do not lead to where"
    ):
        rebuild_memories(run, engine, state, rebuild, iter(stream))


def test_a_phase_does_not_start_where_memories_would_have_to_be_rebuilt(run, world, tmp_path):
    state = saved(run, tmp_path, world, rate=0.0)
    found = marker.verify(step_directory(tmp_path, 12))
    phases = (PhaseConfig(from_step=12, segment_length=4),)
    run = replace(run, data=replace(run.data, phases=phases))
    with pytest.raises(ConfigError, match=r"a phase starts at step 12.*start at a later step"):
        rebuild_of(run, 0, 1, found, state)


@pytest.mark.parametrize(
    ("lengths", "segment", "expected"),
    [
        (8, 8, 3),
        (9, 8, 6),
        (0, 8, 0),
        ((0, 0, 8), 8, 1),
        ((8, 0, 0), 8, 1),
        ((12, 5, 12), 8, REACH),
    ],
)
def test_the_reach_is_that_of_each_layer_on_top_of_the_one_below(lengths, segment, expected):
    model = ModelConfig(num_layers=3, d_model=16, num_heads=2, memory_length=lengths)
    assert segments_remembered(model, segment) == expected


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(num_layers=2, layer_kinds=("deltanet", "attention")),
        ModelConfig(num_layers=2, compressed_length=8, compression_rate=2),
        ModelConfig(num_layers=2, memory_tokens=2),
    ],
)
def test_what_depends_on_all_that_a_lane_has_read_is_not_left_out(model):
    with pytest.raises(ConfigError, match=r"checkpoint.memories_interval=2: .*use .*=1"):
        RunConfig(model=model, optim=TWICE, checkpoint=CheckpointConfig(memories_interval=2))
    RunConfig(model=model, optim=TWICE)


def has_memories(run_dir: RunDir, step: int) -> bool:
    found = marker.verify(step_directory(run_dir.checkpoints, step))
    return load_memory(found, range(4)) is not None


def losses(run_dir: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run_dir.read_metrics() if "loss" in line}


def test_a_run_leaves_memories_out_and_resumes_without_them(run, world, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    kept = replace(run.checkpoint, interval=3, memories_interval=4, keep_last=99)
    run = replace(run, optim=replace(run.optim, steps=21), checkpoint=kept)
    assert run_training(run, run_dir.path, world) == 0
    with_memories = [step for step in range(3, 22, 3) if has_memories(run_dir, step)]
    assert with_memories == [3, 12, 21], "the reach is not read yet; every fourth; the end"
    whole = losses(run_dir)
    for step in (18, 21):
        remove(step_directory(run_dir.checkpoints, step))
    assert run_training(run, run_dir.path, world) == 0
    (event,) = events_of(run_dir.ledger.read(), Resumed)
    assert (event.step, event.rebuilt_steps) == (15, REACH)
    assert "memories rebuilt from the 5 steps before" in event.description
    assert not has_memories(run_dir, 18), "the segments that were read again count as read"
    again = losses(run_dir)
    assert again.keys() == whole.keys()
    assert all(math.isclose(again[step], whole[step], rel_tol=1e-3) for step in whole)
    assert any(again[step] != whole[step] for step in range(16, 22))

    # Segments 15 to 17 are skipped from now on: step 16 reads segment 18. What step 18 is rebuilt
    # from lies on both sides of the gap.
    for step in (18, 21):
        remove(step_directory(run_dir.checkpoints, step))
    spike = {"first_step": 16, "step": 16, "loss": 9.0, "usual_loss": 5.0}
    run_dir.ledger.append(Rewind(**spike, to_step=15, segments=(15, 18)))
    assert run_training(run, run_dir.path, world) == 0
    skipping = losses(run_dir)
    remove(step_directory(run_dir.checkpoints, 21))
    assert run_training(run, run_dir.path, world) == 0
    starts = [event.step for event in events_of(run_dir.ledger.read(), Resumed)]
    assert starts == [15, 15, 18]
    found = losses(run_dir)
    assert all(math.isclose(found[step], skipping[step], rel_tol=1e-3) for step in whole)
    assert any(abs(found[step] - again[step]) > 1e-3 for step in range(16, 22)), "other text"
