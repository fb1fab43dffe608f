from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.config import MixturePart
from foundation.errors import ConfigError
from pretrain.config.data import DataConfig, PhaseConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.run import (
    RunConfig,
    first_step_at,
    lane_seed_at,
    phase_at,
    restarts_lanes,
    run_at,
    runs_of_phases,
    starts_phase,
    tokens_of_steps,
)
from pretrain.recovery.rewind import (
    segments_consumed,
    window_of,
)
from pretrain.rundir.events import Spike
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.unit.pretrain.test_recovery import SETTINGS

MODELS = Path(__file__).parents[3] / "configs" / "models"
AT_40 = PhaseConfig(from_step=40, lanes=4)
BOOKS = (MixturePart(path="books"),)  # type: ignore[arg-type]
RUN = RunConfig(
    seed=7,
    data=DataConfig(
        lanes=4,
        phases=(PhaseConfig(from_step=10, mixture=BOOKS), PhaseConfig(from_step=30, lanes=8)),
    ),
)
WARM_UP = RunConfig(
    seed=7,
    data=DataConfig(
        lanes=4,
        segment_length=16,
        phases=(
            PhaseConfig(from_step=10, segment_length=32),
            PhaseConfig(from_step=30, segment_length=64),
            PhaseConfig(from_step=50, lanes=8),
        ),
    ),
    recovery=SETTINGS,
)


def test_a_phase_changes_what_it_names_and_keeps_the_rest():
    assert [run_at(RUN, step).data.lanes for step in (0, 9, 10, 29, 30, 99)] == [4, 4, 4, 4, 8, 8]
    assert [run_at(RUN, step).data.mixture for step in (9, 10, 30)] == [(), BOOKS, BOOKS]
    assert [phase_at(RUN, step) for step in (0, 9, 10, 30)] == [0, 0, 1, 2]
    assert [first_step_at(RUN, step) for step in (9, 10, 29, 31)] == [0, 10, 10, 30]
    assert [lane_seed_at(RUN, step) for step in (9, 10, 30)] == [7, 8, 9]
    assert [step for step in range(40) if starts_phase(RUN, step)] == [10, 30]
    assert [run.data.lanes for run in runs_of_phases(RUN)] == [4, 4, 8]
    assert run_at(run_at(RUN, 30), 30) == run_at(RUN, 30)


def test_phases_that_change_nothing_or_are_out_of_order_are_errors():
    with pytest.raises(ConfigError, match="from step 5 on changes nothing; expected lanes"):
        PhaseConfig(from_step=5)
    with pytest.raises(ConfigError, match=r"start at the steps \[30, 30\]; expected each"):
        replace(RUN.data, phases=(RUN.data.phases[1],) * 2)


def test_later_phases_may_change_and_started_ones_may_not(tmp_path):
    run_dir = RunDir.create(tmp_path / "run", RUN)
    publish_step(run_dir.checkpoints, 20)
    later = replace(
        RUN, data=replace(RUN.data, phases=(RUN.data.phases[0], PhaseConfig(from_step=20, lanes=2)))
    )
    run_dir.refuse_other_run(later)
    earlier = replace(RUN, data=replace(RUN.data, phases=RUN.data.phases[1:]))
    with pytest.raises(ConfigError, match=r"before step 20; only later phases may change"):
        run_dir.refuse_other_run(earlier)
    run_dir.refuse_other_run(replace(RUN, optim=OptimConfig(steps=2000)))


def test_a_phase_of_another_segment_length_alone_continues_its_lanes():
    assert [run_at(WARM_UP, step).data.segment_length for step in (0, 9, 10, 30, 50)] == [
        16,
        16,
        32,
        64,
        64,
    ]
    assert [step for step in range(60) if starts_phase(WARM_UP, step)] == [10, 30, 50]
    assert [step for step in range(60) if restarts_lanes(WARM_UP, step)] == [50]
    assert [lane_seed_at(WARM_UP, step) for step in (9, 10, 49, 50)] == [7, 7, 7, 10]


def test_tokens_are_counted_by_the_lanes_and_segments_of_each_phase():
    assert tokens_of_steps(WARM_UP, range(60)) == 4 * (10 * 16 + 20 * 32 + 20 * 64) + 10 * 8 * 64
    assert tokens_of_steps(WARM_UP, range(45, 52)) == 5 * 4 * 64 + 2 * 8 * 64
    assert tokens_of_steps(WARM_UP, range(5)) == 5 * 4 * 16
    assert tokens_of_steps(WARM_UP, range(60, 60)) == 0


def test_skipped_data_is_of_the_phase_in_which_the_spike_started():
    spike = Spike(41, 43, 9.0, 3.0)
    without, begun = (
        replace(RUN, data=DataConfig(phases=each), recovery=SETTINGS) for each in ((), (AT_40,))
    )
    assert window_of(spike, [], without, to_step=35).start == 39
    assert window_of(spike, [], begun, to_step=35).start == 40
    assert window_of(spike, [range(10, 15)], begun, to_step=35).start == segments_consumed(
        40, [range(10, 15)]
    )
