"""Tokens without text: Megatron's .bin with its .idx, and arrays of numpy, as nanoGPT writes them.

Arrays are mapped into memory and read in blocks. Nothing is unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data_pipeline.builder.formats import INDEX_SUFFIX
from data_pipeline.builder.records import InvalidRecords, Records, Tell, document_of_tokens
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig
from data_pipeline.errors import DataError
from data_pipeline.files import named_errors, read_regular

# The head of an .idx: magic, version, code of the type, numbers of sequences and of documents + 1.
HEAD = struct.Struct("<9sQBQQ")
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
INTEGERS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by Megatron's codes
ARRAY_SUFFIX = ".npy"
BLOCK = 1 << 20  # tokens that are searched for a separator at once


def read_megatron(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None]
) -> Records:
    """Yield a document for each of the index beside the .bin file."""
    dtype, lengths, starts, ends = _read_index(source.path.with_suffix(INDEX_SUFFIX))
    tokens = _mapped(source.path, dtype)
    last = int((starts + dtype.itemsize * lengths.astype(np.int64)).max(initial=0))
    if last < tokens.nbytes:
        raise InvalidRecords(f"its index ends at byte {last:,}, the file at {tokens.nbytes:,}")
    done = 0
    follow(lambda: done)
    for number in range(len(ends) - 1):
        location = f"{source.name}:{number + 1}"
        parts = []
        for sequence in range(ends[number], ends[number + 1]):
            first, odd = divmod(int(starts[sequence]), dtype.itemsize)
            done = int(starts[sequence])
            if odd or first < 0 or not 0 <= lengths[sequence] <= len(tokens) - first:
                raise InvalidRecords(f"its index puts sequence {sequence} outside of it")
            parts.append(tokens[first : first + lengths[sequence]])
        values = np.concatenate(parts) if parts else tokens[:0]
        yield document_of_tokens(values, location, location, config)


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return the type of the tokens, length and offset of each sequence, and where documents end.

    Offsets are in bytes; document n has the sequences from ends[n] to before ends[n + 1].
    """
    try:
        content = read_regular(path)
        magic, version, code, sequences, documents = HEAD.unpack_from(content)
        size = HEAD.size + 12 * sequences + 8 * documents
        if magic != MAGIC or version != VERSION or code not in INTEGERS or len(content) != size:
            raise ValueError(f"{len(content):,} bytes, version {version}, type {code}")
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing, the index of the .bin file beside it; restore it, or set "
            "format=array for tokens without one"
        ) from None
    except (ValueError, struct.error) as error:
        raise DataError(f"{path} is not an index of Megatron ({error}); restore it") from None
    lengths = np.frombuffer(content, "<i4", sequences, HEAD.size)
    starts = np.frombuffer(content, "<i8", sequences, HEAD.size + 4 * sequences)
    ends = np.frombuffer(content, "<i8", documents, HEAD.size + 12 * sequences)
    if not documents or ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise DataError(f"{path} is corrupted (its documents are not in order); restore it")
    return np.dtype(INTEGERS[code]), lengths, starts, ends


def read_array(source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None]) -> Records:
    """Yield what is between separators of a .npy file, or of plain numbers of `token_dtype`.

    Without a separator the file is one document.
    """
    tokens = _mapped(source.path, np.dtype(config.token_dtype).newbyteorder("<"))
    done = 0
    follow(lambda: done * tokens.itemsize)
    for number, (start, end) in enumerate(_between(tokens, config.tokens_separator), 1):
        done = end
        if end > start:
            location = f"{source.name}:{number}"
            yield document_of_tokens(tokens[start:end], location, location, config)


def _between(tokens: np.ndarray, separator: int) -> Iterator[tuple[int, int]]:
    start = 0
    if separator >= 0:
        for block in range(0, len(tokens), BLOCK):
            for found in np.flatnonzero(tokens[block : block + BLOCK] == separator).tolist():
                yield start, block + found
                start = block + found + 1
    if start < len(tokens):
        yield start, len(tokens)


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return the numbers of a file, in the order of the file."""
    with named_errors(path):
        if path.suffix == ARRAY_SUFFIX:
            try:
                array = np.lib.format.open_memmap(path, mode="r")  # never a pickle or an archive
            except OSError:
                raise
            except Exception as error:  # whatever the parser of its head raises
                reason = " ".join(str(error).partition(". ")[0].split())
                raise InvalidRecords(reason[:100]) from None
            if not np.issubdtype(array.dtype, np.integer) or array.ndim != 1:
                raise InvalidRecords(f"it holds {array.ndim} dimensions of {array.dtype}")
            return array
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise InvalidRecords(f"its {size:,} bytes are no multiple of {dtype}")
        return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
