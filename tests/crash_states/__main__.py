"""Start from what a power failure can leave of a run and of builds; status 1 if that is wrong."""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.crash_states.recorder import Recorder
from tests.crash_states.states import MODELS, History, Tree
from tests.crash_states.subjects import Build, Run, Subject, no_sync, put, silenced

# name -> how to make it, and its part of the states
SUBJECTS: dict[str, tuple[Callable[[Path, Path], Subject], float]] = {
    "run": (Run, 0.7),
    "build": (Build, 0.1),
    "build --processes 2": (lambda root, beside: Build(root, beside, processes=2), 0.1),
    "build that shuffles": (
        lambda root, beside: Build(root, beside, processes=2, shuffles=True),
        0.1,
    ),
}
MOST_SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_states", description=__doc__)
    parser.add_argument("--states", type=int, default=3000, help="how many in all (%(default)s)")
    parser.add_argument("--all", action="store_true", help="every state: an hour or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SUBJECTS)
    arguments = parser.parse_args()
    silenced()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="crash-states-", dir=memory if os.access(memory, os.W_OK) else None
    ) as home:
        wrong = 0
        for number, (name, (make, share)) in enumerate(SUBJECTS.items()):
            if arguments.only in (None, name):
                limit = 0 if arguments.all else round(arguments.states * share / len(MODELS))
                where = Path(home) / str(number)
                subject = make(where / "root", where / "beside")
                wrong += check(name, subject, limit, arguments.seed)
    return 1 if wrong else 0


def check(name: str, subject: Subject, limit: int, seed: int) -> int:
    """Record the subject and start from its states; how many were wrong."""
    put({}, subject.root)
    recorder = Recorder(subject.root)
    subject.record(recorder)
    history = History(recorder.recording)
    assert history.final() == _on_disk(subject.root), "the replay ends in other bytes"
    began, counts, wrong = time.process_time(), Counter[str](), Counter[str]()
    with mock.patch.object(os, "fsync", no_sync):
        for model, tree, ends in history.states(limit, seed):
            counts[model] += 1
            for end in sorted(ends):  # more is told later, but a rewind takes some back
                put(tree, subject.root)
                try:
                    problem = next(iter(subject.problems(tree, history.told(end))), "")
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    wrong[model] += 1
                    if wrong.total() <= MOST_SHOWN:
                        print(f"{name}, model {model}, after operation {end}: {problem}")
                    break
    seconds = time.process_time() - began
    shown = ", ".join(f"{model} {counts[model]} ({wrong[model]} wrong)" for model in MODELS)
    num_operations = len(recorder.recording.operations)
    print(
        f"{name}: {num_operations} operations; states {shown}; {seconds:.0f} s of CPU", flush=True
    )
    return wrong.total()


def _on_disk(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


if __name__ == "__main__":
    sys.exit(main())
