"""`python -m tests.budget` fails where packages outgrow tests/budget.json, which only falls."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from docs.settings_page import page

PACKAGES = ("foundation", "data_pipeline", "pretrain", "launcher")
ROOT = Path(__file__).parents[1]
LIMITS: dict[str, int] = json.loads((ROOT / "tests" / "budget.json").read_text())


def main() -> int:
    """Print what was found and expected; 1 if anything has grown."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {
        "lines": sum(path.read_bytes().count(b"\n") for path in files),
        "files": len(files),
        "settings": sum(line.startswith("| `") for line in page().splitlines()),
        "commands": sum(commands(f"{package}.cli") for package in PACKAGES[1:]),
    }
    for name, count in found.items():
        print(f"{name}: found {count:,}, expected at most {LIMITS[name]:,}")
    return int(any(count > LIMITS[name] for name, count in found.items()))


def commands(module: str) -> int:
    """Count a command's actions; one if it has none."""
    program = getattr(importlib.import_module(module), "PROGRAM", None)
    targets = [target for target, _ in program.commands.values()] if program else []
    return sum(1 if ":" in target else commands(target) for target in targets) or 1


if __name__ == "__main__":
    sys.exit(main())
