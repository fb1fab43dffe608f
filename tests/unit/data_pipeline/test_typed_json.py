"""Values that travel as JSON between processes and in files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from foundation.records import from_json, to_json


class Color(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    name: str
    loss: float | None = None


@dataclass(frozen=True)
class Other:
    count: int


@dataclass(frozen=True)
class Outer:
    parts: tuple[Inner, ...]
    colors: list[Color] = field(default_factory=list)
    sizes: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Outer, Outer((Inner("a", 0.5), Inner("b")), [Color.RED], {"x": 1.0})),
        (Inner | Other | None, Other(3)),
        (Inner | Other | None, None),
        (list[list[int]], [[1, 2], [3, 4]]),
        (tuple[int, str], (1, "a")),
        (tuple[int, ...], (-9, 0, (1 << 63) - 1)),
        (tuple[int, ...], ()),
        (str, "text\udc80"),
        (bool, True),
    ],
    ids=str,
)
def test_a_value_comes_back_as_it_was(kind: Any, value: Any) -> None:
    assert from_json(kind, json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        (int, True),
        (int, "1"),
        (int, 1 << 64),
        (tuple[int, int], [1]),
        (tuple[int, ...], [1, True]),
        (tuple[int, ...], [1, 1 << 63]),
        (tuple[int, ...], [1, "2"]),
        (tuple[int, int], [1, 2, 3]),
        (float, 10**400),
        (list[int], [1, "2"]),
        (dict[str, float], {"x": None}),
        (Inner, {"name": "a", "extra": 1}),
        (Inner, {}),
        (Inner | Other, {"name": 1}),
        (Color, "green"),
    ],
    ids=str,
)
def test_another_value_is_none_of_the_type(kind: Any, tree: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_json(kind, tree)
