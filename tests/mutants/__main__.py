"""`python -m tests.mutants` breaks the code in each place of mutants.yaml and runs its tests.

Each change is made in a copy of the project, so that nothing here is touched. The exit status is 1
if the tests of one pass, which then do not hold what they are named for.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.helpers.checkout import ROOT

LIMIT_SECONDS = 1800
NOT_COPIED = (".git", ".venv*", "*_cache", "__pycache__", "build", "runs")
TESTS_FAILED, INTERRUPTED = 1, 2  # pytest's exit statuses; it is interrupted where an import fails


@dataclass(frozen=True)
class Mutant:
    """A change of the code, what it breaks, and the tests that have to fail."""

    breaks: str
    file: str
    was: str
    now: str
    caught_by: list[str]

    def apply(self, root: Path) -> None:
        """Change the file below `root`; ValueError unless the place is there once."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.was)) != 1:
            raise ValueError(f"{self.file}: found {count} times, expected once: {self.was!r}")
        path.write_text(text.replace(self.was, self.now))


def mutants() -> list[Mutant]:
    """Return all of mutants.yaml."""
    return [Mutant(**each) for each in yaml.safe_load((ROOT / "tests/mutants/mutants.yaml").open())]


def is_caught(mutant: Mutant) -> bool:
    """Whether a test of the mutant fails in a copy of the project with the change."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        copy = Path(directory) / "project"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        mutant.apply(copy)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *mutant.caught_by]
        place = {"cwd": copy, "env": {**os.environ, "PYTHONPATH": str(copy)}}
        more = {"timeout": LIMIT_SECONDS, "capture_output": True, "text": True}
        done = subprocess.run(command, **place, **more)
    if done.returncode not in (0, TESTS_FAILED, INTERRUPTED):
        raise RuntimeError(f"{mutant.breaks}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.returncode != 0


def main() -> int:
    """Print each mutant with whether it was caught; 1 if one was not."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, metavar="N", help="take N of them (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", metavar="TEXT", default="", help="whose description has TEXT")
    arguments = parser.parse_args()
    chosen = [each for each in mutants() if arguments.only in each.breaks]
    if arguments.sample:
        chosen = random.Random(arguments.seed).sample(chosen, arguments.sample)
    missed = 0
    for each in chosen:
        caught = is_caught(each)
        missed += not caught
        print(f"{'caught' if caught else 'MISSED'}: {each.breaks} ({each.file})", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
