from __future__ import annotations

import os
import pty
import subprocess
import sys

from pretrain.terminal.live_bar import LiveOutput, echo
from pretrain.terminal.train_lines import train_line

SCRIPT = """
import sys
from pretrain.terminal.live_bar import live_bar
print("before", flush=True)
with live_bar():
    print("INFO 12:04:31 rank 0: step  5/10  loss 2.5", file=sys.stderr)
    print("saved", flush=True)
    print("INFO 12:04:32 rank 0: step 10/10  loss 2.0", file=sys.stderr)
print("after", flush=True)
"""


def written(*texts: str) -> str:
    reader, writer = os.pipe()
    output = LiveOutput(writer)
    for text in texts:
        output.write(text)
    output.leave()
    os.close(writer)
    with os.fdopen(reader, newline="") as file:
        return file.read()


def screen(text: str) -> list[str]:
    """What a terminal shows: of each line what came after it was cleared last."""
    return [line.split("\r\x1b[2K")[-1].rstrip("\r") for line in text.split("\n")]


def test_measurements_replace_each_other_and_other_lines_stay_above_them():
    first, second = "step  5/10  loss 2.5\n", "INFO 12:04:31 rank 0: step 10/10  loss 2.0\n"
    assert screen(written("resuming\n", first, "saved\n", second)) == [
        "resuming",
        "saved",
        f"[{'#' * 24}] 100%  step 10/10  loss 2.0",
        "",
    ]


def test_a_line_may_come_in_pieces():
    assert screen(written("step  5/", "10  loss", " 2.5\nsa", "ved\n")) == [
        "saved",
        f"[{'#' * 12}{'-' * 12}]  50%  step  5/10  loss 2.5",
        "",
    ]


def test_the_lines_of_a_run_are_recognized():
    line = {"step": 50, "loss": 2.0, "skipped": False, "learning_rate": 1e-3, "grad_norm": 1.0}
    rates = {"tokens_per_second": 1e3, "mfu": 0.1, "data_wait": 0.0, "used_memory_gib": 1.0}
    assert screen(written(train_line([line | rates], 200, 1.0) + "\n"))[0].startswith("[######-")


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
        f"[{'#' * 24}] 100%  step 10/10  loss 2.0",
        "after",
        "",
    ]


def test_lines_of_other_processes_are_shown_without_a_bar_too(capfd):
    echo(b"hello\n")
    assert capfd.readouterr().err == "hello\n"
