"""Settings by step: phases of the data, and what resumes have changed.

A phase has another mixture, number of lanes or segment length from a step on.

With another mixture or number of lanes, the lanes restart with a seed of their own: a phase with
the previous text reads it in another order. A lane does not depend on the segment
length: where that changes alone, every lane continues at its next token with its memory. Model,
optimizer, schedule and steps always continue.

A change that a resume makes in `OF_UPDATES` holds from its step on. Steps before it, which the run
makes again from an older checkpoint, have the old settings: so every step is what it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

from foundation.typed_values import from_tree, to_tree
from pretrain.config.run import RunConfig


@dataclass(frozen=True)
class SettingChange:
    """After `step` updates, a setting in `OF_UPDATES` has the value `new` instead of `old`."""

    step: int
    setting: str
    old: Any
    new: Any


def phase_at(run: RunConfig, step: int) -> int:
    """Return the number of the phase that makes the update after `step` updates; 0: the first."""
    return sum(phase.from_step <= step for phase in run.data.phases)


def settings_at(run: RunConfig, step: int, changes: Sequence[SettingChange]) -> RunConfig:
    """Return the run as it was at `step`, before the later `changes`, which are oldest first."""
    if not changes:
        return run
    tree = to_tree(run)
    for change in reversed(changes):
        if change.step > step:
            *sections, name = change.setting.split(".")
            reduce(dict.__getitem__, sections, tree)[name] = change.old
    return from_tree(RunConfig, tree)


def run_at(run: RunConfig, step: int, changes: Sequence[SettingChange] = ()) -> RunConfig:
    """Return the run with the settings of the update after `step` updates."""
    run = settings_at(run, step, changes)
    data = run.data
    for phase in run.data.phases[: phase_at(run, step)]:
        data = replace(
            data,
            lanes=phase.lanes or data.lanes,
            segment_length=phase.segment_length or data.segment_length,
            mixture=phase.mixture or data.mixture,
        )
    return replace(run, data=data)


def mixture_setting(run: RunConfig, step: int) -> str:
    """Return the name of the setting that gives the mixture at a step."""
    phases = run.data.phases[: phase_at(run, step)]
    numbers = [number for number, phase in enumerate(phases) if phase.mixture]
    return f"data.phases.{numbers[-1]}.mixture" if numbers else "data.mixture"


def runs_of_phases(run: RunConfig) -> list[RunConfig]:
    """Return the run in each of its phases."""
    return [run_at(run, step) for step in (0, *(phase.from_step for phase in run.data.phases))]


def spans_of_phases(run: RunConfig, steps: range) -> list[tuple[RunConfig, int]]:
    """Return the phases that make some of these updates (counted from 0), and how many each."""
    borders = [0, *(phase.from_step for phase in run.data.phases), steps.stop]
    spans = [
        range(max(start, steps.start), min(stop, steps.stop)) for start, stop in pairwise(borders)
    ]
    return [
        (phase, len(span)) for phase, span in zip(runs_of_phases(run), spans, strict=True) if span
    ]


def tokens_of_steps(run: RunConfig, steps: range) -> int:
    """Return how many tokens these updates read, counted from 0, over all lanes and phases."""
    return sum(phase.tokens_per_step * count for phase, count in spans_of_phases(run, steps))


def next_border(run: RunConfig, step: int, changes: Sequence[SettingChange] = ()) -> int:
    """Return the step after `step` at which other settings begin, or the run's last one."""
    borders = [phase.from_step for phase in run.data.phases] + [change.step for change in changes]
    return min([border for border in borders if border > step] + [run.optim.steps])


def restarts_lanes(run: RunConfig, step: int) -> bool:
    """Return whether the update after `step` updates is the first after the lanes restart."""
    return any(phase.from_step == step and phase.restarts_lanes for phase in run.data.phases)


def first_step_at(run: RunConfig, step: int) -> int:
    """Return the number of updates before the phase that `step` is in."""
    return max((phase.from_step for phase in run.data.phases if phase.from_step <= step), default=0)


def lane_seed_at(run: RunConfig, step: int) -> int:
    """Return the seed of the lanes' order: the run's, plus the number of the lanes' first phase."""
    numbered = enumerate(run.data.phases[: phase_at(run, step)], start=1)
    return run.seed + max((number for number, phase in numbered if phase.restarts_lanes), default=0)


def describe_border(run: RunConfig, step: int, changes: Sequence[SettingChange]) -> str:
    """Return what changes after `step` updates, in one line."""
    texts = [f"{c.setting} {c.old} -> {c.new} from step {step}" for c in changes if c.step == step]
    if all(phase.from_step != step for phase in run.data.phases):
        return ", ".join(texts)
    before, after = run_at(run, step - 1).data, run_at(run, step).data
    lanes = "restart" if restarts_lanes(run, step) else "continue"
    changed = before.segment_length != after.segment_length
    segments = f", segments of {after.segment_length}" if changed else ""
    memories = "kept" if before.lanes == after.lanes else "reset"
    phase = f"phase {phase_at(run, step)} from step {step}: {after.lanes} lanes {lanes}{segments}"
    return ", ".join([f"{phase}; memories are {memories}", *texts])
