"""Console scripts made of commands. Only the module of the command that was asked for is imported.

A command is a module with these two functions:

    add_arguments(parser)             defines its flags on an argparse parser
    run(arguments)                    does the work; returns its exit status, or an Answer
Related commands may share a module: the target "package.module:fetch" stands for its functions
`add_fetch_arguments` and `run_fetch`.

A command with actions (`pretrain scale fit`) is a module that defines `PROGRAM` instead: another
Program, named "pretrain scale", whose commands are the actions. Modules are imported late because
importing torch takes seconds. argparse's own subparsers would not take positional arguments, such
as `a.b=value`, between the flags.
"""

from __future__ import annotations

import argparse
import codecs
import difflib
import importlib
import io
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin

from foundation.errors import ConfigError, UserError, did_you_mean, exit_status_of
from foundation.programs import versions
from foundation.settings import Setting, known_answer, other_name, settings_of, suggestion
from foundation.typed_values import json_text

_OVERRIDES = "KEY=VALUE"
_HELP_WIDTH = 80
_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
# Returns what a resume may do with the setting of a name; '' for settings that no run has.
ResumeRule = Callable[[str], str]
_WIDEST = 100  # columns of explained settings; longer lines are hard to read


@dataclass(frozen=True)
class Answer:
    """What a command prints: text for people, or the same facts as values with `--json`."""

    text: str
    values: Any
    status: int = 0


Run = Callable[[argparse.Namespace], "int | Answer"]


@dataclass(frozen=True)
class Program:
    """A console script, or a command with actions."""

    name: str
    purpose: str
    commands: Mapping[str, tuple[str, str]]  # name -> (target, what it does)
    libraries: tuple[str, ...] = ()  # `--version` shows their versions, too
    other_names: tuple[tuple[str, str], ...] = ()  # guesses, and the commands that they mean
    schema: str = ""  # MODULE:CLASS of the settings that commands take, imported for errors

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run one command of the command line and return its exit status."""
        _escape_what_cannot_be_encoded()
        return exit_status_of(
            lambda: self.dispatch(sys.argv[1:] if arguments is None else list(arguments))
        )

    def usage(self) -> str:
        """Return what `--help` prints."""
        width = max(map(len, self.commands))
        lines = [
            textwrap.fill(
                f"{name:{width}}  {summary}",
                _HELP_WIDTH,
                initial_indent="  ",
                subsequent_indent=" " * (width + 4),
                break_on_hyphens=False,
            )
            for name, (_, summary) in self.commands.items()
        ]
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
            print(f"{self.name} {versions(self.libraries)}\nto cite it: CITATION.cff of its source")
            return 0
        if name == "--complete":  # called by a shell, which puts the typed line into COMP_LINE
            line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", 1 << 20))]
            print("\n".join(self.candidates([*line.split()[1:], *line[-1:].split(" ")[1:]])))
            return 0
        if name not in self.commands:
            near = difflib.get_close_matches(name, self.commands, n=1)
            meant = dict(self.other_names).get(name) or "".join(f"{self.name} {x}" for x in near)
            hint = f"did you mean '{meant}'? or" if meant else "expected"
            known = ", ".join(self.commands)
            raise UserError(f"unknown command '{self.name} {name}'; {hint} one of: {known}")
        command = self.command(name)
        if isinstance(command, Program):
            return command.dispatch(rest)
        parser, run = command
        parser.refuse_unknown_flags(rest, self.schema)
        parsed = parser.parse_intermixed_args(rest)
        answer = run(parsed)
        if isinstance(answer, Answer):
            print(json_text(answer.values) if parsed.json else answer.text)
            return answer.status
        return answer

    def candidates(self, words: Sequence[str]) -> list[str]:
        """Return completions of the last word; [] where a file's name may follow.

        `words` are the typed words after the program's name.
        """
        name, *rest = words or [""]
        if not rest:
            return [command for command in self.commands if command.startswith(name)]
        command = self.command(name) if name in self.commands else None
        if isinstance(command, Program):
            return command.candidates(rest)
        return command[0].candidates(rest) if command else []

    def command(self, name: str) -> Program | tuple[_Parser, Run]:
        """Import a command and return its Program, or its parser and `run` function."""
        target, summary = self.commands[name]
        module_name, _, function = target.partition(":")
        module = importlib.import_module(module_name)
        if not function and hasattr(module, "PROGRAM"):
            return module.PROGRAM
        parser = _Parser(
            allow_abbrev=False,
            prog=f"{self.name} {name}",
            description=f"{summary[0].upper()}{summary[1:]}.",
        )
        getattr(module, f"add_{function}_arguments" if function else "add_arguments")(parser)
        return parser, getattr(module, f"run_{function}" if function else "run")


def targets(prefix: str, summaries: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return commands whose targets are `prefix` ("package." or "package.module:") and a name."""
    return {name: (prefix + name.replace("-", "_"), text) for name, text in summaries.items()}


