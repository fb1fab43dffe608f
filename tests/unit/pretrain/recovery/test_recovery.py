import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foundation.errors import ConfigError
from pretrain.config.model import ModelConfig
from pretrain.config.run import (
    DataConfig,
    EngineConfig,
    OptimConfig,
    PhaseConfig,
    RecoveryConfig,
    RunConfig,
    ScheduleConfig,
)
from pretrain.costs.flops import tail_shares
from pretrain.metrics.stragglers import (
    SlownessMeter,
    StragglerWatch,
    rank_that_stalled,
    slowest_rank,
)
from pretrain.recovery import rewind
from pretrain.recovery.out_of_memory import memory_settings, with_fitting_micro_batch
from pretrain.recovery.rewind import (
    SpikeDetector,
    rewind_window,
    segments_consumed,
    skip_windows,
    untrained_loss,
)
from pretrain.rundir.events import Event, Rewind, Slowdown, Spike, TrainingBegan
from pretrain.rundir.history import skipped_windows
from tests.helpers.metrics import train_line
from tests.helpers.models import tiny_model
from tests.helpers.tiny_runs import ALONE

SETTINGS, OFF = (RecoveryConfig(spike_threshold=threshold) for threshold in (5.0, 0.0))


@pytest.fixture
def quick(monkeypatch):
    """A spike of three steps after 20 losses."""
    monkeypatch.setattr(rewind, "SPIKE_STEPS", 3)
    monkeypatch.setattr(rewind, "WINDOW", 20)


def first_spike(losses: Sequence[float | None], *settings: Any, **more: Any) -> Spike | None:
    detector = SpikeDetector(run_of(*settings, **more))
    found = (detector.observe([line]) for line in lines_of(losses))
    return next((spike for spike in found if spike), None)


def run_of(
    settings: RecoveryConfig = SETTINGS,
    warmup_steps: int = 0,
    data_changes: Sequence[int] = (),
    model: ModelConfig = ModelConfig(),  # noqa: B008
) -> RunConfig:
    phases = tuple(PhaseConfig(from_step=step, lanes=16) for step in data_changes)
    optim = OptimConfig(steps=10_000, schedule=ScheduleConfig(warmup_steps=warmup_steps))
    return RunConfig(model=model, recovery=settings, data=DataConfig(phases=phases), optim=optim)


def lines_of(losses: Sequence[float | None]) -> list[dict]:
    return [train_line(step, loss, skipped=loss is None) for step, loss in enumerate(losses, 1)]


def noisy(count: int, level: float = 3.0, fall: float = 0.0) -> list[float]:
    noise = 0.05 * np.random.default_rng(0).standard_normal(count)
    return (level - fall * np.arange(count) + noise).tolist()


# What was found: three rewinds to step 0 of a run whose loss rose from 6.6 to 10 and fell back.
RISE = [7.5, 9.0, 10.0, 9.6, 9.1, 8.6, 8.2, 7.8, 7.5, 7.2, 6.9, 6.65]
HARDER = [*noisy(60), *noisy(40, level=3.6), *noisy(5, level=5.0)]
HIGHER = [*noisy(40), *noisy(30, level=6.0), *noisy(10)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("losses", "more", "steps"),
    [
        ([*noisy(40), 4.0, 4.5, 4.2], {}, (41, 43)),
        (noisy(500), {}, None),
        (noisy(300, level=8.0, fall=0.02), {}, None),
        ([*noisy(40), 9.0, 9.0, *noisy(40)], {}, None),  # over before a third step
        ([*noisy(40), 1.0, 1.0, 1.0, 1.0], {}, None),  # downward
        ([3.0] * 30 + [3.0001] * 5, {}, None),
        ([3.0, 9.0, 3.0, 9.0, 9.0, 9.0], {}, None),  # too few losses to know what is usual
        # skipped steps
        ([3.0] * 20 + [None, None, None], {}, (21, 23)),
        ([*noisy(30), 9.0, None, 9.5], {}, (31, 33)),
        ([3.0] * 20 + [None, 3.0, None, None, 3.0], {}, None),
        ([None] * 20, {}, None),
        ([*noisy(30), None, None, None], {"warmup_steps": 33}, None),
        # the warm-up of the learning rate
        (HIGHER, {}, (41, 43)),
        (HIGHER, {"warmup_steps": 40}, (41, 43)),
        (HIGHER, {"warmup_steps": 70}, None),
        # a harder phase is compared with its own losses only, if they are not too few
        (HARDER, {}, (61, 63)),
        (HARDER[:100], {"data_changes": [60]}, None),
        (HARDER, {"data_changes": [60]}, (101, 103)),
        ([*noisy(60), *noisy(19, level=3.6), *noisy(3, level=5.0)], {"data_changes": [60]}, None),
        # turned off
        ([*noisy(40), 99.0, 99.0, 99.0, None], {"settings": OFF}, None),
    ],
)
def test_a_jump_that_lasts_is_a_spike_and_nothing_else_is(losses, more, steps):
    spike = first_spike(losses, **more)
    assert (spike and (spike.first_step, spike.last_step)) == steps


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("vocab_size", "losses", "steps"),
    [
        (300, [*noisy(20, 5.4, fall=0.12), *noisy(3, 5.8)], (21, 23)),  # ln 300 = 5.70
        (400, [*noisy(20, 5.4, fall=0.12), *noisy(3, 5.8)], None),  # within the deviation
        (300, [*noisy(20, 5.4, fall=0.12), 5.8, 5.8, 4.0, 5.8], None),
        (300, [*noisy(19, 5.4, fall=0.12), *noisy(3, 5.8)], None),  # too few are known
        (300, noisy(60, 5.8), None),  # it has not learned yet
    ],
)
def test_a_loss_above_that_of_untrained_weights_is_anomalous(vocab_size, losses, steps):
    spike = first_spike(losses, model=ModelConfig(vocab_size=vocab_size))
    assert (spike and (spike.first_step, spike.last_step)) == steps


