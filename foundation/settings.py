"""Settings: dataclasses whose fields have ranges, units and meanings, read from YAML files and
overrides. The only module that imports pydantic.

A file may contain `extends: other.yaml` (or a list; paths are relative to the file). Later sources
win key by key, and `a.b=value` overrides win over all files. Mistakes are reported together, up to
MOST_PROBLEMS. pydantic is imported late because commands that read no settings should start fast.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from foundation.credentials import problem_of, redacted
from foundation.errors import ConfigError
from foundation.files import path_text
from foundation.records import is_sha256
from foundation.yaml_files import (
    Tree,
    WrittenFloat,
    WrittenInt,
    abbreviated,
    did_you_mean,
    merge,
    parse_override,
    read_tree,
)

RANGE, UNIT = "range", "unit"
MOST = 10**12  # of steps, tokens or bytes: more than any run has, and exact in float64
MOST_LANES = 1 << 17
MOST_ROWS = 1 << 20  # of a segment or a memory
MOST_THREADS = 4096
OBJECT_STORES = ("s3", "gs", "azure", "oci", "hf")  # schemes of URLs
LARGEST_SEED = (1 << 63) - 1
LONGEST_NAME = 100
_NAME = re.compile(rf"(?![-.])[A-Za-z0-9._+-]{{1,{LONGEST_NAME}}}")


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`; `above` and `below` leave out the number itself.

    With `zero` also 0, which switches something off.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    zero: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether the range has the number; it never has NaN."""
        if self.zero and value == 0:
            return True
        enough = value > self.least if self.above else value >= self.least
        return enough and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        least, most = (
            f"{end:,.15g}" if end < 1e9 else f"{end:g}" for end in (self.least, self.most)
        )
        if not (self.above or self.below):
            return f"{'0 or ' if self.zero else ''}from {least} to {most}"
        low = f"above {least}" if self.above else f"at least {least}"
        return f"{low} and {f'below {most}' if self.below else f'at most {most}'}"


def setting(
    default: Any = MISSING,
    allowed: Range | None = None,
    *,
    unit: str = "",
    default_factory: Any = MISSING,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Return a field of settings. Of a tuple of numbers, each must be in the range.

    `unit` names what a number counts or measures, such as tokens; then it may be written `10k`.
    """
    return field(
        default=default,
        default_factory=default_factory,
        metadata={RANGE: allowed, UNIT: unit, **(metadata or {})},
    )


def ranges_of(schema: Any) -> dict[str, Range]:
    """Return the ranges of a settings class, or of its instance, by the names of the fields."""
    found = {each.name: each.metadata.get(RANGE) for each in fields(schema)}
    return {name: allowed for name, allowed in found.items() if allowed is not None}


def assert_never(value: NoReturn) -> NoReturn:
    """End a `match` over a choice: pyright rejects it while a value of the choice is missing.

    (`typing.assert_never` needs Python 3.11.)
    """
    raise AssertionError(f"no case handles {value!r}")


def check_ranges(section: str, settings: Any) -> None:
    """Raise ConfigError if numbers of the settings are out of their ranges; it names all."""
    wrong = []
    for name, allowed in ranges_of(settings).items():
        value = getattr(settings, name)
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        if not all(each in allowed for each in values):
            found = abbreviated(value if values == [value] else values)
            wrong.append(f"{section}{name}={found} must be {allowed}")
    if wrong:
        raise ConfigError("; ".join(wrong))


def require_no_secrets(name_of: str, path: Path) -> None:
    """Raise ConfigError if `path` is a URL with a password: settings are copied and shown."""
    if problem := problem_of(path_text(path)):
        raise ConfigError(f"{name_of}: {problem}")


def require_object_store(name_of: str, url: str) -> None:
    """Raise ConfigError unless `url` names a place in an object store, without a password."""
    require_no_secrets(name_of, Path(url))
    scheme, _, rest = url.partition("://")
    if scheme not in OBJECT_STORES or not rest.strip("/") or url != path_text(Path(url)):
        expected = ", ".join(f"{each}://BUCKET/FOLDER" for each in OBJECT_STORES)
        raise ConfigError(f"{name_of}: found {abbreviated(url)}, expected one of {expected}")


def require_hash(name_of: str, text: str) -> None:
    """Raise ConfigError unless the text is a SHA-256."""
    if not is_sha256(text):
        raise ConfigError(
            f"{name_of}: found {abbreviated(text)}, expected 64 hexadecimal digits; "
            "`data-pipeline inspect` shows them"
        )


def require_name(name_of: str, name: str) -> None:
    """Raise ConfigError unless `name` can name a directory and a job, and is no option."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name_of}: found {abbreviated(name)}, expected 1 to {LONGEST_NAME} letters, digits "
            "and . _ + -, not beginning with . or -; choose such a name"
        )


