"""Text to token ids and back: SentencePiece (unigram, bpe) or bytes. The only module that imports sentencepiece."""

from __future__ import annotations

import hashlib
import io
import json
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_pipeline.config import SMALLEST_VOCABULARY
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.files import atomic_write, write_json

TokenizerKind = Literal["unigram", "bpe", "bytes"]

DESCRIPTION_NAME = "tokenizer.json"
MODEL_NAME = "tokenizer.model"
NUM_BYTES = 256
# A long string halves BPE's speed, so longer texts are encoded in parts of at least this many characters, cut after a
# newline. A newline is a symbol of its own that no piece crosses, so the parts' tokens are the whole's.
CUT_CHARACTERS = 1 << 15
MAX_SENTENCE_BYTES = 1 << 14
# SentencePiece's result depends on the number of threads, so it is fixed, not taken from the machine.
TRAINING_THREADS = 2


class Tokenizer:
    """Encodes whole texts. Never emits `end_id`, which closes a document; the fingerprint is a hash of the model."""

    def __init__(self, kind: TokenizerKind, model: bytes = b"") -> None:
        self.kind: TokenizerKind = kind
        self.model = model
        self.fingerprint = fingerprint_of(kind, model)
        self._processor: Any = None
        if kind == "bytes":
            self.vocab_size, self.end_id = NUM_BYTES + 1, NUM_BYTES
            return
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size, self.end_id = self._processor.get_piece_size(), self._processor.eos_id()

    @property
    def dtype(self) -> str:
        """The narrowest type of array that holds every id."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def encode(self, text: str) -> np.ndarray:
        """The ids of one text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str], num_threads: int = 1) -> list[np.ndarray]:
        """One array of ids per text, the same whatever the number of threads; other Python threads run meanwhile."""
        if self._processor is None:
            return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]
        cut = [list(_cut_at_newlines(text)) for text in texts]
        flat = [part for parts in cut for part in parts]
        encoded = iter(self._processor.encode(flat, return_type="numpy", num_threads=num_threads))
        return [_join([next(encoded) for _ in parts], self.dtype) for parts in cut]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; ends of documents and ids beyond the vocabulary are left out."""
        kept = [int(i) for i in ids if int(i) != self.end_id and int(i) < self.vocab_size]
        if self._processor is None:
            return bytes(kept).decode(errors="replace")
        return self._processor.decode(kept)

    def text_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """UTF-8 bytes and characters of text that each id stands for, [V]; a text's are the sums over its ids.

        A character that is spelled in bytes counts at its first one; ends of documents count nothing.
        """
        sizes = np.zeros((2, self.vocab_size), np.int64)
        for token in range(self.vocab_size):
            if token == self.end_id:
                continue
            piece = b"" if self._processor else bytes([token])
            if self._processor is not None and not self._processor.is_control(token):
                name = self._processor.id_to_piece(token)
                is_byte = self._processor.is_byte(token)
                piece = (
                    bytes([int(name[3:5], 16)]) if is_byte else name.replace("\u2581", " ").encode()
                )
            sizes[:, token] = len(piece), sum(byte & 0xC0 != 0x80 for byte in piece)
        return sizes[0], sizes[1]

    def save(self, directory: Path) -> None:
        """Write the model, then the description that makes the directory count as a tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.model:
            with atomic_write(directory / MODEL_NAME) as file:
                file.write(self.model)
        description = {
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "end_id": self.end_id,
            "fingerprint": self.fingerprint,
        }
        write_json(directory / DESCRIPTION_NAME, description)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a directory that `save` wrote, or a SentencePiece `.model` file of any origin that has an end token."""
        if path.is_file():
            return _load_foreign(path)
        try:
            description = json.loads((path / DESCRIPTION_NAME).read_bytes())
            kind = description["kind"]
            model = b"" if kind == "bytes" else (path / MODEL_NAME).read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"{path} is no tokenizer: {error.filename} is missing") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path / DESCRIPTION_NAME} is damaged ({error!r}); restore it"
            ) from None
        found = fingerprint_of(kind, model)
        if found != description.get("fingerprint"):
            raise DataError(
                f"{path} is damaged: its model has fingerprint {found[:16]}, "
                f"its description says {str(description.get('fingerprint'))[:16]}; restore it"
            )
        return cls(kind, model)


def fingerprint_of(kind: str, model: bytes) -> str:
    """What tells one tokenizer from another."""
    return hashlib.sha256(kind.encode() + b"\0" + model).hexdigest()


def _load_foreign(path: Path) -> Tokenizer:
    try:
        if not (model := path.read_bytes()):
            raise DataError(f"{path} is no SentencePiece model (it is empty)")
        tokenizer = Tokenizer("unigram", model)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path} is no SentencePiece model ({error})") from None
    if tokenizer.end_id < 0:
        raise DataError(
            f"{path} has no end-of-sentence token (eos_id), which must close every document; train another"
        )
    return tokenizer


def _cut_at_newlines(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > CUT_CHARACTERS:
        newline = text.find("\n", begin + CUT_CHARACTERS - 1)
        if newline < 0:
            break
        yield text[begin : newline + 1]
        begin = newline + 1
    if begin < len(text):
        yield text[begin:]


def _join(parts: list[np.ndarray], dtype: str) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def train_tokenizer(kind: TokenizerKind, vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    """Train on all of `texts`; the same texts in the same order give the same model, whatever the machine's cores.

    Text survives encoding and decoding unchanged, spaces and newlines included, except U+2581, which stands for a
    space in SentencePiece. Characters that are not in the vocabulary become bytes. Raises ConfigError when the text is
    too little for `vocab_size`.
    """
    if kind == "bytes":
        return Tokenizer("bytes")
    import sentencepiece

    model, sentences, on_interrupt = (
        io.BytesIO(),
        _Sentences(texts),
        signal.getsignal(signal.SIGINT),
    )
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
    """Lines, the longest ones in parts, since SentencePiece leaves out what is longer than its limit.

    `raised` is what reading the texts raised, of which SentencePiece makes an error of its own. When all are read,
    Ctrl-C ends the process: SentencePiece trains for minutes without a look at Python's signals.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.raised: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        part_characters = MAX_SENTENCE_BYTES // 4  # UTF-8 takes at most four bytes
        try:
            for text in self._texts:
                for line in text.split("\n"):
                    for begin in range(0, len(line), part_characters):
                        yield line[begin : begin + part_characters]
        except BaseException as error:  # for the caller
            self.raised = error
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _training_advice(vocab_size: int, message: str) -> str:
    limit = re.search(r"value <= (\d+)", message)
    if limit:
        smaller = (
            f"set it to at most {limit.group(1)}, "
            if int(limit.group(1)) >= SMALLEST_VOCABULARY
            else ""
        )
        return (
            f"tokenizer.vocab_size={vocab_size} is more than the training text has pieces for; "
            f"{smaller}give more text, or use tokenizer.kind=bytes"
        )
    required = re.search(r"required_chars[^0-9]*\d+ vs (\d+)|(\d+) required", message)
    hint = f" (at least {required.group(1) or required.group(2)})" if required else ""
    last = message.strip().splitlines()[-1]
    return f"tokenizer.vocab_size={vocab_size} does not suit the training text{hint}: {last}"
