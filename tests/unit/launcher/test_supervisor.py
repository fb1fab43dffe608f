import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from launcher.restart_policy import RestartPolicy
from launcher.run_state import read_state
from launcher.stop_signals import StopSignals
from launcher.supervisor import Ranks, Supervisor
from pretrain.checkpoint.storage_retry import StorageRetry
from pretrain.config.run import RunConfig
from pretrain.processes.local_ranks import RankGroup
from pretrain.recovery.stop_requests import StopRequest
from pretrain.rundir.events import (
    AttemptEnded,
    AttemptReason,
    Interrupted,
    NextAction,
    TrainingBegan,
)
from pretrain.rundir.exit_statuses import EXIT_STOPPED
from pretrain.rundir.history import find_events
from pretrain.rundir.lock import read_lock
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.full_disk import full_disk
from tests.helpers.jobs import until


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.create(tmp_path / "run", RunConfig(name="books"))
    run_dir.ledger.append(TrainingBegan(step=0, world_size=1))
    return run_dir


def starter(command: Sequence[str], num_ranks: int, run_dir: RunDir) -> Callable[[int], Ranks]:
    return partial(RankGroup, command, num_ranks, run_dir.logs)


def stop_at_the_first_failure(run_dir: RunDir, stop: StopSignals) -> None:
    until(lambda: find_events(run_dir.ledger.read(), AttemptEnded), 300)
    stop.received.append(signal.SIGINT)
    stop.requests += 1


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("numbers", [(signal.SIGHUP,), (signal.SIGINT, signal.SIGINT)])
def test_a_closed_terminal_saves_and_two_signals_of_one_ctrl_c_are_one(numbers):
    with StopSignals() as signals:
        send(*numbers)
    stop = StopRequest()
    send(*numbers)
    stop.restore_handlers()
    assert (signals.requests, stop.count) == (1, 1)


def test_a_second_ctrl_c_is_no_request_to_save(monkeypatch):
    for module in ("launcher.stop_signals", "pretrain.recovery.stop_requests"):
        monkeypatch.setattr(f"{module}.ONE_PRESS_SECONDS", 0.0)
    with StopSignals() as signals:
        send(signal.SIGINT, signal.SIGINT)
        assert signals.requests == 2
    stop = StopRequest()
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    stop.restore_handlers()


def test_nohup_keeps_a_closed_terminal_from_stopping_anything():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            stop = StopRequest()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            stop.restore_handlers()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_supervisor_outlasts_a_full_disk_before_and_after_an_attempt(run_dir, monkeypatch):
    monkeypatch.setattr("pretrain.checkpoint.storage_retry.FIRST_PAUSE", 0.05)
    limits, waited = resource.getrlimit(resource.RLIMIT_FSIZE), []

    def fill_the_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))

    def make_room() -> None:
        waited.append(len(run_dir.ledger.read()))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def start(number: int) -> Ranks:
        fill_the_disk()
        return starter(["true"], 1, run_dir)(number)

    patient = RunDir(run_dir.path, StorageRetry(60, make_room))
    publish_step(run_dir.checkpoints, run_dir.config.optim.steps)
    fill_the_disk()
    try:
        status = Supervisor(patient, start, RestartPolicy(), StopSignals()).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 0
    assert waited == [1, 1], "before the attempt, and until its end is written"
    assert isinstance(run_dir.ledger.read()[-1], AttemptEnded)


def test_the_lock_of_a_job_outlasts_a_full_disk_and_a_commands_reports_it(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.checkpoint.storage_retry.FIRST_PAUSE", 0.05)
    with full_disk(largest_file=20) as free_space:
        new = RunDir(tmp_path / "new", StorageRetry(60, free_space))
        with pytest.raises(OSError), new.locked("launcher"):
            pass
        with new.locked("launcher", is_fenced=True):
            lock = read_lock(new.path / "launcher.lock")
    assert lock is not None
    assert lock.is_held


def patient(run_dir: RunDir, stop: StopSignals) -> RunDir:
    return RunDir(run_dir.path, stop.retry(600))


@contextlib.contextmanager
def signal_when(stop: StopSignals, *conditions: Callable[[], bool]) -> Iterator[None]:
    """Send this process SIGTERM as soon as each of the conditions holds, one after the other."""

    def send() -> None:
        for each in conditions:
            try:
                until(each, 300)
            finally:  # also after a timeout, or the supervisor would go on
                os.kill(os.getpid(), signal.SIGTERM)

    with stop, ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send)
        yield
        sender.result()


