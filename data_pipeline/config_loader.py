"""YAML files in, frozen dataclasses out; the only module that knows pydantic.

A file may say `extends: other.yaml` (or a list; paths are relative to the file), later sources win key by key, and
`a.b=value` overrides win over all files. Every mistake is reported, not only the first. pydantic is imported when
settings are checked, so that commands which read none start at once.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from data_pipeline import location
from data_pipeline.errors import ConfigError
from data_pipeline.yaml_files import Tree, did_you_mean, merge, parse_override, read_tree, shown

T = TypeVar("T")
_WRONG = object()  # stands in for a value that could not be read; the reason is among the problems


def load_config(schema: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """The settings of `path` and all it extends, with `a.b=value` overrides on top, as a `schema` instance.

    Raises ConfigError, which lists everything that is wrong.
    """
    tree = read_tree(Path(path))
    for override in overrides:
        merge(tree, parse_override(override))
    return parse_config(schema, tree, source=str(path))


def parse_config(schema: type[T], tree: Mapping[str, Any], source: str) -> T:
    """`tree` as a `schema` instance; ConfigError names `source` and lists every unusable setting."""
    problems: list[str] = []
    value = _build(schema, tree, (), problems)
    if problems:
        raise ConfigError(_report(source, problems))
    return value


def to_tree(config: Any) -> Any:
    """`config` as plain dicts, lists and scalars, ready for YAML or JSON; paths and URLs become text."""
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_tree(getattr(config, field.name)) for field in fields(config)}
    if isinstance(config, Mapping):
        return {str(key): to_tree(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_tree(value) for value in config]
    return location.shown(config) if isinstance(config, Path) else config


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted names whose values differ between two trees -> (before, after); a side without the name shows None."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = (old, new)
    return found


def _build(schema: Any, tree: Any, where: tuple[str, ...], problems: list[str]) -> Any:
    """A `schema` instance, or _WRONG with the reasons added to `problems`."""
    tree = {} if tree is None else tree  # `model:` with nothing under it
    if not isinstance(tree, Mapping):
        problems.append(
            f"{'.'.join(where) or 'settings'}: found {shown(tree)}, expected a section with names under it"
        )
        return _WRONG
    hints = get_type_hints(schema)
    known = [field for field in fields(schema) if field.init]
    names = [field.name for field in known]
    for key in tree:
        if key not in names:
            problems.append(
                f"{_dotted(where, key)}: unknown setting{_did_you_mean_setting(schema, where, str(key))}"
            )
    values: Tree = {}
    for field in known:
        if field.name in tree:
            values[field.name] = _value_of(
                hints[field.name], tree[field.name], (*where, field.name), problems
            )
        elif field.default is MISSING and field.default_factory is MISSING:
            problems.append(f"{_dotted(where, field.name)}: missing; it has no default")
            values[field.name] = _WRONG
    if any(value is _WRONG for value in values.values()):
        return _WRONG
    try:
        return schema(**values)
    except ConfigError as error:
        problems.append(str(error))
        return _WRONG


def _value_of(hint: Any, value: Any, where: tuple[str, ...], problems: list[str]) -> Any:
    if is_dataclass(hint):
        return _build(hint, value, where, problems)
    section = _section_of_list(hint)
    if section is not None and isinstance(value, list):
        built = [
            _build(section, each, (*where, str(number)), problems)
            for number, each in enumerate(value)
        ]
        return _WRONG if any(each is _WRONG for each in built) else tuple(built)
    from pydantic import ValidationError

    if isinstance(value, bool) and hint in (int, float):  # pydantic would take yes for 1
        problems.append(f"{_dotted(where)}: found {shown(value)}, expected a number")
        return _WRONG
    try:
        return _adapter(hint).validate_python(value)
    except ConfigError as error:
        problems.append(str(error))
    except ValidationError as error:
        for item in error.errors():
            wish = item["msg"].replace("Input should be", "expected", 1)
            problems.append(
                f"{_dotted((*where, *item['loc']))}: found {shown(item['input'])}, {wish}"
            )
    return _WRONG


def _section_of_list(hint: Any) -> Any:
    """The schema of each of the sections that a setting lists, or None where it lists none."""
    items = get_args(hint) if get_origin(hint) is tuple else ()
    return items[0] if len(items) == 2 and items[1] is Ellipsis and is_dataclass(items[0]) else None


@functools.cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True))


def _report(source: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return "\n".join(
        [f"{source}: {len(problems)} problems", *(f"  {problem}" for problem in problems)]
    )


def _did_you_mean_setting(schema: Any, where: tuple[str, ...], name: str) -> str:
    """A close name in this section or, `steps` for `optim.steps`, in one of the sections under it."""
    own = [field.name for field in fields(schema)]
    below = {} if difflib.get_close_matches(name, own) else _list_objects(schema, where)
    close = difflib.get_close_matches(name, below, n=1)
    return f"; did you mean {below[close[0]]!r}?" if close else did_you_mean(name, own)


def _list_objects(schema: Any, where: tuple[str, ...]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name, hint in get_type_hints(schema).items():
        if is_dataclass(hint):
            deeper = {field.name: _dotted(where, name, field.name) for field in fields(hint)}
            names = deeper | _list_objects(hint, (*where, name)) | names
    return names


def _dotted(where: Sequence[Any], *names: Any) -> str:
    return ".".join(map(str, (*where, *names)))
