"""`data-pipeline build | merge | fetch | verify | inspect | audit`. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import ConfigError, DataError, exit_status_of

if TYPE_CHECKING:
    from data_pipeline.audit import Piece
    from data_pipeline.build import BuildResult
    from data_pipeline.config import CorpusConfig
    from data_pipeline.corpus import Corpus
    from data_pipeline.mixture import Mixture

# Flags of `build` and the settings they stand for, with the help of each.
BUILD_FLAGS = {
    "input": ("+", "files or folders of text, JSONL, tars of text or Parquet"),
    "output": (None, "new directory for the corpus"),
    "validation-input": ("+", "files or folders for the validation split"),
    "validation-fraction": (None, "of the documents, chosen by a hash of their id"),
    "format": (None, "auto, text (one document per file), jsonl, tar or parquet"),
    "suffixes": ("+", "only files whose names end so"),
    "text-field": (None, "where a record has its text"),
    "id-field": (None, "where a record has its id"),
    "max-rejects": (None, "unusable records before the build stops"),
    "drop-duplicates": (None, "true: keep only the first of documents with the same text"),
    "split-characters": (None, "cut longer documents at paragraph ends into NAME#1, NAME#2, ..."),
    "shard-format": (None, "mds or webdataset"),
    "shard-bytes": (None, "size of a shard"),
    "threads": (None, "for encoding"),
    "vocab-size": (None, "of a tokenizer to train"),
    "tokenizer": (None, "unigram, bpe or bytes; or an existing tokenizer directory or SentencePiece model"),
}
SETTING_FLAGS = {
    "validation-fraction": "validation_fraction",
    "max-rejects": "max_rejects",
    "drop-duplicates": "drop_duplicates",
    "split-characters": "split_characters",
    "shard-bytes": "shard_bytes",
    "threads": "threads",
    "vocab-size": "tokenizer.vocab_size",
}
TOKENIZER_KINDS = ("unigram", "bpe", "bytes")


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
    parser = argparse.ArgumentParser(prog="data-pipeline", description="Text to shards of tokens, and what is in them.")
    commands = parser.add_subparsers(required=True, metavar="build | merge | fetch | verify | inspect | audit")
    build = commands.add_parser("build", help="turn text into a corpus; the same command goes on after a crash")
    build.add_argument("settings", nargs="*", metavar="CONFIG.yaml | a.b=value")
    for flag, (count, text) in BUILD_FLAGS.items():
        build.add_argument(f"--{flag}", nargs=count, help=text)
    how = build.add_mutually_exclusive_group()
    how.add_argument("--processes", type=int, help="build so many parts of the files at the same time and merge them")
    how.add_argument("--part", type=_part, metavar="I/N", help="build part I of N alone, as a task of an array job")
    build.set_defaults(run=_build)
    fetch = commands.add_parser("fetch", help="copy a built corpus from a web server, checking every shard")
    fetch.add_argument("url", help="of the corpus: http:// or https://")
    fetch.add_argument("directory", type=Path, help="where to; the same command goes on after a crash")
    fetch.add_argument("--splits", nargs="+", default=["train"], choices=["train", "validation"])
    fetch.set_defaults(run=_fetch)
    merge = commands.add_parser("merge", help="make one corpus of the parts that `build --part` built")
    merge.add_argument("settings", nargs="*", metavar="CONFIG.yaml | a.b=value")
    for flag, (count, text) in BUILD_FLAGS.items():
        merge.add_argument(f"--{flag}", nargs=count, help=text)
    merge.add_argument("--parts", type=int, required=True, metavar="N", help="how many there are")
    merge.set_defaults(run=_merge)
    verify = commands.add_parser("verify", help="read every byte and compare it with the manifest")
    inspect = commands.add_parser("inspect", help="show sizes, tokenizer, a sample and how even the lanes are")
    audit = commands.add_parser("audit", help="list what each lane reads at each step, without reading tokens")
    for command, run in ((verify, _verify), (inspect, _inspect), (audit, _audit)):
        command.add_argument("directory", type=Path, help="a corpus or one of its splits")
        command.set_defaults(run=run)
    for command in (inspect, audit):
        command.add_argument("--lanes", type=int, default=16)
        command.add_argument("--seed", type=int, default=1, help="of the run")
    audit.add_argument("--segment-length", type=int, default=64)
    audit.add_argument("--steps", type=_steps, default=range(1), metavar="FIRST:END", help="END is left out")
    audit.add_argument("--lane", type=int, help="of this lane alone")
    audit.add_argument("--document", metavar="ID", help="at which steps this document is read, instead of --steps")
    audit.add_argument("--epochs", type=int, default=1, help="how far --document looks")
    audit.add_argument(
        "--mix", action="append", default=[], metavar="DIR=REPEAT", help="another corpus of the run's data.mixture"
    )
    audit.add_argument("--repeat", type=float, default=1.0, help="of the first corpus, beside --mix")
    audit.add_argument("--ranks", type=int, default=1, help="also say which of so many ranks reads the lane")
    audit.add_argument("--json", action="store_true", help="one JSON object per line")
    return parser


def _steps(text: str) -> range:
    first, colon, end = text.partition(":")
    try:
        begin = int(first or 0)
        return range(begin, int(end) if colon else begin + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected FIRST:END such as 0:200, or one step") from None


def _part(text: str) -> tuple[int, int]:
    try:
        part, num_parts = map(int, text.split("/"))
        return part, num_parts
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected I/N such as 3/8") from None


def _build(options: argparse.Namespace) -> int:
    config = _corpus_config(options)
    from data_pipeline.build import build_corpus
    from data_pipeline.build_parts import build_part
    from data_pipeline.build_processes import build_in_processes
    from data_pipeline.progress import StatusLine

    status = StatusLine()
    if options.part:
        part, num_parts = options.part
        result = build_part(config, part, num_parts, status.show)
    elif options.processes is not None:
        _check_positive(options, "processes")
        result = build_in_processes(config, options.processes, status.show)
    else:
        result = build_corpus(config, status.show)
    status.end()
    return _print_result(config, result)


def _merge(options: argparse.Namespace) -> int:
    from data_pipeline.build_parts import merge_parts

    _check_positive(options, "parts")
    config = _corpus_config(options)
    return _print_result(config, merge_parts(config, options.parts))


def _print_result(config: CorpusConfig, result: BuildResult) -> int:
    if result.was_finished:
        print(f"{config.output} is already built from this text with these settings")
    for split, manifest in result.manifests.items():
        print(
            f"{split:<11}{manifest.documents:>12,} documents {manifest.tokens:>15,} tokens "
            f"{len(manifest.shards):>7,} shards"
        )
    if result.duplicates:
        print(f"{result.duplicates:,} documents were left out because their text came before")
    if result.split_documents:
        print(f"{result.split_documents:,} long documents were cut into parts named NAME#1, NAME#2, ...")
    if result.rejects:
        print(f"{result.rejects:,} unusable records were left out; see {config.output / 'rejects.jsonl'}")
    return 0


def _corpus_config(options: argparse.Namespace) -> Any:
    """The settings: the YAML file, then `a.b=value`, then flags."""
    from data_pipeline.config import CorpusConfig
    from data_pipeline.config_loader import parse_config
    from data_pipeline.yaml_files import merge, parse_override, read_tree

    files = [text for text in options.settings if "=" not in text]
    if len(files) > 1:
        raise ConfigError(
            f"found the settings files {', '.join(files)}, expected at most one; let one extend the other"
        )
    tree: dict[str, Any] = {}
    if files:
        tree = read_tree(Path(files[0]))
    for text in options.settings:
        if "=" in text:
            merge(tree, parse_override(text))
    merge(tree, _tree_of_flags(options))
    if isinstance(tree.get("input"), str):
        tree["input"] = [tree["input"]]
    return parse_config(CorpusConfig, tree, source=files[0] if files else "data-pipeline build")


def _tree_of_flags(options: argparse.Namespace) -> dict[str, Any]:
    from data_pipeline.yaml_files import merge, parse_override

    tree: dict[str, Any] = {}
    for flag in BUILD_FLAGS:
        name = flag.replace("-", "_")
        value = getattr(options, name)
        if value is None:
            continue
        if flag in SETTING_FLAGS:
            merge(tree, parse_override(f"{SETTING_FLAGS[flag]}={value}"))
        elif flag == "tokenizer":
            merge(tree, {"tokenizer": {"kind" if value in TOKENIZER_KINDS else "path": value}})
        else:
            tree[name] = value
    return tree


def _fetch(options: argparse.Namespace) -> int:
    from data_pipeline.fetch import fetch_corpus
    from data_pipeline.progress import StatusLine

    status = StatusLine()
    fetch_corpus(options.url, options.directory, options.splits, status.show)
    status.end()
    print(f"{options.directory} holds {' and '.join(options.splits)}, every shard checked")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from data_pipeline.progress import StatusLine
    from data_pipeline.verify import splits_of, verify_split

    problems = []
    status = StatusLine()
    for split in splits_of(options.directory):
        problems += verify_split(split, status.show)
    status.end()
    if problems:
        for problem in problems[:-1]:
            print(problem)
        raise DataError(problems[-1])
    print(f"{options.directory}: every shard is what its manifest says")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from data_pipeline.verify import describe_split, splits_of

    _check_positive(options, "lanes")
    for split in splits_of(options.directory):
        is_only_evaluated = split.name == "validation"
        for line in describe_split(split, 0 if is_only_evaluated else options.lanes, options.seed):
            print(line)
    return 0


def _audit(options: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    _check_positive(options, "lanes", "segment_length", "ranks", "epochs")
    if options.lanes % options.ranks:
        raise ConfigError(
            f"--lanes={options.lanes} does not divide over {options.ranks} ranks; use a multiple of {options.ranks}"
        )
    pieces = _audited_pieces(options)
    if not options.json:
        print("step\tlane\tdocument\toffset\ttokens\tepoch" + ("\trank" if options.ranks > 1 else ""))
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
    from data_pipeline.audit import audit_steps, find_document

    data = _audited_data(options)
    settings = (options.lanes, options.seed, options.segment_length)
    if options.document is None:
        lanes = None if options.lane is None else range(options.lane, options.lane + 1)
        return audit_steps(data, *settings, options.steps, lanes)
    pieces = find_document(data, options.document, *settings, options.epochs)
    return (piece for piece in pieces if options.lane in (None, piece.lane))


def _audited_data(options: argparse.Namespace) -> Corpus | Mixture:
    """The corpus, or the mixture in the order of the run's data.mixture."""
    from data_pipeline.corpus import Corpus, split_directory
    from data_pipeline.mixture import Mixture, exact_repeat

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
    corpora = [Corpus.open(split_directory(directory), check_hashes=False) for directory in directories]
    if repeats == [1.0]:
        return corpora[0]
    return Mixture(corpora, [exact_repeat(repeat) for repeat in repeats])


def _check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(options, name)} must be positive")
