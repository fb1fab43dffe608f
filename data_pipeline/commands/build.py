"""`data-pipeline build` and `data-pipeline merge`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from data_pipeline.builder.build_corpus import BuildResult, build_corpus
from data_pipeline.builder.parts import build_part, merge_parts
from data_pipeline.builder.processes import build_in_processes
from data_pipeline.builder.records import REJECTS_NAME
from data_pipeline.config import CorpusConfig
from data_pipeline.config_loader import parse_config
from data_pipeline.errors import ConfigError, shown_id
from data_pipeline.program import check_positive
from data_pipeline.progress import StatusLine
from data_pipeline.yaml_files import merge, parse_override, read_tree

# Flags that set a setting: nargs and help. Those of PARSED_FLAGS are read as YAML values.
SETTING_FLAGS = {
    "input": ("+", "files or folders of text, JSONL, tars of text or Parquet"),
    "output": (None, "new directory for the corpus"),
    "validation-input": ("+", "files or folders for the validation split"),
    "validation-fraction": (None, "of the documents, chosen by a hash of their id"),
    "format": (None, "auto, text (one document per file), jsonl, tar or parquet"),
    "suffixes": ("+", "read only files with these name endings"),
    "text-field": (None, "field with the text of a record"),
    "id-field": (None, "field with the id of a record"),
    "max-rejects": (None, "unusable records before the build stops"),
    "normalize-newlines": (None, "true: make every \\r\\n and \\r a \\n"),
    "drop-duplicates": (None, "true: keep only the first of documents with equal text"),
    "split-characters": (None, "cut longer documents at paragraph ends into NAME#1, NAME#2, ..."),
    "shard-format": (None, "mds or webdataset"),
    "shard-bytes": (None, "size of a shard"),
    "threads": (None, "threads that encode text"),
    "vocab-size": (None, "of a tokenizer to train"),
    "tokenizer": (
        None,
        "unigram, bpe or bytes; or an existing tokenizer directory or SentencePiece model",
    ),
}
PARSED_FLAGS = {
    "validation-fraction": "validation_fraction",
    "max-rejects": "max_rejects",
    "normalize-newlines": "normalize_newlines",
    "drop-duplicates": "drop_duplicates",
    "split-characters": "split_characters",
    "shard-bytes": "shard_bytes",
    "threads": "threads",
    "vocab-size": "tokenizer.vocab_size",
}
TOKENIZER_KINDS = ("unigram", "bpe", "bytes")


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline build`."""
    _add_settings(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--processes", type=int, metavar="N", help="build N parts in parallel and merge them"
    )
    group.add_argument(
        "--part", type=_part, metavar="I/N", help="build only part I of N, as an array job's task"
    )


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline merge`."""
    _add_settings(parser)
    parser.add_argument("--parts", type=int, required=True, metavar="N", help="number of parts")


def run_build(arguments: argparse.Namespace) -> int:
    """Build a corpus, or one part of it."""
    config = _corpus_config(arguments)
    with StatusLine() as status:
        if arguments.part:
            part, num_parts = arguments.part
            result = build_part(config, part, num_parts, status.show)
        elif arguments.processes is not None:
            check_positive(arguments, "processes")
            result = build_in_processes(config, arguments.processes, status.show)
        else:
            result = build_corpus(config, status.show)
    return _print_result(config, result)


def run_merge(arguments: argparse.Namespace) -> int:
    """Merge finished parts."""
    check_positive(arguments, "parts")
    config = _corpus_config(arguments)
    return _print_result(config, merge_parts(config, arguments.parts))


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | a.b=value")
    for flag, (count, text) in SETTING_FLAGS.items():
        parser.add_argument(f"--{flag}", nargs=count, help=text)


def _part(text: str) -> tuple[int, int]:
    try:
        part, num_parts = map(int, text.split("/"))
        return part, num_parts
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected I/N such as 3/8") from None


def _print_result(config: CorpusConfig, result: BuildResult) -> int:
    if result.was_finished:
        print(f"{config.output} is already built from this text with these settings")
    for split, manifest in result.manifests.items():
        print(
            f"{split:<11}{manifest.documents:>12,} documents {manifest.tokens:>15,} tokens "
            f"{len(manifest.shards):>7,} shards"
        )
    if result.duplicates:
        print(f"{result.duplicates:,} documents were dropped: an earlier one has equal text")
    if result.split_documents:
        print(f"{result.split_documents:,} long documents were cut into NAME#1, NAME#2, ...")
    if result.crlf_documents or result.cr_documents:
        print(
            f"line endings: {result.crlf_documents:,} documents have \\r\\n and "
            f"{result.cr_documents:,} have \\r alone, which became tokens; "
            "normalize_newlines=true builds them with \\n"
        )
    if result.repeated_ids:
        print(
            f"{result.repeated_ids:,} documents have the id of an earlier one, the first is "
            f"{shown_id(result.first_repeated_id)}; audits and suspects name documents by id: "
            "give each its own"
        )
    if result.round_trip.altered:
        print(result.round_trip)
    if result.rejects:
        path = config.output / REJECTS_NAME
        print(f"{result.rejects:,} unusable records were skipped; see {path}")
    return 0


def _corpus_config(arguments: argparse.Namespace) -> CorpusConfig:
    """Return the settings: the YAML file, then `a.b=value` overrides, then flags."""
    files = [text for text in arguments.settings if "=" not in text]
    if len(files) > 1:
        raise ConfigError(
            f"found the settings files {', '.join(files)}, expected at most one; "
            "let one extend the other"
        )
    tree = read_tree(Path(files[0])) if files else {}
    for text in arguments.settings:
        if "=" in text:
            merge(tree, parse_override(text))
    merge(tree, _tree_of_flags(arguments))
    if isinstance(tree.get("input"), str):
        tree["input"] = [tree["input"]]
    return parse_config(CorpusConfig, tree, source=files[0] if files else "data-pipeline build")


def _tree_of_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for flag in SETTING_FLAGS:
        name = flag.replace("-", "_")
        value = getattr(arguments, name)
        if value is None:
            continue
        if flag in PARSED_FLAGS:
            merge(tree, parse_override(f"{PARSED_FLAGS[flag]}={value}"))
        elif flag == "tokenizer":
            merge(tree, {"tokenizer": {"kind" if value in TOKENIZER_KINDS else "path": value}})
        else:
            tree[name] = value
    return tree
