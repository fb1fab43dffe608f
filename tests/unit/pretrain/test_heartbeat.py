from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from pretrain.rundir import heartbeat
from pretrain.rundir.heartbeat import (
    SLOT_BYTES,
    Heartbeat,
    HeartbeatRecord,
    node_file,
    read_heartbeats,
)
from tests.helpers.full_disk import full_disk

STEPS_THEN_WAITS = """
import sys, time
from pathlib import Path
from pretrain.rundir.heartbeat import Heartbeat
from pretrain.recovery.stop_requests import StopRequest

def wait_for_ever():
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not stop.count:
        time.sleep(0.02)
    sys.exit("stop requested" if stop.count else "never ended")

stop = StopRequest()
say = lambda: print("last words", file=sys.stderr)
heartbeats = Path(sys.argv[1])
with Heartbeat(heartbeats, 3, float(sys.argv[2]), last_words=say, local_rank=1) as heartbeat:
    while not (heartbeats / "ranks-from-00002.jsonl").exists():
        time.sleep(0.02)
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


def read_when_step(directory: Path, step: int) -> HeartbeatRecord:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for record in read_heartbeats(directory):
            if record.step == step:
                return record
        time.sleep(0.02)
    raise AssertionError(f"no rank in {directory} said step {step}")


def record_of(rank: int, step: int = 7) -> HeartbeatRecord:
    hostname, now = socket.gethostname(), time.time()
    return HeartbeatRecord(
        rank=rank, time=now, written=now, step=step, phase="save", hostname=hostname, pid=1
    )


def test_a_heartbeat_overwrites_no_file_that_a_link_leads_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "ranks-from-00000.jsonl").symlink_to(precious)
    with Heartbeat(tmp_path, rank=0, watchdog_timeout_seconds=0):
        pass
    assert precious.read_text() == "mine"


def test_the_ranks_of_a_node_share_a_file_in_which_each_blanks_its_line_at_its_end(tmp_path):
    begin, directory = time.time(), tmp_path / "heartbeats"
    with Heartbeat(directory, 8, 0) as first:
        with Heartbeat(directory, 12, 0, local_rank=4) as last:
            first.beat(1, "train")
            read_when_step(directory, 1)
            last.beat(5, "evaluate")
            beat = read_when_step(directory, 5)
            assert [each.rank for each in read_heartbeats(directory)] == [8, 12]
        assert [each.rank for each in read_heartbeats(directory)] == [8]
    assert (beat.rank, beat.phase, beat.pid) == (12, "evaluate", os.getpid())
    assert begin <= beat.time <= time.time()
    assert read_heartbeats(directory) == []
    assert [path.name for path in directory.iterdir()] == ["ranks-from-00008.jsonl"]


def test_a_rank_beats_on_a_full_disk_whose_file_is_there(tmp_path, caplog):
    with Heartbeat(tmp_path, 0, 0) as heartbeat:
        heartbeat.beat(1, "train")
        read_when_step(tmp_path, 1)
        with full_disk(SLOT_BYTES):
            heartbeat.beat(2, "train")
            read_when_step(tmp_path, 2)
    assert not caplog.records


def test_readers_elsewhere_see_the_files_of_all_nodes_and_a_rank_that_moved_once(
    tmp_path, monkeypatch
):
    here = socket.gethostname()
    for first in (0, 2):
        lines = [record_of(rank).line for rank in (first, first + 1)]
        node_file(tmp_path, first).write_bytes(b"".join(lines))
    node_file(tmp_path, 3).write_bytes(replace(record_of(3, step=9), hostname="n9").line)
    monkeypatch.setattr(heartbeat.socket, "gethostname", lambda: "login")
    found = read_heartbeats(tmp_path)
    assert [(each.rank, each.hostname) for each in found] == [
        *((rank, here) for rank in range(3)),
        (3, "n9"),
    ]
    assert {each.is_alive for each in found} == {None}


def test_a_rank_without_a_heartbeat_writes_its_stack_and_ends_but_suspended_time_does_not_count(
    tmp_path,
):
    with start(tmp_path, watchdog_timeout_seconds=2.0) as process:
        read_when_step(tmp_path, 5)
        os.killpg(process.pid, signal.SIGSTOP)  # as Slurm suspends a job: the watchdog, too
        time.sleep(2.5)
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(0.3)
        assert process.poll() is None
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGALRM
    assert re.search(r"^Timeout \(0:00:02\)!$", errors, re.MULTILINE)
    assert "wait_for_ever" in errors
    assert errors.count("last words") == 1
    # Others see where it stood.
    assert [(each.rank, each.step) for each in read_heartbeats(tmp_path)] == [(3, 5)]


def test_sigquit_writes_the_stacks_of_a_process_that_continues_and_sigusr2_requests_a_stop(
    tmp_path,
):
    with start(tmp_path, watchdog_timeout_seconds=0) as process:
        read_when_step(tmp_path, 5)
        process.send_signal(signal.SIGQUIT)
        assert process.stderr is not None
        while "wait_for_ever" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGUSR2)
        _, errors = process.communicate()
    assert errors.splitlines()[-1] == "stop requested"
    assert "most recent call first" not in errors
