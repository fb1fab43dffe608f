from __future__ import annotations

from data_pipeline import progress
from data_pipeline.progress import Progress, Reading, duration, joined


def test_rate_and_time_left_follow_from_what_was_done_since_the_build_went_on(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told: list[Reading] = []
    meter = Progress(told.append, total_bytes=1000)
    meter.finish_file(300)  # skipped: a build that was killed has its shards already
    place = [100]
    meter.follow(lambda: place[0])
    meter.add(characters=1_000_000, tokens=10)
    place[0], now[0] = 300, 110.0
    meter.add(characters=1_000_000, tokens=20)
    assert str(told[-1]) == (
        "2 documents, 0.0M tokens, 2M characters (0.2M/s), 60% of the files, about 20 s left"
    ), "200 bytes in 10 s, 400 are left"
    together = joined([told[-1], told[-1]], seconds=10.0)
    assert (
        str(together)
        == "4 documents, 0.0M tokens, 4M characters (0.4M/s), 60% of the files, about 20 s left"
    )
    meter.finish_file(700)
    meter.show()
    assert str(told[-1]).endswith("100% of the files")


def test_durations_are_as_people_say_them():
    assert [duration(seconds) for seconds in (7.4, 99, 100, 5999, 7200)] == [
        "7 s",
        "99 s",
        "2 min",
        "100 min",
        "2.0 h",
    ]