BYTES = "bytes"
_MEASURES = ("seconds", "hours", "GiB", "MiB per second")  # others are counts
_COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_DECIMAL = {name: factor for name, factor in _COUNTS.items() if name != "B"}
_OF_BYTES = {
    f"{name}{end}": factor for name, factor in (_DECIMAL | _BINARY).items() for end in ("", "B")
}
_OF_COUNTS = {**_COUNTS, **_BINARY}
_LONGEST = 40  # digits; Python refuses to read thousands
_LIKE_A_SIZE = re.compile(r"\d[\d_.,]{0,40}\s?[A-Za-z]{1,20}")
_SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s?([A-Za-z]*)", re.ASCII)


def parse_size(text: str, unit: str) -> int | float | None:
    """Return the number that `text` stands for, or None if it is not a number with a prefix.

    k or K, M, B or G, and T are powers of 1,000; Ki, Mi, Gi and Ti of 1,024. Where the unit is
    bytes, B stands for them: `2GB`, `2GiB`.
    """
    found = _SIZE.fullmatch(text.strip())
    factors = _OF_BYTES if unit == BYTES else _OF_COUNTS
    if not found or found[2] not in factors or len(found[1]) > _LONGEST:
        return None
    value = Fraction(found[1].replace("_", "")) * factors[found[2]]
    return int(value) if value.denominator == 1 else float(value)


def size_example(unit: str) -> str:
    """Return how to write such a number, for an error message."""
    if unit == BYTES:
        return "8MiB or 2GB (kB, MB, GB, TB are powers of 1,000; KiB, MiB, GiB, TiB of 1,024)"
    if unit in _MEASURES:
        return "20, without a unit"
    return "4k or 10M (k, M, B or G, T are powers of 1,000; Ki, Mi, Gi, Ti of 1,024)"


def size_problem(value: object, unit: str) -> str:
    """Return what is wrong with a number whose unit or prefix is unknown; else ''."""
    if not unit or not isinstance(value, str) or not _LIKE_A_SIZE.fullmatch(value.strip()):
        return ""
    if parse_size(value, unit) is not None:
        return ""
    return f"found {value!r}, expected a number of {unit}, such as {size_example(unit)}"


def size_of(unit: str) -> Callable[[str], int]:
    """Return the `type` of a flag whose value is a whole number of `unit`."""

    def parse(text: str) -> int:
        value = parse_size(text.removeprefix("-"), unit)
        if not isinstance(value, int):
            raise _not_a_size(text, unit)
        return -value if text.startswith("-") else value  # the command refuses it by its rule

    return parse


def amount_of(unit: str) -> Callable[[str], float]:
    """Return the `type` of a flag whose value may also be written as 1e9."""

    def parse(text: str) -> float:
        value = parse_size(text, unit)
        try:
            return float(text if value is None else value)
        except ValueError:
            raise _not_a_size(text, unit) from None

    return parse


def _not_a_size(text: str, unit: str) -> argparse.ArgumentTypeError:
    example = size_example(unit)
    return argparse.ArgumentTypeError(
        f"found {text!r}, expected a number of {unit}, such as {example}"
    )


MOST_SUGGESTED = 3


@dataclass(frozen=True)
class Setting:
    """A setting, or a section of settings, of a schema."""

    name: str  # dotted, such as `optim.schedule.shape`; `data.phases[].lanes` in a list's sections
    hint: Any
    field: Field[Any]
    owner: type

    @property
    def leaf(self) -> str:
        return self.field.name

    @property
    def meaning(self) -> str:
        """One sentence; empty if its field has no docstring."""
        return meanings_of(self.owner).get(self.leaf, "")

    @property
    def section(self) -> Any:
        """The schema of its settings, if it is a section or a list of sections, else None."""
        return self.hint if is_dataclass(self.hint) else section_of_list(self.hint)

    @property
    def allowed(self) -> Range | None:
        return self.field.metadata.get(RANGE)

    @property
    def unit(self) -> str:
        """What its number counts or measures; empty for none."""
        return self.field.metadata.get(UNIT, "")

    @property
    def default(self) -> Any:
        """The value without a file; MISSING if it has to be set."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()


def settings_of(schema: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a schema in its order; a section comes before its settings."""
    hints = get_type_hints(schema)
    for each in fields(schema):
        setting = Setting(f"{prefix}{each.name}", hints[each.name], each, schema)
        yield setting
        if setting.section is not None:
            mark = "." if is_dataclass(setting.hint) else "[]."
            yield from settings_of(setting.section, f"{setting.name}{mark}")


