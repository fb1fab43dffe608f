"""`data-pipeline build`: a corpus, a part of one, or the merge of its parts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from data_pipeline.builder.build_corpus import BuildResult, build_corpus
from data_pipeline.builder.build_tokenizer import needs_training
from data_pipeline.builder.parts import (
    build_in_processes,
    build_part,
    can_shuffle,
    merge_parts,
    shuffle_one,
)
from data_pipeline.builder.records import REJECTS_NAME
from data_pipeline.config import BuiltTokenizer, CorpusConfig
from data_pipeline.corpora.corpus import corpus_hash
from foundation.cli import check_least, kind_of
from foundation.errors import ConfigError
from foundation.progress import StatusLine
from foundation.settings import MOST_THREADS, parse_config, settings_of
from foundation.yaml_files import merge, parse_override, read_tree

# Flags that set a setting, named by its last part, and how many values they take.
SETTING_FLAGS = {
    "input": "+",
    "output": None,
    "validation_input": "+",
    "validation_fraction": None,
    "format": None,
    "suffixes": "+",
    "text_field": None,
    "id_field": None,
    "max_rejects": None,
    "newlines": None,
    "drop_duplicates": None,
    "split_characters": None,
    "shuffle_seed": None,
    "shard_format": None,
    "shard_bytes": None,
    "threads": None,
    "tokenizer.vocab_size": None,
}
_NAMED = {"input": "--input PATH", "output": "--output DIR"}  # what has no default
TOKENS_PER_PIECE = 100  # of the training split, on average; with fewer a build says so
TOKENIZER_KINDS = get_args(BuiltTokenizer)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline build`."""
    _add_settings(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--processes", type=int, metavar="N", help="build N parts in parallel and merge them"
    )
    group.add_argument(
        "--part", type=_part, metavar="I/N", help="build only part I of N, as an array job's task"
    )
    group.add_argument("--merge", type=int, metavar="N", help="merge the N parts of such a job")


def run(arguments: argparse.Namespace) -> int:
    """Build a corpus or one part of it, or merge parts."""
    check_least(arguments, 1, "processes", "merge")
    config = _corpus_config(arguments)
    with StatusLine() as status:
        if arguments.part:
            part, num_parts = arguments.part
            result = build_part(config, part, num_parts, status.show)
            if can_shuffle(config, num_parts):
                status.show("shuffling")
                shuffle_one(config, part, num_parts, status.show)
        elif arguments.merge:
            result = merge_parts(config, arguments.merge, status.show)
        elif arguments.processes or config.shuffles:
            processes = arguments.processes or 1
            if processes > MOST_THREADS:
                raise ConfigError(f"--processes={processes} must be at most {MOST_THREADS:,}")
            result = build_in_processes(config, processes, status.show)
        else:
            result = build_corpus(config, status.show)
    return _print_result(config, result)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    words = "settings file, and overrides of its settings, in any order"
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | a.b=value", help=words)
    known = {each.name: each for each in settings_of(CorpusConfig)}
    for name, count in SETTING_FLAGS.items():
        help_text = f"{known[name].meaning.rstrip('.')} ({kind_of(known[name])})"
        flag = f"--{name.rpartition('.')[2].replace('_', '-')}"
        parser.add_argument(flag, help=help_text.replace("%", "%%"), nargs=count)
    words = (
        f"{', '.join(TOKENIZER_KINDS)}; or an existing tokenizer: a directory, tokenizer.json, "
        "SentencePiece model or .tiktoken file"
    )
    parser.add_argument("--tokenizer", help=words)


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
    if hash_of_all := corpus_hash(config.output):
        print(f"manifest_hash {hash_of_all}")
    if result.duplicates:
        print(f"{result.duplicates:,} documents were dropped: an earlier one has equal text")
    if result.split_documents:
        print(f"{result.split_documents:,} long documents were cut into NAME#1, NAME#2, ...")
    train = result.manifests.get("train")
    if train and needs_training(config.tokenizer):
        print(vocabulary_advice(train.tokens, train.vocab_size), end="")
    if result.rejects:
        path = config.output / REJECTS_NAME
        print(f"{result.rejects:,} unusable records were skipped; see {path}")
    return 0


def vocabulary_advice(tokens: int, vocab_size: int) -> str:
    """Return a line about a vocabulary too large for its training text, or ""."""
    if tokens >= TOKENS_PER_PIECE * vocab_size:
        return ""
    return (
        f"the vocabulary is large for this text: {tokens:,} tokens are {tokens / vocab_size:.1f} "
        f"for each of its {vocab_size:,} pieces on average; with fewer than {TOKENS_PER_PIECE} "
        "many pieces are seen too rarely to be learned: a smaller tokenizer.vocab_size may be "
        "better\n"
    )


def _corpus_config(arguments: argparse.Namespace) -> CorpusConfig:
    """Return the settings: the YAML file, then `a.b=value` overrides, then flags."""
    files = [text for text in arguments.settings if "=" not in text]
    if texts := [file for file in files if Path(file).is_dir()]:
        raise ConfigError(
            f"{texts[0]} is a directory, expected a settings file (YAML); give text as "
            f"--input {texts[0]} and the new corpus as --output DIR"
        )
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
    source = files[0] if files else "data-pipeline build"
    if missing := [name for name in _NAMED if tree.get(name) is None]:
        flags = " ".join(_NAMED[name] for name in missing)
        raise ConfigError(f"{source}: found no {' and no '.join(missing)}; add {flags}")
    return parse_config(CorpusConfig, tree, source)


def _tree_of_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for each in settings_of(CorpusConfig):
        value = getattr(arguments, each.leaf, None) if each.name in SETTING_FLAGS else None
        if value is not None:
            is_yaml = each.hint in (int, float, bool)
            merge(tree, parse_override(f"{each.name}={value}") if is_yaml else {each.name: value})
    if (value := arguments.tokenizer) is not None:
        merge(tree, {"tokenizer": {"kind" if value in TOKENIZER_KINDS else "path": value}})
    return tree
