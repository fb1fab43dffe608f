from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.rundir.heartbeat import Heartbeat
from pretrain.rundir.watchdog import await_last_words

STEPS_THEN_WAITS = """
import sys, time
from pathlib import Path
from pretrain.rundir.heartbeat import Heartbeat
from pretrain.recovery.stop_requests import StopRequest

def wait_for_ever():
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not stop._requested:
        time.sleep(0.02)
    sys.exit("stop requested" if stop._requested else "never ended")

stop = StopRequest()
say = lambda: print("last words", file=sys.stderr)
with Heartbeat(Path(sys.argv[1]), 3, float(sys.argv[2]), last_words=say) as heartbeat:
    heartbeat.beat(5, "save")
    wait_for_ever()
"""


def start(directory: Path, watchdog_timeout_seconds: float) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        STEPS_THEN_WAITS,
        str(directory),
        str(watchdog_timeout_seconds),
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def read_when_step(path: Path, step: int) -> dict[str, object]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path.exists() and (beat := json.loads(path.read_text()))["step"] == step:
            return beat
        time.sleep(0.02)
    raise AssertionError(f"{path} never said step {step}")


def test_a_heartbeat_overwrites_no_file_that_a_link_leads_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "rank-00000.tmp").symlink_to(precious)
    (tmp_path / "rank-00000.json").symlink_to(precious)
    with Heartbeat(tmp_path, rank=0, watchdog_timeout_seconds=0):
        pass
    assert precious.read_text() == "mine"


def test_a_heartbeat_says_where_the_rank_is_and_is_removed_when_it_exits_cleanly(tmp_path):
    begin = time.time()
    with Heartbeat(tmp_path / "heartbeats", rank=12, watchdog_timeout_seconds=0) as heartbeat:
        heartbeat.beat(7, "evaluate")
        path = tmp_path / "heartbeats" / "rank-00012.json"
        beat = read_when_step(path, 7)
    assert beat["phase"] == "evaluate"
    assert beat["pid"] == os.getpid()
    assert begin <= float(str(beat["time"])) <= time.time()
    assert not list(path.parent.iterdir())


def test_a_rank_without_a_heartbeat_writes_its_stack_and_ends_but_suspended_time_does_not_count(
    tmp_path,
):
    with start(tmp_path, watchdog_timeout_seconds=2.0) as process:
        read_when_step(tmp_path / "rank-00003.json", 5)
        os.killpg(process.pid, signal.SIGSTOP)  # as Slurm suspends a job: the watchdog, too
        time.sleep(2.5)
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(0.3)
        assert process.poll() is None
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGALRM
    assert re.search(r"^Timeout \(0:00:02\)!$", errors, re.MULTILINE)
    assert "wait_for_ever" in errors
    assert errors.rstrip().endswith("last words")
    assert json.loads((tmp_path / "rank-00003.json").read_text())["phase"] == "save"


def test_sigquit_writes_the_stacks_of_a_process_that_continues_and_sigusr2_requests_a_stop(
    tmp_path,
):
    with start(tmp_path, watchdog_timeout_seconds=0) as process:
        read_when_step(tmp_path / "rank-00003.json", 5)
        process.send_signal(signal.SIGQUIT)
        assert process.stderr is not None
        while "wait_for_ever" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGUSR2)
        _, errors = process.communicate(timeout=30)
    assert errors.splitlines()[-1] == "stop requested"
    assert "most recent call first" not in errors


@pytest.mark.parametrize(
    ("said", "waits"), [(b"!", False), (b"..!", False), (b"", False), (b".", True), (None, True)]
)
def test_a_watchdog_waits_for_last_words_but_not_for_a_rank_that_says_none(said, waits):
    (food, spoon), (question, asks) = os.pipe(), os.pipe()
    if said:
        os.write(spoon, said)
    if said == b"":
        os.close(spoon)  # the rank is gone
    before = time.monotonic()
    await_last_words(food, asks, seconds=0.3)
    assert (time.monotonic() - before >= 0.3) == waits
    assert os.read(question, 8) == b"?"
    for end in (food, question, asks, *([spoon] if said != b"" else [])):
        os.close(end)
