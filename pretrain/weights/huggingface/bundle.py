"""One Python file out of all the definitions that a module needs from our own packages.

An export must run without this project and compute what it computes. So it gets the project's own
source, copied definition by definition: there is no second implementation to keep equal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]  # the folder of our packages
OWN = ("data_pipeline", "pretrain")

Key = tuple[str, str]  # a module, and a name that it defines
Import = tuple[str, str]  # ("import", "numpy as np"), or ("from torch import", "nn")


@dataclass(frozen=True)
class Definition:
    """A function, class or value at the top of a module."""

    line: int
    source: str  # with decorators and the comment above
    uses: frozenset[str]  # names


@dataclass(frozen=True)
class Module:
    docstring: str
    definitions: dict[str, Definition]
    imports: dict[str, Import]  # of other packages, by the name bound here
    own: dict[str, Key]  # the names that come from our packages


@dataclass(frozen=True)
class Bundle:
    text: str
    keys: frozenset[Key]  # what it has


def bundle(
    root: str,
    heading: str,
    replaced: Mapping[str, str],
    beside: Mapping[str, Bundle] | None = None,
) -> Bundle:
    """Return module `root` with everything that it needs of ours, which it no longer imports.

    `replaced` has names that another module defines for all -> that module. `beside` has the other
    bundles of the directory by module name; what they define is imported from them.
    """
    home = {key: name for name, other in (beside or {}).items() for key in other.keys}
    needed = _needed([(root, name) for name in module(root).definitions], replaced, home)
    own = [key for key in needed if key not in home]
    names = [name for _, name in own]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    own.sort(key=lambda key: (_depth(key[0]), key[0], _definition(key).line))
    used = {bound for key in own for bound in _imports_of(key)}
    used |= {(f"from .{home[key]} import", key[1]) for key in needed if key in home}
    parts = [
        f'{heading}\n\n"""{module(root).docstring}\n"""\n',
        "from __future__ import annotations\n",
        "\n".join(_statements(used)),
    ]
    for key, before in zip(own, [("", ""), *own], strict=False):
        mark = "" if key[0] == before[0] else f"# {key[0]}\n\n\n"
        parts.append(f"\n\n{mark}{_definition(key).source}")
    return Bundle("\n".join(parts) + "\n", frozenset(own))


def _needed(start: list[Key], replaced: Mapping[str, str], home: Mapping[Key, str]) -> list[Key]:
    """Return `start` and all definitions that they use, directly or not."""
    found: dict[Key, None] = {}
    while start:
        key = start.pop()
        if key in found:
            continue
        found[key] = None
        if key not in home:
            used = [_resolved(key[0], name) for name in sorted(_definition(key).uses)]
            start += [(replaced.get(each[1], each[0]), each[1]) for each in used if each]
    return list(found)


def _imports_of(key: Key) -> Iterator[Import]:
    imports = module(key[0]).imports
    return (imports[name] for name in _definition(key).uses & imports.keys())


def _statements(imports: set[Import]) -> Iterator[str]:
    """Yield import statements, one per module."""
    for how in sorted({how for how, _ in imports}):
        names = sorted(name for each, name in imports if each == how)
        if how == "import":
            yield from (f"import {name}" for name in names)
        else:
            yield (
                f"{how} {names[0]}"
                if len(names) == 1
                else f"{how} (\n    " + ",\n    ".join(names) + ",\n)"
            )


def _resolved(of_module: str, name: str) -> Key | None:
    """Return where the module's `name` is defined, if that is in our packages."""
    if name in module(of_module).definitions:
        return of_module, name
    return module(of_module).own.get(name)


def _definition(key: Key) -> Definition:
    return module(key[0]).definitions[key[1]]


@cache
def _depth(name: str) -> int:
    """Return the length of the longest chain of imports below a module: what it uses is lower."""
    return 1 + max((_depth(used) for used, _ in module(name).own.values()), default=0)


@cache
def module(name: str) -> Module:
    """Read a module of ours, `pretrain.model.memory` for example."""
    text = (ROOT / (name.replace(".", "/") + ".py")).read_text()
    tree = ast.parse(text)
    read = Module(ast.get_docstring(tree) or "", {}, {}, {})
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                read.imports[bound] = ("import", ast.unparse(alias))
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            for alias in node.names:
                if node.module.split(".")[0] in OWN:
                    assert not alias.asname, f"{name} renames {alias.name}"
                    read.own[alias.name] = (node.module, alias.name)
                else:
                    how = f"from {node.module} import"
                    read.imports[alias.asname or alias.name] = (how, ast.unparse(alias))
        else:
            for defined in _names_of(node):
                read.definitions[defined] = _definition_of(node, text.splitlines())
    return read


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Try):  # an import that may fail
        return [
            alias.name for each in node.body if isinstance(each, ast.Import) for alias in each.names
        ]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [
        each.id
        for target in targets
        if target
        for each in ast.walk(target)
        if isinstance(each, ast.Name)
    ]


def _definition_of(node: ast.stmt, lines: list[str]) -> Definition:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
    while first and lines[first - 1].startswith("#"):
        first -= 1
    uses = frozenset(each.id for each in ast.walk(node) if isinstance(each, ast.Name))
    return Definition(node.lineno, "\n".join(lines[first : node.end_lineno]), uses)
