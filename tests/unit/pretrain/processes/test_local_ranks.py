import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.errors import DataError
from pretrain.processes.local_ranks import (
    EXIT_STOPPED,
    RankGroup,
    describe_exit,
    describe_failure,
    rank_environment,
)
from pretrain.rundir import heartbeat
from pretrain.rundir.attempt_files import AttemptStart
from pretrain.rundir.heartbeat import (
    SLOT_BYTES,
    Heartbeat,
    HeartbeatRecord,
    node_file,
    read_heartbeats,
)
from tests.helpers.full_disk import full_disk
from tests.helpers.jobs import until

STOP_ON_TERM = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({EXIT_STOPPED}))
print("ready", flush=True)
time.sleep(60)
"""


def group_of(code: str, num_ranks: int, logs: Path, **options: bool) -> RankGroup:
    return RankGroup([sys.executable, "-c", code], num_ranks, logs, **options)


def is_running(pid: int) -> bool:
    """False for one that is gone or only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("trap", ["link", "pipe", "link of the folder", "link of the last folder"])
def test_a_rank_s_log_is_written_through_no_link_and_waits_for_no_pipe(tmp_path, trap):
    precious, logs = tmp_path / "precious", tmp_path / "run" / "logs"
    precious.mkdir()
    (precious / "rank-0.log").write_text("mine\n")
    if trap.endswith("folder"):
        folder = logs / "attempt-0" if trap == "link of the last folder" else logs
        folder.parent.mkdir(parents=True)
        folder.symlink_to(precious)
    else:
        log = logs / "attempt-0" / "rank-0.log"
        log.parent.mkdir(parents=True)
        log.symlink_to(precious / log.name) if trap == "link" else os.mkfifo(log)
    with pytest.raises(DataError):
        group_of("print('ours')", 1, logs)
    assert (precious / "rank-0.log").read_text() == "mine\n"


def test_each_rank_learns_who_it_is_and_writes_its_own_log(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "7")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID")
    code = f"import os; print(*map(os.environ.get, {names}), int(os.environ['MASTER_PORT']) > 1023)"
    with RankGroup([sys.executable, "-c", code], 2, tmp_path, attempt=3) as group:
        assert group.wait() == [0, 0]
    for rank in (0, 1):
        expected = f"{rank} {rank} 2 2 127.0.0.1 None True\n"
        assert (tmp_path / "attempt-3" / f"rank-{rank}.log").read_text() == expected


def test_cores_are_divided_over_the_ranks_unless_threads_are_set():
    cores = len(os.sched_getaffinity(0))
    assert rank_environment(1, {})["OMP_NUM_THREADS"] == str(cores)
    assert rank_environment(64 * cores, {})["OMP_NUM_THREADS"] == "1"
    assert rank_environment(1, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    found = rank_environment(2, dict.fromkeys((*names, "TORCHELASTIC_USE_AGENT_STORE"), "eth0"))
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found, "they meet by themselves"
    assert [found[name] for name in names] == ["lo", "lo"], "whatever the caller uses"


@pytest.mark.parametrize(
    ("program", "statuses"),
    [
        ("sys.exit(3) if rank else time.sleep(600)", [-signal.SIGKILL, 3]),  # after the grace
        (f"time.sleep(rank); sys.exit({EXIT_STOPPED} * (1 - rank))", [EXIT_STOPPED, 0]),
    ],
    ids=["a bad end", "a stop after a save"],
)
def test_only_a_bad_end_ends_the_others(tmp_path, program, statuses):
    started = time.monotonic()
    code = f"import os, sys, time; rank = int(os.environ['RANK']); {program}"
    with group_of(code, 2, tmp_path) as group:
        assert group.wait(grace=0.3) == statuses
    assert time.monotonic() - started < 300


def test_waiting_too_long_says_so_and_terminate_asks_every_rank(tmp_path):
    with group_of(STOP_ON_TERM, 2, tmp_path) as group:
        until(lambda: all(log.read_text() == "ready\n" for log in group.logs))
        with pytest.raises(TimeoutError):
            group.wait(timeout=0.1)
        assert group.poll() == [None, None]
        group.terminate()
        assert group.wait() == [EXIT_STOPPED, EXIT_STOPPED]


def test_kill_ends_ranks_and_what_they_started(tmp_path):
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"  # noqa: E501
    with group_of(code, 2, tmp_path) as group:
        until(lambda: all(log.read_text().endswith("\n") for log in group.logs))
        children = [int(log.read_text()) for log in group.logs]
        group.kill()
        assert group.wait() == [-signal.SIGKILL, -signal.SIGKILL]
        until(lambda: not any(map(is_running, children)))


def test_what_a_rank_leaves_behind_ends_with_it(tmp_path):
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    with group_of(code, 1, tmp_path) as group:
        assert group.wait() == [0]
        until(lambda: not is_running(int(group.logs[0].read_text())))


def test_an_exception_in_the_block_leaves_no_orphans(tmp_path):
    with pytest.raises(KeyboardInterrupt), group_of(STOP_ON_TERM, 2, tmp_path) as group:
        raise KeyboardInterrupt
    assert not any(map(is_running, group.pids))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_die_with_their_parent(tmp_path, number):
    parent_code = (
        "from pathlib import Path\nfrom pretrain.processes.local_ranks import RankGroup\n"
        f"with RankGroup(['sleep', '60'], 2, Path({str(tmp_path)!r})) as group:\n"
        "    print(*group.pids, flush=True)\n    group.wait()\n"
    )
    # A suite started in the background ignores SIGINT, and so would all it starts.
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_running, pids))
    parent.send_signal(number)
    parent.wait()
    until(lambda: not any(map(is_running, pids)))


