"""One example: a changed file, its reader, and what the reader must not do.

A reader may return, or refuse in words. It may not raise anything else, take longer than
LIMIT_SECONDS, use more than LIMIT_BYTES more than before, write or remove anything but its own
directories and slots of heartbeats, start a process, unpickle, send control characters to a
terminal, or accept a changed file whose checksums are wrong and read something else.
"""

import contextlib
import io
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from data_pipeline.vocabularies import confined
from foundation.errors import exit_status_of
from tests.fuzz.mutations import CANARY, Change
from tests.fuzz.target import Refused, Target, changes_of
from tests.helpers.memory_limit import memory_limit

LIMIT_SECONDS = 20.0  # a resume also waits for other threads, whose waits for a core are not known
LIMIT_BYTES = 2 << 30
OWN = ("copy", "cache", "scratch")  # directories that a reader may write into
_CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events and the arguments that are paths: (path, descriptor of its directory).
_CHANGING = {
    "os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.chmod": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)), "os.link": ((0, 2), (1, 3)), "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),), "os.utime": ((0, 3),), "shutil.rmtree": ((0, 1),),
}  # fmt: skip
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")


class Finding(Exception):
    """A reader did what it must not do; `kind` and `place` tell findings apart."""

    def __init__(self, kind: str, detail: str, place: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.place = kind, place


class _Hang(BaseException):
    """Raised where the reader is when its time is over."""


@dataclass
class _Watch:
    """What the audit hook looks for while a reader runs."""

    work: Path
    allowed: tuple[str, ...]
    may_read: bool  # also what is elsewhere
    found: list[str]


_watch: _Watch | None = None


bounded_memory = partial(memory_limit, LIMIT_BYTES)


def examine(target: Target, change: Change, work: Path) -> bool:
    """Whether the reader accepts a copy of the target with this change; Finding if it misbehaves.

    `work` is an empty directory, or the one of an earlier example.
    """
    expected = expectation(target, work)
    copy = _prepare(target, work)
    change.apply(copy / target.file)
    if change.is_sealed and target.seal:
        with contextlib.suppress(Exception):  # damaged beyond sealing
            target.seal(copy)
    is_accepted, result = _read(target, copy, work)
    if is_accepted and target.is_protected and not change.is_sealed and result != expected:
        raise Finding("wrong reading", f"{result!r}, the valid file gives {expected!r}")
    return is_accepted


def expectation(target: Target, work: Path) -> object:
    """Return what the valid file reads as."""
    key = (target.home, target.read)
    if key not in _expectations:
        with _caught_output(io.BytesIO()):  # imports, and fills caches elsewhere
            target.read(_prepare(target, work))
        is_accepted, _expectations[key] = _read(target, _prepare(target, work), work)
        assert is_accepted, f"the valid {target.file} is refused"
    return _expectations[key]


_expectations: dict[tuple[Path, Callable[[Path], object]], object] = {}


def try_changes(
    target: Target,
    targets: Mapping[str, Target],
    count: int,
    attempt: Callable[[Change], object],
    is_repeatable: bool = False,
) -> None:
    """Call `attempt` with `count` changes of the target; the same every time if `is_repeatable`."""

    @seed(random.getrandbits(64))
    @settings(
        max_examples=count, derandomize=is_repeatable, deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(change=changes_of(target, targets))
    def run(change: Change) -> None:
        attempt(change)

    run()


def _prepare(target: Target, work: Path) -> Path:
    for name in OWN:
        shutil.rmtree(work / name, ignore_errors=True)
    shutil.copytree(target.home, work / "copy")
    (work / "scratch").mkdir()
    (work / CANARY).mkdir(exist_ok=True)
    (work / CANARY / "file").write_text("[]")
    return work / "copy"


def _read(target: Target, copy: Path, work: Path) -> tuple[bool, Any]:
    """Whether the reader accepts the copy, and what it reads; Finding if it misbehaves."""
    result: list[Any] = []
    output = io.BytesIO()
    try:
        with _caught_output(output), _watched(work, target.names_files) as watch, _time_limit():
            status = exit_status_of(lambda: result.append(target.read(copy)) or 0)
    except Refused:
        status = 2
    except _Hang as hang:
        raise Finding("hang", _trace(hang), _place(hang)) from None
    except (Exception, SystemExit) as error:
        kind = "memory" if isinstance(error, MemoryError) else f"traceback {type(error).__name__}"
        raise Finding(kind, _trace(error), _place(error)) from None
    if watch.found:
        raise Finding("forbidden", "\n".join(watch.found), watch.found[0].split("\n")[0])
    _check_output(output.getvalue().decode(), status)
    return status == 0, result[0] if result else None


def _check_output(text: str, status: int) -> None:
    if "Traceback (most recent" in text:
        raise Finding("traceback shown", text[-4000:], text.strip().splitlines()[-1][:80])
    if found := _CONTROL.search(text):
        start = max(0, found.start() - 200)
        raise Finding("control character", repr(text[start : found.end() + 200]))
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if status and "error" not in text.lower() and not text.strip():
        raise Finding("silent refusal", f"status {status}")
    if any(len(line) > 2_000 for line in errors):
        raise Finding("long line", max(errors, key=len)[:500])


@contextlib.contextmanager
def _caught_output(output: io.BytesIO) -> Iterator[None]:
    """Catch what is printed; undo what a command does to its process."""
    root, environment, hook = logging.getLogger(), os.environ.copy(), sys.excepthook
    handlers, level = list(root.handlers), root.level
    # as strict as the interpreter's own streams
    errors = ("strict", "backslashreplace")
    out, err = (io.TextIOWrapper(output, "utf-8", each, write_through=True) for each in errors)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        out.detach()
        err.detach()
        root.handlers[:] = handlers
        root.setLevel(level)
        sys.excepthook = hook  # each process group wraps it
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _Hang in the block after LIMIT_SECONDS in which a core was free for this thread."""
    start = time.monotonic() - _seconds_queued()

    def expire(*_: object) -> None:
        if time.monotonic() - _seconds_queued() - start >= LIMIT_SECONDS:
            raise _Hang(f"not done after {LIMIT_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    # Every second, in case that the core was busy or that somebody catches the first one.
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _seconds_queued() -> float:
    """How long this thread has waited for a core in all."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


# ------------------------------------------------------------------------------------ audit events


@contextlib.contextmanager
def _watched(work: Path, may_read: bool) -> Iterator[_Watch]:
    global _watch
    if not _hook_added:
        _hook_added.append(True)
        sys.addaudithook(_on_event)
    own = [work / name for name in OWN]
    allowed = tuple(map(os.path.realpath, own))
    before, tempfile.tempdir = tempfile.tempdir, str(work / "scratch")
    _watch = watch = _Watch(work, allowed, may_read, [])
    try:
        yield watch
    finally:
        _watch, tempfile.tempdir = None, before


_hook_added: list[bool] = []


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    watch = _watch
    if watch is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITING:
            _check_change(watch, event, path, None)
        elif watch.may_read or not isinstance(path, (str, bytes)):
            return
        elif CANARY in os.fsdecode(path):
            _note(watch, f"reads {os.fsdecode(path)!r}")
    elif event in _CHANGING:
        for path, directory in _CHANGING[event]:
            descriptor = None if directory is None else arguments[directory]
            _check_change(watch, event, arguments[path], descriptor)
    elif event in _PROCESSES and confined.__name__ not in arguments[1]:
        _note(watch, f"{event} {arguments[:2]!r}")
    elif event == "pickle.find_class":
        _note(watch, f"unpickles {arguments!r}")


def _check_change(watch: _Watch, event: str, path: Any, directory: int | None) -> None:
    """Note a change of anything but the reader's own directories."""
    if isinstance(path, int):
        return  # an open file
    text = os.fsdecode(path)
    if isinstance(directory, int) and directory >= 0 and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
    parent, name = os.path.split(os.path.abspath(text))
    real = os.path.join(os.path.realpath(parent), name)
    if event == "open":
        real = os.path.realpath(real)
    if real.startswith(watch.allowed) or real == os.devnull or "__pycache__" in real:
        return
    _note(watch, f"{event} of {real!r}")


def _note(watch: _Watch, what: str) -> None:
    watch.found.append(f"{what}\n{''.join(traceback.format_stack()[:-3][-12:])}")


def _trace(error: BaseException) -> str:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return text if len(text) < 20_000 else f"{text[:8_000]}\n...\n{text[-8_000:]}"


def _place(error: BaseException) -> str:
    """Return the last line of the project's own code in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/tests/" not in frame.filename]
    packages = re.compile("^(?!.*/site-packages/).*/(foundation|data_pipeline|pretrain|launcher)/")
    ours = [frame for frame in own if packages.match(frame.filename)]
    frame = (ours or own or list(frames))[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
