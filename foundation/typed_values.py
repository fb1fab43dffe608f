"""Typed values: what a file holds, checked once against a type before anything uses it.

A type is a dataclass, a NamedTuple, an enum, a scalar, a list, tuple or dict of them, `X | Y`, or
one of the types below. No other module imports pydantic, and this one does it late: programs that
read nothing should start fast. This module alone translates pydantic's errors.
"""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from foundation.errors import LONGEST_SHOWN, is_one_line, shown
from foundation.paths import is_plain_name, path_text

LARGEST_INTEGER = 1 << 53  # every reader of JSON reads integers up to this one exactly
_SHA256 = re.compile(r"[0-9a-f]{64}")
_EXPECTED = {  # pydantic's code -> our words; for other codes `_problem` takes pydantic's
    "bool_type": "true or false",
    "dataclass_type": "an object",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "path_type": "a path",
    "missing": "one more value",  # a list of fixed length is too short
    "string_type": "text",
    "too_long": "fewer values",
    "tuple_type": "a list, such as [1, 2]",
}


@dataclass(frozen=True)
class Rule:
    """A further condition on values of a type: `Annotated[str, Rule(str.isascii, "ASCII")]`."""

    is_right: Callable[[Any], bool]
    expected: str

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], Any]) -> Any:
        """Return the schema of the type with this rule, as pydantic asks for it."""
        from pydantic_core import PydanticCustomError, core_schema

        def checked(value: Any) -> Any:
            if not self.is_right(value):
                raise PydanticCustomError("rule", "{expected}", {"expected": self.expected})
            return value

        return core_schema.no_info_after_validator_function(checked, handler(kind))


def between(least: int, most: int) -> Rule:
    """Return the rule of the integers from `least` to `most`."""
    return Rule(lambda value: least <= value <= most, f"an integer from {least} to {most}")


def one_of(*choices: str) -> Rule:
    """Return the rule of a text that is one of the choices."""
    return Rule(choices.__contains__, " or ".join(choices))


def is_sha256(text: str) -> bool:
    """Whether this is a SHA-256 as 64 hexadecimal digits."""
    return _SHA256.fullmatch(text) is not None


Count = Annotated[int, between(0, LARGEST_INTEGER)]
Positive = Annotated[int, between(1, LARGEST_INTEGER)]
Finite = Annotated[float, Rule(math.isfinite, "a finite number")]
Sha256 = Annotated[str, Rule(is_sha256, "64 hexadecimal digits")]
FileName = Annotated[str, Rule(is_plain_name, "a plain file name")]
Line = Annotated[str, Rule(is_one_line, "one line of text")]


@dataclass(frozen=True)
class Problem:
    """Why a value is not of its type: pydantic's `code`, the names that lead there, the value."""

    code: str
    where: tuple[str | int, ...]
    value: Any
    expected: str

    def __str__(self) -> str:
        if self.code == "value_error":
            return self.expected
        name = "".join(map(_step_of, self.where)).removeprefix(".") or "the file"
        if self.code == "unexpected_keyword_argument":
            return f"{name} is unknown"
        if self.code == "missing":
            return f"{name} is missing"
        return f"{name} is {shown(self.value)}, expected {self.expected}"


def _step_of(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part if part.isidentifier() and len(part) <= LONGEST_SHOWN else shown(part)}"


class InvalidValue(ValueError):
    """A value is not of the type it should be; the message is the first problem."""

    def __init__(self, problems: Iterator[Problem]) -> None:
        first = next(problems)
        super().__init__(str(first))
        self._first, self._others = first, problems

    def problems(self) -> Iterator[Problem]:
        """Yield all problems, once."""
        yield self._first
        yield from self._others


def from_json(kind: Any, content: bytes | str, **options: bool) -> Any:
    """Return the value of a JSON text as `from_tree` does; ValueError if the text is wrong."""
    return from_tree(kind, parse_json(content), **options)


def from_tree(kind: Any, tree: Any, *, is_open: bool = False, is_finite: bool = False) -> Any:
    """Return a tree of dicts, lists and scalars as a value of a type; InvalidValue if it is not.

    No scalar is converted: `true` and "1" are not numbers, 1.0 is not an int. With `is_open`,
    fields that the type does not name are ignored. With `is_finite`, NaN and inf are invalid.
    """
    from pydantic import ValidationError

    try:
        value = _validator(kind, is_open, is_finite).validate_python(tree)
    except ValidationError as error:
        raise InvalidValue(map(_problem, error.errors(include_url=False))) from None
    if value is None and is_dataclass(kind):
        raise InvalidValue(iter([Problem("dataclass_type", (), None, "an object")]))
    return value


@functools.cache
def _validator(kind: Any, is_open: bool, is_finite: bool) -> Any:
    # pydantic would search all packages' metadata for plug-ins, which takes 15 ms.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import SchemaValidator

    extra = "ignore" if is_open else "forbid"
    optional: Any = kind | None  # pydantic takes no configuration for a dataclass alone
    config = ConfigDict(extra=extra, allow_inf_nan=not is_finite)
    return SchemaValidator(_with_strict_scalars(TypeAdapter(optional, config=config).core_schema))


def _with_strict_scalars(schema: Any) -> Any:
    """Return pydantic's schema, made strict for scalars alone.

    Its strict mode takes no list as a tuple and no dict as a dataclass; its lenient mode takes "1"
    as a number.
    """
    if isinstance(schema, (list, tuple)):
        return type(schema)(map(_with_strict_scalars, schema))
    if not isinstance(schema, dict):
        return schema
    inner = {name: _with_strict_scalars(value) for name, value in schema.items()}
    is_scalar = inner.get("type") in ("int", "float", "bool", "str")
    return {**inner, "strict": True} if is_scalar else inner


def _problem(error: Mapping[str, Any]) -> Problem:
    details = error.get("ctx", {})
    code, message = error["type"], error["msg"].replace("Input should be ", "", 1)
    expected = _EXPECTED.get(code) or details.get("expected") or message
    if code == "value_error":
        expected = str(details["error"])
    return Problem(code, error["loc"], error["input"], expected)


def to_tree(value: Any) -> Any:
    """Return the value as dicts, lists and scalars for YAML or JSON; paths and URLs become text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_tree(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_tree(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(to_tree, value))
    if isinstance(value, Enum):
        return value.value
    return path_text(value) if isinstance(value, Path) else value


def json_text(value: Any, **options: Any) -> str:
    """Return the value as JSON; NaN and inf, which JSON does not have, become null.

    All JSON that the project writes is made here. `options` are for `json.dumps`.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except (ValueError, TypeError):
        return json.dumps(with_nulls(to_tree(value)), allow_nan=False, **options)


def with_nulls(tree: Any) -> Any:
    """Return the tree with null for numbers that are not finite."""
    if isinstance(tree, dict):
        return {name: with_nulls(item) for name, item in tree.items()}
    if isinstance(tree, list):
        return list(map(with_nulls, tree))
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def parse_json(content: bytes | str, **options: Any) -> Any:
    """Return the value of a JSON text; ValueError if it is not JSON or nested too deeply.

    `options` are for `json.loads`.
    """
    try:
        return json.loads(content, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
