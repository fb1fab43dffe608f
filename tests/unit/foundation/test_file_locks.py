"""Locks where the file system has them, and where `flock` fails."""

import os
import socket
import subprocess
import sys

import pytest

from foundation.errors import ConfigError, DataError
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkout import ROOT

WITHOUT_FLOCK = """
import sys
from pathlib import Path
from foundation.locks import NoFileLocksError, open_shared
from pretrain.rundir.lock import Fence, StaleAttempt
from pretrain.rundir.run_dir import RunDir
from tests.helpers.no_flock import deny_flock
deny_flock()
run = Path(sys.argv[1])
with RunDir(run).locked("train"):
    first = Fence(run, "first")
    first.claim()
    with RunDir(run).locked("train"):
        Fence(run, "second").claim()
    try:
        first.check()
    except StaleAttempt as error:
        print(error)
try:
    open_shared(run / "attempt")
except NoFileLocksError as error:
    print(error)
"""


def test_without_flock_a_second_attempt_fences_off_the_first_and_no_shard_cache_works(tmp_path):
    command = [sys.executable, "-c", WITHOUT_FLOCK, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    stale, refused = done.stdout.splitlines()
    assert stale.startswith("attempt first ")
    assert refused.startswith(f"{tmp_path / 'attempt'}: ")
    assert f"{tmp_path / 'train.lock'}: " in done.stderr


def test_an_unknown_holder_is_not_named_and_lock_files_are_for_their_owner_only(tmp_path):
    path = tmp_path / "train.lock"
    with RunDir(tmp_path).locked("train"):
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_text(path.read_text().replace(str(os.getpid()), "1"))
        with pytest.raises(ConfigError, match=str(tmp_path)), RunDir(tmp_path).locked("train"):
            pass
        path.write_text(path.read_text().replace(socket.gethostname(), "elsewhere"))
        with pytest.raises(ConfigError, match="process 1 "), RunDir(tmp_path).locked("train"):
            pass


def test_a_lock_file_with_the_modes_of_a_copy_becomes_private_and_a_pipe_is_none(tmp_path):
    path = tmp_path / "train.lock"
    path.touch(mode=0o644)
    with RunDir(tmp_path).locked("train"):
        assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=str(path)), RunDir(tmp_path).locked("train"):
        pass
