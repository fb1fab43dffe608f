"""`data-pipeline audit`: which lane reads which document at which step.

It walks lanes as LaneStream does, without reading tokens.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data_pipeline.commands.verify import CORPUS_HELP
from data_pipeline.config import MOST_ROWS, CacheConfig
from data_pipeline.corpora.corpus import Corpus, split_directory
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from data_pipeline.lanes.lane_plan import check_lanes, check_range
from data_pipeline.lanes.mixture import Mixture, exact_repeats, plan_of, repeats_of_weights
from foundation.cli import check_least
from foundation.errors import ConfigError, shown_id
from foundation.sizes import size_of
from foundation.typed_values import json_text


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Consecutive tokens of one document that one lane reads in one step."""

    step: int
    lane: int
    shard: str
    index: int  # of the document in its shard
    document: str  # id
    offset: int  # of the first token in the document
    tokens: int
    epoch: int  # of the lane


def audit_steps(
    corpus: Corpus | Mixture,
    num_lanes: int,
    seed: int,
    segment_length: int,
    steps: range,
    lanes: range | None = None,
) -> Iterator[ReadSpan]:
    """Yield what each of `lanes` (default: all) reads in each of `steps`, by step and lane.

    Lanes start at step 0. DataError if the lanes do not suit the corpus. To find the first step
    takes a few binary searches per epoch.
    """
    plan = plan_of(corpus, num_lanes, seed)
    check_lanes(plan, corpus.manifest.longest_whole)
    lanes = lanes or range(num_lanes)
    check_range(lanes, num_lanes)
    first_token = steps.start * segment_length
    walks = [plan.walk(lane, *plan.locate(lane, first_token)) for lane in lanes]
    for step in steps:
        for walk in walks:
            for spans in walk.take(segment_length):
                shard, reader = corpus.manifest.shards[spans.unit].path, corpus.shard(spans.unit)
                columns = (spans.documents, spans.offsets, spans.lengths)
                for index, offset, count in np.stack(columns, 1).tolist():
                    name = reader.document_id(index)
                    yield ReadSpan(step, walk.lane, shard, index, name, offset, count, spans.epoch)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline audit`."""
    add, tokens = parser.add_argument, size_of("tokens")
    add("directory", type=Path, help=CORPUS_HELP)
    add("--lanes", type=int, default=16, help="lanes of the run (default 16)")
    add("--seed", type=int, default=1, help="seed of the run (default 1)")
    add("--segment-length", type=tokens, default=64, help="tokens of a lane per step (default 64)")
    steps = "steps since the lanes started, END excluded (default: the first step)"
    add("--steps", type=_steps, default=range(1), metavar="FIRST:END", help=steps)
    add("--lane", type=int, help="only this lane")
    mix = "another corpus of the run's data.mixture"
    add("--mix", action="append", default=[], metavar="DIR=REPEAT", help=mix)
    add("--repeat", type=float, default=1.0, help="repeats of the first corpus, with --mix")
    add("--weights", action="store_true", help="--repeat and --mix give weights, not repeats")
    add("--ranks", type=int, default=1, help="ranks of the run; also show which reads each lane")
    add("--json", action="store_true", help="print one JSON object per line")


def run(arguments: argparse.Namespace) -> int:
    """Print one line per span of a document."""
    _check(arguments)
    data = _open_data(arguments)
    columns = ["step", "lane", "document", "offset", "tokens", "epoch"]
    if arguments.ranks > 1:
        columns.append("rank")
    if not arguments.json:
        print(*columns, sep="\t")
    lane = arguments.lane
    spans = audit_steps(
        data,
        arguments.lanes,
        arguments.seed,
        arguments.segment_length,
        arguments.steps,
        None if lane is None else range(lane, lane + 1),
    )
    for span in spans:
        row = {**asdict(span), "rank": span.lane * arguments.ranks // arguments.lanes}
        if arguments.json:
            print(json_text(row))
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
    if start < 0 or not steps:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected steps from 0 on, and END after FIRST"
        )
    return steps


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
    corpora = [Corpus.open(split_directory(path), False, CacheConfig()) for path in local]
    if not arguments.mix and arguments.repeat == 1.0:
        return corpora[0]
    exact = repeats_of_weights(corpora, repeats) if arguments.weights else exact_repeats(repeats)
    return Mixture(corpora, exact)
