"""`data-pipeline verify` and `inspect`: check a corpus against its manifests, and describe it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.corpus import (
    Corpus,
    LocalShards,
    check_tokenizer,
    corpus_hash,
    split_directory,
    tokenizer_of,
)
from data_pipeline.corpora.fetch import (
    NotFetchedError,
    fetch_manifest,
    fetch_shard,
    fetch_tokenizer,
    in_parallel,
)
from data_pipeline.corpora.lengths import lengths_file
from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    Manifest,
    ShardInfo,
    read_manifest,
    splits_of,
)
from data_pipeline.corpora.packing import packing_losses
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from data_pipeline.corpora.stores import Store, store_at
from data_pipeline.corpora.web_requests import RetryPolicy
from data_pipeline.lanes.lane_plan import check_lanes
from data_pipeline.lanes.mixture import plan_of
from data_pipeline.shards.mds import INDEX_NAME, SUFFIX, read_index
from data_pipeline.shards.shards import ShardReader
from data_pipeline.tokenizer import Tokenizer
from foundation.cli import check_least
from foundation.errors import DataError, printable, shown_id
from foundation.files import path_below, path_text, url_of
from foundation.progress import StatusLine

SAMPLE_TOKENS = 120
CORPUS_HELP = "directory or URL of a corpus, or the directory of one split"


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline verify`."""
    parser.add_argument("directory", type=Path, help=CORPUS_HELP)


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline inspect`."""
    parser.add_argument("directory", type=Path, help=CORPUS_HELP)
    parser.add_argument("--lanes", type=int, help="lanes of a run (default 16, or what fits)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the run (default 1)")
    parser.add_argument(
        "--packing", type=int, metavar="T", help="what samples of T tokens would lose of it"
    )


def run_verify(arguments: argparse.Namespace) -> int:
    """Print every problem; DataError for the last one."""
    with StatusLine() as status:
        if url := url_of(arguments.directory):
            problems = problems_at(url, status.show)
        else:
            splits = splits_of(arguments.directory)
            problems = [problem for split in splits for problem in verify_split(split, status.show)]
    if problems:
        for problem in problems[:-1]:
            print(printable(problem))
        raise DataError(problems[-1])
    print(f"{path_text(arguments.directory)}: every shard matches its manifest")
    return 0


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print a description of each split. A run does not cut the validation split into its lanes."""
    if arguments.lanes is not None:
        check_least(arguments, 1, "lanes")
    if arguments.packing is not None:
        check_least(arguments, 1, "packing")
    directory = local_corpus_directory(arguments.directory, CacheConfig())
    for split in splits_of(directory):
        manifest = read_manifest(split)  # 16, or with little text the most that are never empty
        usual = max(1, min(16, manifest.tokens // max(manifest.longest_whole, 1)))
        num_lanes = 0 if split.name == "validation" else arguments.lanes or usual
        print(printable("\n".join(describe_split(split, num_lanes, arguments.seed))))
        if arguments.packing:
            corpus = Corpus.open(split, cache=CacheConfig())
            print("\n".join(describe_packing(corpus, arguments.packing)))
    if hash_of_all := corpus_hash(directory):
        print(f"manifest_hash      {hash_of_all}  (all splits)")
    return 0


def problems_at(
    url: str, report: Callable[[str], None], retry_policy: RetryPolicy | None = None
) -> list[str]:
    """Read the tokenizer and every shard of the corpus at `url`; return one line per problem."""
    problems: list[str] = []

    def try_to(fetch: Callable[[], None]) -> None:
        try:
            fetch()
        except NotFetchedError as error:
            problems.append(str(error))

    with TemporaryDirectory(prefix="xl-pretrain-verify-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        for split in SPLITS:
            store = store_at(f"{url.rstrip('/')}/{split}", retry_policy)
            try:
                manifest = fetch_manifest(store, scratch)
            except NotFetchedError as error:
                if split == SPLITS[0] or not error.is_absent:  # validation may be absent
                    raise
                continue
            tokenizer = store_at(f"{url.rstrip('/')}/{TOKENIZER_DIRECTORY}", retry_policy)
            directory = scratch / TOKENIZER_DIRECTORY
            try_to(partial(fetch_tokenizer, tokenizer, directory, manifest.tokenizer))

            def read(info: ShardInfo, store: Store = store) -> None:
                for entry in (info, lengths_file(info)):
                    copy = path_below(scratch, entry.path)
                    try_to(partial(fetch_shard, store, entry, copy, scratch))
                    copy.unlink(missing_ok=True)

            in_parallel(read, manifest.shards, split, report)
    return problems


def verify_split(path: Path, report: Callable[[str], None]) -> list[str]:
    """Read every byte of a split and return one line per problem; `report` gets the progress."""
    manifest = read_manifest(path)
    problems = []
    for number in range(len(manifest.shards)):
        problems += _shard_problems(path, manifest, number)
        report(f"{path.name}: {number + 1}/{len(manifest.shards)} shards")
    problems += _index_problems(path, manifest)
    try:
        Tokenizer.load(path.parent / TOKENIZER_DIRECTORY)
        check_tokenizer(path, manifest.tokenizer)
    except DataError as error:
        problems.append(str(error))
    return problems


def _shard_problems(path: Path, manifest: Manifest, number: int) -> Iterator[str]:
    """Yield what is wrong with a shard, and with the file of its documents' lengths."""
    source = LocalShards(path)
    try:
        _check_tokens(Corpus(path, manifest, source).shard(number), manifest)
    except DataError as error:
        yield str(error)
    try:
        source.lengths(manifest.shards[number])
    except DataError as error:
        yield str(error)


def _check_tokens(shard: ShardReader, manifest: Manifest) -> None:
    """Raise DataError for the first document without an id that can be read, or with a token that
    the tokenizer does not have."""
    for document in range(len(shard)):
        shard.document_id(document)
        tokens = shard.tokens(document)
        is_ended = manifest.is_stream or tokens[-1] == manifest.end_id
        if (largest := int(tokens.max())) >= manifest.vocab_size or not is_ended:
            raise DataError(
                f"shard {shard.path}: document {document} has tokens up to {largest} and ends with "
                f"{tokens[-1]}, expected tokens below {manifest.vocab_size} and "
                f"{manifest.end_id} at the end; build the corpus again"
            )


def _index_problems(path: Path, manifest: Manifest) -> list[str]:
    """Compare the index that stock readers of MDS need with the manifest."""
    expected = {
        shard.path: shard.documents for shard in manifest.shards if shard.path.endswith(SUFFIX)
    }
    try:
        index = read_index(path) if expected else []
        found = {entry["raw_data"]["basename"]: entry["samples"] for entry in index}
    except (ValueError, KeyError, TypeError):
        found = None
    if found == expected:
        return []
    return [f"{path / INDEX_NAME} does not list the shards of {MANIFEST_NAME}; build it again"]


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
