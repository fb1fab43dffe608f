"""`data-pipeline audit`: who reads what, when."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.command_flags import check_positive
from data_pipeline.commands.store import near
from data_pipeline.errors import ConfigError
from data_pipeline.lanes.segment_lengths import SegmentLengths

if TYPE_CHECKING:
    from data_pipeline.corpora.corpus import Corpus
    from data_pipeline.lanes.audit import Piece
    from data_pipeline.lanes.mixture import Mixture


def add_audit_arguments(audit: argparse.ArgumentParser) -> None:
    """The command line of `audit`, beside the corpus, the lanes and the seed."""
    audit.add_argument("--segment-length", type=int, default=64)
    then = "another segment length from a step of the run on, where a phase changes that alone"
    audit.add_argument(
        "--then",
        type=_step_and_length,
        action="append",
        default=[],
        metavar="STEP=LENGTH",
        help=then,
    )
    audit.add_argument(
        "--steps",
        type=_steps,
        metavar="FIRST:END",
        help="END is left out; without it, the first step",
    )
    audit.add_argument(
        "--first-step",
        type=int,
        default=0,
        metavar="STEP",
        help="of the run: where the lanes began",
    )
    audit.add_argument("--lane", type=int, help="of this lane alone")
    audit.add_argument(
        "--document", metavar="ID", help="when this document is read: in --epochs, or in --steps"
    )
    audit.add_argument(
        "--epochs", type=int, help="how far --document looks, 1 unless --steps say it"
    )
    audit.add_argument(
        "--mix",
        action="append",
        default=[],
        metavar="DIR=REPEAT",
        help="another corpus of the run's data.mixture",
    )
    audit.add_argument(
        "--repeat", type=float, default=1.0, help="of the first corpus, beside --mix"
    )
    audit.add_argument(
        "--weights",
        action="store_true",
        help="the mixture has weights: --repeat and --mix give these",
    )
    audit.add_argument(
        "--ranks", type=int, default=1, help="also say which of so many ranks reads the lane"
    )
    audit.add_argument("--json", action="store_true", help="one JSON object per line")
    audit.set_defaults(run=_audit)


def _steps(text: str) -> range:
    first, colon, end = text.partition(":")
    try:
        begin = int(first or 0)
        steps = range(begin, int(end) if colon else begin + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected FIRST:END such as 0:200, or one step"
        ) from None
    if not steps:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, which holds no step; END must lie behind FIRST"
        )
    return steps


def _step_and_length(text: str) -> tuple[int, int]:
    step, _, length = text.partition("=")
    try:
        return int(step), int(length)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected STEP=LENGTH such as 1000=128"
        ) from None


def _audit(options: argparse.Namespace) -> int:
    check_positive(
        options,
        "lanes",
        "segment_length",
        "ranks",
        *(["epochs"] if options.epochs is not None else []),
    )
    if options.lanes % options.ranks:
        raise ConfigError(
            f"--lanes={options.lanes} does not divide over {options.ranks} ranks; use a multiple of {options.ranks}"
        )
    if options.document is None:
        options.steps = options.steps or range(options.first_step, options.first_step + 1)
    if options.steps is not None and not 0 <= options.first_step <= options.steps.start:
        raise ConfigError(
            f"--steps begin at {options.steps.start}, before the lanes did at --first-step={options.first_step}; "
            "audit the phase before with its own lanes and seed"
        )
    pieces = (
        replace(piece, step=piece.step + options.first_step) for piece in _audited_pieces(options)
    )
    if not options.json:
        print(
            "step\tlane\tdocument\toffset\ttokens\tepoch" + ("\trank" if options.ranks > 1 else "")
        )
    for piece in pieces:
        rank = piece.lane * options.ranks // options.lanes
        if options.json:
            print(json.dumps({**asdict(piece), "rank": rank}))
            continue
        document = piece.document if piece.document.isprintable() else json.dumps(piece.document)
        columns = [piece.step, piece.lane, document, piece.offset, piece.tokens, piece.epoch]
        print(*columns, *([rank] if options.ranks > 1 else []), sep="\t")
    return 0


def _audited_pieces(options: argparse.Namespace) -> Iterator[Piece]:
    from data_pipeline.lanes.audit import audit_steps, find_document

    data = _audited_data(options)
    changes = [(step - options.first_step, length) for step, length in options.then]
    settings = (options.lanes, options.seed, SegmentLengths(options.segment_length, changes))
    steps = options.steps and range(
        options.steps.start - options.first_step, options.steps.stop - options.first_step
    )
    if options.document is None:
        lanes = None if options.lane is None else range(options.lane, options.lane + 1)
        return audit_steps(data, *settings, steps, lanes)
    pieces = find_document(data, options.document, *settings, options.epochs, steps)
    return (piece for piece in pieces if options.lane in (None, piece.lane))


def _audited_data(options: argparse.Namespace) -> Corpus | Mixture:
    """The corpus, or the mixture in the order of the run's data.mixture."""
    from data_pipeline.corpora.corpus import Corpus, split_directory
    from data_pipeline.lanes.mixture import Mixture, exact_repeats, repeats_of_weights

    directories, repeats = [options.directory], [options.repeat]
    for text in options.mix:
        directory, equals, repeat = text.rpartition("=")
        try:
            repeats.append(float(repeat))
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"found --mix {text}, expected DIR=REPEAT such as books=2.5")
        directories.append(Path(directory))
    corpora = [
        Corpus.open(split_directory(near(place)), check_hashes=False) for place in directories
    ]
    if not options.mix and options.repeat == 1.0:
        return corpora[0]
    return Mixture(
        corpora, repeats_of_weights(corpora, repeats) if options.weights else exact_repeats(repeats)
    )
