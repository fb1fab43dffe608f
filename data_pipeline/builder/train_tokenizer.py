"""The tokenizer of a build: the one in `tokenizer.path`, else one trained on a sample of the training split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.builder.compression import COMPRESSED_SUFFIXES
from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.records import Document
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.errors import DataError
from data_pipeline.tokenizer import DESCRIPTION_NAME, Tokenizer, train_tokenizer

COMPRESSION_RATIO = 4  # a guess, to choose the sample's rate before the text is read


def fraction_of(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone and is spread evenly."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little") / (
        1 << 48
    )


def is_validation(document_id: str, config: CorpusConfig) -> bool:
    """Whether a document of `config.input` belongs to the validation split."""
    return not config.validation_input and fraction_of(document_id) < config.validation_fraction


def needs_training(settings: TokenizerConfig) -> bool:
    """Whether there is no tokenizer yet with these settings."""
    return not settings.path and settings.kind != "bytes"


def prepare_tokenizer(
    directory: Path, sources: list[SourceFile], config: CorpusConfig
) -> Tokenizer:
    """The tokenizer in `directory`, put there first if a killed build has not already."""
    if not (directory / DESCRIPTION_NAME).exists():
        if config.tokenizer.path:
            tokenizer = Tokenizer.load(config.tokenizer.path)
        elif config.tokenizer.kind == "bytes":
            tokenizer = Tokenizer("bytes")
        else:
            texts = _NonEmpty(training_sample(sources, config))
            tokenizer = train_tokenizer(config.tokenizer.kind, config.tokenizer.vocab_size, texts)
        tokenizer.save(directory)
    return Tokenizer.load(directory)


def training_sample(sources: list[SourceFile], config: CorpusConfig) -> Iterator[str]:
    """Paragraphs of the training documents, at most `training_bytes`, chosen by hash evenly over the whole input."""
    expected = sum(
        s.size * (COMPRESSION_RATIO if s.path.suffix in COMPRESSED_SUFFIXES else 1) for s in sources
    )
    rate = config.tokenizer.training_bytes / max(expected, 1)
    remaining = config.tokenizer.training_bytes
    for source in sources:
        for document in read_documents(source, config):
            if not isinstance(document, Document) or is_validation(document.id, config):
                continue
            for text in _thinned(document, rate):
                remaining -= len(text.encode())
                if remaining < 0:
                    return
                yield text


def _thinned(document: Document, rate: float) -> list[str]:
    if rate >= 1:
        return [document.text]
    paragraphs = document.text.split("\n\n")
    return [
        text
        for number, text in enumerate(paragraphs)
        if fraction_of(f"{number} {document.id}") < rate
    ]


class _NonEmpty:
    """Passes texts through; DataError at the end if there was none."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts

    def __iter__(self) -> Iterator[str]:
        has_any = False
        for text in self._texts:
            has_any = True
            yield text
        if not has_any:
            raise DataError(
                "the input holds no usable text for the training split; check input, text_field and format"
            )
