"""The tokenizer in `tokenizer.path`: one of ours, or the files of another system.

Which kind it is follows from the name and the settings, never from what loads it successfully.

Whether a tokenizer gives texts back: a sample of a build's documents, encoded and decoded.

A model of the user may normalize, drop spaces, or lack characters and the bytes to spell them. Such
losses are in every token of the corpus, and nothing after the build could notice them.

The tokenizer of a build: the one in `tokenizer.path`, else one made of the training split.
"""

from __future__ import annotations

import io
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np

from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.formats import is_compressed
from data_pipeline.builder.records import Document, Reject, fraction_of
from data_pipeline.builder.sources import SourceFile
from data_pipeline.builder.split_writer import is_validation
from data_pipeline.config import SMALLEST_VOCABULARY, CorpusConfig, TokenizerConfig
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.tokenizer import (
    DESCRIPTION_NAME,
    TRAITS,
    Tokenizer,
    read_model,
    tokenizer_of_file,
)
from data_pipeline.vocabularies.built_in import (
    END_TOKEN,
    most_frequent_bytes,
    most_frequent_words,
    words_of_file,
)
from data_pipeline.vocabularies.huggingface import end_token_of, special_tokens_of
from data_pipeline.vocabularies.vocabulary import (
    LARGEST_MODEL_BYTES,
    InvalidVocabulary,
    UnencodableText,
    usual_end,
)
from foundation.errors import ConfigError, DataError
from foundation.files import read_json
from foundation.progress import Note, Report
from foundation.settings import assert_never

HUGGING_FACE_NAME = DESCRIPTION_NAME  # tokenizer.json, as our own description is called
# Files beside it that may say which token ends a text.
HUGGING_FACE_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
TIKTOKEN_SUFFIX = ".tiktoken"


