"""Word-level vocabularies, as Transformer-XL has for WikiText-103 and One Billion Word.

A text is a sequence of lines, a line a sequence of words between white space. The token `end_token`
ends each line, and the last line's also ends the document. So the tokens of all documents, one
after the other, are the tokens of all lines. A word outside the vocabulary becomes `<unk>` or
`<UNK>`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from data_pipeline.vocabularies.vocabulary import InvalidVocabulary, check_size
from foundation.errors import DataError

END_TOKEN = "<eos>"
UNKNOWN_NAMES = ("<unk>", "<UNK>")


class Words:
    """The words of a file, one a line, in the order of their ids."""

    end_text = "\n"

    def __init__(self, model: bytes, end_token: str) -> None:
        names = _text_of(model).split("\n")
        self.vocab_size = check_size(len(names))
        self._names, self._ids = names, {name: number for number, name in enumerate(names)}
        if len(self._ids) < len(names) or any(len(name.split()) != 1 for name in names):
            raise InvalidVocabulary("not a list of different words, one a line; restore it")
        if end_token not in self._ids:
            raise InvalidVocabulary(f"a list of words without {end_token!r}; set end_token")
        self.end_id = self._ids[end_token]
        self._unknown = next((self._ids[name] for name in UNKNOWN_NAMES if name in self._ids), None)

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        """Return one array of ids per text; DataError for an unknown word without `<unk>`."""
        return [np.array(self._encode(text), np.uint32) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, line in enumerate(text.removesuffix("\n").split("\n")):
            if number:
                ids.append(self.end_id)
            try:
                ids.extend(self._ids[word] for word in line.split())
            except KeyError as error:
                if self._unknown is None:
                    raise DataError(
                        f"the word {error.args[0]!r} is not in the vocabulary, which has no "
                        f"{' or '.join(UNKNOWN_NAMES)} either; build from more text, or raise "
                        "tokenizer.vocab_size"
                    ) from None
                while ids and ids[-1] != self.end_id:  # words of the line up to an unknown one
                    ids.pop()
                ids.extend(self._ids.get(word, self._unknown) for word in line.split())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        lines: list[list[str]] = [[]]
        for token in ids:
            if token == self.end_id:
                lines.append([])
            else:
                lines[-1].append(self._names[token])
        return "\n".join(map(" ".join, lines))

    def token_texts(self) -> list[bytes]:
        """Return each word with one byte for the space or line end after it."""
        texts = [f"{name} ".encode() for name in self._names]
        texts[self.end_id] = b""
        return texts


def normalized_words(text: str) -> str:
    """Return the text with one space between words: this is what its tokens keep."""
    return "\n".join(" ".join(line.split()) for line in text.removesuffix("\n").split("\n"))


def words_of_file(content: bytes, end_token: str) -> bytes:
    """Return the model of a file with a word first in each line, such as before its count.

    As in Transformer-XL's code, `end_token` comes first if the file does not have it, and a
    repeated word keeps its first place.
    """
    lines = filter(None, (line.split() for line in _text_of(content).split("\n")))
    return _model_of((line[0] for line in lines), end_token)


def most_frequent_words(texts: Iterable[str], most: int, end_token: str) -> bytes:
    """Return the model of the `most` most frequent words; of equal counts, the first seen first.

    If there are more words, `<unk>` replaces the last of them.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    counts.pop(end_token, None)
    kept = [word for word, _ in counts.most_common(most - 1)]
    if len(kept) < len(counts) and not set(UNKNOWN_NAMES) & set(kept):
        kept[-1] = UNKNOWN_NAMES[0]
    return _model_of(kept, end_token)


def _model_of(words: Iterable[str], end_token: str) -> bytes:
    ids = dict.fromkeys(words)
    names = ids if end_token in ids else {end_token: None, **ids}
    return "\n".join(names).encode()


def _text_of(content: bytes) -> str:
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8 at byte {error.start}"
        raise InvalidVocabulary(f"not a list of words ({reason}); restore it") from None
