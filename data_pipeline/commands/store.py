"""`data-pipeline fetch` and `data-pipeline upload`: corpora between this disk and a store."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.corpora.cache_config import CacheConfig


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `data-pipeline fetch`."""
    parser.add_argument("url", metavar="URL", help="of the corpus: s3://, http://, https:// ...")
    parser.add_argument(
        "directory", type=Path, help="where to; the same command goes on after a crash"
    )
    parser.add_argument("--splits", nargs="+", default=["train"], choices=["train", "validation"])
    parser.add_argument(
        "--raw",
        action="store_true",
        help="the URL holds no corpus but objects, text to build one from: copy them all",
    )
    parser.set_defaults(run=_fetch)


def add_upload_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `data-pipeline upload`."""
    parser.add_argument("directory", type=Path, help="a corpus made by `build`")
    parser.add_argument(
        "url",
        metavar="URL",
        help="where to: s3://BUCKET/NAME; the same command goes on after a crash",
    )
    parser.set_defaults(run=_upload)


def near(place: Path) -> Path:
    """The directory in which a command finds the corpus at `place`, a directory or a URL."""
    from data_pipeline.corpora.remote_corpus import local_corpus_directory

    return local_corpus_directory(place, CacheConfig())


def _fetch(options: argparse.Namespace) -> int:
    from data_pipeline.commands.copy_corpus import fetch_corpus, fetch_objects
    from data_pipeline.progress import StatusLine

    status = StatusLine()
    if options.raw:
        count = fetch_objects(options.url, options.directory, status.show)
        status.end()
        print(f"{options.directory} holds the {count:,} objects below {options.url}")
        return 0
    fetch_corpus(options.url, options.directory, options.splits, status.show)
    status.end()
    print(f"{options.directory} holds {' and '.join(options.splits)}, every shard checked")
    return 0


def _upload(options: argparse.Namespace) -> int:
    from data_pipeline.commands.copy_corpus import upload_corpus
    from data_pipeline.progress import StatusLine

    status = StatusLine()
    splits = upload_corpus(options.directory, options.url, status.show)
    status.end()
    print(f"{options.url} holds {' and '.join(splits)}; every file was read back and is the same")
    return 0
