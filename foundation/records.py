"""Fields of files that others wrote, parsed once into checked types before anything uses them, and
typed values as JSON and back: reading builds what the type says, or nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from foundation.credentials import redacted

LARGEST_INTEGER = 1 << 53  # what every reader of JSON can hold
LONGEST_NAME_BYTES = 255
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Of characters: control, format (such as the order of writing), half ones, line ends.
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
LONGEST_SHOWN = 60  # characters of a wrong value in a message


class InvalidField(Exception):
    """A field is missing or has a wrong value; the message says which."""


class Fields:
    """The fields of a JSON object. Every method raises InvalidField unless the field is right."""

    def __init__(self, tree: object, what: str = "") -> None:
        if not isinstance(tree, Mapping):
            raise InvalidField(f"{what or 'the file'} is {shown(tree)}, expected an object")
        self._tree: Mapping[str, Any] = tree
        self._what = f"{what}." if what else ""

    def only(self, names: Sequence[str]) -> Fields:
        """Return these fields; InvalidField if there are others."""
        if unknown := sorted(map(str, set(self._tree) - set(names))):
            raise InvalidField(f"{self._what}{shown(unknown[0])} is unknown")
        return self

    def has(self, name: str) -> bool:
        """Whether there is such a field."""
        return name in self._tree

    def integer(self, name: str, least: int = 0, most: int = LARGEST_INTEGER) -> int:
        value = self._value(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        """Return a finite number."""
        value = self._value(name)
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise self._wrong(name, "a number")
        return float(value)

    def numbers(self, name: str) -> list[float]:
        """Return the finite numbers of a list."""
        value = self._value(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list of numbers")
        return [
            Fields({f"{name}[{n}]": each}).number(f"{name}[{n}]") for n, each in enumerate(value)
        ]

    def flag(self, name: str) -> bool:
        """Return a truth value, which may be 0 or 1."""
        value = self._value(name)
        if value not in (0, 1):
            raise self._wrong(name, "true or false")
        return bool(value)

    def sha256(self, name: str) -> str:
        """Return a SHA-256 as 64 hexadecimal digits."""
        value = self._value(name)
        if not isinstance(value, str) or not is_sha256(value):
            raise self._wrong(name, "64 hexadecimal digits")
        return value

    def file_name(self, name: str) -> str:
        """Return the name of a file in a directory: neither hidden nor a path."""
        value = self._value(name)
        if not isinstance(value, str) or not is_plain_name(value):
            raise self._wrong(name, "a plain file name")
        return value

    def text(self, name: str) -> str:
        """Return a text of one line."""
        value = self._value(name)
        if not isinstance(value, str) or not _is_one_line(value):
            raise self._wrong(name, "one line of text")
        return value

    def any_text(self, name: str) -> str:
        """Return a text of any characters."""
        value = self._value(name)
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self._value(name)
        if not isinstance(value, str) or value not in choices:
            raise self._wrong(name, " or ".join(choices))
        return value

    def object(self, name: str) -> Fields:
        """Return the fields of an object."""
        return Fields(self._value(name), f"{self._what}{name}")

    def objects(self, name: str) -> dict[str, Fields]:
        """Return the objects of an object, by their names."""
        inner = self.object(name)
        return {str(each): inner.object(each) for each in inner._tree}

    def tree(self, name: str) -> dict[str, Any]:
        """Return an object as it is, for whoever checks its fields."""
        self.object(name)
        return dict(self._value(name))

    def integers_by_name(self, name: str, most: int = LARGEST_INTEGER) -> dict[str, int]:
        """Return the integers from 0 to `most` of an object."""
        inner = self.object(name)
        return {str(each): inner.integer(each, 0, most) for each in inner._tree}

    def integers(self, name: str, most: int = LARGEST_INTEGER) -> list[int]:
        """Return the integers of a list, from 0 on; none for null."""
        value = self._value(name)
        if value is None:
            return []
        is_list = isinstance(value, (list, tuple))
        if not is_list or not all(isinstance(n, int) and 0 <= n <= most for n in value):
            raise self._wrong(name, f"a list of integers from 0 to {most}")
        return list(value)

    def items(self, name: str) -> list[Fields]:
        """Return the objects of a list."""
        value = self._value(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return [Fields(item, f"{self._what}{name}[{n}]") for n, item in enumerate(value)]

    def _value(self, name: str) -> Any:
        if name not in self._tree:
            raise InvalidField(f"{self._what}{name} is missing")
        return self._tree[name]

    def _wrong(self, name: str, expected: str) -> InvalidField:
        found = shown(self._tree[name])
        return InvalidField(f"{self._what}{name} is {found}, expected {expected}")


def is_sha256(text: str) -> bool:
    """Whether this is a SHA-256 as 64 hexadecimal digits."""
    return _SHA256.fullmatch(text) is not None


def is_plain_name(name: str) -> bool:
    """Whether this is the name of a visible file in some directory, and nothing else."""
    return (
        0 < len(name.encode(errors="replace")) <= LONGEST_NAME_BYTES
        and not name.startswith(".")
        and "/" not in name
        and _is_one_line(name)
    )


def _is_one_line(text: str) -> bool:
    if text.isascii():
        return text.isprintable()  # the same, many times faster
    return not any(unicodedata.category(each) in _UNPRINTABLE for each in text)


def represented(value: object) -> str:
    """Return `repr` of a value without secrets, or its type if it has none.

    They are hidden here, because a URL that is cut short no longer shows where its password ends.
    """
    try:
        return redacted(repr(value))
    except (ValueError, RecursionError):  # an integer of 5,000 digits, a list in lists in lists
        return f"of type {type(value).__name__}"


def shown(value: object) -> str:
    """Return a value as a message shows it: on one line, and short."""
    text = represented(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


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


def json_text(value: Any, **options: Any) -> str:
    """Return the value as JSON, which has no NaN and inf: they are null.

    Everything that is written as JSON is made here. `options` are those of `json.dumps`.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except (ValueError, TypeError):
        return json.dumps(plain(value), allow_nan=False, **options)


def plain(value: Any) -> Any:
    """Return the value as JSON has it: numbers that are not finite are null."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


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
