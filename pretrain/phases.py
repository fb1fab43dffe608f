"""Phases of a run: from a step on, another mixture or another number of lanes. Torch-free.

A phase is a run of its own as far as its lanes are concerned: they begin anew, with a seed of their own, so that a
phase with the text of the one before reads it in another order. Model, optimizer, schedule and steps go on.
"""

from __future__ import annotations

from dataclasses import replace

from pretrain.config import RunConfig


def phase_at(run: RunConfig, step: int) -> int:
    """The number of the phase to which the update after `step` updates belongs; 0 is the run's beginning."""
    return sum(phase.from_step <= step for phase in run.data.phases)


def run_at(run: RunConfig, step: int) -> RunConfig:
    """The run with the data and the lanes of the phase."""
    data = run.data
    for phase in run.data.phases[: phase_at(run, step)]:
        data = replace(data, lanes=phase.lanes or data.lanes, mixture=phase.mixture or data.mixture)
    return replace(run, data=data)


def runs_of_phases(run: RunConfig) -> list[RunConfig]:
    """The run in each of its phases."""
    return [run_at(run, step) for step in (0, *(phase.from_step for phase in run.data.phases))]


def begins_phase(run: RunConfig, step: int) -> bool:
    """Whether the update after `step` updates is a phase's first."""
    return any(phase.from_step == step for phase in run.data.phases)


def first_step_at(run: RunConfig, step: int) -> int:
    """The number of updates before the phase."""
    return max((phase.from_step for phase in run.data.phases if phase.from_step <= step), default=0)


def lane_seed_at(run: RunConfig, step: int) -> int:
    """The seed of the lanes' order in the phase."""
    return run.seed + phase_at(run, step)
