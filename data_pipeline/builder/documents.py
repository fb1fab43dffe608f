"""The documents of an input file: text, JSONL, a tar of text, or Parquet.

All but Parquet may be compressed. The only module that imports pyarrow, which nothing else needs.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from data_pipeline.builder.decompression import BLOCK_BYTES, CORRUPTION, decompressed
from data_pipeline.builder.formats import kind_by_name, stated_kind
from data_pipeline.builder.records import (
    Document,
    Reject,
    document_id,
    document_of_bytes,
    document_of_json,
    longest_json,
    too_long,
)
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.files import named_errors
from data_pipeline.setting_fields import assert_never
from data_pipeline.shards.tar import TarError, TarMember, tar_members

if TYPE_CHECKING:
    import pyarrow

TEXT_EXTENSION, JSON_EXTENSION = "txt", "json"
ROWS_AT_ONCE, BYTES_AT_ONCE = 1024, 1 << 28  # of Parquet
Tell = Callable[[], int]
Records = Iterator[Document | Reject]


def read_documents(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None] = lambda tell: None
) -> Records:
    """Yield every record of a file in order; DataError if the file cannot be read to its end.

    `follow` is called with a function that returns how many of the file's bytes were read so far.
    """
    try:
        match source.kind:
            case "parquet":
                yield from _read_parquet(source, config, follow)
            case "text":
                yield from _read_bytes(_read_text, source, config, follow)
            case "jsonl":
                yield from _read_bytes(_read_jsonl, source, config, follow)
            case "tar":
                yield from _read_bytes(_read_tar, source, config, follow)
            case _:
                assert_never(source.kind)
    except (*CORRUPTION, TarError) as error:
        raise DataError(_corrupted(source, error)) from None


def _read_bytes(
    reader: Callable[[BinaryIO, SourceFile, CorpusConfig], Records],
    source: SourceFile,
    config: CorpusConfig,
    follow: Callable[[Tell], None],
) -> Records:
    """Yield what `reader` makes of the file's bytes, unpacked."""
    with named_errors(source.path), open(source.path, "rb", BLOCK_BYTES) as raw:
        follow(raw.tell)
        yield from reader(decompressed(raw, source.path.name), source, config)


def _corrupted(source: SourceFile, reason: object) -> str:
    return (
        f"{source.path} is corrupted or truncated ({reason}); "
        "fetch it again or remove it from the input"
    )


