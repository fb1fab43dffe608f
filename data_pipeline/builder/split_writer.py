"""Write the encoded documents of one split into shards, each recorded in the build's journal.

This module also decides which split a document belongs to, checks that no split of a build will be
empty, and counts what a build has encoded so far.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.journal import BuildJournal, FinishedShard
from data_pipeline.builder.records import Document, Reject, fraction_of
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig, ShardFormat
from data_pipeline.corpora.lengths import write_lengths
from data_pipeline.corpora.manifest import SPLITS, Manifest, ShardInfo
from data_pipeline.shards.shards import FORMATS, shard_name, write_index, write_shard
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import DataError
from foundation.files import make_directory, sha256_of
from foundation.progress import INTERVAL_SECONDS, Note, Report, duration

ENOUGH_DOCUMENTS, ENOUGH_CHARACTERS = 4, 400_000  # for a validation split: some 100,000 tokens
Sources = list[tuple[str, SourceFile]]  # (split, file); "" if each document decides on its split


def is_validation(document_id: str, config: CorpusConfig) -> bool:
    """Whether a document of `config.input` belongs to the validation split."""
    is_by_id = not config.validation_input and not config.is_stream
    return is_by_id and fraction_of(document_id) < config.validation_fraction


def splits_of_build(config: CorpusConfig) -> tuple[str, ...]:
    """Return the splits that a build with these settings writes."""
    return SPLITS if config.validation_input or config.validation_fraction else SPLITS[:1]


def check_sources(
    config: CorpusConfig, sources: Sources, report: Report | None = None
) -> CorpusConfig:
    """Raise DataError if a split would get no document, before hours of encoding.

    With `report`, an empty validation split is no error if a larger fraction fills it: return the
    settings with that fraction, and report its documents. Otherwise return `config`. Files are read
    only as far as the first document of each split.
    """
    documents, texts = dict.fromkeys(splits_of_build(config), 0), list[tuple[float, str, int]]()
    rejects: list[Reject] = []
    for split, source in sources:
        targets = (split,) if split else ("train",) if config.validation_input else tuple(documents)
        if all(documents[target] for target in targets):
            continue
        for document in read_documents(source, config):
            if isinstance(document, Reject):
                rejects += [] if document.is_empty_row else [document]
                if len(rejects) > config.max_rejects:
                    return config  # the build will stop for this reason
                continue
            target = split or ("validation" if is_validation(document.id, config) else "train")
            documents[target] += 1
            size = len(document.text if document.tokens is None else document.tokens)
            texts.append((fraction_of(document.id), document.id, size))
            if all(documents.values()):
                return config
            if all(documents[target] for target in targets):
                break
    hint = ""
    if not config.validation_input and documents["train"] > 1:
        hint = f"; the smallest fraction that gives it one is {_above(min(texts)[0]):g}"
    if rejects:
        hint += (
            f"; the first of {len(rejects)} unusable records is {rejects[0].source}: "
            f"{rejects[0].reason}"
        )
    if not documents["train"]:
        inputs = ", ".join(map(str, config.input))
        raise DataError(f"no documents for the training split in {inputs}{hint}")
    if documents.get("validation", 1):
        return config
    if config.validation_input:
        inputs = ", ".join(map(str, config.validation_input))
        raise DataError(f"no documents for the validation split in validation_input={inputs}{hint}")
    share = f"validation_fraction={config.validation_fraction} of {documents['train']} documents"
    if report is None or len(texts) == 1:
        raise DataError(
            f"no documents for the validation split: {share}{hint}; raise it, set it to 0 for no "
            "split, or name other text with validation_input"
        )
    taken = _documents_for_validation(texts)
    names = ", ".join(name for _, name, _ in taken)
    report(Note(f"validation split: {share} gives none, so it takes {len(taken)}: {names}"))
    return replace(config, validation_fraction=math.nextafter(taken[-1][0], 1.0))


def _documents_for_validation(texts: list[tuple[float, str, int]]) -> list[tuple[float, str, int]]:
    """Return the documents with the lowest hashes: enough for an evaluation.

    Enough are ENOUGH_DOCUMENTS with ENOUGH_CHARACTERS. Two or more documents never exceed a tenth
    of the text.
    """
    taken, size = [], 0
    for text in sorted(texts)[:-1]:
        is_enough = len(taken) >= ENOUGH_DOCUMENTS and size >= ENOUGH_CHARACTERS
        if taken and (is_enough or 10 * (size + text[2]) > sum(size for _, _, size in texts)):
            break
        taken.append(text)
        size += text[2]
    return taken


def _above(fraction: float) -> float:
    """Return a number just above `fraction` and below 1, with three decimals or more if needed."""
    digits = max(3, 1 - math.floor(math.log10(fraction))) if fraction else 3
    rounded = (math.floor(fraction * 10**digits) + 1) / 10**digits
    return rounded if rounded < 1 else (1 + fraction) / 2


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """What is stored of a document."""

    id: str
    tokens: np.ndarray  # the last one ends the document, unless the next document continues it
    text_bytes: int  # UTF-8
    characters: int
    location: str = ""  # in the input: file, or file:record


def encoded_document(document: Document, ids: np.ndarray, tokenizer: Tokenizer) -> EncodedDocument:
    """Return what is stored of a document; `ids` are its encoded text, or its own tokens."""
    tokens, text = ids, document.text
    if not document.continues:
        text += tokenizer.end_text
    if not document.continues or tokenizer.leaves_out_end_of(text):
        tokens = np.append(ids, np.array(tokenizer.end_id, ids.dtype))
    if document.tokens is None:
        text_bytes, characters = len(text.encode()), len(text)
    else:
        bytes_V, characters_V = tokenizer.text_sizes()
        text_bytes, characters = int(bytes_V[tokens].sum()), int(characters_V[tokens].sum())
    return EncodedDocument(document.id, tokens, text_bytes, characters, document.source)


class ShardFiles(Protocol):
    """The kind of files that a split is written to."""

    limit: int  # bytes of a file; one with a single document may be larger

    def name(self, number: int) -> str:
        """Return the name of shard `number`."""
        ...

    def size_of(self, document: EncodedDocument) -> int:
        """Return how many bytes of the limit the document takes up."""
        ...

    def write(
        self, path: Path, documents: Sequence[EncodedDocument], scratch: Path
    ) -> dict[str, Any]:
        """Write a shard atomically, see `write_shard`."""
        ...


class CorpusShards:
    """Shards of a corpus, in the order of their documents."""

    def __init__(self, config: CorpusConfig) -> None:
        self.limit = config.shard_bytes
        self._format: ShardFormat = config.shard_format

    def name(self, number: int) -> str:
        return shard_name(number, self._format)

    def size_of(self, document: EncodedDocument) -> int:
        return FORMATS[self._format].sample_bytes(document.id, document.tokens.nbytes)

    def write(
        self, path: Path, documents: Sequence[EncodedDocument], scratch: Path
    ) -> dict[str, Any]:
        return write_shard(path, [(each.id, each.tokens) for each in documents], scratch)


class SplitWriter:
    """Writes documents, in their order, into shards up to the limit of `files`.

    A document that is larger than the limit gets a shard of its own.
    """

    def __init__(
        self, split: str, files: ShardFiles, tokenizer: Tokenizer, journal: BuildJournal
    ) -> None:
        self.split = split
        self._files = files
        self._tokenizer = tokenizer
        self._journal = journal
        self._directory = make_directory(journal.output / split)
        self.shards = [shard for shard in journal.shards if shard.split == split]
        counts = (shard.info.documents + len(shard.rejects) for shard in self.shards)
        self._documents_to_skip = sum(counts)
        self._start_shard()

    def skip(self) -> bool:
        """Count the split's next document; return whether a shard from before a restart has it."""
        self._documents_to_skip -= 1
        return self._documents_to_skip >= 0

    def rejects_before(self) -> list[Reject]:
        """Return the rejects of the shards from before a restart."""
        return [reject for shard in self.shards for reject in shard.rejects]

    def reject(self, reject: Reject) -> None:
        """Record that the split's next document has no ids; a restart skips it with its shard."""
        self._rejects.append(reject)

    def skip_all(self, count: int) -> bool:
        """Count `count` documents if shards from before a restart have them; return if they do."""
        if count > self._documents_to_skip:
            return False
        self._documents_to_skip -= count
        return True

    def _start_shard(self) -> None:
        self._pending: list[EncodedDocument] = []
        self._rejects: list[Reject] = []
        self._bytes = 0

    def add(self, document: EncodedDocument) -> None:
        """Add a document; first write the pending ones as a shard if it does not fit with them."""
        size = self._files.size_of(document)
        if self._pending and self._bytes + size > self._files.limit:
            self.flush()
        self._pending.append(document)
        self._bytes += size

    def flush(self) -> None:
        """Write the pending documents as a shard."""
        if not self._pending:
            return
        path = self._directory / self._files.name(len(self.shards))
        entry = self._files.write(path, self._pending, self._journal.directory / "scratch")
        lengths = [len(document.tokens) for document in self._pending]
        sha256 = sha256_of(path)
        info = ShardInfo(
            path=path.name,
            documents=len(lengths),
            tokens=sum(lengths),
            longest_document=max(lengths),
            size=path.stat().st_size,
            sha256=sha256,
            text_bytes=sum(document.text_bytes for document in self._pending),
            characters=sum(document.characters for document in self._pending),
            lengths=write_lengths(path, sha256, lengths),
        )
        shard = FinishedShard(self.split, info, entry, tuple(self._rejects))
        self._journal.record(shard)
        self.shards.append(shard)
        self._start_shard()

    def finish(self, is_stream: bool = False) -> None:
        """Write the index, then the manifest, which marks the split as complete."""
        write_index(self._directory, [shard.index_entry for shard in self.shards])
        manifest = Manifest(
            dtype=self._tokenizer.dtype,
            tokenizer=self._tokenizer.fingerprint,
            end_id=self._tokenizer.end_id,
            vocab_size=self._tokenizer.vocab_size,
            shards=tuple(shard.info for shard in self.shards),
            is_stream=is_stream,
        )
        manifest.write(self._directory)


