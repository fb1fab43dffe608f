"""`python -m tests.budget` fails where the project outgrows tests/budget.json, which only falls."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.settings_page import page

PACKAGES = ("foundation", "data_pipeline", "pretrain", "launcher")
ROOT = Path(__file__).parents[1]
LIMITS: dict[str, int] = json.loads((ROOT / "tests" / "budget.json").read_text())
GENERATED = ("settings.md", "commands.md")


def main() -> int:
    """Print what was found and expected; 1 if anything has grown."""
    for name, count in found().items():
        print(f"{name}: found {count:,}, expected at most {LIMITS[name]:,}")
    return int(any(count > LIMITS[name] for name, count in found().items()))


@functools.cache
def found() -> dict[str, int]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    tests = list((ROOT / "tests").rglob("*.py"))
    nodes = [node for path in tests for node in ast.walk(ast.parse(path.read_text()))]
    pages = [each for each in (ROOT / "docs").glob("*.md") if each.name not in GENERATED]
    imported = {name for node in nodes for name in imports(node, modules)}
    return {
        "lines": lines_of(files),
        "files": len(files),
        "settings": sum(line.startswith("| `") for line in page().splitlines()),
        "commands": sum(commands(f"{package}.cli") for package in PACKAGES[1:]),
        "words": sum(len(path.read_text().split()) for path in [ROOT / "README.md", *pages]),
        "lines of tests": lines_of(tests),
        "modules that tests import": len(imported),
        "sentences that tests assert": sum(map(asserts_a_sentence, nodes)),
    }


def lines_of(files: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in files)


def commands(module: str) -> int:
    """Count a command's actions; one if it has none."""
    program = getattr(importlib.import_module(module), "PROGRAM", None)
    targets = [target for target, _ in program.commands.values()] if program else []
    return sum(1 if ":" in target else commands(target) for target in targets) or 1


def imports(node: ast.AST, modules: set[str]) -> Iterator[str]:
    """The packages' modules that a statement imports."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return
    for name in (alias.name for alias in node.names):
        if isinstance(node, ast.ImportFrom):
            within = f"{node.module}.{name}"
            name = within if within in modules else str(node.module)
        if name.split(".")[0] in PACKAGES:
            yield name


def asserts_a_sentence(node: ast.AST) -> bool:
    """Whether it is an assertion or a `match=` with a text of three words or more."""
    is_match = isinstance(node, ast.keyword) and node.arg == "match"
    if not is_match and not isinstance(node, ast.Assert):
        return False
    checked = ast.walk(node.value if is_match else node.test)
    texts = [str(each.value) for each in checked if isinstance(each, ast.Constant)]
    return any(" " in text and len(re.findall("[A-Za-z]{2,}", text)) > 2 for text in texts)


if __name__ == "__main__":
    sys.exit(main())