def _read_text(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    raw = file.read(config.max_document_bytes + 1)
    if stated_kind(config) is None and not kind_by_name(source.name) and b"\0" in raw:
        yield Reject(source.name, f"not text (byte {raw.index(0)} is 0)")
        return
    yield document_of_bytes(raw.removeprefix(codecs.BOM_UTF8), source.name, source.name, config)


def _read_jsonl(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    longest_line = longest_json(config)
    number = 0
    while line := file.readline(longest_line):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        location = f"{source.name}:{number}"
        if len(line) == longest_line and not line.endswith(b"\n"):
            yield too_long(location, config)
            while (line := file.readline(BLOCK_BYTES)) and not line.endswith(b"\n"):
                pass
        elif line.strip():
            yield document_of_json(line.rstrip(b"\r\n"), location, location, config)


@dataclass
class _Sample:
    """Consecutive tar members KEY.EXTENSION: all extensions, and the contents that may be text."""

    key: str
    location: str
    extensions: list[str] = field(default_factory=list)
    contents: dict[str, bytes | Reject] = field(default_factory=dict)


def _read_tar(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    """Yield a document for each sample, as WebDataset groups members; TarError if it is invalid.

    Its text is KEY.txt or KEY.text_field, else the field text_field of KEY.json. Its id is the key,
    unless the JSON has one.
    """
    sample = None
    for member in tar_members(file):
        # A key ends at the first dot after the last slash.
        folder, slash, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        key = folder + slash + stem
        if sample is None or sample.key != key:
            if sample is not None:
                yield _document_of_sample(sample, config)
            sample = _Sample(key, f"{source.name}:{key}")
        sample.extensions.append(extension)
        if extension in (config.text_field, TEXT_EXTENSION, JSON_EXTENSION):
            contents = _read_member(member, extension, sample.location, config)
            sample.contents[extension] = contents
    if sample is not None:
        yield _document_of_sample(sample, config)


def _read_member(
    member: TarMember, extension: str, location: str, config: CorpusConfig
) -> bytes | Reject:
    if not member.is_file:
        reason = f"{member.name} is a link or a device in the archive, expected a file"
        return Reject(location, reason)
    longest = longest_json(config) if extension == JSON_EXTENSION else config.max_document_bytes
    return member.read() if member.size <= longest else too_long(location, config)


def _document_of_sample(sample: _Sample, config: CorpusConfig) -> Document | Reject:
    for extension in (config.text_field, TEXT_EXTENSION, JSON_EXTENSION):
        if extension in sample.contents:
            contents = sample.contents[extension]
            if isinstance(contents, Reject):
                return contents
            convert = document_of_json if extension == JSON_EXTENSION else document_of_bytes
            return convert(contents, sample.key, sample.location, config)
    found = ", ".join(map(repr, sample.extensions))
    expected = " or ".join(dict.fromkeys((TEXT_EXTENSION, config.text_field, JSON_EXTENSION)))
    return Reject(sample.location, f"found members {found}, expected {expected}")


def _read_parquet(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None]
) -> Records:
    """Yield a document for each row, from the columns text_field and, if it exists, id_field."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{source.path} needs pyarrow, which is not installed; `pip install pyarrow`"
        ) from None
    row = 0
    try:
        schema = pyarrow.parquet.read_metadata(source.path).schema
        flat = [schema.column(number).path for number in range(len(schema))]
        # One long text may stand for a thousand rows: it stays one while it is read.
        shared = [name for name in (config.text_field, config.id_field) if name in flat]
        with pyarrow.parquet.ParquetFile(source.path, read_dictionary=shared) as file:
            num_rows = max(file.metadata.num_rows, 1)
            follow(lambda: row * source.size // num_rows)
            columns = _columns(file.schema_arrow.names, source, config)
            for batch in file.iter_batches(_rows_at_once(file.metadata), columns=columns):
                texts = _texts(batch.column(config.text_field), source, config)
                has_ids = config.id_field in batch.schema.names
                ids = _values(batch.column(config.id_field)) if has_ids else [None] * len(texts)
                for text, value in zip(texts, ids, strict=True):
                    row += 1
                    location = f"{source.name}:{row}"
                    if text is None:
                        yield Reject(location, f"field {config.text_field!r} is null")
                    else:
                        name = document_id(value, location)
                        yield document_of_bytes(text, name, location, config)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(_corrupted(source, str(error).splitlines()[0])) from None


def _rows_at_once(metadata: Any) -> int:
    """Return how many rows are read at a time: fewer where they are long."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    longest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // max(longest, 1)))


def _columns(names: list[str], source: SourceFile, config: CorpusConfig) -> list[str]:
    if config.text_field not in names:
        raise DataError(
            f"{source.path} has the columns {', '.join(names)}, not {config.text_field!r}; "
            "set text_field"
        )
    return [name for name in (config.text_field, config.id_field) if name in names]


def _texts(column: pyarrow.Array, source: SourceFile, config: CorpusConfig) -> list[bytes | None]:
    values = _values(column)
    found = next((value for value in values if not isinstance(value, bytes | None)), None)
    if found is not None:
        raise DataError(
            f"column {config.text_field!r} of {source.path} holds {type(found).__name__}, "
            "expected text; set text_field"
        )
    return values


def _values(column: Any) -> list[Any]:
    """Return Python values of a column; text as bytes, because it may not be valid UTF-8."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        values = _values(column.dictionary)
        return [None if index is None else values[index] for index in column.indices.to_pylist()]
    if pyarrow.types.is_string_view(column.type):
        column = column.cast(pyarrow.large_string())
    is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    return (column.cast(pyarrow.large_binary()) if is_text else column).to_pylist()
