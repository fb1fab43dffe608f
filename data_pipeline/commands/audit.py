"""`data-pipeline audit`: which lane reads which document at which step."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from data_pipeline.commands.verify import CORPUS_HELP
from data_pipeline.config import CacheConfig, SegmentLengths
from data_pipeline.corpora.corpus import Corpus, split_directory
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from data_pipeline.lanes.audit import ReadSpan, audit_steps, find_document
from data_pipeline.lanes.mixture import Mixture, exact_repeats, repeats_of_weights
from foundation.cli import check_least
from foundation.errors import ConfigError, shown_id
from foundation.settings import MOST_ROWS, size_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline audit`."""
    add = parser.add_argument
    add("directory", type=Path, help=CORPUS_HELP)
    add("--lanes", type=int, default=16, help="lanes of the run (default 16)")
    add("--seed", type=int, default=1, help="seed of the run (default 1)")
    add(
        "--segment-length",
        type=size_of("tokens"),
        default=64,
        help="tokens of a lane per step (default 64)",
    )
    then = "segment length from a step on, for phases that change nothing else"
    add("--then", type=_then, action="append", default=[], metavar="STEP=LENGTH", help=then)
    add("--steps", type=_steps, metavar="FIRST:END", help="without END (default: the first step)")
    first = "step of the run at which the lanes started (default 0)"
    add("--first-step", type=int, default=0, metavar="STEP", help=first)
    add("--lane", type=int, help="only this lane")
    add("--document", metavar="ID", help="when this document is read, in --epochs or --steps")
    add("--epochs", type=int, help="epochs to search for --document (default 1, or by --steps)")
    mix = "another corpus of the run's data.mixture"
    add("--mix", action="append", default=[], metavar="DIR=REPEAT", help=mix)
    add("--repeat", type=float, default=1.0, help="repeats of the first corpus, with --mix")
    add("--weights", action="store_true", help="--repeat and --mix give weights, not repeats")
    add("--ranks", type=int, default=1, help="also show which of this many ranks reads the lane")
    add("--json", action="store_true", help="print one JSON object per line")


def run(arguments: argparse.Namespace) -> int:
    """Print one line per span of a document."""
    _check(arguments)
    if arguments.document is None and arguments.steps is None:
        arguments.steps = range(arguments.first_step, arguments.first_step + 1)
    if arguments.steps is not None and not 0 <= arguments.first_step <= arguments.steps.start:
        raise ConfigError(
            f"--steps start at {arguments.steps.start}, before the lanes did at "
            f"--first-step={arguments.first_step}; audit the phase before with its own lanes and "
            "seed"
        )
    data = _open_data(arguments)
    columns = ["step", "lane", "document", "offset", "tokens", "epoch"]
    if arguments.ranks > 1:
        columns.append("rank")
    if not arguments.json:
        print(*columns, sep="\t")
    for span in _spans(data, arguments):
        row = {**asdict(span), "rank": span.lane * arguments.ranks // arguments.lanes}
        if arguments.json:
            print(json.dumps(row))
            continue
        row["document"] = shown_id(span.document)
        print(*(row[column] for column in columns), sep="\t")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    check_least(arguments, 1, "lanes", "segment_length", "ranks")
    if arguments.segment_length > MOST_ROWS:
        raise ConfigError(
            f"--segment-length={arguments.segment_length} must be at most {MOST_ROWS:,}"
        )
    if arguments.epochs is not None:
        check_least(arguments, 1, "epochs")
    if arguments.lanes % arguments.ranks:
        raise ConfigError(
            f"--lanes={arguments.lanes} does not divide over {arguments.ranks} ranks; "
            f"use a multiple of {arguments.ranks}"
        )


def _steps(text: str) -> range:
    first, colon, end = text.partition(":")
    try:
        start = int(first or 0)
        steps = range(start, int(end) if colon else start + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected FIRST:END such as 0:200, or one step"
        ) from None
    if not steps:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, which contains no step; END must be after FIRST"
        )
    return steps


def _then(text: str) -> tuple[int, int]:
    step, _, length = text.partition("=")
    try:
        return int(step), int(length)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected STEP=LENGTH such as 1000=128"
        ) from None


def _spans(data: Corpus | Mixture, arguments: argparse.Namespace) -> Iterator[ReadSpan]:
    """Yield the spans with steps of the run. Lanes count steps from their own start."""
    first_step, steps = arguments.first_step, arguments.steps
    changes = [(step - first_step, length) for step, length in arguments.then]
    lengths = SegmentLengths(arguments.segment_length, changes)
    settings = (arguments.lanes, arguments.seed, lengths)
    lane = arguments.lane
    if steps is not None:
        steps = range(steps.start - first_step, steps.stop - first_step)
    if arguments.document is None:
        assert steps is not None, "run() has set the first step"
        spans = audit_steps(data, *settings, steps, None if lane is None else range(lane, lane + 1))
    else:
        spans = find_document(data, arguments.document, *settings, arguments.epochs, steps)
    for span in spans:
        if lane in (None, span.lane):
            yield replace(span, step=span.step + first_step)


def _open_data(arguments: argparse.Namespace) -> Corpus | Mixture:
    """Open the corpus, or the mixture in the order of the run's data.mixture."""
    directories, repeats = [arguments.directory], [arguments.repeat]
    for text in arguments.mix:
        directory, _, repeat = text.rpartition("=")
        try:
            repeats.append(float(repeat))
        except ValueError:
            directory = ""
        if not directory:
            raise ConfigError(f"found --mix {text}, expected DIR=REPEAT such as books=2.5")
        directories.append(Path(directory))
    local = [local_corpus_directory(directory, CacheConfig()) for directory in directories]
    corpora = [Corpus.open(split_directory(path), check_hashes=False) for path in local]
    if not arguments.mix and arguments.repeat == 1.0:
        return corpora[0]
    exact = repeats_of_weights(corpora, repeats) if arguments.weights else exact_repeats(repeats)
    return Mixture(corpora, exact)
