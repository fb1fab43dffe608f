"""The command `data-pipeline` and its actions. What an action needs is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.command_flags import check_positive
from data_pipeline.commands.audit import add_audit_arguments
from data_pipeline.commands.build import add_build_arguments, add_merge_arguments
from data_pipeline.commands.store import add_fetch_arguments, add_upload_arguments, near
from data_pipeline.errors import DataError, exit_status_of
from data_pipeline.location import shown, url_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, or 2 after a line that says what the user can put right."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes the settings in one place only; users write them before, between and after the flags.
    if any(text.startswith("-") for text in rest) or (rest and not hasattr(options, "settings")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.settings += rest
    return exit_status_of(lambda: options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="data-pipeline", description="Text to shards of tokens, and what is in them."
    )
    commands = parser.add_subparsers(
        required=True, metavar="build | merge | fetch | upload | verify | inspect | audit"
    )
    build = commands.add_parser(
        "build", help="turn text into a corpus; the same command goes on after a crash"
    )
    add_build_arguments(build)
    add_merge_arguments(
        commands.add_parser("merge", help="make one corpus of the parts that `build --part` built")
    )
    add_fetch_arguments(
        commands.add_parser("fetch", help="copy a corpus from a store, checking every shard")
    )
    add_upload_arguments(
        commands.add_parser(
            "upload", help="copy a corpus to an object store and read back every byte"
        )
    )
    verify = commands.add_parser("verify", help="read every byte and compare it with the manifest")
    inspect = commands.add_parser(
        "inspect", help="show sizes, tokenizer, a sample and how even the lanes are"
    )
    audit = commands.add_parser(
        "audit", help="list what each lane reads at each step, without reading tokens"
    )
    for command, run in ((verify, _verify), (inspect, _inspect), (audit, None)):
        command.add_argument(
            "directory", type=Path, help="a corpus, one of its splits, or a corpus' URL"
        )
        command.set_defaults(run=run)
    for command in (inspect, audit):
        command.add_argument("--lanes", type=int, default=16)
        command.add_argument("--seed", type=int, default=1, help="of the run")
    add_audit_arguments(audit)
    return parser


def _verify(options: argparse.Namespace) -> int:
    from data_pipeline.commands.verify import splits_of, verify_split
    from data_pipeline.progress import StatusLine

    problems = []
    status = StatusLine()
    if url := url_of(options.directory):
        from data_pipeline.commands.copy_corpus import problems_at

        problems = problems_at(url, status.show)
    else:
        for split in splits_of(options.directory):
            problems += verify_split(split, status.show)
    status.end()
    if problems:
        for problem in problems[:-1]:
            print(problem)
        raise DataError(problems[-1])
    print(f"{shown(options.directory)}: every shard is what its manifest says")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from data_pipeline.commands.verify import describe_split, splits_of

    check_positive(options, "lanes")
    for split in splits_of(near(options.directory)):
        is_only_evaluated = split.name == "validation"
        for line in describe_split(split, 0 if is_only_evaluated else options.lanes, options.seed):
            print(line)
    return 0
