"""RUN/ledger.jsonl, the events of a run. No other module writes or reads it. Torch-free.

A line is {"time": "2026-11-22T04:12:31.250+00:00", "event": "attempt_ended", FIELDS OF THE EVENT},
without the fields that are None. The order of events is the order of lines, not of times: the
clocks of nodes jump and disagree.
"""

import datetime
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foundation.errors import os_error_text
from foundation.files import append_whole, lines_of, warn_of_lines
from foundation.typed_values import from_tree, json_text, parse_json, to_tree
from pretrain.checkpoint.storage_retry import StorageRetry, with_retries
from pretrain.rundir.events import Event
from pretrain.rundir.history import without_refused_jobs

NOTABLE_SECONDS = 60.0  # the largest difference of clocks that needs no warning
EVENTS = {kind.name(): kind for kind in Event.__subclasses__()}
logger = logging.getLogger(__name__)


def in_order(events: Sequence[Event], now: float) -> tuple[list[Event], int]:
    """Return the events with corrected times, and how many were wrong by NOTABLE_SECONDS.

    The times never decrease and never exceed `now`, so no duration between events is negative.
    """
    latest, ordered, num_off = 0.0, [], 0
    for event in events:
        latest = max(latest, min(event.time, now))
        num_off += abs(event.time - latest) > NOTABLE_SECONDS
        ordered.append(replace(event, time=latest))
    return ordered, num_off


class Ledger:
    """The file. The constructor touches nothing."""

    def __init__(self, path: Path, retry: StorageRetry | None = None) -> None:
        self.path = path
        self._retry = retry or StorageRetry()
        self._was_there = False

    def append(self, event: Event) -> None:
        """Add an event with the present time; it is on disk when this returns.

        While storage fails, try again for as long as the run's `StorageRetry` allows.
        """
        event = replace(event, time=time.time())
        with_retries(self._retry, lambda: self._write(event))

    def append_if_possible(self, event: Event) -> None:
        """Add an event that the run can lack: if storage fails, only log it."""
        try:
            self._write(replace(event, time=time.time()))
        except OSError as error:
            logger.warning("not in the ledger: %s: %s", event.description, os_error_text(error))

    def _write(self, event: Event) -> None:
        append_whole(self.path, event_line(event), sync=True)

    def history(self) -> list[Event]:
        """Return the run's events with times in order (`in_order`); warn if clocks differed.

        Skips events of jobs that ended because another job had the run.
        """
        events, num_off = in_order(without_refused_jobs(self.read()), time.time())
        if num_off:
            logger.warning(
                "%s: %d events have times in the future or out of order; clocks differ, durations "
                "are estimates", self.path, num_off,
            )  # fmt: skip
        return events

    def check_present(self) -> None:
        """Raise OSError if the ledger was there and is missing. No run removes it, so its storage
        is away."""
        if self._was_there:
            os.stat(self.path)

    def read(self) -> list[Event]:
        """Return all events, oldest first; damaged or unknown lines are skipped, with a warning.

        Waits like `append` if the ledger was there before and is missing.
        """
        with_retries(self._retry, self.check_present)
        events, unusable = [], []
        for number, line in enumerate(lines_of(self.path), start=1):
            if not line.strip():
                continue
            try:
                tree = parse_json(line)
                when = datetime.datetime.fromisoformat(tree.pop("time"))
                when = when.astimezone(datetime.timezone.utc).timestamp()
                events.append(from_tree(EVENTS[tree.pop("event")], {**tree, "time": when}))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                unusable.append(number)
        warn_of_lines(logger, self.path, "an event", *unusable)
        self._was_there |= bool(events)
        return events


def event_line(event: Event) -> bytes:
    """Return the event's line in the file."""
    fields = to_tree(event)
    when = datetime.datetime.fromtimestamp(fields.pop("time"), datetime.timezone.utc)
    head = {"time": when.isoformat(timespec="milliseconds"), "event": event.name()}
    values = {name: value for name, value in fields.items() if value is not None}
    return json_text(head | values).encode() + b"\n"
