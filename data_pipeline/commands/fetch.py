"""`data-pipeline fetch` and `data-pipeline upload`: copy a corpus from or to a store."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.corpora.copy_corpus import fetch_corpus, upload_corpus
from data_pipeline.corpora.manifest import SPLITS
from data_pipeline.corpora.stores import store_at
from foundation.progress import StatusLine


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline fetch`."""
    parser.add_argument("url", metavar="URL", help="s3://, http://, https:// ... URL of the corpus")
    parser.add_argument(
        "directory", type=Path, help="output directory; rerun the command to resume after a crash"
    )
    parser.add_argument("--splits", nargs="+", default=["train"], choices=SPLITS)


def add_upload_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `data-pipeline upload`."""
    parser.add_argument("directory", type=Path, help="a corpus made by `data-pipeline build`")
    parser.add_argument(
        "url",
        metavar="URL",
        help="target such as s3://BUCKET/NAME; rerun the command to resume after a crash",
    )


def run_fetch(arguments: argparse.Namespace) -> int:
    """Download a corpus."""
    url, directory = arguments.url, arguments.directory
    store_at(url)  # DataError for a location of another kind
    with StatusLine() as status:
        fetch_corpus(url, directory, arguments.splits, status.show)
    print(f"{directory} holds {' and '.join(arguments.splits)}; every shard was checked")
    return 0


def run_upload(arguments: argparse.Namespace) -> int:
    """Upload a corpus and compare what the store returns."""
    with StatusLine() as status:
        splits = upload_corpus(arguments.directory, arguments.url, status.show)
    print(f"{arguments.url} holds {' and '.join(splits)}; every file was read back and compared")
    return 0
