"""Console scripts made of commands. Only the module of the command that was asked for is imported.

A command is a module with these two functions:

    add_arguments(parser)             defines its flags on an argparse parser
    run(arguments) -> exit status     does the work

Related commands may share a module: the target "package.module:fetch" stands for its functions
`add_fetch_arguments` and `run_fetch`.

A module may have HINTS: what to do instead of settings (`KEY=VALUE`) or of further arguments
(`TEXT`) that the command does not take.

A command with actions (`pretrain scale fit`) is a module that defines `PROGRAM` instead: another
Program, named "pretrain scale", whose commands are the actions. Programs nest to any depth.

Modules are imported late because importing torch takes seconds and most commands do not need it.
Positional arguments such as `a.b=value` overrides may stand before, between and after the flags.
argparse's own subparsers do not support that.

Lines of a command's output, fitted to the terminal: its columns stay readable at 80 of them.

The settings of a schema as text for a terminal.
"""

from __future__ import annotations

import argparse
import codecs
import difflib
import importlib
import io
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin

from foundation.errors import ConfigError, UserError, exit_status_of
from foundation.own_programs import installed_version
from foundation.settings import (
    CLOSE,
    MOST_SUGGESTED,
    OTHER_NAMES,
    Setting,
    settings_called,
    settings_of,
    suggestion,
)
from foundation.yaml_files import YAML_SUFFIXES, did_you_mean

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_UNKNOWN = "unrecognized arguments: "  # argparse's words
_REQUIRED = "the following arguments are required: "


