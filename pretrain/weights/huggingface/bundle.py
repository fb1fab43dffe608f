"""One Python file out of all the definitions that a module needs from our own packages.

An export must run without this project and compute what it computes. So it gets the project's own
source, copied definition by definition: there is no second implementation to keep equal.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path

from foundation.files import read_text

ROOT = Path(__file__).parents[3]  # the folder of our packages
OWN = ("foundation", "data_pipeline", "pretrain")
# Methods of the facts of layers that only planning and training call.
LEFT_OUT = ("flops", "kept", "kept_bytes", "paths", "environment", "memory_text")
Key = tuple[str, str]  # a module, and a name that it defines
Import = tuple[str, str]  # ("import", "numpy as np"), or ("from torch import", "nn")


@dataclass(frozen=True)
class Definition:
    """A function, class or value at the top of a module."""

    line: int
    source: str  # with decorators and the comment above
    uses: frozenset[str]  # all names that its source has


@dataclass(frozen=True)
class Module:
    """A module of our packages, as read from its source."""

    docstring: str
    definitions: dict[str, Definition]
    imports: dict[str, Import]  # of other packages, by the name bound here
    own: dict[str, Key]  # the names that come from our packages


def bundle(
    root: str,
    heading: str,
    replaced: Mapping[str, str],
    home: Mapping[Key, str],
    more: Sequence[Key] = (),
) -> tuple[str, list[Key]]:
    """Return one file of our definitions that module `root` and `more` need, and their keys.

    `replaced`: name -> the module whose definition replaces all others of that name. `home`:
    definition -> the file of the same export to import it from.
    """
    needed: dict[Key, None] = {}
    waiting = [*((root, name) for name in module(root).definitions), *more]
    while waiting:
        key = waiting.pop()
        if key not in needed:
            needed[key] = None
            if key not in home:
                waiting += _used(key, replaced).values()
    own = [key for key in needed if key not in home]
    names = [_name_of(key) for key in own]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    own.sort(key=lambda key: (_depth(key[0]), key[0], _definition(key).line))
    used_imports = {(f"from .{home[key]} import", _name_of(key)) for key in needed if key in home}
    for key in own:
        imports = module(key[0]).imports
        used_imports |= {imports[name] for name in _definition(key).uses & imports.keys()}
    statements: dict[str, list[str]] = {}
    for how, name in sorted(used_imports):
        statements.setdefault(how, []).append(name)
    parts = [
        f'{heading}\n\n"""{module(root).docstring}\n"""\n',
        "from __future__ import annotations\n",
        "\n".join(f"{how} {', '.join(names)}" for how, names in statements.items()),
    ]
    for key, before in zip(own, [("", ""), *own], strict=False):
        mark = "" if key[0] == before[0] else f"# {key[0]}\n\n\n"
        parts.append(f"\n\n{mark}{_renamed(key, replaced)}")
    return "\n".join(parts) + "\n", own


def _definition(key: Key) -> Definition:
    return module(key[0]).definitions[key[1]]


def _used(key: Key, replaced: Mapping[str, str]) -> dict[str, Key]:
    """Return our definitions that a definition uses, by their names in its source."""
    parsed, used = module(key[0]), {}
    for name in sorted(_definition(key).uses):
        if target := (key[0], name) if name in parsed.definitions else parsed.own.get(name):
            used[name] = (replaced.get(target[1], target[0]), target[1])
    return used


def _name_of(key: Key) -> str:
    """Return a definition's name in the file: of a layer's function, with its kind in front.

    Several kinds of layers may have functions of one name.
    """
    parts, name = key[0].split("."), key[1]
    is_of_a_kind = parts[0] not in OWN or parts[1] == "mixers"
    is_class = name[0].isupper() and not name.isupper()
    return f"{parts[-2]}_{name}" if is_of_a_kind and not is_class else name


def _renamed(key: Key, replaced: Mapping[str, str]) -> str:
    """Return a definition's source with the names that definitions have in the file."""
    source = _definition(key).source
    for name, used in {**_used(key, replaced), key[1]: key}.items():
        if name != _name_of(used):
            source = re.sub(rf"(?<![\w.]){re.escape(name)}\b", _name_of(used), source)
    return source


@cache
def _depth(name: str) -> int:
    """Return the length of a module's longest chain of imports; less for modules that it uses."""
    return 1 + max((_depth(used) for used, _ in module(name).own.values()), default=0)


@cache
def module(name: str) -> Module:
    """Read a module, such as `pretrain.model.memory`, or one of a package with kinds of layers."""
    own = {*OWN, name.split(".")[0]}
    spec = None if name.startswith(OWN) else find_spec(name)
    path = spec.origin if spec and spec.origin else ROOT / (name.replace(".", "/") + ".py")
    text = read_text(Path(path))
    tree, lines = ast.parse(text), text.splitlines()
    read = Module(ast.get_docstring(tree) or "", {}, {}, {})
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                read.imports[bound] = ("import", ast.unparse(alias))
        elif isinstance(node, ast.ImportFrom):
            used = "." * node.level + (node.module or "")
            used = resolve_name(used, name.rpartition(".")[0]) if node.level else used
            for alias in node.names:
                if used.split(".")[0] in own:
                    assert not alias.asname, f"{name} renames {alias.name}"
                    read.own[alias.name] = (used, alias.name)
                else:
                    how = f"from {used} import"
                    read.imports[alias.asname or alias.name] = (how, ast.unparse(alias))
        else:
            first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))]) - 1
            while first and lines[first - 1].startswith("#"):
                first -= 1
            end = node.end_lineno or node.lineno
            left_out = _left_out(node)
            uses = frozenset(_names_in(node))
            source = "\n".join(lines[n] for n in range(first, end) if n not in left_out)
            targets = getattr(node, "targets", [getattr(node, "target", ast.Pass())])
            defined = [name for target in targets for name in _names_in(target)]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined = [node.name]
            elif isinstance(node, ast.Try):  # an import that may fail
                imports = [line for line in node.body if isinstance(line, ast.Import)]
                defined = [alias.name for line in imports for alias in line.names]
            for defined_name in defined:
                read.definitions[defined_name] = Definition(node.lineno, source, uses)
    return read


def _left_out(node: ast.AST) -> set[int]:
    """Remove LEFT_OUT methods from a class of facts; return their lines, counted from 0."""
    numbers: set[int] = set()
    if isinstance(node, ast.ClassDef) and re.search(r"^Mixer$|Facts$", node.name):
        for part in [part for part in node.body if getattr(part, "name", "") in LEFT_OUT]:
            node.body.remove(part)
            numbers |= {*range(part.lineno - 2, part.end_lineno or 0)}  # and the line before
    return numbers


def _names_in(node: ast.AST) -> list[str]:
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
