"""Programs of several commands: finds the command that was asked for, imports it alone, runs it.

Each command is a module with `add_arguments(parser)` and `run(arguments) -> exit status`. Only that module is imported:
importing torch takes seconds, and most commands need none of it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_pipeline.errors import UserError, exit_status_of
from data_pipeline.yaml_files import did_you_mean


@dataclass(frozen=True)
class Program:
    """A console script and its commands."""

    name: str
    purpose: str
    commands: Mapping[str, tuple[str, str]]  # name -> (module, what it does)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run one command of the command line; returns its exit status."""
        return exit_status_of(
            lambda: self._dispatch(sys.argv[1:] if arguments is None else list(arguments))
        )

    def usage(self) -> str:
        """What `--help` prints."""
        width = max(map(len, self.commands))
        lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in self.commands.items()]
        more = f"'{self.name} COMMAND --help' says more about one of them."
        return "\n".join(
            [f"usage: {self.name} COMMAND ...", "", self.purpose, "", *lines, "", more]
        )

    def _dispatch(self, arguments: list[str]) -> int:
        if not arguments:
            print(self.usage(), file=sys.stderr)
            return 2
        name, *rest = arguments
        if name in ("-h", "--help"):
            print(self.usage())
            return 0
        if name not in self.commands:
            raise UserError(
                f"'{self.name} {name}' is no command{did_you_mean(name, list(self.commands))}"
            )
        module_name, summary = self.commands[name]
        module = importlib.import_module(module_name)
        description = f"{summary[0].upper()}{summary[1:]}."
        parser = argparse.ArgumentParser(prog=f"{self.name} {name}", description=description)
        module.add_arguments(parser)
        return module.run(_parsed(parser, rest))


def _parsed(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Settings may stand between the options, but for commands with actions, where argparse refuses that."""
    try:
        return parser.parse_intermixed_args(arguments)
    except TypeError:
        return parser.parse_args(arguments)