@dataclass(frozen=True)
class Program:
    """A console script, or a command with actions."""

    name: str
    purpose: str
    commands: Mapping[str, tuple[str, str]]  # name -> (target, what it does)
    meant: Mapping[str, str] = field(default_factory=dict)  # what others would guess -> what to run

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run one command of the command line and return its exit status."""
        _escape_what_cannot_be_encoded()
        return exit_status_of(
            lambda: self.dispatch(sys.argv[1:] if arguments is None else list(arguments))
        )

    def usage(self) -> str:
        """Return what `--help` prints."""
        width = max(map(len, self.commands))
        lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in self.commands.items()]
        more = f"Run '{self.name} COMMAND --help' for the flags of a command."
        return "\n".join(
            [f"usage: {self.name} COMMAND ... | --version", "", self.purpose, "", *lines, "", more]
        )

    def dispatch(self, arguments: list[str]) -> int:
        """Run the command named by the first argument; UserError if there is no such command."""
        if not arguments:
            print(self.usage(), file=sys.stderr)
            return 2
        name, *rest = arguments
        if name in ("-h", "--help"):
            print(self.usage())
            return 0
        if name == "--version":
            print(f"{self.name} {installed_version()}")
            return 0
        if name not in self.commands:
            hint = did_you_mean(name, list(self.commands))
            hint = f"; use '{self.meant[name]}'" if name in self.meant else hint
            if "/" in name:  # the RUN or file that a command is followed by
                hint = f"; one of {', '.join(sorted(self.commands))} comes before {name}"
            raise UserError(f"unknown command '{self.name} {name}'{hint}")
        target, summary = self.commands[name]
        module_name, _, function = target.partition(":")
        module = importlib.import_module(module_name)
        if not function and hasattr(module, "PROGRAM"):
            return module.PROGRAM.dispatch(rest)
        parser = _Parser(
            allow_abbrev=False,
            prog=f"{self.name} {name}",
            description=f"{summary[0].upper()}{summary[1:]}.",
        )
        getattr(module, f"add_{function}_arguments" if function else "add_arguments")(parser)
        run = getattr(module, f"run_{function}" if function else "run")
        parser.hints = getattr(module, "HINTS", parser.hints)
        rest = parser.with_overrides_first(rest)
        parser.words = rest
        parser.refuse_unknown_flags(rest)
        return run(parser.parse_intermixed_args(rest))


def _escape_what_cannot_be_encoded() -> None:
    """Show escapes on an output whose encoding lacks characters, instead of failing at them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as every other error: in one line."""

    hints: Mapping[str, str] = MappingProxyType({})  # HINTS of the command's module
    words: Sequence[str] = ()  # of the command line

    def refuse_unknown_flags(self, arguments: Sequence[str]) -> None:
        """Raise UserError for a flag that there is not, whose value may look like an argument."""
        flags = itertools.takewhile(lambda each: each != "--", arguments)
        for flag in (each for each in flags if each.startswith("--")):
            if flag.partition("=")[0] not in self._option_string_actions:
                self.error(f"{_UNKNOWN}{flag}")

    def with_overrides_first(self, arguments: Sequence[str]) -> list[str]:
        """The arguments with the file and overrides that follow a flag's several numbers moved
        before them."""
        if not any(isinstance(action, _Overrides) for action in self._actions):
            return list(arguments)
        moved, kept, flag = [], [], None
        for word in arguments:
            flag = self._option_string_actions.get(word, None if word.startswith("--") else flag)
            takes = flag.type if flag is not None and flag.nargs == "+" else None
            is_file = takes is not Path and word.endswith(YAML_SUFFIXES)
            (moved if takes and (is_file or _OVERRIDE.match(word)) else kept).append(word)
        return moved + kept

    def error(self, message: str) -> NoReturn:
        _, _, rest = message.partition(_UNKNOWN)
        hint = self._hint(rest.split()[0].partition("=")[0], rest) if rest else ""
        if "expected one argument" in message and self._has_value_with_dash(message.split()[1]):
            hint = "; a value that starts with a dash follows an equals sign, as in --flag=-1"
        if flag := self._flag_that_took(message):
            hint = f"; {flag} takes all words up to the next flag, so write other arguments first"
        message = message.replace(
            ", KEY=VALUE", ""
        )  # argparse takes what may be left out for required
        raise UserError(f"{message}{hint or f'; see {self.prog} --help'}")

    def _flag_that_took(self, message: str) -> str:
        """The flag of several values that may have taken an argument which is missing, or ""."""
        known = self._option_string_actions
        if not self.words or not self.words[0].startswith("-"):
            return ""  # what comes first is not missing
        several = [word for word in self.words if word in known and known[word].nargs in ("+", "*")]
        if re.match(f"{_REQUIRED}[^-]", message):
            return several[-1] if several else ""
        refused = message.partition(": expected")[0]  # of no value at all, argparse expects one
        return next((flag for flag in several if refused.startswith(f"argument {flag}: ")), "")

    def _has_value_with_dash(self, names: str) -> bool:
        """Whether a word that is no flag, but begins like one, follows the flag `-n/--names:`."""
        flags = names.rstrip(":").split("/")
        after = [word for flag, word in itertools.pairwise(self.words) if flag in flags]
        known = self._option_string_actions
        return any(word[:1] == "-" and word.partition("=")[0] not in known for word in after)

    def _hint(self, name: str, unknown: str) -> str:
        """Return how to write what was not recognized: a flag of this name, or arguments."""
        if not name.startswith("-"):
            kind = "KEY=VALUE" if _OVERRIDE.match(unknown) else "TEXT"
            return f"; {self.hints[kind]}" if kind in self.hints else ""
        schemas = (action.schema for action in self._actions if isinstance(action, _Overrides))
        setting = name.lstrip("-").replace("-", "_")
        if meant := [
            f"{each}=VALUE" for schema in schemas for each in settings_called(schema, setting)
        ]:
            return f"; a setting has no dashes: {' or '.join(meant[:MOST_SUGGESTED])}"
        flags = {flag.lstrip("-"): flag for flag in self._option_string_actions}
        del flags["h"], flags["help"]
        # without their dashes, by which all flags are alike
        begun = [flag for flag in flags if flag.startswith(name.lstrip("-"))]
        close = begun or difflib.get_close_matches(name.lstrip("-"), flags, n=1, cutoff=CLOSE)
        if close:
            return f"; did you mean {flags[close[0]]!r}?"
        return f"; expected one of: {', '.join(sorted(flags.values()))}" if flags else ""


def add_experiment(
    parser: argparse.ArgumentParser,
    schema: Any,
    words: str = "experiment file (YAML)",
    file: str = "experiment",
) -> None:
    """Define the argument `file` and `overrides` of settings of `schema`.

    Overrides may also come first.
    """
    parser.add_argument(file, type=Path, metavar=file.upper(), help=words)
    overrides = parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        action=_Overrides,
        help="settings that override the file's, such as model.dropout=0.1",
    )
    assert isinstance(overrides, _Overrides)
    overrides.schema, overrides.file = schema, file


class _Overrides(argparse.Action):
    """Takes the one name that is no override as the file, wherever it stands."""

    schema: Any = None  # of the settings
    file = ""  # the argument for it

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        first = getattr(namespace, self.file)
        names = [str(first), *values]
        files = [name for name in names if not _OVERRIDE.match(name)]
        if len(files) != 1 and names[0] not in files and not first.exists():
            found = " ".join(names)
            raise UserError(
                f"found {found}, expected one {self.file} and overrides of its settings"
            )
        if len(files) == 1:
            setattr(namespace, self.file, Path(files[0]))
            names = files + [name for name in names if name != files[0]]
        namespace.overrides = names[1:]


def check_least(arguments: argparse.Namespace, least: int, *names: str) -> None:
    """Raise ConfigError for the first of these flags with a value below `least`; None is none."""
    for name in names:
        value = getattr(arguments, name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and not each >= least:
                raise ConfigError(f"--{name.replace('_', '-')}={each} must be {least} or more")


LEAST_WIDTH = 40


def print_fitted(lines: Iterable[str], indent: int) -> None:
    """Print the lines; on a terminal, what does not fit continues below, indented by `indent`.

    In a pipe a line stays whole, for those who search in it.
    """
    width = terminal_width()
    for line in fitted(lines, indent, width) if width else lines:
        print(line)


def terminal_width() -> int:
    """The columns of the terminal that stdout is; 0 in a pipe, where lines stay whole."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def fitted(lines: Iterable[str], indent: int, width: int) -> Iterator[str]:
    """Yield the lines, those that are longer than `width` in several."""
    for line in lines:
        if len(line) <= width:
            yield line
            continue
        start, text = line[:indent], line[indent:]
        if start.strip() and not start.endswith(" "):  # no column begins there
            start, text = line[: len(line) - len(line.lstrip())], line
        yield from textwrap.wrap(
            text.strip(),
            max(width, LEAST_WIDTH),
            initial_indent=start,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )


_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
# What a resume may do with a setting, by its name; empty for settings that no run has.
ResumeRule = Callable[[str], str]


def no_resume(name: str) -> str:
    return ""


def matching(schema: Any, prefix: str) -> list[Setting]:
    """Return the settings that are called `prefix` here or in another system, with those in them.

    If there are none, those that have it in a name or as a choice. ConfigError, with a close name,
    if there are none either.
    """
    known = list(settings_of(schema))
    others: Mapping[str, str] = getattr(schema, OTHER_NAMES, {})
    names = {
        each.name: (each.name, each.leaf, *others.get(each.name, "").split()) for each in known
    }
    choices = {x.name: get_args(x.hint) if get_origin(x.hint) is Literal else () for x in known}
    meant = [name for name, called in names.items() if prefix in called] or [
        name
        for name, called in names.items()
        if any(prefix in each for each in called) or prefix in choices[name]
    ]
    if not meant:
        *sections, name = prefix.split(".")
        owners = [each.section for each in known if each.name == ".".join(sections)]
        hint = suggestion((*owners, schema)[0] or schema, schema, sections, name, "")
        raise ConfigError(f"{prefix}: unknown setting{hint}")
    inside = tuple(f"{name}{mark}" for name in meant for mark in (".", "["))
    return [x for x in known if x.name in meant or x.name.startswith(inside)]


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
        text += f" {setting.allowed}"
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


def _and(text: str) -> str:
    return f"; {text}" if text else ""