def test_rank_zero_may_be_shown_here_too(tmp_path, capfd):
    code = (
        "import logging, os; from pretrain.terminal.log import set_up_logging; "
        "set_up_logging('pretrain'); set_up_logging('rank ' + os.environ['RANK']); "
        "logging.getLogger('pretrain').warning('logged'); print('noise')"
    )
    with group_of(code, 2, tmp_path, echo_rank_zero=True) as group:
        assert group.wait() == [0, 0]
    (shown,) = capfd.readouterr().err.splitlines()
    assert shown.endswith("rank 0: logged")
    for rank, log in enumerate(group.logs):
        assert log.read_text().splitlines()[-1] == "noise"
        assert f"rank {rank}: logged\n" in log.read_text()


PROBLEM = "http://store/shard-7: found status 403"
FAILS_FIRST = f"""
import logging, os, sys, time
from pretrain.terminal.log import set_up_logging
rank = os.environ["RANK"]
set_up_logging("rank " + rank)
if rank == "1":
    logging.getLogger("pretrain").error("{PROBLEM}")
    sys.exit(2)
raise RuntimeError("gloo: connection closed by peer")
"""


def test_the_rank_that_knows_what_is_wrong_is_the_one_reported(tmp_path, capfd):
    with group_of(FAILS_FIRST, 2, tmp_path, echo_rank_zero=True) as group:
        statuses = group.wait()
    assert statuses == [1, 2]
    assert capfd.readouterr().err == ""
    assert "Traceback" in group.logs[0].read_text()
    said = describe_failure(statuses, group.logs, first_failure=1)
    assert said == f"rank 1: {PROBLEM}"


def test_the_rank_that_failed_by_itself_is_the_one_reported(tmp_path):
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    logs[1].write_text("".join(f"line {number}\n" for number in range(40)) + "boom\n")
    first, *rest = describe_failure([-signal.SIGKILL, 1], logs, lines=2).splitlines()
    assert {"rank", "1", "status"} <= {*re.findall(r"\w+", first)}
    assert rest == ["  | line 39", "  | boom"]
    assert describe_failure([0, EXIT_STOPPED], logs) == ""
    assert "SIGKILL" in describe_exit(-9)
    assert "/dev/shm" in describe_exit(-signal.SIGBUS)


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
say = lambda: print("final report", file=sys.stderr)
heartbeats = Path(sys.argv[1])
with Heartbeat(heartbeats, 3, float(sys.argv[2]), local_rank=1) as heartbeat:
    heartbeat.final_report = say
    while not (heartbeats / "ranks-from-00002.jsonl").exists():
        time.sleep(0.02)
    heartbeat.beat(5, "save")
    wait_for_ever()