@dataclass(slots=True)
class Reading:
    """Counts of a build after some seconds; as text, with its rate and time left."""

    total_bytes: int  # of all input files
    skipped_bytes: int = 0  # read before the first new document: a resumed build skips these
    file_bytes: int = 0  # read so far
    documents: int = 0
    characters: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        fraction = self.file_bytes / max(self.total_bytes, 1)
        done, to_do = self.file_bytes - self.skipped_bytes, self.total_bytes - self.file_bytes
        left = ""
        if done > 0.02 * to_do > 0:
            left = f", about {duration(self.seconds * to_do / done)} left"
        rate = self.characters / max(self.seconds, 1e-9)
        documents = f"{self.documents:,} document{'' if self.documents == 1 else 's'}"
        return (
            f"{documents}, {_amount(self.tokens)} tokens, "
            f"{_amount(self.characters)} characters ({_amount(rate)}/s), "
            f"{int(100 * fraction)}% of the files{left}"
        )


def _amount(count: float) -> str:
    """Return 512, 12.3k or 4.0M."""
    if count < 1000:
        return f"{count:.0f}"
    return f"{count / 1e3:.1f}k" if count < 1e6 else f"{count / 1e6:,.1f}M"


def sum_of_readings(readings: Iterable[Reading], seconds: float) -> Reading:
    """Return the sums of the readings of several processes, after `seconds`."""
    rows = list(readings)
    names = [field.name for field in fields(Reading) if field.name != "seconds"]
    counts = {name: sum(getattr(row, name) for row in rows) for name in names}
    return Reading(**counts, seconds=seconds)


