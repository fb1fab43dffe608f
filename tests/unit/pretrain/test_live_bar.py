from __future__ import annotations

import os
import pty
import subprocess
import sys

from pretrain.terminal.live_bar import LiveOutput, LogLine
from pretrain.terminal.text import train_line
from tests.helpers.metrics import train_line as metrics_of_step

SPEEDS = {
    "train_loss": 1.0,
    "tokens_per_second": 1234567,
    "mfu": 0.4,
    "data_wait": 0.01,
    "used_memory_gib": 70,
}
SCRIPT = """
import sys
from pretrain.terminal.live_bar import LogLine, live_bar, show
print("before", flush=True)
with live_bar():
    show(LogLine("INFO 12:04:31 rank 0: step  5/10  loss 2.5", "step  5/10  loss 2.5", 0.5))
    print("saved", flush=True)
    show(LogLine("INFO 12:04:32 rank 0: step 10/10  loss 2.0", "step 10/10  loss 2.0", 1.0))
print("after", flush=True)
"""


def measured(message: str, progress: float) -> LogLine:
    return LogLine(f"INFO 12:04:31 rank 0: {message}", message, progress)


def written(*texts: str | LogLine) -> str:
    reader, writer = os.pipe()
    output = LiveOutput(writer)
    for text in texts:
        output.write(text) if isinstance(text, str) else output.show(text)
    output.leave()
    os.close(writer)
    with os.fdopen(reader, newline="") as file:
        return file.read()


def screen(text: str) -> list[str]:
    """What a terminal shows: of each line what came after it was cleared last."""
    return [line.split("\r\x1b[2K")[-1].rstrip("\r") for line in text.split("\n")]


def test_measurements_replace_each_other_and_other_lines_stay_above_them():
    first = measured("step  5/10  loss 2.5", 0.5)
    second = measured("step 10/10  loss 2.0", 1.0)
    assert screen(written("resuming\n", first, "saved\n", second)) == [
        "resuming",
        "saved",
        f"[{'#' * 4}] 100%  step 10/10  loss 2.0",
        "",
    ]


def test_80_columns_show_loss_speed_and_time_left_and_wide_terminals_all(monkeypatch):
    line = train_line([metrics_of_step(99_999, **SPEEDS)], 100_000, seconds_per_step=7.5)
    for columns, width in (("80", 4), ("240", 24)):
        monkeypatch.setenv("COLUMNS", columns)
        shown = screen(written(measured(line, 0.5)))[0]
        assert len(shown) < int(columns)
        assert shown.startswith(f"[{'#' * (width // 2)}{'-' * (width // 2)}]  50%  step  99999/")
        assert "train loss 1.0000  1,234,567 tok/s  left 7.5 s" in shown
    assert line in shown


def test_on_a_terminal_there_is_a_bar_and_elsewhere_plain_lines():
    plain = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert plain.stdout == "before\nsaved\nafter\n"
    assert plain.stderr.splitlines() == [
        "INFO 12:04:31 rank 0: step  5/10  loss 2.5",
        "INFO 12:04:32 rank 0: step 10/10  loss 2.0",
    ]
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", SCRIPT], stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert screen(shown) == [
        "before",
        "saved",
        f"[{'#' * 4}] 100%  step 10/10  loss 2.0",
        "after",
        "",
    ]
