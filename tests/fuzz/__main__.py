"""`python -m tests.fuzz --minutes 60`: hostile files for an hour, by two processes.

    FOLDER/worker-0/          counts.json, and what it examines now
    FOLDER/finding-HASH/      example.json (to repeat it), input.bin (the file), traceback.txt

Prints a line per minute with the examples of each target so far. A process that dies or hangs
beyond rescue is a finding, too, and is replaced. Exit status 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.programs import own_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fuzz.mutations import Change
    from tests.fuzz.target import Target

PROCESSES = 2
BATCH_SECONDS = 4.0
FIRST_BATCH = 5
UNKNOWN_TARGET = 2
# Then the process ends, with its stacks: nothing else can stop native code. By the clock on the
# wall, so a machine that has other work needs many times what an example may take.
STUCK_SECONDS = 900.0
SLOW_SECONDS = 1.0  # of an example: reports, whose readers are tried without their pictures
REPLAY = "python -m tests.fuzz --replay {}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), metavar="FOLDER")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--targets", nargs="*", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--replay", type=Path, metavar="FINDING", help="examine a finding again")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        return replay(arguments.replay)
    if arguments.worker is not None:
        work(arguments)
        return 0
    return supervise(arguments)


# ---------------------------------------------------------------------------------- the supervisor


def supervise(arguments: argparse.Namespace) -> int:
    """Keep the processes running until the time is over, and report."""
    folder, start = arguments.findings, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("worker-*"):
        shutil.rmtree(left)
    end, reported = start + 60 * arguments.minutes, 0
    processes = [_start(arguments, number, end) for number in range(arguments.processes)]
    while any(process.poll() is None for process in processes) or time.monotonic() < end:
        time.sleep(0.5)
        for number, process in enumerate(processes):
            if process.poll() == UNKNOWN_TARGET:
                print((folder / f"worker-{number}" / "stderr.txt").read_text(), end="")
                for other in processes:
                    other.kill()
                    other.wait()
                return UNKNOWN_TARGET
            if process.poll() is not None and time.monotonic() < end:
                _record_death(folder, number, process.returncode)
                processes[number] = _start(arguments, number, end)
        minute = int((time.monotonic() - start) / 60)
        if minute > reported:
            reported = minute
            print(f"minute {minute}: {_summary(folder)}", flush=True)
    print(f"end: {_summary(folder)}")
    findings = sorted(folder.glob("finding-*"))
    for finding in findings:
        first = (finding / "traceback.txt").read_text(errors="replace").split("\n")[0]
        print(f"{first[:150]}\n  {REPLAY.format(finding)}")
    return 1 if findings else 0


def _start(arguments: argparse.Namespace, number: int, end: float) -> subprocess.Popen[bytes]:
    minutes = max(0.0, end - time.monotonic()) / 60
    command = own_command("tests.fuzz", "--worker", str(number))
    command += ["--minutes", str(minutes), "--findings", str(arguments.findings)]
    command += ["--processes", str(arguments.processes)]
    command += ["--targets", *arguments.targets] if arguments.targets else []
    own = arguments.findings / f"worker-{number}"
    own.mkdir(exist_ok=True)
    with open(own / "stderr.txt", "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def _counts(folder: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in folder.glob("worker-*/counts-*.json"):
        with contextlib.suppress(ValueError):  # it is being written
            counts.update(json.loads(path.read_text()))
    return counts


def _summary(folder: Path) -> str:
    counts = _counts(folder)
    each = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
    found = len(list(folder.glob("finding-*")))
    return f"{counts.total():,} examples, {found} findings ({each})"


def _record_death(folder: Path, number: int, status: int) -> None:
    own = folder / f"worker-{number}"
    text = (own / "stderr.txt").read_text(errors="replace")[-8_000:]
    (own / "stderr.txt").write_text("")
    current = own / "current.json"
    tree = json.loads(current.read_text()) if current.exists() else {"target": "(none)"}
    save_finding(folder, tree, f"the process ended with status {status}\n{text}", tree["target"])


def save_finding(folder: Path, tree: dict, text: str, place: str) -> None:
    """Write a finding, unless there is a shorter one of the same target and place."""
    from tests.fuzz.mutations import Change

    first = text.split("\n")[0].split(":")[0]
    name = hashlib.sha256(f"{tree['target']} {first} {place}".encode()).hexdigest()[:10]
    found = folder / f"finding-{name}"
    content = Change.of_tree(tree).content if "kind" in tree else b""
    if found.exists() and (found / "input.bin").stat().st_size <= len(content):
        return
    beside = folder / f".finding-{name}-{os.getpid()}"
    beside.mkdir()
    (beside / "example.json").write_text(json.dumps(tree))
    (beside / "input.bin").write_bytes(content)
    (beside / "traceback.txt").write_text(f"{tree['target']}: {text}\n", errors="replace")
    shutil.rmtree(found, ignore_errors=True)
    beside.rename(found)


# -------------------------------------------------------------------------------------- a process


def work(arguments: argparse.Namespace) -> None:
    """Examine the targets in turn until the time is over: random and single changes of each."""
    from tests.fuzz.examine import bounded_memory, try_changes
    from tests.fuzz.targets import Workplace

    end = time.monotonic() + 60 * arguments.minutes
    own = arguments.findings.resolve() / f"worker-{arguments.worker}"
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        targets = Workplace(Path(name)).make()
        chosen = arguments.targets or list(targets)
        if unknown := set(chosen) - set(targets):
            print(
                f"error: no target {sorted(unknown)}; there are {sorted(targets)}", file=sys.stderr
            )
            sys.exit(UNKNOWN_TARGET)
        place = Path(name) / "work"
        place.mkdir()
        counts, sizes = Counter[str](), dict.fromkeys(chosen, FIRST_BATCH)
        single = {each: _single_changes(each, targets[each], arguments, own) for each in chosen}
        for turn in itertools.count():
            for each in random.sample(chosen, len(chosen)):
                if time.monotonic() > end:
                    return
                start, target = time.monotonic(), targets[each]
                see = partial(_examine, own, each, target, place)
                with bounded_memory():  # libraries that are loaded late are no example's fault
                    changes = list(itertools.islice(single[each], sizes[each])) if turn % 2 else []
                    for change in changes:
                        see(change)
                    if not changes:
                        try_changes(target, targets, sizes[each], see)
                counts[each] += len(changes) or sizes[each]
                per_second = sizes[each] / (time.monotonic() - start)
                sizes[each] = max(FIRST_BATCH, min(400, int(BATCH_SECONDS * per_second)))
                (own / f"counts-{os.getpid()}.json").write_text(json.dumps(counts))


def _single_changes(
    name: str, target: Target, arguments: argparse.Namespace, own: Path
) -> Iterator[Change]:
    """Yield this process' share of the single changes of a file.

    A process that takes the place of one that died goes on after the change that ended it.
    """
    from tests.fuzz.target import single_changes

    progress = own / f"single-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
    done = int(progress.read_text()) if progress.exists() else 0
    share = itertools.islice(single_changes(target), arguments.worker, None, arguments.processes)
    for number, change in enumerate(share if target.seconds < SLOW_SECONDS else ()):
        if number >= done:
            progress.write_text(str(number + 1))
            yield change


def _examine(own: Path, name: str, target: Target, place: Path, change: Change) -> None:
    """Examine one example, and save what is found; what seems to hang, if it does so twice."""
    from tests.fuzz.examine import Finding, examine

    tree = {"target": name, **change.to_tree()}
    (own / "current.json").write_text(json.dumps(tree))
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    try:
        try:
            examine(target, change, place)
        except Finding as finding:
            if finding.kind != "hang":
                raise
            examine(target, change, place)  # the disk, or another thread, may have had to wait
    except Finding as finding:
        save_finding(own.parent, tree, str(finding), finding.place)
    finally:
        faulthandler.cancel_dump_traceback_later()


def replay(finding: Path) -> int:
    """Examine a finding again; 1 if it is still one."""
    from tests.fuzz.examine import Finding, bounded_memory, examine
    from tests.fuzz.mutations import Change
    from tests.fuzz.targets import Workplace

    tree = json.loads((finding / "example.json").read_text())
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        target = Workplace(Path(name)).make()[tree["target"]]
        place = Path(name) / "work"
        place.mkdir()
        try:
            with bounded_memory():
                is_accepted = examine(target, Change.of_tree(tree), place)
        except Finding as found:
            print(found)
            return 1
    print(f"no finding: {'accepted' if is_accepted else 'refused'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
