"""`data-pipeline verify`: check a corpus against its manifests."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from data_pipeline.corpora.corpus import Corpus, LocalShards
from data_pipeline.corpora.corpus_identity import check_tokenizer
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
from data_pipeline.corpora.stores import Store, store_at
from data_pipeline.corpora.web_requests import RetryPolicy
from data_pipeline.shards.mds import INDEX_NAME, SUFFIX, read_index
from data_pipeline.shards.shards import ShardReader
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import DataError, printable
from foundation.paths import path_below, path_text, url_of
from foundation.progress import StatusLine

CORPUS_HELP = "directory or URL of a corpus, or the directory of one split"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline verify`."""
    parser.add_argument("directory", type=Path, help=CORPUS_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Print every problem but the last one, and raise that as DataError."""
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
    """Raise DataError for the first document whose id cannot be read, that has a token outside the
    vocabulary, or that does not end with `end_id`."""
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
        listed = {entry["raw_data"]["basename"]: entry["samples"] for entry in index}
    except (ValueError, KeyError, TypeError):
        listed = None
    if listed == expected:
        return []
    return [f"{path / INDEX_NAME} does not list the shards of {MANIFEST_NAME}; build it again"]