def test_the_loss_of_untrained_weights_is_that_of_logits_of_zero():
    model = tiny_model(vocab_size=50, cutoffs=(10, 30))
    for parameter in model.parameters():
        parameter.data.zero_()
    first_tokens_BL = torch.tensor([[0, 10, 30]])
    nll_BL, _ = model(first_tokens_BL, first_tokens_BL, None)
    expected = (nll_BL[0] * torch.tensor(tail_shares(model.config))).sum()
    assert untrained_loss(model.config) == pytest.approx(expected.item(), rel=1e-6)
    assert untrained_loss(ModelConfig(vocab_size=256)) == math.log(256)


def test_a_jump_that_falls_back_within_12_steps_is_no_spike_by_default():
    fallen = [*noisy(100, level=6.6), *RISE, *noisy(30, 6.5)]
    assert first_spike(fallen, RecoveryConfig()) is None
    stays = [*noisy(100, level=6.6), *RISE[:3], *noisy(60, level=10.0)]
    assert first_spike(stays, RecoveryConfig()), "a jump that lasts is a spike"


@pytest.mark.usefixtures("quick")
def test_a_spike_says_how_high_losses_were_and_what_was_usual():
    spike = first_spike([*noisy(30), 9.0, None, 9.5])
    assert spike == Spike(31, 33, 9.5, pytest.approx(3.0, abs=0.05))
    assert first_spike([3.0] * 20 + [None, None, None]) == Spike(21, 23, None, 3.0)


@pytest.mark.usefixtures("quick")
def test_a_suspicion_opens_at_the_first_anomalous_step_and_closes_with_the_jump():
    detector = SpikeDetector(run_of(SETTINGS))
    lines = lines_of([*noisy(40), 4.0, 3.3, 3.0])  # 3.3: closer, but not back
    suspected = [(detector.observe([line]), detector.suspected)[1] for line in lines]
    since = [each and each.first_step for each in suspected]
    assert since == [None] * 40 + [41, 41, None]


REWINDS = {
    "23": (64, 83),  # diverged
    "random documents in half of the lanes 0": (201, 220),
    "a few much too large updates 1": (202, 221),
}
RECORDED = json.loads((Path(__file__).parents[3] / "data/recovery/losses.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_rewind_where_they_were_damaged_or_diverged_and_nowhere_else(name):
    """By `python -m benchmarks recovery --record FILE`; the healthy three rewound at step 11 when
    three steps were enough.
    """
    run = RECORDED[name]
    spike = first_spike(run["losses"], RecoveryConfig(), run["warmup_steps"])
    found = spike and (spike.first_step, spike.last_step)
    assert found == REWINDS.get(name.split(":")[0])


def ledger_of(*windows: range) -> list[Event]:
    skipped = [(each.start, each.stop) for each in windows]
    rewinds = [Rewind(spike=Spike(1, 2), to_step=0, segments=each) for each in skipped]
    return [TrainingBegan(step=0, world_size=1), *rewinds]


def batches_of(numbers: range) -> list[SimpleNamespace]:
    return [SimpleNamespace(number=each, starts_BL=np.zeros((2, 3), bool)) for each in numbers]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4), st.integers(0, 60))
def test_a_run_resumed_at_any_step_reads_what_the_uninterrupted_one_reads(spans, resumed_at):
    windows = skipped_windows(ledger_of(*(range(start, start + length) for start, length in spans)))
    batches = batches_of(range(200))
    uninterrupted = [batch.number for batch in skip_windows(batches, 0, windows)]
    assert not any(number in window for number in uninterrupted for window in windows)
    consumed = segments_consumed(resumed_at, windows)
    resumed = [batch.number for batch in skip_windows(batches[consumed:], consumed, windows)]
    assert resumed == uninterrupted[resumed_at:]


def test_after_a_gap_every_lane_starts_a_document():
    batches = batches_of(range(5))
    list(skip_windows(batches, 10, [range(11, 13)]))
    assert [batch.starts_BL[:, 0].all() for batch in batches] == [False, False, False, True, False]
    assert not batches[3].starts_BL[:, 1:].any()


