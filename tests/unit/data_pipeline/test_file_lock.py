"""Locks where the file system has them, and where `flock` fails for every process (seccomp)."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from foundation import locks
from foundation.errors import ConfigError, DataError
from foundation.locks import (
    PATIENCE_SECONDS,
    NoFileLocksError,
    OwnerFile,
    exclusive_lock,
    held_lock,
    open_shared,
)
from pretrain.rundir.lock import read_lock
from pretrain.rundir.run_dir import RunDir
from tests.helpers.no_flock import without_flock

PROGRAM = """
import sys, time
from pathlib import Path
from tests.helpers.no_flock import deny_flock
from pretrain.rundir.run_dir import RunDir
from foundation.errors import exit_status_of
deny_flock()
def hold():
    with RunDir(Path(sys.argv[1])).locked("train"):
        print("held", flush=True)
        sys.stdin.read()
    return 0
sys.exit(exit_status_of(hold))
"""


def start(run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_flock_a_run_is_locked_against_a_second_process_and_free_after_a_kill(tmp_path):
    first = start(tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n", first.communicate()
    lock = read_lock(tmp_path / "train.lock")
    assert lock is not None
    assert (lock.pid, lock.is_held) == (first.pid, True)
    second = start(tmp_path)
    out, error = second.communicate()
    assert (second.returncode, out) == (2, "")
    assert f"is in use by process {first.pid} (train) on" in error
    assert error.count("\n") == 1
    first.send_signal(signal.SIGKILL)
    first.wait()
    killed = read_lock(tmp_path / "train.lock")
    assert killed is not None
    assert killed.is_held is False
    third = start(tmp_path)
    out, error = third.communicate("")
    assert (third.returncode, out) == (0, "held\n"), error
    assert [path.name for path in tmp_path.iterdir()] == ["train.lock"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_one_of_many_threads_holds_the_lock_at_a_time(tmp_path, number):
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(5):
            with exclusive_lock(tmp_path / "lock", seconds=30):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    with without_flock(number):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1]


def test_without_flock_who_waits_too_long_for_a_lock_names_its_holder(tmp_path):
    with (
        without_flock(),
        exclusive_lock(tmp_path / "lock", seconds=1),
        pytest.raises(DataError, match=rf"a stopped one \(process {os.getpid()} on '") as error,
        exclusive_lock(tmp_path / "lock", seconds=0),
    ):
        pass
    assert socket.gethostname() in str(error.value)


def test_a_lock_of_another_machine_is_taken_over_only_after_a_long_silence(tmp_path):
    def leave(silence: float) -> OwnerFile:
        owner = OwnerFile(tmp_path / "lock")
        owner.path.unlink(missing_ok=True)
        foreign = {"token": "1", "hostname": "n2", "machine": "x", "pid": 1, "started": "1"}
        owner.path.write_text(json.dumps(foreign))
        now = owner.path.stat().st_mtime
        os.utime(owner.path, (now, now - silence))
        return owner

    assert not leave(silence=PATIENCE_SECONDS - 20).try_acquire()
    assert leave(silence=0).is_held() is None
    owner = leave(silence=PATIENCE_SECONDS + 1)
    assert owner.try_acquire()
    assert OwnerFile(tmp_path / "lock").is_held() is True
    owner.release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_file_that_its_maker_could_not_write_is_free_after_the_same_silence(tmp_path):
    owner = OwnerFile(tmp_path / "lock")
    owner.path.touch()  # killed right after it made the file
    assert not owner.try_acquire()
    now = owner.path.stat().st_mtime
    os.utime(owner.path, (now, now - PATIENCE_SECONDS - 1))
    assert owner.try_acquire()
    owner.release()
    assert not owner.path.exists()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))  # the same as a full disk
    try:
        with pytest.raises(OSError, match="large"):
            owner.try_acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not owner.path.exists()


def test_a_holder_touches_its_file_and_does_not_remove_that_of_a_successor(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(locks, "TOUCH_SECONDS", 0.02)
    owner = OwnerFile(tmp_path / "lock")
    assert owner.try_acquire()
    os.utime(owner.path, (0, 0))
    deadline = threading.Event()
    while owner.path.stat().st_mtime == 0:
        assert not deadline.wait(0.01)
    owner.path.write_text("{}")
    while "was taken by another process" not in caplog.text:
        assert not deadline.wait(0.01)
    owner.release()
    assert owner.path.exists()


def test_a_shard_cache_without_flock_is_refused_by_the_name_of_its_file(tmp_path):
    (tmp_path / "shard").touch()
    with without_flock(), pytest.raises(NoFileLocksError, match=str(tmp_path / "shard")):
        open_shared(tmp_path / "shard")


def test_an_unknown_holder_is_not_named_and_lock_files_are_for_their_owner_only(tmp_path):
    with RunDir(tmp_path).locked("train"):
        pass
    path = tmp_path / "train.lock"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text().replace(str(os.getpid()), "1"))
    with (
        held_lock(path) as held,
        pytest.raises(ConfigError, match="in use by a process that is not known"),
        RunDir(tmp_path).locked("train"),
    ):
        assert held
    path.write_text(path.read_text().replace(socket.gethostname(), "elsewhere"))
    with (
        held_lock(path) as held,
        pytest.raises(ConfigError, match=r"only its host knows, the last was process 1 \(train\)"),
        RunDir(tmp_path).locked("train"),
    ):
        assert held


def test_a_lock_file_with_the_modes_of_a_copy_becomes_private_and_a_pipe_is_none(tmp_path):
    path = tmp_path / "train.lock"
    path.touch(mode=0o644)
    with held_lock(path):
        assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="is not a regular file, expected a lock"), held_lock(path):
        pass


def test_a_machine_without_a_boot_id_goes_by_its_name(tmp_path, monkeypatch):
    booted = locks.boot_of_machine()
    monkeypatch.setattr(locks, "_BOOT_ID", tmp_path / "none")
    assert locks.boot_of_machine() == socket.gethostname() != booted
