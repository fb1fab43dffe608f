"""Tokens without text: Megatron's .bin with its .idx, and arrays of numpy, as nanoGPT writes them.

Arrays are mapped into memory and read in blocks. Nothing is unpickled.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data_pipeline.builder.compression import InvalidRecords, UnreadableRecords
from data_pipeline.builder.formats import INDEX_SUFFIX, MEGATRON_MAGIC, NUMPY_MAGIC
from data_pipeline.builder.records import Records, Tell, document_of_tokens
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig
from foundation.errors import ConfigError, DataError
from foundation.files import LARGEST_READ_BYTES, named_errors, open_regular, read_regular

# The head of an .idx: magic, version, code of the type, numbers of sequences and of documents + 1.
HEAD = struct.Struct("<9sQBQQ")
VERSION = 1
INTEGERS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by Megatron's codes
ARRAY_SUFFIX = ".npy"
FEWEST_PARTS = 16  # groups of numbers; fewer show nothing about their width
LARGEST_UNSTATED = 1 << 20  # assumed size of a vocabulary whose size is not set
BLOCK = 1 << 20  # tokens that are searched for a separator at once


def read_megatron(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None]
) -> Records:
    """Yield each document that the index beside the .bin file lists."""
    dtype, lengths, starts, ends = _read_index(source.path.with_suffix(INDEX_SUFFIX))
    _check_type(dtype, source.path, config)
    tokens = _mapped_plain(source.path, dtype)
    check_width(tokens, config)
    last = int((starts + dtype.itemsize * lengths.astype(np.int64)).max(initial=0))
    if last < tokens.nbytes:
        raise InvalidRecords(f"its index ends at byte {last:,}, the file at {tokens.nbytes:,}")
    if (total := int(np.abs(lengths.astype(np.int64)).sum())) > len(tokens):
        raise InvalidRecords(f"its index has {total:,} tokens, the file {len(tokens):,}")
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
        content = read_regular(path, LARGEST_READ_BYTES)
        magic, version, code, sequences, documents = HEAD.unpack_from(content)
        size = HEAD.size + 12 * sequences + 8 * documents
        if magic == MEGATRON_MAGIC and len(content) == size + sequences:
            raise UnreadableRecords("its index has modes of several media; write one of text")
        if (
            magic != MEGATRON_MAGIC
            or version != VERSION
            or code not in INTEGERS
            or len(content) != size
        ):
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
    dtype = np.dtype(config.token_dtype).newbyteorder("<") if config.token_dtype else None
    tokens = _mapped(source.path, dtype, config)
    done = 0
    follow(lambda: done * tokens.itemsize)
    for number, (start, end) in enumerate(_between(tokens, config.tokenizer.end_id), 1):
        done = end
        if end > start:
            location = f"{source.name}:{number}"
            yield document_of_tokens(tokens[start:end], location, location, config)


def _between(tokens: np.ndarray, separator: int) -> Iterator[tuple[int, int]]:
    start = 0
    if separator >= 0:
        for block in range(0, len(tokens), BLOCK):
            for index in np.flatnonzero(tokens[block : block + BLOCK] == separator).tolist():
                yield start, block + index
                start = block + index + 1
    if start < len(tokens):
        yield start, len(tokens)


def _mapped(path: Path, dtype: np.dtype | None, config: CorpusConfig) -> np.ndarray:
    """Return the numbers in a file, of the type in its numpy header, else of `dtype` or uint16."""
    with named_errors(path), open_regular(path) as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            tokens = _mapped_numpy(path)
        elif path.suffix.lower() == ARRAY_SUFFIX and dtype is None:
            raise UnreadableRecords(
                "it has no header of numpy; set token_dtype if it holds plain numbers, as OLMo's do"
            )
        else:
            tokens = _mapped_plain(path, dtype or np.dtype("<u2"))
    _check_type(tokens.dtype, path, config)
    check_width(tokens, config)
    return tokens


def _mapped_numpy(path: Path) -> np.ndarray:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # refuses pickles and archives
    except OSError:
        raise
    except Exception as error:  # whatever the parser of its head raises
        reason = " ".join(str(error).partition(". ")[0].split())
        # A file of pickled objects is not damaged.
        kind = UnreadableRecords if "object" in reason else InvalidRecords
        raise kind(reason[:100]) from None
    if not np.issubdtype(array.dtype, np.integer) or array.ndim != 1:
        raise UnreadableRecords(
            f"it holds {array.ndim} dimensions of {array.dtype}, expected one of integers"
        )
    if (end := array.offset + array.nbytes) != (size := path.stat().st_size):
        raise InvalidRecords(f"its array ends at byte {end:,}, the file at {size:,}")
    return array


def _mapped_plain(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise InvalidRecords(f"its {size:,} bytes are no multiple of {dtype}; check token_dtype")
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)


def _check_type(dtype: np.dtype, path: Path, config: CorpusConfig) -> None:
    """Raise ConfigError if the type cannot hold `end_id`, or all ids of an unknown tokenizer."""
    largest, tokenizer = np.iinfo(dtype).max, config.tokenizer
    for name, needed in (
        ("end_id", tokenizer.end_id),
        ("vocab_size", tokenizer.vocab_size - 1 if tokenizer.kind == "unknown" else 0),
    ):
        if needed > largest:
            raise ConfigError(
                f"{path} holds {dtype}, whose largest id is {largest:,}, but tokenizer.{name} is "
                f"{getattr(tokenizer, name):,}; correct it, or token_dtype"
            )


def check_width(tokens: np.ndarray, config: CorpusConfig) -> None:
    """Raise UnreadableRecords if numbers are most likely halves or quarters of wider numbers.

    Of the parts of a wider id, all but one are as small as the vocabulary allows, mostly 0. In data
    of events, too, every second id may have few values, but larger ones.
    """
    stated, vocab_size = config.tokenizer.kind == "unknown", config.tokenizer.vocab_size
    largest = ((vocab_size if stated else LARGEST_UNSTATED) - 1) >> 8 * tokens.itemsize
    first = tokens[: BLOCK - BLOCK % 4]
    for times in (4, 2):
        parts = first[: len(first) - len(first) % times].reshape(-1, times)
        wider = 8 * times * tokens.itemsize
        if len(parts) < FEWEST_PARTS or wider > 64:
            continue
        # Numbers of the other byte order are recognized, too, and small ones that are floats.
        if (parts <= largest).all(0).sum() == times - 1:
            raise UnreadableRecords(
                f"{times - 1} of {times} numbers are at most {largest}: they are {wider}-bit "
                f"numbers read as {tokens.dtype}; set token_dtype to uint{wider}"
            )
