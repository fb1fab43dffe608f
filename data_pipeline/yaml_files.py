"""YAML files as plain dicts: `extends`, `a.b=value` overrides, numbers such as 1e-3; the only module that knows PyYAML.

PyYAML is imported when a file is read or written, so that commands which touch none start at once.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError

Tree = dict[str, Any]
# The project's configurations: a link to the top level's configs/, in a wheel the files themselves.
SHIPPED = Path(__file__).parent / "configs"
_FLOAT_TAG = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(
    r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"
)  # PyYAML takes 1e-3 for text, YAML 1.2 does not


def find_config(path: Path) -> Path:
    """Return `path`, or where it is `configs/...` and missing, the shipped file of that name."""
    if path.parts[:1] != ("configs",) or path.exists():
        return path
    shipped = SHIPPED.joinpath(*path.parts[1:])
    return shipped if shipped.exists() else path


def read_tree(path: Path, extended_by: tuple[Path, ...] = ()) -> Tree:
    """`path` merged over everything it extends, as plain dicts; not yet checked against any schema."""
    path = find_config(path)
    resolved = path.resolve()
    if resolved in extended_by:
        chain = " -> ".join(item.name for item in (*extended_by, resolved))
        raise ConfigError(f"{path} extends itself: {chain}; remove one of these 'extends'")
    own = _parse_yaml(_read_text(path, extended_by), path)
    parents = own.pop("extends", None) or []
    parents = [parents] if isinstance(parents, str) else parents
    if not (isinstance(parents, list) and all(isinstance(parent, str) for parent in parents)):
        raise ConfigError(
            f"{path}: extends={parents!r} must be a file name or a list of file names"
        )
    merged: Tree = {}
    for parent in parents:
        merge(merged, read_tree(path.parent / parent, (*extended_by, resolved)))
    merge(merged, own)
    return merged


def _read_text(path: Path, extended_by: tuple[Path, ...]) -> str:
    wanted_by = f", which {extended_by[-1]} extends," if extended_by else ""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        parent = find_config(path.parent)
        names = [item.name for item in parent.glob("*.y*ml")] if parent.is_dir() else []
        raise ConfigError(
            f"{path}{wanted_by} does not exist{did_you_mean(path.name, names)}"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}{wanted_by} is a directory; name a YAML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}{wanted_by} is not UTF-8 text (byte {error.start}); is it a YAML file?"
        ) from None


def _parse_yaml(text: str, path: Path) -> Tree:
    import yaml

    try:
        tree = yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(
            f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}"
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {shown(tree)}; expected settings as 'name: value' lines")
    return tree


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader, which also reads 1e-3 as a number (YAML 1.2) and refuses a key given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping_of(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name!r} is given twice", key.start_mark
                )
            seen.add(name)
        loader.flatten_mapping(node)
        return loader.construct_mapping(node, deep=True)

    Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+0123456789."))
    Loader.add_constructor("tag:yaml.org,2002:map", mapping_of)
    return Loader


def parse_override(override: str) -> Tree:
    """`a.b=value` as the tree {a: {b: value}}; the value is read as YAML."""
    import yaml

    dotted, equals, text = override.partition("=")
    names = dotted.split(".")
    if not equals or not all(names):
        raise ConfigError(
            f"override {override!r} is not of the form section.name=value, such as optim.steps=100"
        )
    try:
        value = yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(
            f"override {override!r}: {text!r} is not a YAML value: {problem}"
        ) from None
    for name in reversed(names):
        value = {name: value}
    return value


def merge(into: Tree, tree: Mapping[str, Any]) -> None:
    """Lay `tree` over `into`, in place: sections key by key, everything else as a whole."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            merge(into[key], value)
        elif not (
            value is None and isinstance(into.get(key), dict)
        ):  # an empty section takes nothing away
            into[key] = value


def dump_yaml(tree: Any) -> str:
    """`tree` as YAML text that reads back to an equal value."""
    import yaml

    return yaml.dump(tree, Dumper=_dumper(), sort_keys=False, width=120)


@functools.cache
def _dumper() -> Any:
    """PyYAML's safe writer, which puts text that `_loader` would take for a number in quotes."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+0123456789."))
    return Dumper


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """The tail of an error message: the closest of `names`, or all of them where none is close."""
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(sorted(names))}" if names else ""


def shown(value: Any) -> str:
    """`value` as it goes into an error message: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
