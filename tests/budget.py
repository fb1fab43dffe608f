"""`python -m tests.budget` fails where the project outgrows tests/budget.json, which only falls."""

import functools
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from docs.settings_page import page

PACKAGES = ("foundation", "data_pipeline", "pretrain", "launcher")
ROOT = Path(__file__).parents[1]
LIMITS: dict[str, int] = json.loads((ROOT / "tests" / "budget.json").read_text())
KINDS = ("assigned late", "homonym", "long docstring", "phrase", "vague local")
GENERATED = ("settings.md", "commands.md")
# A folder for each kind of layer, and their tests, which count for themselves: a new kind needs no
# lines of others.
KINDS_FOLDER, KINDS_TESTS = (Path(name) / "mixers" for name in ("pretrain", "tests/unit/pretrain"))


def main() -> int:
    """Print what was found and expected; 1 if anything has grown."""
    for name, count in found().items():
        print(f"{name}: found {count:,}, expected at most {LIMITS[name]:,}")
    return int(any(count > LIMITS[name] for name, count in found().items()))


@functools.cache
def found() -> dict[str, int]:
    from tests.house_words import places  # it takes the packages from here

    words = Counter(kind for _, kind, _ in places(list(PACKAGES)))
    layers = [
        [*folder.rglob("*.py")] for folder in (ROOT / KINDS_FOLDER).iterdir() if folder.is_dir()
    ]
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    layer_tests = {*(ROOT / KINDS_TESTS).rglob("*.py")}
    tests = {*(ROOT / "tests").rglob("*.py")} - layer_tests
    pages = [each for each in (ROOT / "docs").glob("*.md") if each.name not in GENERATED]
    return {
        "lines": lines_of(files - {path for layer in layers for path in layer}),
        "lines of the largest kind of layer": max(map(lines_of, layers)),
        "settings": sum(line.startswith("| `") for line in page().splitlines()),
        "commands": sum(commands(f"{package}.cli") for package in PACKAGES[1:]),
        "words": sum(len(path.read_text().split()) for path in [ROOT / "README.md", *pages]),
        "lines of tests": lines_of(tests),
        "lines of the largest test of layers": max(lines_of([path]) for path in layer_tests),
        **{kind: words[kind] for kind in KINDS},
    }


def lines_of(files: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in files)


def commands(module: str) -> int:
    """Count a command's actions; one if it has none."""
    program = getattr(importlib.import_module(module), "PROGRAM", None)
    targets = [target for target, _ in program.commands.values()] if program else []
    return sum(1 if ":" in target else commands(target) for target in targets) or 1


if __name__ == "__main__":
    sys.exit(main())