def _escape_what_cannot_be_encoded() -> None:
    """Print escapes, instead of failing, where an output's encoding lacks a character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong command line on one line, as all errors are reported."""

    def refuse_unknown_flags(self, arguments: Sequence[str], schema: str) -> None:
        """Raise UserError for an unknown flag; argparse might complain of its value instead.

        It names the setting of the `schema` that may be meant.
        """
        for word in itertools.takewhile(lambda word: word != "--", arguments):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                # Dashes are not compared: all flags share them.
                flags = {flag.lstrip("-"): flag for flag in self._option_string_actions}
                del flags["h"], flags["help"]
                longer = [flag for flag in flags if flag.startswith(name.lstrip("-"))]
                close = longer or difflib.get_close_matches(name.lstrip("-"), flags, n=1)
                hint = did_you_mean(flags[close[0]] if close else "", list(flags.values()))
                takes_settings = any(action.metavar == _OVERRIDES for action in self._actions)
                if schema and takes_settings and not close:
                    module, _, class_name = schema.partition(":")
                    root = getattr(importlib.import_module(module), class_name)
                    known = known_answer(root, (), name.lstrip("-").replace("-", "_"))
                    hint = f"{known}; settings are KEY=VALUE" if known else hint
                raise UserError(f"unrecognized arguments: {name}{hint}")

    def candidates(self, words: Sequence[str]) -> list[str]:
        """Return completions of the last word: flags after a dash, else the last flag's choices."""
        latest = next((word for word in reversed(words[:-1]) if word.startswith("-")), "")
        action = self._option_string_actions.get(latest)
        choices: Iterable[Any] = (action and action.choices) or ()
        if words[-1].startswith("-"):
            choices = self._option_string_actions
        return [text for text in map(str, choices) if text.startswith(words[-1])]

    def error(self, message: str) -> NoReturn:
        message = message.replace(f", {_OVERRIDES}", "")  # argparse calls overrides required
        raise UserError(f"{message}; see {self.prog} --help")


def add_prefix(parser: argparse.ArgumentParser) -> None:
    """Define the argument of every command that explains settings."""
    words = "a setting, a section, a part of a name or of an explanation (default: all)"
    parser.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help=words)


def add_experiment(parser: argparse.ArgumentParser, words: str = "experiment file (YAML)") -> None:
    """Define the arguments `experiment` and `overrides`."""
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help=words)
    add_overrides(parser, "settings that override the file's, such as model.dropout=0.1")


def add_overrides(parser: argparse.ArgumentParser, words: str) -> None:
    """Define the argument `overrides`."""
    parser.add_argument("overrides", nargs="*", metavar=_OVERRIDES, help=words)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Define `--json` for a command that returns an Answer."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def check_least(arguments: argparse.Namespace, least: int, *names: str) -> None:
    """Raise ConfigError for the first of these flags with a value below `least`; None is valid."""
    for name in names:
        value = getattr(arguments, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not number >= least:
                raise ConfigError(f"--{name.replace('_', '-')}={number} must be {least} or more")


def check_output_file(option: str, path: Path | None, example: str) -> None:
    """Raise ConfigError unless a file can be written at `path`."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; name a file, such as {path / example}")
    _check_parents(option, path)


def check_output_directory(option: str, path: Path) -> None:
    """Raise ConfigError unless `path` is a directory or can become one."""
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{option} {path} is a file; name a directory, since several files are written"
        )
    _check_parents(option, path)


def _check_parents(option: str, path: Path) -> None:
    nearest = next((parent for parent in path.parents if parent.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise ConfigError(
            f"{option} {path}: {nearest} is a file, not a directory; choose another path"
        )


def no_resume(name: str) -> str:
    return ""


def matching(schema: Any, prefix: str) -> list[Setting]:
    """Return the settings with the name `prefix`; else with it in their name or among their
    choices; else with it in their meaning. A section's own settings follow it.

    ConfigError, with a close name, if no setting matches.
    """
    known = list(settings_of(schema))
    other = other_name(schema, prefix.rpartition(".")[2])
    exact = [one.name for one in known if prefix == one.leaf or one.name in (prefix, other)]
    if other and not exact:
        raise ConfigError(f"{prefix}: unknown setting; here it is {other}")
    meant = (
        exact
        or [one.name for one in known if prefix in one.name or prefix in _choices(one.hint)]
        or [one.name for one in known if prefix.lower() in one.meaning.lower()]
    )
    if not meant:  # a mapping's item, such as model.mixers.deltanet
        meant = [one.name for one in known if not one.section and prefix.startswith(one.name + ".")]
    if not meant:
        *sections, name = prefix.split(".")
        owners = [one.section for one in known if one.name == ".".join(sections)]
        if sections and not owners:  # another system's section
            hint = known_answer(schema, (), name) or suggestion(schema, schema, (), sections[0])
        else:
            hint = suggestion((*owners, schema)[0] or schema, schema, sections, name)
        raise ConfigError(f"{prefix}: unknown setting{hint}")
    inside = tuple(f"{name}{mark}" for name in meant for mark in (".", "["))
    return [one for one in known if one.name in meant or one.name.startswith(inside)]


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the names that a setting's type allows, for it or its items; () for other types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(itertools.chain.from_iterable(map(_choices, get_args(hint))))


def show_settings(schema: Any, prefix: str, rule: ResumeRule = no_resume) -> int:
    """Print the settings that match `prefix`, in lines as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    for line in as_text(schema, prefix, rule, width):
        print(line)
    return 0


def as_text(schema: Any, prefix: str, rule: ResumeRule, width: int) -> Iterator[str]:
    """Yield lines of at most `width` columns about the settings that match `prefix`."""
    for setting in matching(schema, prefix):
        head = setting.name if setting.section else f"{setting.name} = {default_of(setting)}"
        facts = [setting.meaning]
        if not setting.section:
            facts.append(f"Value: {kind_of(setting)}{_and(rule(setting.name))}")
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
    """Return the default as a file would set it; `required` if there is no default."""
    return "required" if setting.default is MISSING else value_text(setting.default)


def as_overrides(settings: Mapping[str, Any]) -> str:
    """Return the settings as a user would type them on a command line."""
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
        *others, last = map(value_text, items)
        return f"{', '.join(others)} or {last}"
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
