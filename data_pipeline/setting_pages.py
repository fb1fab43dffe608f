"""The settings of a schema as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from data_pipeline.errors import ConfigError
from data_pipeline.setting_tree import OTHER_NAMES, Setting, settings_of, suggestion

_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
SHORTEST_PART = 4  # characters of a name that are looked for inside of others
SHORTEST_BEGINNING = 3  # characters of a name that are looked for at the beginning of others
# What a resume may do with a setting, by its name; empty for settings that no run has.
ResumeRule = Callable[[str], str]


def no_resume(name: str) -> str:
    return ""


def matching(schema: Any, prefix: str) -> list[Setting]:
    """Return the settings that begin with `prefix`, or are called so here or in another system.

    If there are none: those that have it as a choice, as a part of their name, or else as the
    beginning of a name here or in another system. ConfigError, with a close name, if there are none
    either.
    """
    known = list(settings_of(schema))
    others: Mapping[str, str] = getattr(schema, OTHER_NAMES, {})
    meant = [each.name for each in known if each.name == prefix]
    meant = meant or [each.name for each in known if each.leaf == prefix]
    meant = meant or [name for name, text in others.items() if prefix in text.split()]
    meant = meant or [x.name for x in known if prefix and prefix in _choices_of(x.hint)]
    meant = meant or [x.name for x in known if len(prefix) >= SHORTEST_PART and prefix in x.leaf]
    if len(prefix) >= SHORTEST_BEGINNING and not meant:
        called = {x.name: (x.leaf, *others.get(x.name, "").split()) for x in known}
        meant = [x for x, names in called.items() if any(y.startswith(prefix) for y in names)]
    if prefix and not meant:
        *sections, name = prefix.split(".")
        owners = [each.section for each in known if each.name == ".".join(sections)]
        hint = suggestion((*owners, schema)[0] or schema, schema, sections, name, "")
        raise ConfigError(f"{prefix}: unknown setting{hint}")
    inside = tuple(f"{name}{mark}" for name in meant for mark in (".", "["))
    return [x for x in known if not prefix or x.name in meant or x.name.startswith(inside)]


def as_text(schema: Any, prefix: str, rule: ResumeRule, width: int) -> Iterator[str]:
    """Yield lines of at most `width` that describe the settings that begin with `prefix`."""
    others: Mapping[str, str] = getattr(schema, OTHER_NAMES, {})
    for setting in matching(schema, prefix):
        head = setting.name if setting.section else f"{setting.name} = {default_of(setting)}"
        facts = [setting.meaning]
        if not setting.section:
            facts.append(f"Value: {kind_of(setting)}{_and(rule(setting.name))}")
        if names := others.get(setting.name):
            facts.append(f"Elsewhere: {', '.join(names.split())}")
        yield head
        for fact in facts:
            yield from textwrap.wrap(fact, width, initial_indent="    ", subsequent_indent="      ")


def kind_of(setting: Setting) -> str:
    """Return type, choices, range and unit of a setting: `integer from 1 to 4,096, layers`."""
    text = _type_of(setting.hint)
    if setting.allowed is not None:
        text += f"{',' if setting.allowed.or_zero else ''} {setting.allowed}"
    return text + _and(setting.unit)


def default_of(setting: Setting) -> str:
    """Return the default as a file would set it; `required` where there is none."""
    return "required" if setting.default is MISSING else value_text(setting.default)


def as_overrides(settings: Mapping[str, Any]) -> str:
    """Return the settings as they would stand on a command line."""
    return " ".join(f"{name}={value_text(value)}" for name, value in settings.items())


def value_text(value: Any) -> str:
    """Return a setting's value as a file would have it: `false`, `null`, `[1, 2]`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(str, value))}]"
    return f"{value}" if value != "" else '""'


def _type_of(hint: Any) -> str:
    items, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        shown = ['""' if each == "" else str(each) for each in items]
        return f"{', '.join(shown[:-1])} or {shown[-1]}"
    if origin is tuple:
        has_plural = items[0] is not bool and get_origin(items[0]) is not Literal
        return f"list of {_type_of(items[0])}{'s' if has_plural else ''}"
    if origin is dict:
        return "mapping"
    if NoneType in items:
        return f"{_type_of(items[0])} or null"
    if origin is UnionType:
        return " or ".join(map(_type_of, items))
    return _TYPES[hint]


def _choices_of(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _and(text: str) -> str:
    return f"; {text}" if text else ""
