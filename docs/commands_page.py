"""Writes docs/commands.md from the programs' parsers: `python -m docs.commands_page`."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import data_pipeline.cli
import launcher.cli
import pretrain.cli
from foundation.cli import Program

PATH = Path(__file__).with_name("commands.md")
MAKEFILE = PATH.parents[1] / "Makefile"
PROGRAMS = (data_pipeline.cli.PROGRAM, pretrain.cli.PROGRAM, launcher.cli.PROGRAM)
INTERNAL = ("launcher batch",)  # what only batch scripts call
INTRODUCTION = """\
# Commands

    pretrain --help             # every program and every command has --help
    pretrain --version          # with the commit of a checkout, torch and DeepSpeed

Written by `python -m docs.commands_page` from the parsers. Config overrides (`KEY=VALUE`) may stand
before and after the experiment and the options. `--json` prints values instead of text.
[Exit codes](#exit-codes) are the same for all.

RUN is the directory of a run, or a run's name in `runs/`: `first` means `runs/first` where there is
no `./first`, `SWEEP/CELL` the run of a cell. `status` and `report` also take the folder of a sweep
or a sweep file, which stand for all its cells that have started.

Tab completion, for each program:

    complete -o default -C 'pretrain --complete' pretrain                              # bash
    autoload -Uz bashcompinit && bashcompinit                                    # zsh, then as bash
    complete -c pretrain -a '(COMP_LINE=(commandline -cp) pretrain --complete)'         # fish
"""
EXIT_CODES = """\
## Exit codes

| status | meaning |
|---|---|
| 0 | done |
| 1 | a check found a difference |
| 2 | the input needs a change, which one line says, or the supervisor gave up |
| 74, 77 | storage or network failed; the node is unusable (ranks only; the launcher tries again) |
| 75 | stopped on request, after saving a checkpoint if training had begun |
| 76 | out of memory (ranks only; the launcher halves the micro-batch and restarts) |
| 130 | interrupted |
"""
# The page that tells more of a command.
PAGES = {
    "new, describe, train, report, verify-resume, checkpoint": "training",
    "adopt": "hybrids",
    "branch, signal": "changing",
    "evaluate, generate, import-original": "evaluation",
    "export": "ecosystem",
    "check-mixer": "your-layer",
    "settings": "settings",
    "scale": "scaling",
    "build, inspect, verify": "data",
    "audit": "lanes",
}


def page() -> str:
    """Return the text of docs/commands.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    pages = {name: page for names, page in PAGES.items() for name in names.split(", ")}
    yield INTRODUCTION
    for program in PROGRAMS:
        yield from (f"## {program.name}", "", program.purpose, "")
        for name in program.commands:
            yield from _command(program, name, pages.get(name, "launcher"))
    yield from ("## make", "", "| target | what it does |", "|---|---|")
    for target, text in re.findall(r"^([a-z-]+):.*?## (.*)", MAKEFILE.read_text(), re.MULTILINE):
        yield f"| `make {target}` | {text.replace('|', '/')} |"
    yield from ("", EXIT_CODES.rstrip())


def _command(program: Program, name: str, page: str) -> Iterator[str]:
    """Yield a command's heading, purpose and flags; those of each of its actions."""
    command = program.command(name)
    title = f"{program.name} {name}"
    if title in INTERNAL:
        return
    if isinstance(command, Program):
        for action in command.commands:
            yield from _command(command, action, page)
        return
    parser, _ = command
    yield from (f"### {title}", "", f"{parser.description} More: [{page}.md]({page}.md).", "")
    yield from ("| argument | meaning |", "|---|---|")
    for action in parser._actions:
        if action.dest != "help" and action.help != argparse.SUPPRESS:
            meaning = (action.help or "") % {"default": action.default, "prog": parser.prog}
            yield f"| `{_form(action)}` | {meaning.replace('|', '/')} |".replace("|  |", "| |")
    yield ""


def _form(action: argparse.Action) -> str:
    """Return how an argument is written: `--lanes LANES`, `RUN ...`."""
    choices = "|".join(map(str, action.choices)) if action.choices else ""
    shown = action.metavar or choices or action.dest.upper()
    value = (" ".join(shown) if isinstance(shown, tuple) else shown).replace("|", "\\|")
    if action.nargs == 0:
        value = ""
    elif action.nargs in ("*", "+"):
        value += " ..."
    return " ".join(filter(None, (", ".join(action.option_strings), value)))


if __name__ == "__main__":
    PATH.write_text(page())
