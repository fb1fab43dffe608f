"""Whether a tokenizer gives texts back: a sample of a build's documents, encoded and decoded.

A user's model may normalize texts, drop spaces, or lack characters and the bytes to spell them.
The corpus then lacks them, too, and nothing after the build could notice it.
"""

from collections import Counter

import numpy as np

from data_pipeline.builder.records import Document, fraction_of
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.vocabularies.vocabulary import UnencodableText
from foundation.errors import DataError
from foundation.progress import Note, Report

ALWAYS = 100  # documents at the start of a build that are all checked
SAMPLED_FRACTION = 0.01  # of the later documents, chosen by a hash of their id
SAMPLED_CHARACTERS = 4096  # checked of a document, from an offset chosen by that hash
MOST_NAMED = 8  # lost characters that a message names


class RoundTripCheck:
    """Encodes and decodes a sample of the documents that `see` gets; reports the first altered."""

    def __init__(self, tokenizer: Tokenizer, report: Report) -> None:
        self._tokenizer, self._report = tokenizer, report
        self._num_seen, self._has_noted = 0, False

    def see(self, document: Document) -> None:
        """Check the document if it is in the sample and has a text."""
        if self._has_noted or document.tokens is not None:
            return
        self._num_seen += 1
        if self._num_seen > ALWAYS and fraction_of(f"sample {document.id}") >= SAMPLED_FRACTION:
            return
        longest_start = max(len(document.text) - SAMPLED_CHARACTERS, 0)
        start = int(fraction_of(f"offset {document.id}") * longest_start)
        text = _sample_of(document.text, start, self._tokenizer.end_text)
        try:
            ids = self._tokenizer.encode(text)
            decoded = self._tokenizer.decode(ids)
        except UnencodableText:  # the document will be a reject
            return
        if self._num_seen <= ALWAYS and not np.array_equal(ids, self._tokenizer.encode(text)):
            raise DataError(
                f"the tokenizer gives the text of {document.source} other tokens each time; give "
                "one without sampling or dropout"
            )
        if decoded == (text := self._tokenizer.normalized(text)):
            return
        lost = [name for name, _ in (Counter(text) - Counter(decoded)).most_common(MOST_NAMED)]
        loss = f"lost characters: {', '.join(map(repr, lost))}" if lost else "with other characters"
        self._report(
            Note(
                f"the tokenizer alters texts, first seen in {document.source}; {loss}; for a "
                "corpus that keeps them, train one here or use tokenizer.kind=bytes"
            )
        )
        self._has_noted = True


def _sample_of(text: str, start: int, end_text: str) -> str:
    """Return SAMPLED_CHARACTERS from `start` on; more if the text is cut at `end_text` alone."""
    end = start + SAMPLED_CHARACTERS
    if end_text:
        start = text.rfind(end_text, 0, start) + len(end_text) if start else 0
        end = text.find(end_text, end)
    return text[start : end if end >= 0 else len(text)]