def waits(caplog: pytest.LogCaptureFixture) -> bool:
    return any("run waits" in message for message in caplog.messages)


def test_sigterm_ends_the_wait_for_a_full_disk(run_dir, caplog):
    caplog.set_level("INFO")
    stop = StopSignals()
    with full_disk(4096), run_dir.locked("launcher"), signal_when(stop, lambda: waits(caplog)):
        status = Supervisor(patient(run_dir, stop), pytest.fail, RestartPolicy(), stop).run()
    assert status == EXIT_STOPPED
    assert f"{run_dir.path}: " in caplog.text
    # the ledger's few bytes still fit
    assert find_events(run_dir.ledger.read(), Interrupted) == [
        Interrupted(signal="SIGTERM", step=0)
    ]


def test_a_stop_that_no_ledger_can_take_is_in_the_log(run_dir, caplog):
    stop = StopSignals()

    def start(number: int) -> Ranks:
        fill.enter_context(full_disk(4096))
        return starter(["false"], 1, run_dir)(number)

    run_dir.ledger.path.write_bytes(run_dir.ledger.path.read_bytes() + b" " * 4096 + b"\n")
    signaled = signal_when(stop, lambda: waits(caplog))
    with contextlib.ExitStack() as fill, run_dir.locked("launcher"), signaled:
        status = Supervisor(patient(run_dir, stop), start, RestartPolicy(), stop).run()
    assert status == EXIT_STOPPED
    unwritten = [each for each in caplog.messages if each.startswith("not in the ledger")]
    assert len(unwritten) == 2
    assert "rank 0 " in unwritten[0]
    assert "SIGTERM" in unwritten[1]


def test_a_run_whose_last_step_is_not_saved_is_not_finished(run_dir):
    policy = RestartPolicy(attempts_without_progress=2, first_delay=0.0)
    status = Supervisor(run_dir, starter(["true"], 1, run_dir), policy, StopSignals()).run()
    assert status == 2
    ended = find_events(run_dir.ledger.read(), AttemptEnded)
    assert [each.next for each in ended] == [NextAction.RETRY, NextAction.GIVE_UP]
    assert {each.reason for each in ended} == {AttemptReason.UNSAVED}
    publish_step(run_dir.checkpoints, run_dir.config.optim.steps)
    assert Supervisor(run_dir, starter(["true"], 1, run_dir), policy, StopSignals()).run() == 0


@pytest.mark.parametrize(("command", "lost_at"), [("sleep", 1), ("false", 2)])
def test_a_job_without_its_nodes_starts_no_attempt_and_counts_none(run_dir, command, lost_at):
    """They are lost when it is asked for the first time, before an attempt, or after one."""
    asked = []

    def is_allocated() -> bool:
        asked.append(len(list(run_dir.logs.iterdir())))
        return len(asked) < lost_at

    starts, more = starter([command, "0"], 1, run_dir), {"job": "17", "is_allocated": is_allocated}
    status = Supervisor(run_dir, starts, RestartPolicy(), StopSignals(), **more).run()
    assert status == EXIT_STOPPED
    assert asked == [0, 1][:lost_at]
    assert not find_events(run_dir.ledger.read(), AttemptEnded)


