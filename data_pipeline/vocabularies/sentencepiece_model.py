"""SentencePiece models, trained here or by others; texts have the tokens that the library gives."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from data_pipeline.vocabularies.vocabulary import (
    InvalidVocabulary,
    encoding_errors,
    library_errors,
    no_end,
)

# A long string halves BPE's speed, so a BPE model of our own encodes longer texts in parts of at
# least this many characters, cut after a newline. In such a model a newline is a separate symbol
# that no merge crosses, and nothing is added at the start of a text, so the parts have the same
# tokens as the whole. For other models texts are not cut: a user's may add a space at every start,
# and unigram sums float32 scores from the start, so that near ties may have another winner.
CUT_CHARACTERS = 1 << 15


class SentencePieceModel:
    """The pieces of a model. Without `end_token`, its end of a sentence ends a document."""

    end_text = ""

    def __init__(self, model: bytes, may_cut: bool, end_token: str = "") -> None:
        import sentencepiece

        if not model:
            raise InvalidVocabulary("not a SentencePiece model (it is empty); restore it")
        with library_errors("a SentencePiece model"):
            self.processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
            # Read all names now: one that is not UTF-8 would otherwise be an error in some text.
            names = self.processor.id_to_piece(list(range(self.processor.get_piece_size())))
        self.vocab_size, self._may_cut = len(names), may_cut
        self.end_id = names.index(end_token) if end_token in names else self.processor.eos_id()
        if end_token and end_token not in names:
            raise no_end(end_token)
        if self.end_id < 0:
            raise InvalidVocabulary(
                "without an end-of-sentence token (eos_id), which must end every document; set "
                "tokenizer.end_token to another of its pieces, or train another"
            )

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        """Return one array of ids per text; releases the GIL."""
        cut = [list(_cut_at_newlines(text)) if self._may_cut else [text] for text in texts]
        flat = [part for parts in cut for part in parts]
        with encoding_errors():
            ids = self.processor.encode(flat, return_type="numpy", num_threads=num_threads)
        encoded = iter(ids)
        none = np.zeros(0, np.uint16)
        return [np.concatenate([next(encoded) for _ in parts] or [none]) for parts in cut]

    def decode(self, ids: Sequence[int]) -> str:
        return self.processor.decode(list(ids))

    def token_texts(self) -> list[bytes]:
        return list(map(self._text_of, range(self.vocab_size)))

    def _text_of(self, token: int) -> bytes:
        if self.processor.is_control(token):
            return b""
        name = self.processor.id_to_piece(token)
        if self.processor.is_byte(token):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()


def _cut_at_newlines(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > CUT_CHARACTERS:
        newline = text.find("\n", start + CUT_CHARACTERS - 1)
        if newline < 0:
            break
        yield text[start : newline + 1]
        start = newline + 1
    if start < len(text):
        yield text[start:]
