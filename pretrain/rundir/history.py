"""Which steps of which start are still part of a run's history. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.rundir.training_events import Event, Restored, Rewind, TrainingBegan

LAST = 1 << 62


def steps_that_stand(ledger: Sequence[Event]) -> dict[str, int]:
    """Return attempt -> the last of its steps that no later start, rewind or restore undid.

    What an attempt saved after that step belongs to a past that the run has left: another attempt
    has made those steps again, perhaps on other data.
    """
    standing: dict[str, int] = {}
    limit = LAST
    for event in reversed(ledger):
        if isinstance(event, TrainingBegan):
            standing[event.attempt] = limit
            limit = min(limit, event.step)
        elif isinstance(event, Rewind):
            limit = min(limit, event.to_step)
        elif isinstance(event, Restored):
            limit = min(limit, event.step)
    return standing
