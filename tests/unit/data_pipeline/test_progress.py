from __future__ import annotations

import pytest

from data_pipeline.builder.split_writer import Progress, Reading, joined
from foundation import progress
from foundation.progress import StatusLine, duration


def test_rate_and_time_left_count_from_the_resume_of_the_build(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    reports: list[Reading] = []
    meter = Progress(reports.append, total_bytes=1000)
    meter.finish_file(300)  # skipped: a build that was killed has its shards already
    position = [100]
    meter.follow(lambda: position[0])
    meter.add(characters=1_000_000, tokens=10)
    position[0], now[0] = 300, 110.0
    meter.add(characters=1_000_000, tokens=20)
    assert str(reports[-1]) == (
        "2 documents, 30 tokens, 2.0M characters (200.0k/s), 60% of the files, about 20 s left"
    ), "200 bytes in 10 s, 400 are left"
    together = joined([reports[-1], reports[-1]], seconds=10.0)
    assert (
        str(together)
        == "4 documents, 60 tokens, 4.0M characters (400.0k/s), 60% of the files, about 20 s left"
    )
    meter.finish_file(700)
    meter.show()
    assert str(reports[-1]).endswith("100% of the files")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.25, "0.25 s"),
        (9.97, "10 s"),
        (100, "1.7 min"),
        (5999, "100 min"),
        (6000, "1.7 h"),
        (2e5, "2.3 days"),
        (1e8, "1,157 days"),
    ],
)
def test_a_duration_has_one_unit_that_fits_it(seconds, text):
    assert duration(seconds) == text


def test_one_file_is_not_read_before_its_documents_are(capsys):
    with StatusLine() as line:
        meter = Progress(line.show, total_bytes=500)
        meter.follow(lambda: 500)
        meter.add(characters=90, tokens=12)
        meter.show()
        meter.add(characters=90, tokens=12)
        meter.finish_file(500)
        meter.show()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("1 document, 12 tokens, 90 characters (")
    assert "99% of the files" in first
    assert last.startswith("2 documents, 24 tokens, 180 characters (")
    assert last.endswith("100% of the files")
