"""The tokenizer of a build: the one in `tokenizer.path`, else one made of the training split."""

import io
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeGuard

from data_pipeline.builder.compression import is_compressed
from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.given_tokenizer import given_tokenizer
from data_pipeline.builder.records import Document, Reject, fraction_of
from data_pipeline.builder.sources import SourceFile
from data_pipeline.builder.split_writer import is_validation
from data_pipeline.config import SMALLEST_VOCABULARY, CorpusConfig, TokenizerConfig
from data_pipeline.tokenizer import DESCRIPTION_NAME, TRAITS, Tokenizer
from data_pipeline.vocabularies.built_in import most_frequent_bytes
from data_pipeline.vocabularies.words import END_TOKEN, most_frequent_words
from foundation.errors import ConfigError, DataError
from foundation.settings import assert_never

COMPRESSION_RATIO = 4  # assumed text bytes per byte of a compressed file, for the sampling rate
MAX_SENTENCE_BYTES = 1 << 14
# SentencePiece's result depends on the number of threads, so it does not follow the machine.
TRAINING_THREADS = 2


def needs_training(settings: TokenizerConfig) -> bool:
    """Whether the tokenizer has to be made from the text."""
    return not settings.path and TRAITS[settings.kind].is_made


def describe_tokenizer(settings: TokenizerConfig) -> str:
    """Return where the tokenizer comes from, as a line of progress."""
    if not needs_training(settings):
        return str(settings.path or settings.kind)
    if TRAITS[settings.kind].counts_all:
        return f"counting {settings.kind} of the text"
    return (
        f"training {settings.kind} with {settings.vocab_size:,} pieces on at most "
        f"{settings.training_bytes / 1e6:g} MB of the text"
    )


def prepare_tokenizer(
    directory: Path, sources: list[SourceFile], config: CorpusConfig
) -> Tokenizer:
    """Return the tokenizer in `directory`, trained or copied first unless it exists."""
    if not (directory / DESCRIPTION_NAME).exists():
        settings = config.tokenizer
        if settings.path:
            tokenizer = given_tokenizer(settings.path, settings).load()
        elif TRAITS[settings.kind].counts_all:
            tokenizer = make_tokenizer(settings, _non_empty(training_texts(sources, config)))
        else:
            tokenizer = make_tokenizer(settings, _non_empty(training_sample(sources, config)))
        tokenizer.save(directory)
        return tokenizer
    return Tokenizer.load(directory)


