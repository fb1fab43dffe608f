"""All settings of a schema as one list, with their meanings, and the settings meant by wrong names.

A setting's meaning is the docstring below its field. Error messages, the commands `settings` and
docs/settings.md show the same sentence.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from data_pipeline.setting_fields import RANGE, UNIT, Range
from data_pipeline.yaml_files import did_you_mean

MOST_SUGGESTED = 3
CLOSE = 0.75  # similarity from which a name of another system counts as misspelt
OTHER_NAMES = "OTHER_NAMES"  # attribute of a schema: dotted name -> its names in other systems
ELSEWHERE = "ELSEWHERE"  # attribute: what to do -> settings of other systems that ours do not have


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


def settings_called(root: Any, name: str) -> list[str]:
    """Return the dotted names of the settings that are called so, here or else in other systems."""
    known = [each for each in settings_of(root) if "[]" not in each.name and each.section is None]
    others: Mapping[str, str] = getattr(root, OTHER_NAMES, {})
    if name in (each.name for each in known):
        return [name]
    own = [each.name for each in known if name == each.leaf]
    return own or [each.name for each in known if name in others.get(each.name, "").split()]


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


def suggestion(schema: Any, root: Any, where: Sequence[str], name: str, value: Any) -> str:
    """Return the end of an error about the unknown `name` in the section `where` of `root`.

    It names the settings that are called so elsewhere, in the schema or in another system, what to
    do instead, or else a close name.
    """
    for advice, names in getattr(root, ELSEWHERE, {}).items():
        if name in names.split():
            return f"; {advice}"
    known = {each.name: each for each in settings_of(root)}
    others: Mapping[str, str] = getattr(root, OTHER_NAMES, {})
    meant = [each for each in known.values() if name in others.get(each.name, "").split()]
    if meant:
        target = _target(meant[0], known, value)
        meaning = target.meaning.rstrip(".")
        return f"; use {target.name}{f' ({meaning})' if meaning else ''}"
    plain = [each for each in known.values() if "[]" not in each.name]
    inside = [each for each in plain if each.name.startswith(".".join((*where, "")))]
    same = [each for each in inside if each.leaf == name] or [x for x in plain if x.leaf == name]
    if same:
        targets = [_target(each, known, value).name for each in same]
        return f"; did you mean {_listed(targets)}?"
    own = [each.name for each in fields(schema)]
    nested = {each.leaf: each.name for each in reversed(inside)}
    close = difflib.get_close_matches(name, nested, n=1)
    if difflib.get_close_matches(name, own):
        return did_you_mean(name, own)
    if close:
        return f"; did you mean {nested[close[0]]!r}?"
    foreign = {other: each for each, text in others.items() for other in text.split()}
    close = difflib.get_close_matches(name, foreign, n=1, cutoff=CLOSE)
    return f"; did you mean {foreign[close[0]]!r}?" if close else did_you_mean(name, own)


def section_hint(section: Any, where: Sequence[str], value: Any) -> str:
    """Return the end of an error about one `value` in place of a section: what to write."""
    name = ".".join(where)
    hints = get_type_hints(section)
    for each in fields(section):
        if value in _choices(hints[each.name]):
            return f"; write {name}.{each.name}={value}"
    names = ", ".join(each.name for each in fields(section))
    return f"; its settings are {names}"


def _target(setting: Setting, known: Mapping[str, Setting], value: Any) -> Setting:
    """Return the setting; of a section, the one in it that can have this value, if any can."""
    inside = (each for each in known.values() if each.name.startswith(f"{setting.name}."))
    return next((each for each in inside if value in _choices(each.hint)), setting)


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:MOST_SUGGESTED]]
    return " or ".join([", ".join(shown[:-1]), shown[-1]] if shown[:-1] else shown)
