"""What several tests of this folder read."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.corpus import Corpus

TEXTS = [
    f"entry {number}: na\u00efve \u2192 {'ab' * (number % 7)}\n" * (1 + number % 5)
    for number in range(40)
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    """The validation split of forty short texts with characters of several bytes."""
    root: Path = tmp_path_factory.mktemp("corpus")
    (root / "text").mkdir()
    for number, words in enumerate(TEXTS):
        (root / "text" / f"{number:02}.txt").write_text(words, encoding="utf-8")
    build_corpus(
        CorpusConfig(
            input=(root / "text",),
            output=root / "data",
            validation_fraction=0.3,
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=320),
        )
    )
    return Corpus.open(root / "data" / "validation")
