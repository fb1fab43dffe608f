"""Typed values as JSON and back. Reading builds what the type says, or nothing.

For lines of files and messages between processes, which others may have written: unlike unpickling,
reading them runs no code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

MOST = (1 << 63) - 1


def to_json(value: Any) -> Any:
    """Return the value as dicts, lists and scalars, which `from_json` reads back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(name): to_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def from_json(kind: Any, value: Any) -> Any:
    """Return what JSON made of a value of the type `kind`, as such a value.

    TypeError or ValueError if it is none. `kind` may be a dataclass, an Enum, a scalar, a list, a
    tuple, a dict, Any, or `X | Y` of them.
    """
    if kind is Any:
        return value
    if isinstance(kind, UnionType):
        return _one_of(get_args(kind), value)
    outer, inner = get_origin(kind), get_args(kind)
    if outer is tuple and inner == (int, ...) and _are_integers(value):
        return tuple(value)
    if outer is tuple and isinstance(value, list):
        kinds = [inner[0]] * len(value) if inner[-1] is ... else inner
        return tuple(from_json(*each) for each in zip(kinds, value, strict=True))
    if outer is list and isinstance(value, list):
        return [from_json(inner[0], each) for each in value]
    if outer is dict and isinstance(value, dict):
        return {name: from_json(inner[1], each) for name, each in value.items()}
    if outer is None and issubclass(kind, Enum):
        return kind(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return built(kind, value)
    if type(value) is int and not -MOST <= value <= MOST:
        raise ValueError("found an integer of more than 64 bits")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not (outer or kind):
        raise TypeError(f"found {value!r}, expected {kind}")
    return value


def built(kind: type[Any], tree: Mapping[str, Any]) -> Any:
    """Return a dataclass from its fields; TypeError or ValueError if they are not that."""
    hints = _hints(kind)
    if not isinstance(tree, Mapping) or not tree.keys() <= hints.keys():
        raise TypeError(f"found {tree!r}, expected {kind.__name__}")
    return kind(**{name: from_json(hints[name], value) for name, value in tree.items()})


def _are_integers(value: Any) -> bool:
    """Whether it is a list of what JSON calls integers of 64 bits: asked once of thousands, such as
    the exit statuses of ranks."""
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        return False
    return not value or (min(value) >= -MOST and max(value) <= MOST)


def _one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None and NoneType in kinds:
        return None
    *others, last = [kind for kind in kinds if kind is not NoneType]
    for kind in others:
        try:
            return from_json(kind, value)
        except (ValueError, TypeError):
            continue
    return from_json(last, value)


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)