@pytest.mark.parametrize(
    ("phases", "skipped", "window"),
    [
        ((), [], range(39, 53)),  # step 41 reads segment 40
        ((), [range(10, 15)], range(44, 58)),
        ((PhaseConfig(from_step=40, lanes=4),), [], range(40, 53)),  # no data of the phase before
        ((PhaseConfig(from_step=40, lanes=4),), [range(10, 15)], range(45, 58)),
    ],
)
def test_the_window_reaches_from_before_the_spike_to_the_margin_after_it(phases, skipped, window):
    run = RunConfig(data=DataConfig(phases=phases), recovery=SETTINGS)
    assert rewind_window(Spike(41, 43, 9.0, 3.0), skipped, run, to_step=35) == window


RUN = RunConfig(data=DataConfig(lanes=24), engine=EngineConfig(kind="torch"))


def out_of_memory(lanes: int) -> tuple[int, dict[str, Any]]:
    return lanes, memory_settings(RUN, 2)


@pytest.mark.parametrize(("failed", "lanes"), [([], 0), ([12], 6), ([12, 6, 3], 1)])
def test_a_micro_batch_that_ran_out_of_memory_is_halved_to_a_divisor_of_the_lanes(failed, lanes):
    found = with_fitting_micro_batch(RUN, 2, list(map(out_of_memory, failed)))
    assert found == replace(RUN, engine=replace(RUN.engine, micro_batch_lanes=lanes))


def test_settings_that_need_less_memory_start_with_the_whole_micro_batch_again():
    saving = replace(RUN, engine=replace(RUN.engine, activation_checkpointing="full"))
    assert with_fitting_micro_batch(saving, 2, [out_of_memory(12)]) == saving
    assert with_fitting_micro_batch(RUN, 4, [out_of_memory(12)]) == RUN


def test_a_single_lane_that_does_not_fit_is_an_error_with_advice():
    with pytest.raises(ConfigError, match="activation_checkpointing=full"):
        with_fitting_micro_batch(RUN, 2, [out_of_memory(1)])


def test_the_slowest_rank_is_compared_with_the_others():
    for seconds_R, rank, ratio in (([1.0, 1.0, 3.0, 1.2], 2, 3.0), ([1.0, 2.5], 1, 2.5)):
        expected = Slowdown(step=7, rank=rank, seconds=max(seconds_R), ratio=ratio)
        assert slowest_rank(7, seconds_R) == expected
    assert slowest_rank(7, [1.0]) is None


def slow_rank(rank: int, seconds: float, ratio: float) -> Slowdown:
    return Slowdown(step=7, rank=rank, seconds=seconds, ratio=ratio)


def test_a_rank_is_named_once_and_only_when_it_stays_slow():
    watch = StragglerWatch()
    slow, other, even = slow_rank(2, 3.0, 3.0), slow_rank(1, 3.0, 2.0), slow_rank(2, 1.0, 1.1)
    observed = [
        watch.observe(each, num_steps=1)
        for each in (slow, slow, even, slow, other, slow, slow, slow, slow, slow)
    ]
    assert observed == [False] * 7 + [True, False, False]


def test_a_rank_is_not_named_before_it_has_cost_a_second():
    watch = StragglerWatch()
    short = slow_rank(2, 0.031, 3.0)  # 20 ms more than the others, for each of 10 steps
    observed = [watch.observe(short, num_steps=10) for _ in range(7)]
    assert observed == [False] * 4 + [True, False, False]


def lost(*steps: float) -> float:
    meter = SlownessMeter(nn.Identity(), ALONE)
    for seconds in steps:
        meter.end_step(seconds)
    meter.close()
    return meter.take_stalled()


def test_only_a_step_far_beyond_the_usual_by_seconds_and_by_ratio_is_a_stall():
    assert lost(*[0.1] * 5, 20.1, 0.1) == pytest.approx(20.0)
    assert lost(*[0.1] * 5, 2.0) == 0, "a hiccup of short steps"
    assert lost(*[30.0] * 5, 60.0) == 0, "long steps vary by more"
    assert lost(40.0, *[0.1] * 5) == 0, "the first step compiles kernels"


@pytest.mark.parametrize(
    ("frozen_R", "busy_R", "rank"),
    [
        ([0.0, 20.0], [0.1, 0.1], 1),  # stopped while it was in a collective
        ([0.0, 0.0], [0.1, 19.0], 1),  # its storage hung while it waited for data
        ([20.0, 20.0], [0.1, 0.1], None),  # the job was suspended
        ([0.0, 0.0], [0.1, 0.1], None),  # the network
        ([20.0], [0.1], None),
    ],
)
def test_the_rank_that_the_others_waited_for_is_found(frozen_R, busy_R, rank):
    assert rank_that_stalled(20.0, frozen_R, busy_R) == rank
