"""Settings: dataclasses whose fields have ranges, units and meanings, read from YAML files and
overrides.

A file may contain `extends: other.yaml` (or a list; paths are relative to the file). Of files that
set the same key, the last one wins, and `a.b=value` overrides win over all files. Mistakes are
reported together, up to MOST_PROBLEMS.
"""

import ast
import difflib
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from foundation.credentials import problem_of, redacted
from foundation.errors import ConfigError, did_you_mean, shown
from foundation.paths import path_text
from foundation.sizes import is_like_size, parse_size, size_example
from foundation.typed_values import InvalidValue, Problem, from_tree, is_sha256
from foundation.yaml_files import WrittenFloat, WrittenInt, merge, parse_overrides, read_tree

COMMAND_LINE = "command line"
MOST_PROBLEMS = 20  # problems that one message lists
MOST_SUGGESTED = 3  # settings that one message suggests
_LONGEST_PART = 60  # characters that a message shows of each part of a dotted name
LONGEST_SHOWN = 200  # characters of a value in any message
RANGE, UNIT = "range", "unit"  # keys of a field's metadata
MOST = 10**12  # steps, tokens or bytes: more than any run has, and exact in float64
MOST_THREADS = 4096
OBJECT_STORES = ("s3", "gs", "azure", "oci", "hf")  # schemes of their URLs
LONGEST_NAME = 100  # characters of a name that a user chooses
_NAME = re.compile(rf"(?![-.])[A-Za-z0-9._+-]{{1,{LONGEST_NAME}}}")
T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`; `above` excludes `least` itself, `below` excludes `most`.

    `zero` adds the number 0, for settings that 0 switches off.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    zero: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether the number is in the range; NaN never is."""
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
    """Return a dataclass field for a setting; if it is a tuple, each number must be `allowed`.

    `unit` names what a number counts or measures, such as tokens. With a unit, `10k` is a number.
    """
    return field(
        default=default,
        default_factory=default_factory,
        metadata={RANGE: allowed, UNIT: unit, **(metadata or {})},
    )


def ranges_of(schema: Any) -> dict[str, Range]:
    """Return the ranges of a settings class, or of its instance, by the names of the fields."""
    ranges = {field.name: field.metadata.get(RANGE) for field in fields(schema)}
    return {name: allowed for name, allowed in ranges.items() if allowed is not None}


def assert_never(value: NoReturn) -> NoReturn:
    """End a `match` over a choice: pyright reports the choices that have no `case`.

    (`typing.assert_never` needs Python 3.11.)
    """
    raise AssertionError(f"no case handles {value!r}")


def check_ranges(section: str, settings: Any) -> None:
    """Raise one ConfigError that names all settings whose numbers are out of their ranges."""
    wrong = []
    for name, allowed in ranges_of(settings).items():
        value = getattr(settings, name)
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        if not all(number in allowed for number in values):
            text = shown(value if values == [value] else values)
            wrong.append(f"{section}{name}={text} must be {allowed}")
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
        expected = ", ".join(f"{name}://BUCKET/FOLDER" for name in OBJECT_STORES)
        raise ConfigError(f"{name_of}: found {shown(url)}, expected one of {expected}")


def require_hash(name_of: str, text: str, source: str) -> None:
    """Raise ConfigError unless the text is a SHA-256; `source` is a command that shows it."""
    if not is_sha256(text):
        raise ConfigError(
            f"{name_of}: found {shown(text)}, expected 64 hexadecimal digits; {source} shows them"
        )


def require_name(name_of: str, name: str) -> None:
    """Raise ConfigError unless `name` can name a directory and a job, and is not like a flag."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name_of}: found {shown(name)}, expected 1 to {LONGEST_NAME} letters, digits "
            "and . _ + -, not beginning with . or -; choose such a name"
        )


@dataclass(frozen=True)
class Setting:
    """A setting, or a section of settings, of a schema."""

    name: str  # dotted: `optim.schedule.shape`; in a list of sections, `data.phases[].lanes`
    hint: Any
    field: Field[Any]
    owner: type

    @property
    def leaf(self) -> str:
        return self.field.name

    @property
    def meaning(self) -> str:
        """The docstring of its field; empty if the field has none."""
        return meanings_of(self.owner).get(self.leaf, "")

    @property
    def section(self) -> Any:
        """The schema of the section, or of the sections in a list; None for other settings."""
        return self.hint if is_dataclass(self.hint) else section_of_list(self.hint)

    @property
    def allowed(self) -> Range | None:
        return self.field.metadata.get(RANGE)

    @property
    def unit(self) -> str:
        """What its number counts or measures; empty without a unit."""
        return self.field.metadata.get(UNIT, "")

    @property
    def default(self) -> Any:
        """The value if no file sets it; MISSING if a file must."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()


def settings_of(schema: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a schema in its order; a section comes before its settings."""
    for setting in _own_settings(schema, prefix):
        yield setting
        if setting.section is not None:
            mark = "." if is_dataclass(setting.hint) else "[]."
            yield from settings_of(setting.section, f"{setting.name}{mark}")


def _own_settings(schema: Any, prefix: str = "") -> list[Setting]:
    hints = get_type_hints(schema)
    return [
        Setting(f"{prefix}{field.name}", hints[field.name], field, schema)
        for field in fields(schema)
    ]


def section_of_list(hint: Any) -> Any:
    """Return the schema of the sections of a list setting, or None for other settings."""
    items = get_args(hint) if get_origin(hint) is tuple else ()
    return items[0] if len(items) == 2 and items[1] is Ellipsis and is_dataclass(items[0]) else None


def member_of(hint: Any, value: Any) -> Any:
    """Return the member of a union such as `int | tuple[int, ...]` that is meant by a value.

    It is the tuple for a list. A type that is no such union is returned as it is.
    """
    tuples = [member for member in get_args(hint) if get_origin(member) is tuple]
    others = [member for member in get_args(hint) if get_origin(member) is not tuple]
    if get_origin(hint) is not UnionType or len(tuples) != 1 or len(others) != 1:
        return hint
    return tuples[0] if isinstance(value, (list, tuple)) else others[0]


@functools.cache
def meanings_of(schema: type) -> Mapping[str, str]:
    """Return field name -> its docstring, for a class and what it inherits."""
    meanings: dict[str, str] = {}
    for base in reversed(schema.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                meanings[statement.target.id] = inspect.cleandoc(after.value.value)
    return meanings


def suggestion(schema: Any, root: Any, where: Sequence[str], name: str) -> str:
    """Return the end of an error about the unknown `name` in the section `where` of `root`.

    It is `known_answer`, else a close name.
    """
    if "." in name:
        nested = name.replace(".", ": {") + ": ..." + "}" * name.count(".")
        return f"; in a file, write sections inside each other: {nested}"
    if answer := known_answer(root, where, name):
        return answer
    own = [field.name for field in fields(schema)]
    nested = {setting.leaf: setting.name for setting in reversed(_settings_inside(root, where))}
    close = difflib.get_close_matches(name, nested, n=1, cutoff=0.8)
    if close and not difflib.get_close_matches(name, own):
        return f"; did you mean {nested[close[0]]!r}?"
    return did_you_mean(name, own).replace(" mean '", f" mean '{'.'.join((*where, ''))}")


def known_answer(root: Any, where: Sequence[str], name: str) -> str:
    """Return the end of an error that tells with certainty which setting is meant; else ''.

    It names the settings with that name in other sections, else the setting that the root's
    `other_names` gives for another system's name.
    """
    plain = [setting.name for setting in _settings_inside(root, ()) if setting.leaf == name]
    inside = [same for same in plain if same.startswith(".".join((*where, "")))]
    if same := inside or plain:
        return f"; did you mean {' or '.join(map(repr, same[:MOST_SUGGESTED]))}?"
    other = other_name(root, name)
    return f"; here it is {other}" if other else ""


def _settings_inside(root: Any, where: Sequence[str]) -> list[Setting]:
    known = [setting for setting in settings_of(root) if "[]" not in setting.name]
    return [setting for setting in known if setting.name.startswith(".".join((*where, "")))]


def other_name(schema: Any, name: str) -> str:
    """Return what a name of another system is called here, from `other_names`; '' if unknown."""
    known: Mapping[str, str] = getattr(schema, "other_names", {})
    return known.get(name.lower().replace("_", "").replace("-", ""), "")


def load_config(
    schema: type[T], path: Path, overrides: Sequence[str] = (), overridden_by: str = COMMAND_LINE
) -> T:
    """Return `path`, what it extends, and `a.b=value` overrides as a `schema` instance.

    ConfigError lists the file's problems first, then, under `overridden_by`, the overrides'.
    """
    tree = read_tree(Path(path))
    merge(tree, parse_overrides(overrides))
    value, problems = _checked(schema, tree)
    if not problems:
        return value
    _, of_file = _checked(schema, read_tree(Path(path))) if overrides else (None, problems)
    added = [problem for problem in problems if problem not in of_file]
    kept = [problem for problem in problems if problem in of_file]
    raise _error_of((str(path), kept), (f"{overridden_by} (over {path})", added))


def parse_config(schema: type[T], tree: Mapping[str, Any], source: str) -> T:
    """Return `tree` as a `schema` instance; ConfigError lists the invalid settings of `source`."""
    value, problems = _checked(schema, tree)
    if problems:
        raise _error_of((source, problems))
    return value


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return dotted name -> (before, after) where values differ; a missing value is None."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            changes[f"{prefix}{key}"] = (old, new)
    return changes


def _checked(schema: Any, tree: Mapping[str, Any]) -> tuple[Any, Sequence[str]]:
    """Return the instance, or None if the tree does not make one, and all problems found."""
    value, texts = None, list(_texts_in(tree, ()))
    problems = [f"{_dotted(where)}: {secret}" for where, x in texts if (secret := problem_of(x))]
    try:
        value = from_tree(schema, _as_json(schema, tree), is_finite=True)
    except InvalidValue as error:
        described = (line for problem in error.problems() for line in _describe(schema, problem))
        problems += itertools.islice(described, MOST_PROBLEMS)  # each suggestion takes time
    problems = list(dict.fromkeys(problems))
    long_texts = sorted({text for _, text in texts if len(text) > LONGEST_SHOWN}, key=len)
    for text in reversed(long_texts if problems else ()):
        problems = [problem.replace(text, shown(text)) for problem in problems]
    return value, problems


def _as_json(hint: Any, value: Any, unit: str = "") -> Any:
    """Return a setting's value as JSON has it, converted to its type where YAML reads another.

    If the setting has a unit, `10k` becomes a number; if it is an integer, 1e6 becomes one; if it
    is text, a number becomes the text that the file has.
    """
    if is_dataclass(hint) and (value is None or isinstance(value, Mapping)):
        known = {setting.leaf: setting for setting in _own_settings(hint)}
        return {
            str(name): _as_json(known[name].hint, item, known[name].unit) if name in known else item
            for name, item in (value or {}).items()  # `model:` with nothing under it
        }
    hint = member_of(hint, value)
    if isinstance(value, (list, tuple)):
        hints = [inner for inner in get_args(hint) if inner is not Ellipsis]
        hints = hints if len(hints) == len(value) else [*(hints[:1] or [Any])] * len(value)
        return [_as_json(*pair, unit) for pair in zip(hints, value, strict=True)]
    if isinstance(value, Mapping):
        _, inner = get_args(hint) if len(get_args(hint)) == 2 else (Any, Any)
        return {_written(name): _as_json(inner, item) for name, item in value.items()}
    types = types_of(hint)
    if isinstance(value, WrittenInt | WrittenFloat) and types <= {str, Path, NoneType}:
        return value.written
    if isinstance(value, str) and unit and (size := parse_size(value, unit)) is not None:
        value = size
    if isinstance(value, float) and int in types and value.is_integer():
        return int(value)
    return None if value == "" and Path in types else value  # Path("") is the working directory


def _written(key: Any) -> str:
    return key.written if isinstance(key, WrittenInt | WrittenFloat) else str(key)


def types_of(hint: Any) -> set[type]:
    """Return the scalar types that a value of this type, or an item of a list, may have."""
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    inside = [inner for inner in get_args(hint) if inner is not Ellipsis]
    return set().union(*map(types_of, inside)) if inside else {hint}


def _describe(root: Any, problem: Problem) -> Sequence[str]:
    """Return lines about the problem; none if it is about a union's member that is not meant."""
    hint, unit, owner, names = root, "", root, list[str]()
    for part in problem.where:
        if is_dataclass(hint):
            owner = hint
            known = {setting.leaf: setting for setting in _own_settings(owner)}.get(str(part))
            hint, unit = (known.hint, known.unit) if known else (Any, "")
            names.append(str(part))
        elif isinstance(part, str) and member_of(hint, []) is not hint:
            is_list = isinstance(problem.value, list)  # `part` is pydantic's name of a member
            if problem.code == "tuple_type" if part.startswith("tuple") else is_list:
                return ()
        else:
            names.append(str(part))
            hint = section_of_list(hint) or Any
    name = _dotted(names)
    if problem.code == "value_error":
        return [problem.expected]
    if problem.code == "unexpected_keyword_argument":
        inside = problem.value if isinstance(problem.value, Mapping) else {}
        answers = {f"{name}.{leaf}": known_answer(root, (), str(leaf)) for leaf in inside}
        if not any(answers.values()):  # else it is another system's section
            answers = {name: suggestion(owner, root, names[:-1], names[-1])}
        return [f"{leaf}: unknown setting{answer}" for leaf, answer in answers.items()]
    if problem.code == "missing" and isinstance(problem.where[-1], str):
        return [f"{name}: missing; it has no default"]
    if problem.code == "dataclass_type":
        expected = "a section; its settings are "
        expected += ", ".join(setting.leaf for setting in _own_settings(hint))
    elif is_like_size(problem.value, unit):
        expected = f"a number of {unit}, such as {size_example(unit)}"
    else:
        expected = "a section" if problem.code == "dict_type" else problem.expected
    is_absent = problem.value is None or problem.code == "missing"
    value = "no value" if is_absent else shown(problem.value)
    return [f"{name or 'settings'}: found {value}, expected {expected}"]


def _texts_in(value: Any, where: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the location and the text of every text in a setting's value, keys included."""
    if isinstance(value, (str, Path)):
        yield where, str(value)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from ((where, str(name)), *_texts_in(item, (*where, name)))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _texts_in(item, (*where, number))


def _report(source: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    listed = problems[:MOST_PROBLEMS]
    more = " or more" if len(listed) == MOST_PROBLEMS else ""
    lines = [f"{source}: {len(listed)} problems{more}", *(f"  {problem}" for problem in listed)]
    return "\n".join(lines)


def _error_of(*sources: tuple[str, Sequence[str]]) -> ConfigError:
    """Return the error that lists the problems of each source that has some."""
    return ConfigError("\n".join(_report(*source) for source in sources if source[1]))


def _dotted(names: Sequence[Any]) -> str:
    """Return the dotted name; a part that a user made up may be long, and is cut."""
    parts = (redacted(str(name)) for name in names)  # once cut, a password is not recognized
    return ".".join(f"{x[:_LONGEST_PART]}..." if len(x) > _LONGEST_PART else x for x in parts)