def given_tokenizer(path: Path, settings: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer at `path`; DataError if it is not one, or its end is not known."""
    if path.is_dir() and _holds_hugging_face(path):
        path = path / HUGGING_FACE_NAME
    if not path.is_file():
        inside = path / TOKENIZER_DIRECTORY
        if (inside / DESCRIPTION_NAME).is_file() and not (path / DESCRIPTION_NAME).exists():
            raise DataError(f"{path} is a corpus, expected a tokenizer; give that in it, {inside}")
        return Tokenizer.load(path)
    if TRAITS[settings.kind].is_list:
        return _of_words(path, settings)
    if path.suffix == ".json":
        return _of_hugging_face(path, settings)
    if path.suffix == TIKTOKEN_SUFFIX or settings.pattern:
        return _of_tiktoken(path, settings)
    options = {"end_token": settings.end_token} if settings.end_token else {}
    return tokenizer_of_file(path, "sentencepiece", options)


def _holds_hugging_face(directory: Path) -> bool:
    """Whether its tokenizer.json is one of Hugging Face, and not our description."""
    try:
        tree = read_json(directory / HUGGING_FACE_NAME, LARGEST_MODEL_BYTES)
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and "model" in tree and "fingerprint" not in tree


def _of_words(path: Path, settings: TokenizerConfig) -> Tokenizer:
    end_token = settings.end_token or END_TOKEN
    try:
        return Tokenizer(
            "words", words_of_file(read_model(path), end_token), {"end_token": end_token}
        )
    except (InvalidVocabulary, DataError) as error:
        raise DataError(f"{path} is {error}") from None


def _of_hugging_face(path: Path, settings: TokenizerConfig) -> Tokenizer:
    try:
        companions = (path.with_name(name) for name in HUGGING_FACE_COMPANIONS)
        stated = settings.end_token or end_token_of(*map(_companion, companions))
        end_token = stated or usual_end(special_tokens_of(read_model(path)))
    except ValueError as error:
        raise DataError(f"{path} is not a tokenizer of Hugging Face ({error})") from None
    return tokenizer_of_file(path, "huggingface", {"end_token": end_token})


def _companion(path: Path) -> Any:
    try:
        return read_json(path) if path.exists() else None
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}); set tokenizer.end_token") from None


def _of_tiktoken(path: Path, settings: TokenizerConfig) -> Tokenizer:
    if not settings.pattern or not settings.special_tokens:
        raise ConfigError(
            f"{path} has ranks only; set tokenizer.pattern and tokenizer.special_tokens to those "
            "of its encoding (pat_str and special_tokens of tiktoken)"
        )
    end_token = settings.end_token or usual_end(settings.special_tokens)
    options = {
        "pattern": settings.pattern,
        "special_tokens": settings.special_tokens,
        "end_token": end_token,
    }
    return tokenizer_of_file(path, "tiktoken", options)


ALWAYS = 100  # documents at the start of a build
SAMPLED_FRACTION = 0.01  # of the others, chosen by a hash of their id
SAMPLED_CHARACTERS = 4096  # of a document, from an offset chosen by its hash
MOST_NAMED = 8  # lost characters in a message


class RoundTripCheck:
    """Encodes and decodes a sample of the documents that pass; notes the first that is altered."""

    def __init__(self, tokenizer: Tokenizer, report: Report) -> None:
        self._tokenizer, self._report = tokenizer, report
        self._passed, self._has_noted = 0, False

    def see(self, document: Document) -> None:
        """Check the document if it is in the sample and has a text."""
        if self._has_noted or document.tokens is not None:
            return
        self._passed += 1
        if self._passed > ALWAYS and fraction_of(f"sample {document.id}") >= SAMPLED_FRACTION:
            return
        longest_start = max(len(document.text) - SAMPLED_CHARACTERS, 0)
        start = int(fraction_of(f"offset {document.id}") * longest_start)
        text = _sample_of(document.text, start, self._tokenizer.end_text)
        try:
            ids = self._tokenizer.encode(text)
            found = self._tokenizer.decode(ids)
        except UnencodableText:  # the document will be a reject
            return
        if self._passed <= ALWAYS and not np.array_equal(ids, self._tokenizer.encode(text)):
            raise DataError(
                f"the tokenizer gives the text of {document.source} other tokens each time; give "
                "one without sampling or dropout"
            )
        if found == (text := self._tokenizer.normalized(text)):
            return
        lost = [name for name, _ in (Counter(text) - Counter(found)).most_common(MOST_NAMED)]
        what = f"lost characters: {', '.join(map(repr, lost))}" if lost else "with other characters"
        self._report(
            Note(
                f"the tokenizer alters texts, first seen in {document.source}; {what}; for a "
                "corpus that keeps them, train one here or use tokenizer.kind=bytes"
            )
        )
        self._has_noted = True


def _sample_of(text: str, start: int, end_text: str) -> str:
    """Return the text from `start` on, with whole words where the tokenizer needs them."""
    end = start + SAMPLED_CHARACTERS
    if end_text:
        start = text.rfind(end_text, 0, start) + len(end_text) if start else 0
        end = text.find(end_text, end)
    return text[start : end if end >= 0 else len(text)]


COMPRESSION_RATIO = 4  # assumed, to choose the sampling rate before the text is read
MAX_SENTENCE_BYTES = 1 << 14
# SentencePiece's result depends on the number of threads, so it does not follow the machine.
TRAINING_THREADS = 2


def needs_training(settings: TokenizerConfig) -> bool:
    """Whether the tokenizer has to be trained."""
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
            tokenizer = given_tokenizer(settings.path, settings)
        elif TRAITS[settings.kind].counts_all:
            tokenizer = make_tokenizer(settings, _non_empty(training_texts(sources, config)))
        else:
            tokenizer = make_tokenizer(settings, _non_empty(training_sample(sources, config)))
        tokenizer.save(directory)
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
    """Yield the text of every training document; of a stream, also what is held out."""
    for source in sources:
        all_of_it = replace(source, start=0, size=source.file_size) if config.is_stream else source
        for document in read_documents(all_of_it, config):
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
    Decoding gives the text back unchanged, spaces and newlines included, except U+2581, by which
    SentencePiece writes a space. Characters outside the vocabulary become bytes. ConfigError if
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
        # From here on SentencePiece trains for minutes without checking Python's signals, so let
        # Ctrl-C end the process directly.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _training_advice(vocab_size: int, message: str) -> str:
    if limit := re.search(r"value <= (\d+)", message):
        largest = int(limit.group(1))
        smaller = f"set it to at most {largest}, " if largest >= SMALLEST_VOCABULARY else ""
        return (
            f"tokenizer.vocab_size={vocab_size} is more than the training text has pieces for; "
            f"{smaller}give more text, or use tokenizer.kind=bytes"
        )
    required = re.search(r"required_chars[^0-9]*\d+ vs (\d+)|(\d+) required", message)
    hint = f" (at least {required.group(1) or required.group(2)})" if required else ""
    last = message.strip().splitlines()[-1]
    return f"tokenizer.vocab_size={vocab_size} does not suit the training text{hint}: {last}"
