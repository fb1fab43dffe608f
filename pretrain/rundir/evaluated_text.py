"""What a validation loss rests on: documents, and losses of parts of the split. Torch-free.

A part has successive documents; all parts have about equally many tokens. They are treated as a
random sample. A loss is the ratio of two sums over parts, of losses and of tokens, and has the
variance of a ratio (Cochran, Sampling Techniques, section 6.4). Two models are compared part by
part, which removes most of what makes one text harder than another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from pretrain.terminal.text import counted

PARTS = "parts"  # in the line of an evaluation
MEASURED = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "tokens", "documents")
MEASURED += ("standard_error", PARTS)  # all that an evaluation has measured in that line


@dataclass(frozen=True)
class EvaluatedText:
    """The documents that an evaluation has read; without parts if these are not known."""

    documents: int = 0
    parts: tuple[tuple[float, int], ...] = ()  # (mean loss in nats per token, number of tokens)

    @classmethod
    def of_line(cls, line: Mapping[str, Any] | None) -> EvaluatedText:
        """Return the text of an evaluation from its line."""
        if not line or not line.get(PARTS):
            return cls()
        parts = ((math.nan if loss is None else loss, tokens) for loss, tokens in line[PARTS])
        return cls(int(line.get("documents") or 0), tuple(parts))

    @property
    def tokens(self) -> int:
        return sum(self.part_tokens)

    @property
    def part_tokens(self) -> tuple[int, ...]:
        """The tokens of each part: equal for equal texts, and only their losses are compared."""
        return tuple(tokens for _, tokens in self.parts)

    @property
    def standard_error(self) -> float | None:
        """The standard error of the loss; None with fewer than two parts."""
        return _standard_error(self.parts)

    @property
    def description(self) -> str:
        """The text in words: `100,000 tokens of 4 documents`."""
        words = f"{self.tokens:,} tokens of {counted(self.documents, 'document')}"
        return words if self.parts else "-"

    @property
    def cells(self) -> tuple[str, str]:
        """The texts of a table's cells: the standard error, and what the loss rests on."""
        error = self.standard_error
        return "-" if error is None else f"{error:.4f}", self.description


def is_parts(value: Any) -> bool:
    """Return whether the value is a list of losses and tokens, as lines of evaluations have."""
    return isinstance(value, list) and all(
        isinstance(part, list)
        and len(part) == 2
        and type(part[0]) in (float, int, NoneType)
        and type(part[1]) is int
        and part[1] > 0
        for part in value
    )


def difference_error(first: EvaluatedText, second: EvaluatedText) -> float | None:
    """Return the standard error of the difference of two losses on the same parts, else None."""
    if first.part_tokens != second.part_tokens:
        return None
    pairs = zip(first.parts, second.parts, strict=True)
    return _standard_error([(loss - other, tokens) for (loss, tokens), (other, _) in pairs])


def _standard_error(parts: Sequence[tuple[float, int]]) -> float | None:
    if len(parts) < 2:
        return None
    total = sum(tokens for _, tokens in parts)
    mean = sum(value * tokens for value, tokens in parts) / total
    squares = sum((tokens * (value - mean)) ** 2 for value, tokens in parts)
    return math.sqrt(len(parts) / (len(parts) - 1) * squares) / total
