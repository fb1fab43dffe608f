"""`data-pipeline inspect`: describe a corpus."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.commands.verify import CORPUS_HELP
from data_pipeline.config import CacheConfig
from data_pipeline.corpora.corpus import Corpus, split_directory
from data_pipeline.corpora.corpus_identity import corpus_hash, tokenizer_of
from data_pipeline.corpora.manifest import read_manifest, splits_of
from data_pipeline.corpora.packing import packing_losses
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from data_pipeline.lanes.lane_plan import check_lanes
from data_pipeline.lanes.mixture import plan_of
from foundation.cli import check_least
from foundation.errors import printable, shown_id

SAMPLE_TOKENS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline inspect`."""
    add = parser.add_argument
    add("directory", type=Path, help=CORPUS_HELP)
    add("--lanes", type=int, help="lanes of a run (default 16, or what fits)")
    add("--seed", type=int, default=1, help="seed of the run (default 1)")
    add("--packing", type=int, metavar="T", help="show what loaders of T-token samples would lose")


def run(arguments: argparse.Namespace) -> int:
    """Print a description of each split. A run does not cut the validation split into its lanes."""
    if arguments.lanes is not None:
        check_least(arguments, 1, "lanes")
    if arguments.packing is not None:
        check_least(arguments, 1, "packing")
    directory = local_corpus_directory(arguments.directory, CacheConfig())
    for split in splits_of(directory):
        manifest = read_manifest(split)  # 16 lanes, or with little text those that are never empty
        usual = max(1, min(16, manifest.tokens // max(manifest.longest_whole, 1)))
        num_lanes = 0 if split.name == "validation" else arguments.lanes or usual
        print(printable("\n".join(describe_split(split, num_lanes, arguments.seed))))
        if arguments.packing:
            corpus = Corpus.open(split, cache=CacheConfig())
            print("\n".join(describe_packing(corpus, arguments.packing)))
    if hash_of_all := corpus_hash(directory):
        print(f"manifest_hash      {hash_of_all}  (all splits)")
    return 0


def describe_split(path: Path, num_lanes: int, seed: int) -> Iterator[str]:
    """Yield sizes, tokenizer, a sample, and how even `num_lanes` lanes are (0: without that)."""
    corpus = Corpus.open(split_directory(path), cache=CacheConfig())
    manifest = corpus.manifest
    size = sum(shard.size for shard in manifest.shards)
    tokenizer = tokenizer_of(corpus.directory.parent)
    fingerprint = tokenizer.fingerprint[:16]
    yield f"{corpus.location}"
    longest = f"{manifest.documents:,}; the longest has {manifest.longest_whole:,} tokens"
    yield f"  documents        {'a stream' if manifest.is_stream else longest}"
    yield f"  tokens           {manifest.tokens:,} as {manifest.dtype}"
    yield (
        f"  text             {manifest.text_bytes:,} bytes, {manifest.characters:,} characters, "
        f"{manifest.text_bytes / manifest.tokens:.2f} bytes per token"
    )
    yield f"  shards           {len(manifest.shards):,}, {size / 1e6:.1f} MB"
    yield (
        f"  tokenizer        {tokenizer.kind}, {tokenizer.vocab_size:,} ids, "
        f"fingerprint {fingerprint}"
    )
    yield f"  manifest hash    {manifest.hash[:16]}"
    if num_lanes:
        yield f"  lanes            {_lane_spread(corpus, num_lanes, seed)}"
    reader = corpus.shard(0)
    sample = tokenizer.decode(reader.tokens(0)[:SAMPLE_TOKENS])
    yield f"  sample           {shown_id(reader.document_id(0))}: {sample!r}"


def describe_packing(corpus: Corpus, length: int) -> Iterator[str]:
    """Yield a table of what loaders of samples of `length` tokens lose, beside the lanes."""
    lengths = (corpus.document_lengths(index) for index in range(len(corpus.manifest.shards)))
    yield f"  samples of {length:,} tokens{'':<10}{'documents cut':>14}{'lost':>14}{'padding':>14}"
    for loss in packing_losses(lengths, length):
        yield (
            f"    {loss.loader:<26}{loss.documents_cut:>14,}{loss.tokens_lost:>14,}"
            f"{loss.padding:>14,}"
        )


def _lane_spread(corpus: Corpus, num_lanes: int, seed: int) -> str:
    plan = plan_of(corpus, num_lanes, seed)
    advice = check_lanes(plan, corpus.manifest.longest_whole)
    lengths = plan.lane_lengths(0)
    spread = (
        f"{num_lanes} of {lengths.min():,} to {lengths.max():,} tokens, "
        f"mean {lengths.mean():,.0f} (epoch 0)"
    )
    return f"{spread}; {advice}" if advice else spread