@pytest.mark.parametrize("job", [None, "17"])
def test_ctrl_c_while_a_failed_run_waits_for_its_next_attempt_is_a_stop(run_dir, job, caplog):
    caplog.set_level("INFO")
    stop = StopSignals()
    fails = starter([sys.executable, "-I", "-S", "-c", "raise SystemExit(1)"], 1, run_dir)
    threading.Thread(target=stop_at_the_first_failure, args=(run_dir, stop)).start()
    status = Supervisor(run_dir, fails, RestartPolicy(first_delay=60.0), stop, job=job).run()
    assert status == EXIT_STOPPED
    assert "nothing" in caplog.messages[-1]
    if job is None:
        state = read_state(run_dir.path)
        assert state.state == "stopped"
        assert not state.is_lost


def test_ctrl_c_before_the_ranks_are_up_promises_no_checkpoint(tmp_path, caplog):
    caplog.set_level("INFO")
    stop, new = StopSignals(), RunDir(tmp_path / "new")
    stop.requests = 1
    sleeps = starter(["sleep", "60"], 1, new)
    assert Supervisor(new, sleeps, RestartPolicy(), stop).run() == EXIT_STOPPED
    assert "nothing" in caplog.messages[-1]


# Stands for a rank whose last save waits for storage: the first request to stop it, the second ends
# the wait.
WAITS_FOR_STORAGE = """
import pathlib, signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
while len(got) < 2:
    pathlib.Path(sys.argv[1]).write_text(str(len(got)))
    time.sleep(0.02)
raise SystemExit(75)
"""


def test_another_sigterm_reaches_ranks_that_wait_for_storage_and_kills_none(run_dir, tmp_path):
    stop, seen = StopSignals(), tmp_path / "seen"
    waits = starter([sys.executable, "-I", "-S", "-c", WAITS_FOR_STORAGE, str(seen)], 1, run_dir)

    def has_got(count: str) -> Callable[[], bool]:
        return lambda: seen.exists() and seen.read_text() == count

    with signal_when(stop, has_got("0"), has_got("1")):
        Supervisor(run_dir, waits, RestartPolicy(), stop).run()
    (ended,) = find_events(run_dir.ledger.read(), AttemptEnded)
    assert (ended.statuses, ended.reason) == ((75,), AttemptReason.STOP_REQUESTED)


# Dies as its lines say, one per life: a signal's number kills it, "exit N" ends it.
CHILD = """
import os, signal, sys
from pathlib import Path
lives = Path(sys.argv[1]).read_text().splitlines()
Path(sys.argv[1]).write_text("\\n".join(lives[1:]))
if lives[0].startswith("exit"):
    sys.exit(int(lives[0].split()[1]))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
os.kill(os.getpid(), int(lives[0]))
"""
# Has its handlers late, as a supervisor that imports its modules first.
LATE = """
import signal, sys, time
print("alive", flush=True)
time.sleep(0.5)
received = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: received.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))
print(*sorted(received), flush=True)
"""
PARENT = """
import sys
from launcher.slurm.batch_process import BatchProcess
sys.exit(BatchProcess(sys.argv[1:]).run())
"""


def start_child(*child: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, sys.executable, "-S", "-c", *child]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("lives", "status", "said"),
    [
        (["9", "11", "exit 75"], 75, ["by SIGKILL; starting", "by SIGSEGV; starting"]),
        (["15", "exit 0"], 128 + signal.SIGTERM, []),  # Slurm has requeued the job, and ends it
        (["9", "9", "9", "exit 0"], 128 + signal.SIGKILL,
         ["by SIGKILL; starting"] * 2 + ["by SIGKILL 3 times in a row; giving up"]),
    ],
)  # fmt: skip
def test_a_supervisor_that_a_signal_killed_is_started_again_and_its_exit_is_the_jobs(
    tmp_path, lives, status, said
):
    script = tmp_path / "lives"
    script.write_text("\n".join(lives))
    process = start_child(CHILD, str(script))
    _, errors = process.communicate()
    assert process.returncode == status
    lines = errors.splitlines()
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))


def test_signals_reach_a_supervisor_that_has_no_handlers_for_them_yet():
    process = start_child(LATE)
    assert process.stdout is not None
    assert process.stdout.readline() == "alive\n"
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert output == f"{int(signal.SIGUSR1)} {int(signal.SIGTERM)}\n"
    assert process.returncode == 0
