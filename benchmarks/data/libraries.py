"""How fast tokenizers of other systems encode, compared with their libraries alone.

Both encode the same batch on the same threads. Ours also returns arrays of the corpus' dtype, and
looks for the end of a document in every text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data.encoding import library_texts
from benchmarks.measure import Comparison, Measurement, timed
from data_pipeline.builder.given_tokenizer import given_tokenizer
from data_pipeline.config import TokenizerConfig
from data_pipeline.vocabularies.huggingface import HuggingFaceTokenizer
from data_pipeline.vocabularies.tiktoken_ranks import TiktokenRanks
from tests.helpers.tokenizer_files import byte_level_json, tiktoken_file

LIBRARY_GOAL = 1 / 1.25  # our rate over the library's own


@dataclass(frozen=True)
class LibrariesSize:
    """How much text, of Python's standard library."""

    megabytes: float = 16
    training_megabytes: float = 2
    vocab_size: int = 8_000
    threads: int = os.cpu_count() or 1
    rounds: int = 3


def library_costs(directory: Path, size: LibrariesSize) -> Iterator[Measurement]:
    """Yield our rate over the library's, of each library."""
    texts = list(library_texts(size.megabytes * 1e6))
    training = list(library_texts(size.training_megabytes * 1e6))
    (directory / "tokenizer.json").write_text(byte_level_json(training, size.vocab_size))
    ranks = directory / "x.tiktoken"
    given = TokenizerConfig(**tiktoken_file(training, ranks, size.vocab_size))  # type: ignore[arg-type]
    huggingface = given_tokenizer(directory / "tokenizer.json", TokenizerConfig()).load()
    tiktoken = given_tokenizer(ranks, given).load()
    library = HuggingFaceTokenizer(huggingface.model, **huggingface.options)
    encoding = TiktokenRanks(tiktoken.model, **tiktoken.options)
    cases = {
        "tokenizers": (
            huggingface,
            lambda: library.library.encode_batch_fast(texts, add_special_tokens=False),
        ),
        "tiktoken": (
            tiktoken,
            lambda: encoding.library.encode_ordinary_batch(texts, num_threads=size.threads),
        ),
    }
    for name, (tokenizer, alone) in cases.items():
        yield from Comparison(
            name=f"rate over {name} alone, {size.megabytes:.0f} MB of text",
            goal=LIBRARY_GOAL,
            baseline=timed(alone),
            candidate=timed(lambda own=tokenizer: own.encode_many(texts, size.threads)),
            rounds=size.rounds,
        ).measure()
