"""`data-pipeline build` and `merge`: flags, settings, and what is said at the end."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.command_flags import check_positive
from data_pipeline.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.builder.build_corpus import BuildResult
    from data_pipeline.config import CorpusConfig

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
    "tokenizer": (
        None,
        "unigram, bpe or bytes; or an existing tokenizer directory or SentencePiece model",
    ),
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


def add_build_arguments(build: argparse.ArgumentParser) -> None:
    """The command line of `build`."""
    _add_settings(build)
    how = build.add_mutually_exclusive_group()
    how.add_argument(
        "--processes",
        type=int,
        help="build so many parts of the files at the same time and merge them",
    )
    how.add_argument(
        "--part",
        type=_part,
        metavar="I/N",
        help="build part I of N alone, as a task of an array job",
    )
    build.set_defaults(run=_build)


def add_merge_arguments(merge: argparse.ArgumentParser) -> None:
    """The command line of `merge`."""
    _add_settings(merge)
    merge.add_argument("--parts", type=int, required=True, metavar="N", help="how many there are")
    merge.set_defaults(run=_merge)


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("settings", nargs="*", metavar="CONFIG.yaml | a.b=value")
    for flag, (count, text) in BUILD_FLAGS.items():
        command.add_argument(f"--{flag}", nargs=count, help=text)


def _part(text: str) -> tuple[int, int]:
    try:
        part, num_parts = map(int, text.split("/"))
        return part, num_parts
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected I/N such as 3/8") from None


def _build(options: argparse.Namespace) -> int:
    config = _corpus_config(options)
    from data_pipeline.builder.build_corpus import build_corpus
    from data_pipeline.builder.parts import build_part
    from data_pipeline.builder.processes import build_in_processes
    from data_pipeline.progress import StatusLine

    status = StatusLine()
    if options.part:
        part, num_parts = options.part
        result = build_part(config, part, num_parts, status.show)
    elif options.processes is not None:
        check_positive(options, "processes")
        result = build_in_processes(config, options.processes, status.show)
    else:
        result = build_corpus(config, status.show)
    status.end()
    return _print_result(config, result)


def _merge(options: argparse.Namespace) -> int:
    from data_pipeline.builder.parts import merge_parts

    check_positive(options, "parts")
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
        print(
            f"{result.split_documents:,} long documents were cut into parts named NAME#1, NAME#2, ..."
        )
    if result.rejects:
        print(
            f"{result.rejects:,} unusable records were left out; see {config.output / 'rejects.jsonl'}"
        )
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
