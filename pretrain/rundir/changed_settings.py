"""What a resume may change of a run's settings, and what that does to its learning rate."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foundation.settings import differences
from foundation.typed_values import to_tree
from pretrain.config.resolve import with_absolute_paths
from pretrain.config.run import OF_RATE, RunConfig, why_fixed
from pretrain.optim.schedule import learning_rate_at

Names = Sequence[str] | None  # of settings, or None
LARGEST_RISE = 1.2  # factor of the learning rate that a change of steps alone may bring


def refused_changes(
    before: RunConfig, after: RunConfig, step: int, held: RunConfig, given: Names = None
) -> dict[str, str]:
    """Return the settings that a run may not change after `step` updates: `old -> new (why)`.

    The last update was made with the settings `held`. The rate may rise steeply only if `given`,
    the overrides of a command, say what it shall be; None: if other changes than of steps do.
    """
    changes = _changes(before, after)
    refused = {key: _refusal(key, old, new, step) for key, (old, new) in changes.items()}
    of_rate = [key for key in changes if key.startswith(OF_RATE)]
    says = [key for key in (changes if given is None else given) if key.startswith(OF_RATE[1:])]
    if of_rate and not says:
        refused[of_rate[0]] = refused[of_rate[0]] or _steep_rise(held, after, step)
    return {key: "{} -> {} ({})".format(*changes[key], why) for key, why in refused.items() if why}


def planned_otherwise(before: RunConfig, after: RunConfig) -> dict[str, str]:
    """Return the changes that make a run another cell of its sweep, settings of updates included.
    More steps do not."""
    return {
        key: f"{old} -> {new}"
        for key, (old, new) in _changes(before, after).items()
        if why_fixed(key) or (key.startswith("optim.") and (key != "optim.steps" or new < old))
    }


def describe_rate(held: RunConfig, after: RunConfig, step: int) -> str:
    """Return the next and last update's learning rates; '' if it is as planned or the last."""
    last, planned = (learning_rate_at(held.optim, number) for number in (max(0, step - 1), step))
    rate = learning_rate_at(after.optim, step)
    ratio = f"{rate / last:.2g}" if last else ""
    if not step or math.isclose(rate, planned, rel_tol=1e-6) or ratio == "1":
        return ""
    times = f"{ratio} times the last one, " if ratio else "the last one "
    return f"learning rate of step {step + 1}: {rate:.3g}, {times}{last:.3g}"


def describe_course(held: RunConfig, after: RunConfig) -> str:
    """Return how the schedule differs from the one of the last update; '' if it does not."""
    last, now = held.optim.schedule.shape, after.optim.schedule.shape
    return "" if last == now else f"; the schedule is {now}, for the last update it was {last}"


def lower_rate(run: RunConfig, directory: Path, from_step: int | None = None) -> str:
    """Return the advice to resume the run with half its learning rate, as a command."""
    asked = "" if from_step is None else f" --from-step {from_step}"
    rate = f"optim.learning_rate={run.optim.learning_rate / 2:.3g}"
    return f"lower the rate (launcher resume {directory}{asked} {rate})"


def _steep_rise(held: RunConfig, after: RunConfig, step: int) -> str:
    """Return why more steps alone are refused; '' if they hardly raise the learning rate."""
    if not 0 < step < after.optim.steps:  # a finished run makes no next step
        return ""
    last, planned = (learning_rate_at(held.optim, number) for number in (step - 1, step))
    if learning_rate_at(after.optim, step) <= LARGEST_RISE * max(last, planned):
        return ""
    return (
        f"{describe_rate(held, after, step)}; give the rate that it shall have, such as "
        f"optim.schedule.shape=constant optim.learning_rate={last or held.optim.learning_rate:.4g}"
    )


def _changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return what differs, except a vocabulary size that one of the two leaves to the corpus."""
    changes = differences(*(to_tree(with_absolute_paths(run)) for run in (before, after)))
    if not all(changes.get("model.vocab_size", ())):
        del changes["model.vocab_size"]
    return changes


def _refusal(key: str, old: Any, new: Any, step: int) -> str:
    """Return why a run that has made `step` updates may not make this change; '' if it may."""
    if key == "optim.steps":
        return f"it has made {step}" if new < step else ""
    if key == "data.phases":
        was, now = ([phase for phase in p if phase["from_step"] < step] for p in (old, new))
        return f"before step {step}; only later phases may change" if was != now else ""
    return why_fixed(key)
