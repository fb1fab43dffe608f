"""`python -m tests.house_words [FOLDER...]`: how plainly the packages are written, counted.

Prints each place of the named folders (all packages if none is named), then the sums: what is
assigned in the middle of a module, names that two modules define, long docstrings of modules,
phrases that a reader has to read twice, and locals that do not say what they hold.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.budget import PACKAGES, ROOT

MOST_PARAGRAPHS = 4  # of a module's docstring: more have more than one subject
# Every module of a command has these; the modules of shard formats, and those that an export takes
# along, define what others define, under the same names on purpose.
SHARED_NAMES = frozenset({"main", "run", "add_arguments"})
TWINS = re.compile(
    r"data_pipeline/shards/|pretrain/weights/huggingface/\w+_xl_pretrain.py"
    r"|pretrain/mixers/\w+/exported.py"
)
PHRASES = (
    r"\bth(?:ose|at) of\b",
    r"\b(?:is|are) none\b",
    r"\b(?:with|by|to|from|in|of) which\b",
    r"\b(?:stood|stands?|standing) still\b|\bstandstill",
    r"\bpatience\b|\boutages?\b|\boutlasts?\b",
    r"\bthe one before\b",
    r"\b(?:no|some|any)body\b|\bwhoever\b",
    r"\bleft out\b",
    r"\b(?:as|so) many\b",
    r"\bin place of\b",
    r"\bobey(?:s|ed)?\b|\bstrangers?\b|\blast words\b|\bhunger|\bhungry\b",
)
VAGUE_LOCALS = frozenset({"found", "each", "what"})


def modules(folders: list[str]) -> Iterator[tuple[Path, str, ast.Module]]:
    """Yield path, text and tree of the modules below the folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            yield path.relative_to(ROOT), text, ast.parse(text)


def assigned_late(tree: ast.Module) -> list[int]:
    """Return the lines of assignments after the first definition that could stand above it.

    Type aliases may stand anywhere, and so may what needs a definition of the module.
    """
    defined: set[str] = set()
    lines = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and defined:
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned = {target.id for target in targets if isinstance(target, ast.Name)}
            if names & defined:
                defined |= assigned  # what needs this needs the definition
            elif not all(re.fullmatch(r"_?[A-Z][a-z]\w*|__\w+__", name) for name in assigned):
                lines.append(node.lineno)
    return lines


def public_names(path: Path, tree: ast.Module) -> set[str]:
    """Return the public functions and classes that a module defines."""
    if TWINS.match(path.as_posix()):
        return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in tree.body if isinstance(node, kinds)}
    return {name for name in names - SHARED_NAMES if not name.startswith("_")}


def paragraphs(tree: ast.Module) -> int:
    """Return how many paragraphs a module's docstring has, drawings and lists counted as text."""
    return len(re.split(r"\n\s*\n", ast.get_docstring(tree) or ""))


def phrase_lines(text: str) -> list[tuple[int, str]]:
    """Return line number and phrase of all that PHRASES match."""
    matches = re.finditer("|".join(PHRASES), text.replace("None", "NULL").lower())
    return [(text.count("\n", 0, match.start()) + 1, match.group()) for match in matches]


def vague_locals(tree: ast.Module) -> list[tuple[int, str]]:
    """Return line and name where a local is given a name that says nothing of what it holds."""
    return [
        (node.lineno, node.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if node.id in VAGUE_LOCALS
    ]


def places(folders: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield where, of which kind and what, for all that is counted in the folders."""
    definers: dict[str, list[Path]] = defaultdict(list)
    for path, _, tree in modules(list(PACKAGES)):
        for name in public_names(path, tree):
            definers[name].append(path)
    for path, text, tree in modules(folders):
        for line in assigned_late(tree):
            yield f"{path}:{line}", "assigned late", text.splitlines()[line - 1].split("=")[0]
        if (count := paragraphs(tree)) > MOST_PARAGRAPHS:
            yield str(path), "long docstring", f"{count} paragraphs"
        for line, phrase in phrase_lines(text):
            yield f"{path}:{line}", "phrase", " ".join(phrase.split())
        for line, name in vague_locals(tree):
            yield f"{path}:{line}", "vague local", name
        for name in sorted(public_names(path, tree)):
            if len(definers[name]) > 1 and path == definers[name][0]:
                others = ", ".join(map(str, definers[name][1:]))
                yield str(path), "homonym", f"{name}, also in {others}"


def main() -> None:
    """Print the places in the folders that the command line names, and the sums."""
    listed = list(places(sys.argv[1:] or list(PACKAGES)))
    for where, kind, detail in listed:
        print(f"{where}: {kind}: {detail}")
    for kind, count in sorted(Counter(kind for _, kind, _ in listed).items()):
        print(f"{kind}: {count}")


if __name__ == "__main__":
    main()