def make_tokenizer(settings: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer of the settings' kind, made of all of `texts` where it has a model."""
    match settings.kind:
        case "unigram" | "bpe":
            return train_tokenizer(settings.kind, settings.vocab_size, texts)
        case "words":
            end_token = settings.end_token or END_TOKEN
            model = most_frequent_words(texts, settings.vocab_size, end_token)
            return Tokenizer("words", model, {"end_token": end_token})
        case "characters":
            return Tokenizer("characters", most_frequent_bytes(texts))
        case "bytes":
            return Tokenizer("bytes")
        case "unknown":
            return Tokenizer("unknown", options=unknown_options(settings))
        case _:
            assert_never(settings.kind)


def unknown_options(settings: TokenizerConfig) -> dict[str, int]:
    """Return what is known of an unknown tokenizer; ConfigError if the settings do not say it."""
    if settings.end_id < 0:
        raise ConfigError(
            "tokenizer.kind=unknown needs tokenizer.end_id, the id that ends a document, and "
            "tokenizer.vocab_size; or give the tokenizer of the tokens with tokenizer.path"
        )
    return {"vocab_size": settings.vocab_size, "end_id": settings.end_id}


def training_texts(sources: list[SourceFile], config: CorpusConfig) -> Iterator[str]:
    """Yield the text of every training document; of a stream, its held-out stretches, too."""
    for source in sources:
        whole = replace(source, start=0, size=source.file_size) if config.is_stream else source
        for document in read_documents(whole, config):
            if _is_for_training(document, config):
                yield document.text


def training_sample(sources: list[SourceFile], config: CorpusConfig) -> Iterator[str]:
    """Yield paragraphs of training documents, at most `training_bytes`.

    They are chosen by hash, evenly over the whole input.
    """
    sizes = (
        source.size * (COMPRESSION_RATIO if is_compressed(source.name) else 1) for source in sources
    )
    rate = config.tokenizer.training_bytes / max(sum(sizes), 1)
    remaining = config.tokenizer.training_bytes
    for source in sources:
        for document in read_documents(source, config):
            if not _is_for_training(document, config):
                continue
            for text in _sampled(document, rate):
                remaining -= len(text.encode())
                if remaining < 0:
                    return
                yield text


def _is_for_training(record: Document | Reject, config: CorpusConfig) -> TypeGuard[Document]:
    if not isinstance(record, Document) or record.tokens is not None:
        return False
    return not is_validation(record.id, config)


def _sampled(document: Document, rate: float) -> list[str]:
    if rate >= 1:
        return [document.text]
    return [
        text
        for number, text in enumerate(document.text.split("\n\n"))
        if fraction_of(f"{number} {document.id}") < rate
    ]


def _non_empty(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; DataError at the end if there were none."""
    has_any = False
    for text in texts:
        has_any = True
        yield text
    if not has_any:
        raise DataError(
            "the input has no usable text for the training split; check input, text_field and "
            "format; for tokens, give their tokenizer or set tokenizer.kind=unknown"
        )


def train_tokenizer(
    kind: Literal["unigram", "bpe"], vocab_size: int, texts: Iterable[str]
) -> Tokenizer:
    """Train a SentencePiece model on all of `texts`.

    Equal texts in equal order give an equal model on any machine.
    Decoding gives the text back unchanged, spaces and newlines included, except U+2581, which
    SentencePiece writes for a space. Characters outside the vocabulary become bytes. ConfigError if
    there is too little text for `vocab_size`.
    """
    import sentencepiece

    model, sentences = io.BytesIO(), _Sentences(texts)
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            character_coverage=0.9999,
            user_defined_symbols=["\n"],
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=MAX_SENTENCE_BYTES,
            num_threads=TRAINING_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        if sentences.raised:
            raise sentences.raised from None
        raise ConfigError(_training_advice(vocab_size, str(error))) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, on_interrupt)
    return Tokenizer(kind, model.getvalue())


class _Sentences:
    """Lines of the texts; long lines in parts, because SentencePiece ignores lines over its limit.

    `raised` keeps the error of reading the texts, which SentencePiece replaces by its own.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.raised: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        part_characters = MAX_SENTENCE_BYTES // 4  # UTF-8 takes at most four bytes
        try:
            for text in self._texts:
                for line in text.split("\n"):
                    for start in range(0, len(line), part_characters):
                        yield line[start : start + part_characters]
        except BaseException as error:  # raised again by train_tokenizer
            self.raised = error
            raise
        # From here on SentencePiece trains for minutes, while Python handles no signals. Let Ctrl-C
        # end the process directly.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _training_advice(vocab_size: int, message: str) -> str:
    if limit := re.search(r"value <= (\d+)", message):
        # A power of two, up to half of the possible pieces: the others are rare words.
        largest = int(limit.group(1))
        sensible = max(SMALLEST_VOCABULARY, 1 << (largest.bit_length() - 2))
        smaller = f"set it to {sensible}, " if largest >= SMALLEST_VOCABULARY else ""
        return (
            f"tokenizer.vocab_size={vocab_size} is more than the training text has pieces for; "
            f"{smaller}give more text, or use tokenizer.kind=bytes"
        )
    required = re.search(r"required_chars[^0-9]*\d+ vs (\d+)|(\d+) required", message)
    hint = f" (at least {required.group(1) or required.group(2)})" if required else ""
    last = message.strip().splitlines()[-1]
    return f"tokenizer.vocab_size={vocab_size} does not suit the training text{hint}: {last}"
