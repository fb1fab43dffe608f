"""The documents of a file of raw text: text, JSONL, a tar of text, or Parquet; the first three plain, .gz or .zst."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import BinaryIO

from data_pipeline.builder.compression import BLOCK_BYTES, DAMAGE, decompressed
from data_pipeline.builder.parquet_documents import read_parquet
from data_pipeline.builder.records import (
    Document,
    Reject,
    document_of_bytes,
    document_of_json,
    longest_json,
    too_long,
)
from data_pipeline.builder.sources import SourceFile
from data_pipeline.builder.tar_documents import read_tar
from data_pipeline.config import CorpusConfig
from data_pipeline.errors import DataError
from data_pipeline.files import named_errors
from data_pipeline.shards.tar import TarError

Tell = Callable[[], int]


def read_documents(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None] = lambda tell: None
) -> Iterator[Document | Reject]:
    """Every record of a file in its order. DataError when the file itself cannot be read to its end.

    `follow` is given a function that tells, while the file is read, how many of its bytes have been.
    """
    if source.kind == "parquet":
        yield from read_parquet(source, config, follow)
        return
    reader = {"text": _read_text, "jsonl": _read_jsonl, "tar": read_tar}[source.kind]
    try:
        with named_errors(source.path), open(source.path, "rb", BLOCK_BYTES) as raw:
            follow(raw.tell)
            yield from reader(decompressed(raw, source.path.suffix), source, config)
    except (*DAMAGE, TarError) as error:
        raise DataError(
            f"{source.path} is damaged or cut off ({error}); fetch it again or take it out"
        ) from None


def _read_text(
    file: BinaryIO, source: SourceFile, config: CorpusConfig
) -> Iterator[Document | Reject]:
    raw = file.read(config.max_document_bytes + 1)
    yield document_of_bytes(raw.removeprefix(codecs.BOM_UTF8), source.name, source.name, config)


def _read_jsonl(
    file: BinaryIO, source: SourceFile, config: CorpusConfig
) -> Iterator[Document | Reject]:
    longest_line = longest_json(config)
    number = 0
    while line := file.readline(longest_line):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        place = f"{source.name}:{number}"
        if len(line) == longest_line and not line.endswith(b"\n"):
            yield too_long(place, config)
            while (line := file.readline(BLOCK_BYTES)) and not line.endswith(b"\n"):
                pass
        elif line.strip():
            yield document_of_json(line.rstrip(b"\r\n"), place, place, config)
