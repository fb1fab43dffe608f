"""Every error of the operating system is one line and status 2; writers try again after some."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.cli import main as data_pipeline
from foundation.errors import ConfigError, DataError, exit_status_of, is_of_site
from foundation.files import write_text
from launcher.cli import main as launcher
from pretrain.checkpoint.storage_retry import StorageRetry, WriteFailures, with_retries
from pretrain.cli import main as pretrain
from pretrain.errors import StorageError, UnreadableError
from tests.helpers.small_disks import needs_mounts

EXPERIMENT = "configs/experiments/demo.yaml"


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (data_pipeline, "build loop"),
        (data_pipeline, "build --input=text --output=loop/corpus"),
        (data_pipeline, "inspect loop"),
        (pretrain, "train loop --run-dir=run"),
        (pretrain, f"train {EXPERIMENT} data.path=loop --run-dir=run"),
        (pretrain, "describe loop"),
        (launcher, f"submit {EXPERIMENT} --cluster=loop"),
        (launcher, f"submit {EXPERIMENT} --cluster=configs/clusters/cpu.yaml --run-dir=loop"),
    ],
)
def test_a_circle_of_links_as_any_path_is_one_line(tmp_path, monkeypatch, capsys, main, arguments):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("text").mkdir()
    assert main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "loop" in line
    assert os.strerror(errno.ELOOP) in line


def raising(error: Exception) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


def test_every_error_of_a_file_is_one_line_with_its_name_and_what_to_do(capsys):
    for number in errno.errorcode:
        error = OSError(number, os.strerror(number), "data/x")
        if isinstance(error, BrokenPipeError):
            continue  # the reader of our output has gone: nothing to say
        assert exit_status_of(raising(error)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        problem, _, remedy = line.partition("; ")
        assert problem == f"error: data/x: {os.strerror(number)}"
        assert len(remedy) > 10
        assert number != errno.EDQUOT or "disk space" not in remedy, "of a quota, not of the disk"
        assert exit_status_of(raising(OSError(number, os.strerror(number)))) == 2
        assert "check the path" not in capsys.readouterr().err, "which is not named"


def test_a_file_that_cannot_be_written_is_named_and_not_its_temporary_one(tmp_path, capsys):
    for path in (tmp_path / "absent" / "x.yaml", tmp_path / "folder"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        assert exit_status_of(lambda path=path: write_text(path, "x") or 0) == 2
        assert capsys.readouterr().err.startswith(f"error: {path}: ")


WITHOUT_INODES = """
mount -t tmpfs -o size=1m,nr_inodes=3 tmpfs "$DISK"
touch "$DISK/x"
exec "$PYTHON" -c 'from data_pipeline.cli import main; import sys; sys.exit(main(sys.argv[1:]))' \\
    build --input="$TEXT" --output="$DISK/out" validation_fraction=0
"""


@needs_mounts
def test_a_disk_without_inodes_is_not_told_to_free_space(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text\n" * 9)
    places = {"DISK": str(tmp_path / "disk"), "TEXT": str(tmp_path / "text")}
    command = ["unshare", "--map-root-user", "--mount", "bash", "-ec", WITHOUT_INODES]
    variables = {**os.environ, **places, "PYTHON": sys.executable}
    built = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert built.returncode == 2
    (line,) = built.stderr.splitlines()
    assert "inodes" in line


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(f"/shared/{'x' * 4000}/run.json is missing; check the path"),
        OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "y" * 4000),
    ],
)
def test_a_path_of_thousands_of_characters_is_shortened_in_the_middle(capsys, error):
    assert exit_status_of(raising(error)) == 2
    said = capsys.readouterr().err
    assert len(said) < 600
    assert "[...]" in said


def from_cause(error: Exception, cause: Exception) -> Exception:
    try:
        try:
            raise cause
        except Exception:
            raise error from None
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((OSError(number, "x"), True) for number in (errno.EIO, errno.ESTALE, errno.ENOMEM)),
        *((OSError(number, "x"), True) for number in (errno.ENOSPC, errno.EDQUOT)),
        *((OSError(number, "x"), False) for number in (errno.ENOENT, errno.EACCES, errno.EINVAL)),
        (MemoryError(), True),
        (UnreadableError("x"), True),
        (from_cause(DataError("corrupted"), OSError(errno.EIO, "x")), True),
        (from_cause(DataError("corrupted"), OSError(errno.ENOENT, "x")), False),
        (ConfigError("x"), False),
    ],
)
def test_what_storage_and_memory_do_is_told_from_what_the_user_asked_for(error, expected):
    assert is_of_site(error) is expected


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, which passes only in pauses."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_pauses_between_tries_double_to_a_minute_and_the_last_try_is_at_the_end(clock):
    tries: list[float] = []
    path, full = "/shared/run/metrics.jsonl", os.strerror(errno.ENOSPC)

    def write() -> None:
        tries.append(clock[0])
        raise OSError(errno.ENOSPC, full, path)

    with pytest.raises(StorageError) as error:
        with_retries(StorageRetry(200.0), write)
    assert tries == pytest.approx([0, 1, 3, 7, 15, 31, 63, 123, 183, 200])
    assert str(error.value).startswith(f"{path}: {full} ")
    assert "checkpoint.storage_patience_seconds=200" in str(error.value)


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(clock, caplog):
    failures = WriteFailures(StorageRetry(600.0))
    for _ in range(2):
        for _ in range(3):
            failures.failed("/run: full", "training continues")
            failures.pause()
        failures.ended()
    begins, ends, *again = caplog.messages
    assert begins.startswith("/run: full; ")
    assert "7 s" in ends
    assert again == [begins, ends]
