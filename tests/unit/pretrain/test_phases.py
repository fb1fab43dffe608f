from __future__ import annotations

from dataclasses import replace

import pytest

from data_pipeline.errors import ConfigError
from data_pipeline.mixture_part import MixturePart
from pretrain.config import DataConfig, OptimConfig, PhaseConfig, RunConfig
from pretrain.healing import Spike, segments_behind, window_of
from pretrain.phases import begins_phase, first_step_at, lane_seed_at, phase_at, run_at, runs_of_phases
from pretrain.run_dir import RunDir
from tests.unit.pretrain.test_healing import SETTINGS

BOOKS = (MixturePart(path="books"),)  # type: ignore[arg-type]
RUN = RunConfig(
    seed=7,
    data=DataConfig(lanes=4, phases=(PhaseConfig(from_step=10, mixture=BOOKS), PhaseConfig(from_step=30, lanes=8))),
)


def test_a_phase_changes_what_it_names_and_keeps_the_rest():
    assert [run_at(RUN, step).data.lanes for step in (0, 9, 10, 29, 30, 99)] == [4, 4, 4, 4, 8, 8]
    assert [run_at(RUN, step).data.mixture for step in (9, 10, 30)] == [(), BOOKS, BOOKS]
    assert [phase_at(RUN, step) for step in (0, 9, 10, 30)] == [0, 0, 1, 2]
    assert [first_step_at(RUN, step) for step in (9, 10, 29, 31)] == [0, 10, 10, 30]
    assert [lane_seed_at(RUN, step) for step in (9, 10, 30)] == [7, 8, 9]
    assert [step for step in range(40) if begins_phase(RUN, step)] == [10, 30]
    assert [run.data.lanes for run in runs_of_phases(RUN)] == [4, 4, 8]
    assert run_at(run_at(RUN, 30), 30) == run_at(RUN, 30)


def test_phases_that_change_nothing_or_are_out_of_order_are_refused():
    with pytest.raises(ConfigError, match="expected from_step of 1 or more, and lanes or a mixture"):
        PhaseConfig(from_step=5)
    with pytest.raises(ConfigError, match=r"begin at the steps \[30, 30\], expected each"):
        replace(RUN.data, phases=(RUN.data.phases[1],) * 2)


def test_phases_to_come_may_change_and_begun_ones_may_not(tmp_path):
    run_dir = RunDir.create(tmp_path / "run", RUN)
    (run_dir.checkpoints / "step-00000020").mkdir()
    later = replace(RUN, data=replace(RUN.data, phases=(RUN.data.phases[0], PhaseConfig(from_step=20, lanes=2))))
    run_dir.refuse_other_run(later)
    earlier = replace(RUN, data=replace(RUN.data, phases=RUN.data.phases[1:]))
    with pytest.raises(ConfigError, match=r"begun before step 20; only later ones may change"):
        run_dir.refuse_other_run(earlier)
    run_dir.refuse_other_run(replace(RUN, optim=OptimConfig(steps=2000)))


def test_data_passed_over_is_of_the_phase_in_which_the_spike_was_met():
    spike = Spike(41, 43, 9.0, 3.0)
    assert window_of(spike, [], SETTINGS, phase_step=0).start == 39
    assert window_of(spike, [], SETTINGS, phase_step=40).start == 40
    assert window_of(spike, [range(10, 15)], SETTINGS, phase_step=40).start == segments_behind(40, [range(10, 15)])
