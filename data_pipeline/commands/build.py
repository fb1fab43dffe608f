"""`data-pipeline build`: a corpus, a part of one, or the merge of its parts."""

import argparse
import os
from pathlib import Path

from data_pipeline.builder.build_corpus import BuildResult, build_corpus
from data_pipeline.builder.build_tokenizer import needs_training
from data_pipeline.builder.parallel_build import (
    build_in_processes,
    build_part,
    can_shuffle,
    merge_parts,
    shuffle_one,
)
from data_pipeline.builder.records import REJECTS_NAME
from data_pipeline.config import CorpusConfig
from data_pipeline.corpora.copies import copied_documents
from data_pipeline.corpora.corpus_identity import corpus_hash
from data_pipeline.corpora.manifest import HOW_TO_SPLIT
from foundation.cli import check_least
from foundation.errors import ConfigError
from foundation.progress import StatusLine
from foundation.settings import MOST_THREADS, parse_config
from foundation.yaml_files import merge, parse_overrides, read_tree

# Settings without a default, with their flags.
FLAGS = {"input": "--input PATH", "output": "--output DIR"}
LISTS = ("input", "validation_input", "suffixes")  # a single item may stand without brackets
TOKENS_PER_PIECE = 100  # with fewer in the training split, a build advises a smaller vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline build`."""
    add, words = parser.add_argument, "settings file, and overrides of its settings, in any order"
    add("settings", nargs="*", metavar="CONFIG.yaml | a.b=value", help=words)
    add("--input", nargs="+", action="extend", metavar="PATH", help="text to read")
    add("--output", metavar="DIR", help="folder of the new corpus")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--processes", type=int, metavar="N", help="build N parts in parallel and merge them")
    add("--part", type=_part, metavar="I/N", help="build part I of N, as an array job's task")
    add("--merge", type=int, metavar="N", help="merge N parts that were built with --part")


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
    validation = result.manifests.get("validation")
    if "train" in result.manifests and validation is None:
        print(f"warning: no validation split, which a run on this text alone needs; {HOW_TO_SPLIT}")
    if validation and validation.documents == 1 and not validation.is_stream:
        print(
            "warning: the validation split is one document, whose loss says little of other texts; "
            "raise validation_fraction, or name them (validation_input)"
        )
    if hash_of_all := corpus_hash(config.output):
        print(f"manifest_hash {hash_of_all}")
    train = result.manifests.get("train")
    if train and needs_training(config.tokenizer):
        print(vocabulary_advice(train.tokens, train.vocab_size), end="")
    is_new = bool(hash_of_all) and validation is not None and not result.was_finished
    if is_new and (copies := copied_documents(config.output)):
        print(f"{copies:,} training documents are copies of validation documents")
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
    # `--input` takes every word up to the next flag, also overrides `a.b=value`, which have no
    # slash before "=".
    given = arguments.input or []
    inputs = [w for w in given if "=" not in w or "/" in w.partition("=")[0] or os.path.exists(w)]
    words = [*arguments.settings, *(word for word in given if word not in inputs)]
    files = [text for text in words if "=" not in text]
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
    merge(tree, parse_overrides(text for text in words if "=" in text))
    flags = {"input": inputs, "output": arguments.output}
    merge(tree, {name: value for name, value in flags.items() if value})
    for name in LISTS:
        if isinstance(tree.get(name), str):
            tree[name] = [tree[name]]
    source = files[0] if files else "data-pipeline build"
    if missing := [name for name in FLAGS if tree.get(name) is None]:
        added = " ".join(FLAGS[name] for name in missing)
        raise ConfigError(f"{source}: found no {' and no '.join(missing)}; add {added}")
    return parse_config(CorpusConfig, tree, source)
