"""Phases of a run: from a step on, another mixture, another number of lanes or another segment length. Torch-free.

Lanes of another mixture or another number are begun anew, with a seed of their own, so that a phase with the text of
the one before reads it in another order. The segment length is no property of a lane: where it changes alone, every
lane goes on at its next token with what it remembers. Model, optimizer, schedule and steps go on in any case.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from pretrain.config.run import RunConfig


def phase_at(run: RunConfig, step: int) -> int:
    """The number of the phase to which the update after `step` updates belongs; 0 is the run's beginning."""
    return sum(phase.from_step <= step for phase in run.data.phases)


def run_at(run: RunConfig, step: int) -> RunConfig:
    """The run with the data, the lanes and the segments of the phase."""
    data = run.data
    for phase in run.data.phases[: phase_at(run, step)]:
        data = replace(
            data,
            lanes=phase.lanes or data.lanes,
            segment_length=phase.segment_length or data.segment_length,
            mixture=phase.mixture or data.mixture,
        )
    return replace(run, data=data)


def runs_of_phases(run: RunConfig) -> list[RunConfig]:
    """The run in each of its phases."""
    return [run_at(run, step) for step in (0, *(phase.from_step for phase in run.data.phases))]


def spans_of_phases(run: RunConfig, steps: range) -> list[tuple[RunConfig, int]]:
    """The run in each phase to which some of these updates belong, counted from 0, and how many of them do."""
    borders = [0, *(phase.from_step for phase in run.data.phases), steps.stop]
    spans = [
        range(max(begin, steps.start), min(end, steps.stop)) for begin, end in pairwise(borders)
    ]
    return [
        (phase, len(span)) for phase, span in zip(runs_of_phases(run), spans, strict=True) if span
    ]


def tokens_of_steps(run: RunConfig, steps: range) -> int:
    """How many tokens these updates read, counted from 0, those of all lanes and of each phase."""
    return sum(phase.tokens_per_step * count for phase, count in spans_of_phases(run, steps))


def begins_phase(run: RunConfig, step: int) -> bool:
    """Whether the update after `step` updates is a phase's first."""
    return any(phase.from_step == step for phase in run.data.phases)


def begins_lanes(run: RunConfig, step: int) -> bool:
    """Whether the update after `step` updates is the first of lanes that begin anew."""
    return any(phase.from_step == step and phase.begins_lanes for phase in run.data.phases)


def advice_on_phases(run: RunConfig) -> str:
    """Text for the user about phases that never begin, or ""."""
    beyond = [
        str(phase.from_step) for phase in run.data.phases if phase.from_step >= run.optim.steps
    ]
    if not beyond:
        return ""
    return f"the run ends after step {run.optim.steps}: data.phases from step {', '.join(beyond)} on never begin"


def first_step_at(run: RunConfig, step: int) -> int:
    """The number of updates before the phase."""
    return max((phase.from_step for phase in run.data.phases if phase.from_step <= step), default=0)


def lanes_since(run: RunConfig, step: int) -> int:
    """The number of updates before the phase's lanes began, in it or in an earlier one."""
    begun = (
        phase.from_step
        for phase in run.data.phases
        if phase.from_step <= step and phase.begins_lanes
    )
    return max(begun, default=0)


def lane_seed_at(run: RunConfig, step: int) -> int:
    """The seed of the lanes' order in the phase: the run's plus the number of the phase in which they began."""
    return run.seed + phase_at(run, lanes_since(run, step))