"""


def start(directory: Path, watchdog_timeout_seconds: float) -> subprocess.Popen[str]:
    arguments = [str(directory), str(watchdog_timeout_seconds)]
    command = [sys.executable, "-c", STEPS_THEN_WAITS, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def read_when_step(directory: Path, step: int) -> HeartbeatRecord:
    until(lambda: step in [record.step for record in read_heartbeats(directory)])
    return next(record for record in read_heartbeats(directory) if record.step == step)


def record_of(rank: int, step: int = 7) -> HeartbeatRecord:
    moment = dict.fromkeys(("time", "written"), time.time())
    here = {"hostname": socket.gethostname(), "pid": 1}
    return HeartbeatRecord(rank=rank, step=step, phase="save", **moment, **here)


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


def test_readers_elsewhere_see_all_nodes_and_a_rank_that_moved_once(tmp_path, monkeypatch):
    here = socket.gethostname()
    for first in (0, 2):
        lines = [record_of(rank).line for rank in (first, first + 1)]
        node_file(tmp_path, first).write_bytes(b"".join(lines))
    node_file(tmp_path, 3).write_bytes(replace(record_of(3, step=9), hostname="n9").line)
    monkeypatch.setattr(heartbeat.socket, "gethostname", lambda: "login")
    found = read_heartbeats(tmp_path)
    hosts = [(each.rank, each.hostname) for each in found]
    assert hosts == [(0, here), (1, here), (2, here), (3, "n9")]
    assert {each.is_alive for each in found} == {None}


def test_a_rank_without_a_heartbeat_ends_but_suspended_time_does_not_count(tmp_path):
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
    assert errors.count("final report") == 1
    # Others see where it stood.
    assert [(each.rank, each.step) for each in read_heartbeats(tmp_path)] == [(3, 5)]


BUSY_THREADS = """
import re, sys, threading
from pathlib import Path
from pretrain.rundir.heartbeat import Heartbeat

def turn():
    while True:
        (lambda *given: sorted(given))(*range(20))

def never_gives_the_interpreter_back():
    re.match("(a+)+$", "a" * 64 + "b")

with Heartbeat(Path(sys.argv[1]), 0, 1.0):
    for _ in range(3 * (sys.argv[2] == "busy")):
        threading.Thread(target=turn, daemon=True).start()
    if sys.argv[2] == "blocked":
        never_gives_the_interpreter_back()
    threading.Event().wait()
"""


@pytest.mark.parametrize(("does", "seen"), [("busy", "in turn"), ("blocked", "in never_gives")])
def test_a_rank_that_hangs_ends_by_its_watchdog_whatever_its_threads_do(tmp_path, does, seen):
    command = [sys.executable, "-c", BUSY_THREADS, str(tmp_path), does]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == -signal.SIGALRM
    assert seen in ended.stderr
    # The handler of the signal can crash a process whose threads run; it is the last resort.
    assert ("most recent call first" in ended.stderr) == (does == "blocked")


def test_sigquit_writes_stacks_and_sigusr2_requests_a_stop(tmp_path):
    with start(tmp_path, watchdog_timeout_seconds=0) as process:
        read_when_step(tmp_path, 5)
        process.send_signal(signal.SIGQUIT)
        while "wait_for_ever" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGUSR2)
        _, errors = process.communicate()
    assert errors.splitlines()[-1] == "stop requested"
    assert "wait_for_ever" not in errors


@pytest.mark.parametrize(
    ("come", "late", "blamed"),
    [
        ({0: "start", 1: "start", 2: "start", 3: "start"}, [], None),
        ({0: "start", 1: "start", 2: "start", 3: "launch"}, [3], 3),
        ({0: "train", 1: "save"}, [2, 3], 2),  # a node hangs
        ({1: "start", 2: "start"}, [0, 3], None),  # two do: which is to blame is unknown
        ({}, [0, 1, 2, 3], None),
    ],
)
def test_ranks_that_have_not_come_are_named_and_their_node_blamed(come, late, blamed):
    start = AttemptStart(100.0, ("n1", "n1", "n2", "n2"))
    beats = [replace(record_of(rank), phase=phase) for rank, phase in come.items()]
    stale = [replace(record_of(rank), written=99.0) for rank in range(4)]
    assert start.late_ranks([*beats, *stale]) == late
    assert start.late_rank(beats) == blamed
    said = start.describe(beats, 280.0)
    assert said.startswith("starting for 3")
    assert all(f"rank {rank} on {start.nodes[rank]}" in said for rank in late[:3])
    assert start.describe(beats, 110.0) == "starting for 10 s"