def section_of_list(hint: Any) -> Any:
    """Return the schema of the sections of a list setting, or None for other settings."""
    items = get_args(hint) if get_origin(hint) is tuple else ()
    return items[0] if len(items) == 2 and items[1] is Ellipsis and is_dataclass(items[0]) else None


def member_of(hint: Any, value: Any) -> Any:
    """Return the type in question for a value: of `int | tuple[int, ...]`, by whether it is a list.

    Other types are returned as they are.
    """
    of_lists = [each for each in get_args(hint) if get_origin(each) is tuple]
    others = [each for each in get_args(hint) if get_origin(each) is not tuple]
    if get_origin(hint) is not UnionType or len(of_lists) != 1 or len(others) != 1:
        return hint
    return of_lists[0] if isinstance(value, (list, tuple)) else others[0]


@functools.cache
def meanings_of(schema: type) -> Mapping[str, str]:
    """Return field name -> its docstring, for a class and what it inherits."""
    found: dict[str, str] = {}
    for each in reversed(schema.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                found[statement.target.id] = inspect.cleandoc(after.value.value)
    return found


def suggestion(schema: Any, root: Any, where: Sequence[str], name: str) -> str:
    """Return the end of an error about the unknown `name` in the section `where` of `root`.

    It names the settings that are called so in other sections, or else a close name.
    """
    plain = [each for each in settings_of(root) if "[]" not in each.name]
    inside = [each for each in plain if each.name.startswith(".".join((*where, "")))]
    same = [each.name for each in inside if each.leaf == name]
    if same := same or [each.name for each in plain if each.leaf == name]:
        return f"; did you mean {' or '.join(map(repr, same[:MOST_SUGGESTED]))}?"
    own = [each.name for each in fields(schema)]
    nested = {each.leaf: each.name for each in reversed(inside)}
    close = difflib.get_close_matches(name, nested, n=1)
    if close and not difflib.get_close_matches(name, own):
        return f"; did you mean {nested[close[0]]!r}?"
    return did_you_mean(name, own)


T = TypeVar("T")
COMMAND_LINE = "command line"
MOST_PROBLEMS = 20  # in one message
_LONGEST_NAME = 60  # characters of an unknown setting's name in a message
LONGEST_SHOWN = 200  # characters of a value in a message, whoever wrote the message
_EXPECTED = {  # instead of pydantic's words
    "path_type": "expected a path",
    "tuple_type": "expected a list, such as [1, 2]",
    "dict_type": "expected a section",
    "too_long": "expected fewer values",
    "int_parsing_size": "expected a smaller number",
    "missing": "expected one more value",  # of a list with a fixed number
}
_WRONG = object()  # in place of an invalid value, whose reason is among the problems


def load_config(
    schema: type[T], path: Path, overrides: Sequence[str] = (), overridden_by: str = COMMAND_LINE
) -> T:
    """Return `path`, what it extends, and `a.b=value` overrides as a `schema` instance.

    ConfigError lists the invalid settings: those of the file, and those that `overridden_by` made.
    """
    tree = read_tree(Path(path))
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
    problems: list[str] = []
    value = _build(schema, tree, (), problems, schema)
    long = sorted({text for text in _texts_in(tree) if len(text) > LONGEST_SHOWN}, key=len)
    for text in reversed(long if problems else ()):
        problems = [problem.replace(text, abbreviated(text)) for problem in problems]
    return value, problems


def _error_of(*found: tuple[str, Sequence[str]]) -> ConfigError:
    """The error that lists the problems of each source that has some."""
    return ConfigError("\n".join(_report(source, each) for source, each in found if each))


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


def _build(schema: Any, tree: Any, where: tuple[str, ...], problems: list[str], root: Any) -> Any:
    """Return a `schema` instance, or _WRONG with the reasons added to `problems`."""
    tree = {} if tree is None else tree  # `model:` with nothing under it
    if not isinstance(tree, Mapping):
        problems.append(
            f"{'.'.join(where) or 'settings'}: found {abbreviated(tree)}, expected a section; its "
            f"settings are {', '.join(each.name for each in fields(schema))}"
        )
        return _WRONG
    hints = get_type_hints(schema)
    known = [field for field in fields(schema) if field.init]
    names = [field.name for field in known]
    for key in tree:
        if key not in names and len(problems) < MOST_PROBLEMS:  # hints take time
            hint = suggestion(schema, root, where, str(key))
            problems.append(f"{_dotted(where, key)}: unknown setting{hint}")
    values: Tree = {}
    for known_field in known:
        unit = known_field.metadata.get(UNIT, "")
        if known_field.name in tree and (problem := size_problem(tree[known_field.name], unit)):
            problems.append(f"{_dotted(where, known_field.name)}: {problem}")
            values[known_field.name] = _WRONG
        elif known_field.name in tree:
            values[known_field.name] = _value_of(
                hints[known_field.name],
                _with_sizes(tree[known_field.name], unit),
                (*where, known_field.name),
                problems,
                root,
            )
        elif known_field.default is MISSING and known_field.default_factory is MISSING:
            problems.append(f"{_dotted(where, known_field.name)}: missing; it has no default")
            values[known_field.name] = _WRONG
    if any(value is _WRONG for value in values.values()):
        return _WRONG
    try:
        return schema(**values)
    except ConfigError as error:
        problems.append(str(error))
        return _WRONG


def _value_of(hint: Any, value: Any, where: tuple[str, ...], problems: list[str], root: Any) -> Any:
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
    value = as_written(hint, value)
    if value == "" and Path in types_of(hint):  # Path("") would be the working directory
        value = None
    if not {bool, Any} & types_of(hint) and any(
        isinstance(each, bool) for each in _scalars_in(value)
    ):
        # pydantic would accept yes as 1
        expected = "text" if types_of(hint) <= {str, Path} else "a number"
        problems.append(f"{_dotted(where)}: found {abbreviated(value)}, expected {expected}")
        return _WRONG
    try:
        return _adapter(hint).validate_python(value)
    except ConfigError as error:
        problems.append(str(error))
    except ValidationError as error:
        for item in error.errors():
            name, found = _dotted((*where, *item["loc"])), abbreviated(item["input"])
            expected = item["msg"].replace("Input should be", "expected", 1)
            expected = _EXPECTED.get(item["type"], expected)
            found = "no value" if item["input"] is None else found
            problems.append(f"{name}: found {found}, {expected}")
    return _WRONG


def types_of(hint: Any) -> set[type]:
    """Return the scalar types that a value of this type may have, also inside of lists."""
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    inside = [each for each in get_args(hint) if each is not Ellipsis]
    return set().union(*map(types_of, inside)) if inside else {hint}


def as_written(hint: Any, value: Any) -> Any:
    """Return the value with numbers as they were written, where the setting is text."""
    if isinstance(value, list):
        items = [each for each in get_args(hint) if each is not Ellipsis]
        hints = items if len(items) == len(value) else [*(items[:1] or [Any])] * len(value)
        return [as_written(each, item) for each, item in zip(hints, value, strict=True)]
    if isinstance(value, Mapping):
        keys, values = get_args(hint) if len(get_args(hint)) == 2 else (Any, Any)
        return {as_written(keys, key): as_written(values, item) for key, item in value.items()}
    if isinstance(value, WrittenInt | WrittenFloat):
        if types_of(hint) <= {str, Path, type(None)}:
            return value.written
        return int(value) if isinstance(value, int) else float(value)
    return value


def _scalars_in(value: Any) -> Iterator[Any]:
    """Yield every scalar in the lists and sections of a value."""
    if isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _scalars_in(each)
    else:
        yield value


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
    shown = problems[:MOST_PROBLEMS]
    more = " or more" if len(shown) == MOST_PROBLEMS else ""
    lines = [f"{source}: {len(shown)} problems{more}", *(f"  {problem}" for problem in shown)]
    return "\n".join(lines)


def _dotted(where: Sequence[Any], *names: Any) -> str:
    """Return the name of a setting; parts that no setting has may be long, and are cut."""
    parts = (redacted(str(each)) for each in (*where, *names))  # before a cut hides their end
    return ".".join(f"{x[:_LONGEST_NAME]}..." if len(x) > _LONGEST_NAME else x for x in parts)
