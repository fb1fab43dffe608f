"""Settings: YAML files and overrides to frozen dataclasses. The only module that imports pydantic.

A file may contain `extends: other.yaml` (or a list; paths are relative to the file). Later sources
win key by key, and `a.b=value` overrides win over all files. Mistakes are reported together, up to
MOST_PROBLEMS. pydantic is imported late because commands that read no settings should start fast.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from data_pipeline.credentials import problem_of
from data_pipeline.errors import ConfigError
from data_pipeline.file_kinds import names_of, refuse_other_kind
from data_pipeline.files import path_text
from data_pipeline.setting_fields import UNIT
from data_pipeline.setting_tree import member_of, section_hint, section_of_list, suggestion
from data_pipeline.sizes import parse_size, size_problem
from data_pipeline.yaml_files import Tree, abbreviated, merge, parse_override, read_tree

T = TypeVar("T")
COMMAND_LINE = "command line"
MOST_PROBLEMS = 20  # in one message
_LONGEST_NAME = 60  # characters of an unknown setting's name in a message
_UNPARSED = ", unable to parse string as an integer"  # pydantic's words
_EXPECTED = {  # instead of pydantic's words
    "path_type": "expected a path",
    "tuple_type": "expected a list",
    "dict_type": "expected a section with names in it",
    "missing": "expected one more value",  # of a list with a fixed number
}
_PERCENT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)%")
_WRONG = object()  # in place of an invalid value, whose reason is among the problems


def load_config(
    schema: type[T],
    path: Path,
    overrides: Sequence[str] = (),
    overridden_by: str = COMMAND_LINE,
) -> T:
    """Return `path`, what it extends, and `a.b=value` overrides as a `schema` instance.

    ConfigError lists the invalid settings: those of the file, and those that `overridden_by` made.
    """
    tree = read_tree(Path(path))
    refuse_other_kind(tree, Path(path), names_of(schema))
    for override in overrides:
        merge(tree, parse_override(override))
    value, problems = _checked(schema, tree)
    if not problems:
        return value
    _, of_file = _checked(schema, read_tree(Path(path))) if overrides else (None, problems)
    made = [problem for problem in problems if problem not in of_file]
    kept = [problem for problem in problems if problem in of_file]
    raise _error_of((str(path), kept), (f"{overridden_by} (over {path})", made))


def parse_config(schema: type[T], tree: Mapping[str, Any], source: str) -> T:
    """Return `tree` as a `schema` instance; ConfigError lists the invalid settings of `source`."""
    value, problems = _checked(schema, tree)
    if problems:
        raise _error_of((source, problems))
    return value


def _checked(schema: Any, tree: Mapping[str, Any]) -> tuple[Any, Sequence[str]]:
    """The instance, meaningless if there are problems, and what is wrong with the settings."""
    problems = _Problems()
    value: Any = None
    with contextlib.suppress(_TooManyError):
        value = _build(schema, tree, (), problems, schema)
    return value, problems


def _error_of(*found: tuple[str, Sequence[str]]) -> ConfigError:
    """The error that lists the problems of each source that has some."""
    return ConfigError("\n".join(_report(source, each) for source, each in found if each))


class _TooManyError(Exception):
    """A message has room for no more problems."""


class _Problems(list[str]):
    """What is wrong with settings. Adding the last that is reported raises _TooManyError."""

    def append(self, problem: str) -> None:
        super().append(problem)
        if len(self) == MOST_PROBLEMS:
            raise _TooManyError


def to_tree(config: Any) -> Any:
    """Return `config` as dicts, lists and scalars for YAML or JSON; paths and URLs become text."""
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_tree(getattr(config, field.name)) for field in fields(config)}
    if isinstance(config, Mapping):
        return {str(key): to_tree(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_tree(value) for value in config]
    return path_text(config) if isinstance(config, Path) else config


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return dotted names whose values differ -> (before, after); None if a side lacks the name."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = (old, new)
    return found


def _build(schema: Any, tree: Any, where: tuple[str, ...], problems: _Problems, root: Any) -> Any:
    """Return a `schema` instance, or _WRONG with the reasons added to `problems`."""
    tree = {} if tree is None else tree  # `model:` with nothing under it
    if not isinstance(tree, Mapping):
        name, found = ".".join(where) or "settings", abbreviated(tree)
        hint = section_hint(schema, where, tree)
        problems.append(f"{name}: found {found}, expected a section with names in it{hint}")
        return _WRONG
    hints = get_type_hints(schema)
    known = [field for field in fields(schema) if field.init]
    names = [field.name for field in known]
    for key, value in tree.items():
        if key not in names:
            hint = suggestion(schema, root, where, str(key), value)
            problems.append(f"{_dotted(where, key)}: unknown setting{hint}")
    values: Tree = {}
    for field in known:
        unit = field.metadata.get(UNIT, "")
        if field.name in tree and (problem := size_problem(tree[field.name], unit)):
            problems.append(f"{_dotted(where, field.name)}: {problem}")
            values[field.name] = _WRONG
        elif field.name in tree:
            values[field.name] = _value_of(
                hints[field.name],
                _with_sizes(tree[field.name], unit),
                (*where, field.name),
                problems,
                root,
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


def _value_of(hint: Any, value: Any, where: tuple[str, ...], problems: _Problems, root: Any) -> Any:
    if is_dataclass(hint):
        return _build(hint, value, where, problems, root)
    section = section_of_list(hint)
    if section is not None and isinstance(value, list):
        built = [
            _build(section, each, (*where, str(number)), problems, root)
            for number, each in enumerate(value)
        ]
        return _WRONG if any(each is _WRONG for each in built) else tuple(built)
    from pydantic import ValidationError

    hint = member_of(hint, value)
    if problem := next(filter(None, map(problem_of, _texts_in(value))), None):
        problems.append(f"{_dotted(where)}: {problem}")
        return _WRONG
    if isinstance(value, bool) and hint in (int, float):  # pydantic would accept yes as 1
        problems.append(f"{_dotted(where)}: found {abbreviated(value)}, expected a number")
        return _WRONG
    try:
        return _adapter(hint).validate_python(value)
    except ConfigError as error:
        problems.append(str(error))
    except ValidationError as error:
        for item in error.errors():
            name, found = _dotted((*where, *item["loc"])), abbreviated(item["input"])
            expected = item["msg"].replace("Input should be", "expected", 1)
            expected = expected.replace(_UNPARSED, ", such as 1000, without commas")
            expected = _EXPECTED.get(item["type"], expected)
            if item["type"] == "tuple_type" and item["input"] is not None:
                expected = f"expected a list, such as {_as_list(item['input'])}"
            elif item["type"] == "float_parsing" and (
                part := _PERCENT.fullmatch(str(item["input"]))
            ):
                expected = f"expected a fraction, such as {float(part[1]) / 100:g}"
            found = "no value" if item["input"] is None else found
            problems.append(f"{name}: found {found}, {expected}")
    return _WRONG


def _as_list(value: Any) -> str:
    """Return how to write a list that was written without brackets."""
    if isinstance(value, str) and "," in value and len(value) <= _LONGEST_NAME:
        return f"[{', '.join(each.strip() for each in value.split(','))}]"
    return f"[{abbreviated(value)}]"


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a value of a setting, also names of its keys."""
    if isinstance(value, (str, Path)):
        yield str(value)
    elif isinstance(value, Mapping):
        yield from _texts_in([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts_in(each)


def _with_sizes(value: Any, unit: str) -> Any:
    """Return the value with the number that `10k` stands for, where the setting has a unit."""
    if isinstance(value, list):
        return [_with_sizes(each, unit) for each in value]
    size = parse_size(value, unit) if unit and isinstance(value, str) else None
    return value if size is None else size


@functools.cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True))


def _report(source: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    more = " or more" if len(problems) == MOST_PROBLEMS else ""
    lines = [f"{source}: {len(problems)} problems{more}", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)


def _dotted(where: Sequence[Any], *names: Any) -> str:
    """Return the name of a setting; parts that no setting has may be long, and are cut."""
    parts = map(str, (*where, *names))
    return ".".join(f"{x[:_LONGEST_NAME]}..." if len(x) > _LONGEST_NAME else x for x in parts)
