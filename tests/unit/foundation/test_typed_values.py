"""Values of files are of the types that their readers expect, or refused by name."""

import json
import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest

from foundation.typed_values import (
    Count,
    FileName,
    InvalidValue,
    Line,
    Positive,
    Sha256,
    between,
    from_json,
    from_tree,
    json_text,
    to_tree,
)


class Color(Enum):
    RED = "red"


class Pair(NamedTuple):
    first: Count
    second: Positive


@dataclass(frozen=True)
class Part:
    size: Annotated[int, between(1, 9)] = 1
    pairs: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        if self.size == 7:
            raise ValueError("no part has size 7")


@dataclass(frozen=True)
class Whole:
    name: Line
    rate: float = 0.5
    is_done: bool = False
    color: Color = Color.RED
    mode: Literal["slow", "fast"] = "slow"
    path: Path | None = None
    file: FileName = "a"
    hash: Sha256 = "0" * 64
    shares: tuple[int, float] = (1, 1.0)
    parts: dict[str, Part] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def test_a_value_is_read_back_as_it_was_written():
    whole = Whole(
        "n", math.inf, True, path=Path("s3:/b/x"), shares=(2, 0.5),
        parts={"p": Part(3, (Pair(0, 1),))}, extra={"a": [1, {"b": None}], "c": "\udcff"},
    )  # fmt: skip
    assert from_json(Whole, json.dumps(to_tree(whole))) == whole
    assert from_json(Whole, json_text({"name": "n", "rate": 1})) == Whole("n", 1.0)
    assert from_tree(Whole | None, None) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a\nb"}, "name is 'a\\nb', expected one line of text"),
        ({"name": 7}, "name is 7, expected text"),
        ({"rate": "1"}, "rate is '1', expected a number"),
        ({"rate": True}, "rate is True, expected a number"),
        ({"rate": 10**400}, "rate is 1000"),
        ({"is_done": 1}, "is_done is 1, expected true or false"),
        ({"color": "blue"}, "color is 'blue', expected 'red'"),
        ({"mode": None}, "mode is None, expected 'slow' or 'fast'"),
        ({"path": 3}, "path is 3, expected a path"),
        ({"file": "../x"}, "file is '../x', expected a plain file name"),
        ({"file": ".x"}, "file is '.x', expected a plain file name"),
        ({"hash": "A" * 64}, "expected 64 hexadecimal digits"),
        ({"shares": [1]}, "shares[1] is missing"),
        ({"shares": [1, 2, 3]}, "shares is [1, 2, 3], expected fewer values"),
        ({"shares": "12"}, "shares is '12', expected a list, such as [1, 2]"),
        ({"parts": []}, "parts is [], expected an object"),
        ({"parts": {"p": None}}, "parts.p is None, expected an object"),
        ({"parts": {"p": {"size": 0}}}, "parts.p.size is 0, expected an integer from 1 to 9"),
        ({"parts": {"p": {"size": 1.0}}}, "parts.p.size is 1.0, expected an integer"),
        ({"parts": {"p": {"size": 7}}}, "no part has size 7"),
        ({"parts": {"p": {"size": 1, "../\n": 2}}}, "parts.p.'../\\n' is unknown"),
        ({"parts": {"p": {"pairs": [[0, 1], [0, 0]]}}}, "parts.p.pairs[1][1] is 0, expected"),
        ({"name": "https://u:secret@h/\n"}, "name is 'https://***@h/\\n'"),
        ({"x" * 900: 1}, "is unknown"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_in_a_short_line(change, message):
    with pytest.raises(InvalidValue) as caught:
        from_tree(Whole, {"name": "n", **change})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_what_is_no_object_or_no_json_is_refused():
    for tree in (None, [], 3, "x"):
        with pytest.raises(InvalidValue, match=r"the file is .*, expected an object"):
            from_tree(Whole, tree)
    for text in ("{", "[" * 100_000, b"\xff"):
        with pytest.raises(ValueError):
            from_json(Whole, text)


def test_only_open_objects_have_other_fields_and_only_finite_numbers_are_finite():
    assert from_tree(Part, {"size": 2, "more": 1}, is_open=True) == Part(2)
    assert from_tree(Whole, {"name": "n", "rate": math.inf}).rate == math.inf
    with pytest.raises(InvalidValue, match="rate is inf, expected a finite number"):
        from_tree(Whole, {"name": "n", "rate": math.inf}, is_finite=True)


def test_all_problems_are_there():
    tree = {"rate": "x", "parts": {"p": {"size": 0, "more": 1}}, "more": 2}
    with pytest.raises(InvalidValue) as caught:
        from_tree(Whole, tree)
    names = [".".join(map(str, problem.where)) for problem in caught.value.problems()]
    assert sorted(names) == ["more", "name", "parts.p.more", "parts.p.size", "rate"]
