"""Whether a tokenizer gives texts back: a sample of a build's documents, encoded and decoded.

A model of the user may normalize, drop spaces, or lack characters and the bytes to spell them. Such
losses are in every token of the corpus, and nothing after the build could notice them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from data_pipeline.builder.records import Document, fraction_of
from data_pipeline.progress import Note, Report
from data_pipeline.tokenizer import Tokenizer

ALWAYS = 100  # documents at the start of a build
SAMPLED_FRACTION = 0.01  # of the others, chosen by a hash of their id
SAMPLED_CHARACTERS = 4096  # of a document, from an offset chosen by its hash
MOST_NAMED = 8  # lost characters in a message
MOST_COUNTED = 1000  # kinds of them in the build's record


@dataclass
class RoundTrip:
    """Counts of the sample. Documents are checked in their order, so a resume changes nothing."""

    sampled: int = 0
    altered: int = 0  # did not come back as they were
    lost: dict[str, int] = field(default_factory=dict)  # characters that did not come back

    def check(self, text: str, tokenizer: Tokenizer) -> None:
        """Count whether `text` comes back from its tokens."""
        found, text = tokenizer.decode(tokenizer.encode(text)), tokenizer.normalized(text)
        self.sampled += 1
        if found != text:
            self.altered += 1
            self._add(Counter(text) - Counter(found))

    def _add(self, lost: dict[str, int]) -> None:
        self.lost = dict((Counter(self.lost) + Counter(lost)).most_common(MOST_COUNTED))

    def __str__(self) -> str:
        """Return what was lost, in one line."""
        most = Counter(self.lost).most_common(MOST_NAMED)
        names = [f"{name!r} ({count:,})" for name, count in most]
        more = f" and {len(self.lost) - MOST_NAMED} other" if len(self.lost) > MOST_NAMED else ""
        what = f"lost characters: {', '.join(names)}{more}" if names else "with other characters"
        return (
            f"the tokenizer altered {self.altered:,} of {self.sampled:,} sampled texts; {what}; "
            "for a corpus that keeps them, train one here or use tokenizer.kind=bytes"
        )


def joined(counts: Iterable[RoundTrip]) -> RoundTrip:
    """Return the sums."""
    total = RoundTrip()
    for part in counts:
        total.sampled += part.sampled
        total.altered += part.altered
        total._add(part.lost)
    return total


class RoundTripCheck:
    """Checks a sample of the documents that pass, and notes the first that comes back altered."""

    def __init__(self, tokenizer: Tokenizer, report: Report) -> None:
        self.counts = RoundTrip()
        self._tokenizer, self._report = tokenizer, report
        self._passed = 0

    def see(self, document: Document) -> None:
        """Check the document if it is in the sample and has a text."""
        if document.tokens is not None:
            return
        self._passed += 1
        if self._passed > ALWAYS and fraction_of(f"sample {document.id}") >= SAMPLED_FRACTION:
            return
        longest_start = max(len(document.text) - SAMPLED_CHARACTERS, 0)
        start = int(fraction_of(f"offset {document.id}") * longest_start)
        was_altered = self.counts.altered
        sample = _sample_of(document.text, start, self._tokenizer.end_text)
        self.counts.check(sample, self._tokenizer)
        if self.counts.altered and not was_altered:
            self._report(Note(f"{self.counts} (first seen in {document.source})"))


def _sample_of(text: str, start: int, end_text: str) -> str:
    """Return the text from `start` on, with whole words where the tokenizer needs them."""
    end = start + SAMPLED_CHARACTERS
    if end_text:
        start = text.rfind(end_text, 0, start) + len(end_text) if start else 0
        end = text.find(end_text, end)
    return text[start : end if end >= 0 else len(text)]
