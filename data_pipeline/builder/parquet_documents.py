"""Documents out of Parquet files. The only module that imports pyarrow, which nothing else needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from data_pipeline.builder.records import Document, Reject, document_id, document_of_bytes
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig
from data_pipeline.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 1024


def read_parquet(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Callable[[], int]], None]
) -> Iterator[Document | Reject]:
    """A document for each row, of the columns text_field and, where there is one, id_field."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{source.path} needs pyarrow, which is not installed; `pip install pyarrow`"
        ) from None
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            num_rows = max(file.metadata.num_rows, 1)
            follow(lambda: row * source.size // num_rows)
            for batch in file.iter_batches(
                ROWS_AT_ONCE, columns=_columns(file.schema_arrow.names, source, config)
            ):
                texts = _as_bytes(batch.column(config.text_field), source, config)
                has_ids = config.id_field in batch.schema.names
                ids = _values(batch.column(config.id_field)) if has_ids else [None] * len(texts)
                for text, value in zip(texts, ids, strict=True):
                    row += 1
                    place = f"{source.name}:{row}"
                    if text is None:
                        yield Reject(place, f"field {config.text_field!r} holds nothing")
                    else:
                        yield document_of_bytes(text, document_id(value, place), place, config)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{source.path} is damaged or cut off ({reason}); fetch it again or take it out"
        ) from None


def _columns(names: list[str], source: SourceFile, config: CorpusConfig) -> list[str]:
    if config.text_field not in names:
        raise DataError(
            f"{source.path} has the columns {', '.join(names)}, not {config.text_field!r}; set text_field"
        )
    return [name for name in (config.text_field, config.id_field) if name in names]


def _as_bytes(
    column: pyarrow.Array, source: SourceFile, config: CorpusConfig
) -> list[bytes | None]:
    values = _values(column)
    found = next((value for value in values if not isinstance(value, bytes | None)), None)
    if found is not None:
        kind = type(found).__name__
        raise DataError(
            f"column {config.text_field!r} of {source.path} holds {kind}, expected text; set text_field"
        )
    return values


def _values(column: Any) -> list[Any]:
    """Python values of a column; text as bytes, because it may be no UTF-8."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    return (column.cast(pyarrow.large_binary()) if is_text else column).to_pylist()
