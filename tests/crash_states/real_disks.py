"""Start from images of real file systems, copied after an fsync of a run and of builds; as root.

A copy has what had reached the device. It is mounted, which replays its journal, and the same is
checked as of the states that models allow.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.crash_states.__main__ import SUBJECTS
from tests.crash_states.recorder import Recorder
from tests.crash_states.states import History
from tests.crash_states.subjects import Subject, no_sync, silenced

IMAGE_BYTES = 320 << 20  # XFS wants 300 MB; most of it is a hole
MAKERS = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}


class CopyingRecorder(Recorder):
    """A recorder that syncs, and copies the image after every so many of these."""

    def __init__(self, root: Path, image: Path, every: int) -> None:
        super().__init__(root)
        self._image, self._every, self._fsync = image, every, os.fsync
        self.num_syncs = 0
        self.copies: list[tuple[Path, int]] = []  # with how many operations there were

    def _sync(self, descriptor: int) -> None:
        with self._lock:
            super()._sync(descriptor)
            self._fsync(descriptor)
            self.num_syncs += 1
            if self.num_syncs % self._every == 0:
                copy = self._image.with_name(f"{self._image.name}.{self.num_syncs}")
                _call("cp", "--sparse=always", self._image, copy)
                self.copies.append((copy, len(self.recording.operations)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_states.real_disks")
    parser.add_argument("--every", type=int, default=8, help="fsyncs per copy (%(default)s)")
    parser.add_argument("--only", choices=SUBJECTS)
    arguments = parser.parse_args()
    if os.geteuid():
        print("error: found a user without the right to mount images, expected root")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # after unmounting
    silenced()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="power-") as home:
        for kind in MAKERS:
            for number, name in enumerate(SUBJECTS):
                if arguments.only in (None, name):
                    where = Path(home) / f"{kind}-{number}"
                    wrong += _check(kind, name, where, arguments.every)
    return 1 if wrong else 0


def _check(kind: str, name: str, home: Path, every: int) -> int:
    """Record the subject on a new image and start from the copies; how many were wrong."""
    disk, image = home / "disk", home / "image"
    disk.mkdir(parents=True)
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    _call(*MAKERS[kind], image)
    make, _ = SUBJECTS[name]
    with _mounted(image, disk):
        subject = make(disk / "root", home / "beside")
        subject.root.mkdir()
        os.sync()
        recorder = CopyingRecorder(subject.root, image, every)
        subject.record(recorder)
    history = History(recorder.recording)
    wrong = 0
    for copy, end in recorder.copies:
        with _mounted(copy, disk), mock.patch.object(os, "fsync", no_sync):
            problem = _problem(subject, history.told(end))
        if problem:
            wrong += 1
            print(f"{kind}, {name}, after operation {end}: {problem}")
        copy.unlink()
    counts = f"{recorder.num_syncs} fsyncs, {len(recorder.copies)} images ({wrong} wrong)"
    print(f"{kind}, {name}: {counts}", flush=True)
    return wrong


def _problem(subject: Subject, told: list[object]) -> str:
    try:
        return next(iter(subject.problems({}, told)), "")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _mounted(image: Path, disk: Path) -> Iterator[None]:
    _call("mount", "-o", "loop", image, disk)
    try:
        yield
    finally:  # lazily: a thread may still have a file open
        _call("umount", "--lazy", disk)


def _call(*command: str | Path) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