class Progress:
    """Counts what a build encodes; reports it every `INTERVAL_SECONDS` and at the end."""

    def __init__(self, report: Report, total_bytes: int) -> None:
        self._report = report
        self._counts = Reading(total_bytes)
        self._finished_bytes = 0  # size of the files that were read to their end
        self._tell: Callable[[], int] = lambda: 0  # bytes read of the current file
        self._is_in_file = False
        self._started = self._reported = time.monotonic()

    def follow(self, tell: Callable[[], int]) -> None:
        """Note that a file was opened; `tell` returns how many of its bytes were read."""
        self._tell, self._is_in_file = tell, True

    def finish_file(self, size: int) -> None:
        """Note that a file of `size` bytes was read to its end."""
        self._finished_bytes += size
        self._tell, self._is_in_file = (lambda: 0), False

    def add(self, characters: int, tokens: int) -> None:
        """Count an encoded document."""
        counts = self._counts
        if not counts.documents:
            counts.skipped_bytes = self._finished_bytes + self._tell()
        counts.documents += 1
        counts.characters += characters
        counts.tokens += tokens
        if time.monotonic() - self._reported >= INTERVAL_SECONDS:
            self.show()

    def show(self) -> None:
        """Report now."""
        self._reported = time.monotonic()
        file_bytes = self._finished_bytes + self._tell()
        if self._is_in_file:  # bytes are read ahead: not 100 % before the last document
            file_bytes = min(file_bytes, self._counts.total_bytes - 1)
        seconds = self._reported - self._started
        self._report(replace(self._counts, file_bytes=file_bytes, seconds=seconds))
