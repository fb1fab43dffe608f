"""Tables: Parquet, and Arrow files as `datasets` writes them; text or tokens by row.

No other module imports pyarrow.
"""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from data_pipeline.builder.compression import UnreadableRecords
from data_pipeline.builder.records import (
    EMPTY_ROW,
    Document,
    Records,
    Reject,
    Tell,
    corrupted,
    document_id,
    document_of_bytes,
    document_of_tokens,
)
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig
from data_pipeline.vocabularies.vocabulary import missing_library
from foundation.errors import DataError
from foundation.files import open_regular

ROWS_AT_ONCE, BYTES_AT_ONCE = 1024, 1 << 28  # the most of a Parquet file that is read at once
ARROW_FILE_MAGIC = b"ARROW1"  # without it, a file is an Arrow stream, as `datasets` writes them
DICTIONARY_ENCODINGS = frozenset(
    ("PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED")
)
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def read_parquet(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None]
) -> Records:
    """Yield a document for each row of a Parquet file."""
    _require_pyarrow(source)
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        shared = _shared_columns(pyarrow.parquet.read_metadata(source.path), config)
        with pyarrow.parquet.ParquetFile(
            source.path, read_dictionary=shared, page_checksum_verification=True
        ) as file:
            num_rows = max(file.metadata.num_rows, 1)
            follow(lambda: row * source.size // num_rows)
            columns = _columns(file.schema_arrow.names, source, config)
            for batch in file.iter_batches(_rows_at_once(file.metadata), columns=columns):
                for record in _records_of(batch, row, source, config):
                    row += 1
                    yield record
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise DataError(corrupted(source, _reason(error))) from None


def _shared_columns(metadata: Any, config: CorpusConfig) -> list[str]:
    """Return the columns to read as dictionaries: one long text may stand in 1,000 rows.

    pyarrow cannot read a column as a dictionary if one of its pages has another encoding.
    """
    names, others = set(), set()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            names.add(column.path_in_schema)
            if not DICTIONARY_ENCODINGS.issuperset(column.encodings):
                others.add(column.path_in_schema)
    return [name for name in (config.text_field, config.id_field) if name in names - others]


def read_arrow(source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None]) -> Records:
    """Yield a document for each row of an Arrow file or stream."""
    _require_pyarrow(source)
    import pyarrow
    import pyarrow.ipc

    row = 0
    try:
        with open_regular(source.path) as file:
            follow(file.tell)
            is_file = file.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
            file.seek(0)
            for batch in _batches(pyarrow.ipc, file, is_file):
                chosen = batch.select(_columns(batch.schema.names, source, config))
                for record in _records_of(chosen, row, source, config):
                    row += 1
                    yield record
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(corrupted(source, _reason(error))) from None


def _reason(error: Exception) -> str | UnreadableRecords:
    """Return the first line of a library's error.

    A MemoryError is the file's fault, too: pyarrow reserves the sizes that a file states.
    """
    text = next(iter(str(error).splitlines()), type(error).__name__)
    if isinstance(error, NotImplementedError) or "crypt" in text:
        return UnreadableRecords(f"{text}; write it without that")
    return f"it states sizes beyond memory: {text}" if isinstance(error, MemoryError) else text


def _batches(ipc: Any, file: Any, is_file: bool) -> Iterator[Any]:
    if not is_file:
        yield from ipc.open_stream(file)
        file.seek(-len(STREAM_END), os.SEEK_CUR)
        if file.read(len(STREAM_END) + 1) != STREAM_END:
            raise ValueError("it does not end with the mark of a stream's end")
        return
    reader = ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _require_pyarrow(source: SourceFile) -> None:
    if find_spec("pyarrow") is None:
        raise missing_library(str(source.path), "pyarrow", "parquet")


def _records_of(
    batch: Any, row: int, source: SourceFile, config: CorpusConfig
) -> Iterator[Document | Reject]:
    """Yield a document for each row of the batch; `row` rows of the file came before it."""
    has_ids = config.id_field in batch.schema.names
    ids = _values(batch.column(config.id_field)) if has_ids else [None] * batch.num_rows
    column = batch.column(config.text_field)
    is_text = not _is_list(column.type)
    values: Any = (_texts if is_text else _tokens)(column, source, config)
    convert: Callable[..., Document | Reject] = document_of_bytes if is_text else document_of_tokens
    for number, (value, own_id) in enumerate(zip(values, ids, strict=True), row + 1):
        location = f"{source.name}:{number}"
        if value is None:
            yield Reject(location, f"field {config.text_field!r} is null")
        elif is_text and not value.strip():
            yield Reject(location, EMPTY_ROW)
        else:
            yield convert(value, document_id(own_id, location), location, config)


def _is_list(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _tokens(column: Any, source: SourceFile, config: CorpusConfig) -> Iterator[np.ndarray | None]:
    """Yield the ids in each row of a column of lists; None for a row that is or has a null."""
    import pyarrow

    if not pyarrow.types.is_integer(column.type.value_type):
        raise DataError(
            f"column {config.text_field!r} of {source.path} holds {column.type}, expected text or "
            "lists of integers; set text_field"
        )
    for row in _valid(column):
        ids = row.values
        yield None if ids is None or ids.null_count else ids.to_numpy(zero_copy_only=False)


def _rows_at_once(metadata: Any) -> int:
    """Return how many rows are read at a time: fewer if rows are long."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    longest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // max(longest, 1)))


def _columns(names: list[str], source: SourceFile, config: CorpusConfig) -> list[str]:
    wanted = config.text_field
    if wanted not in names:
        raise DataError(
            f"{source.path} has the columns {', '.join(names)}, not {wanted!r}; set text_field"
        )
    for name in (wanted, config.id_field):
        if names.count(name) > 1:
            raise DataError(f"{source.path} has {names.count(name)} columns {name!r}, expected one")
    return [name for name in (wanted, config.id_field) if name in names]


def _texts(column: Any, source: SourceFile, config: CorpusConfig) -> list[bytes | None]:
    values = _values(column)
    if not all(isinstance(value, bytes | None) for value in values):
        raise DataError(
            f"column {config.text_field!r} of {source.path} holds {column.type}, expected text; "
            "set text_field"
        )
    return values


def _values(column: Any) -> list[Any]:
    """Return Python values of a column; text as bytes, because it may not be valid UTF-8."""
    import pyarrow

    column = _valid(column)
    if not pyarrow.types.is_dictionary(column.type):
        return column.to_pylist()
    values = _values(column.dictionary)
    return [None if index is None else values[index] for index in column.indices.to_pylist()]


def _valid(column: Any) -> Any:
    """Return the column, with text as bytes; ArrowInvalid if an offset leads out of its data.

    pyarrow does not check every offset in a file, and a wrong one would end the process.
    """
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column.indices.validate(full=True)
        nothing = pyarrow.nulls(len(column.dictionary))
        pyarrow.DictionaryArray.from_arrays(column.indices, nothing)  # checks every index
        return column
    bytes_of = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    kind = bytes_of.get(column.type)
    column = column.view(kind) if kind else column
    column.validate(full=True)
    return column
