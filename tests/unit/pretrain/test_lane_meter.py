from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from data_pipeline.lanes.lane_stream import LaneStream
from pretrain.config.data import DataConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig, lanes_of_rank
from pretrain.metrics.recorder import LaneMeter
from pretrain.state import TrainState
from tests.helpers.corpora import write_numbered_corpus

NUM_LANES, LENGTH, STEPS = 4, 8, 40
CPU = torch.device("cpu")
RUN = RunConfig(
    model=ModelConfig(vocab_size=50, num_layers=2, d_model=4, num_heads=2, memory_length=5),
    data=DataConfig(lanes=NUM_LANES, segment_length=LENGTH),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    lengths = np.random.default_rng(3).integers(1, 30, (3, 12))
    return write_numbered_corpus(tmp_path_factory.mktemp("lanes"), lengths.tolist())


def memories_of(lanes: range, num_slots: int) -> list[tuple[torch.Tensor, ...]]:
    """Rows of layer 0 have the norm 5 in every lane, those of layer 1 that of their lane's number."""  # noqa: E501
    hidden_BMD = torch.tensor([[3.0, 0.0, -4.0, 0.0]]).expand(len(lanes), 5, 4)
    numbers_B11 = torch.tensor(list(lanes), dtype=torch.float32).view(-1, 1, 1)
    levels = (
        hidden_BMD,
        torch.tensor([0.0, 1.0, 0.0, 0.0]) * numbers_B11.expand(-1, 5, 1),
        torch.zeros(len(lanes), 5),
    )
    return [tuple(slot) for slot in zip(*(level.chunk(num_slots) for level in levels), strict=True)]


def measured(corpus, world_size: int, num_slots: int) -> list[dict]:
    """The numbers of two intervals, from the sums of all ranks."""
    states, meters, streams = [], [], []
    run = RUN
    for rank in range(world_size):
        lanes = lanes_of_rank(run, rank, world_size)
        states.append(TrainState(memories=list(memories_of(lanes, num_slots))))
        streams.append(LaneStream(corpus, NUM_LANES, 1, LENGTH, lanes))
        meters.append(LaneMeter(run, states[-1]))
    found = []
    for _ in range(2):
        for _ in range(STEPS):
            for state, meter, stream in zip(states, meters, streams, strict=True):
                batch = next(stream)
                meter.add(batch)
                state.cursor = batch.cursor
        sums = torch.stack([meter.take(CPU) for meter in meters]).sum(0)
        found.append(meters[0].numbers(sums.tolist()))
    return found


@pytest.mark.parametrize(("world_size", "num_slots"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_every_world_and_slots_measure_what_is_known_of_the_lanes(corpus, world_size, num_slots):
    intervals = measured(corpus, world_size, num_slots)
    stream = LaneStream(corpus, NUM_LANES, 1, LENGTH, range(NUM_LANES))
    epochs, starts = [0], []
    for _ in range(2):
        batches = [next(stream) for _ in range(STEPS)]
        starts.append(sum(int(batch.starts_BL.sum()) for batch in batches))
        epochs.append(int(batches[-1].cursor.epochs_B.sum()))
    assert [each["lane_epochs_started"] for each in intervals] == np.diff(epochs).tolist()
    assert min(np.diff(epochs)) > NUM_LANES, "every lane began another epoch in each interval"
    assert [each["documents_started"] for each in intervals] == starts
    for each in intervals:
        assert each["memory_norm/layer.0"] == pytest.approx(5.0)
        assert each["memory_norm/layer.1"] == pytest.approx((0 + 1 + 2 + 3) / 4)


def test_a_run_without_memory_has_no_norms_and_a_norm_that_is_not_finite_is_none(corpus):
    state = TrainState.fresh(2)
    meter = LaneMeter(RUN, state)
    assert meter.numbers(meter.take(CPU).tolist()) == {
        "lane_epochs_started": 0,
        "documents_started": 0,
    }
    state.memories = list(memories_of(range(NUM_LANES), 1))
    state.memories = [(state.memories[0][0] * float("inf"), *state.memories[0][1:])]
    found = meter.numbers(meter.take(CPU).tolist())
    assert found["memory_norm/layer.0"] is None
    assert found["memory_norm/layer.1"] == 1.5


def test_a_resumed_run_counts_epochs_from_its_checkpoint(corpus):
    stream = LaneStream(corpus, NUM_LANES, 1, LENGTH, range(NUM_LANES))
    cursor = [next(stream) for _ in range(STEPS)][-1].cursor
    state = TrainState(cursor=cursor)
    meter = LaneMeter(RUN, state)
    assert meter.take(CPU).tolist() == [0, 0]
    state.cursor = replace(cursor, epochs_B=cursor.epochs_B + np.array([0, 1, 0, 2]))
    assert meter.take(CPU).tolist() == [3, 0]
