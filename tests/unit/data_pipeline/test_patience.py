from __future__ import annotations

import errno
import os

import pytest

from foundation.retry import Outage, Patience, StorageError, outlast


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, which passes only in pauses."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ENOTDIR])
def test_pauses_between_tries_double_to_a_minute_and_the_last_try_is_at_the_end(clock, number):
    tries: list[float] = []

    def write() -> None:
        tries.append(clock[0])
        raise OSError(number, os.strerror(number), "/shared/run/metrics.jsonl")

    with pytest.raises(StorageError) as error:
        outlast(Patience(200.0), write)
    assert tries == pytest.approx([0, 1, 3, 7, 15, 31, 63, 123, 183, 200])
    assert str(error.value).startswith(
        f"/shared/run/metrics.jsonl: {os.strerror(number)} "
        "(waited checkpoint.storage_patience_seconds=200); "
    )


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(clock, caplog):
    outage = Outage(Patience(600.0))
    for _ in range(2):
        for _ in range(3):
            outage.failed("/run: full", "training continues")
            outage.pause()
        outage.ended()
    assert (
        caplog.messages
        == [
            "/run: full; training continues, and tries again for up to 10 min",
            "works again after 7 s: /run: full",
        ]
        * 2
    )


def test_who_waits_says_how_to_stop(clock, caplog):
    tries = iter([OSError("away"), OSError("full"), None])

    def write() -> None:
        if error := next(tries):
            raise error

    outlast(Patience(600.0), write)
    assert caplog.messages[0] == (
        "away; the run waits, and tries again for up to 10 min; "
        "a request to stop (Ctrl-C, SIGTERM, scancel) ends the wait"
    )
