"""Small corpora for tests: real builds of generated text, the same bytes every time."""

from __future__ import annotations

import json
import random
from pathlib import Path

from data_pipeline.build import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig

SUBJECTS = [
    "the river",
    "a lantern",
    "our captain",
    "the old clock",
    "her letter",
    "a grey horse",
    "the harbour",
    "my brother",
]
VERBS = ["carried", "forgot", "answered", "followed", "painted", "remembered", "crossed", "waited for"]
OBJECTS = [
    "the morning",
    "a silver key",
    "the quiet town",
    "two strangers",
    "the long road",
    "a paper boat",
    "the storm",
]
TINY_VOCABULARIES = {"bytes": 300, "unigram": 320, "bpe": 400}


def make_text(generator: random.Random, sentences: int) -> str:
    """Sentences with a structure that a small model can learn; each document keeps to one subject."""
    subject = generator.choice(SUBJECTS)
    lines = []
    for number in range(sentences):
        line = f"{subject} {generator.choice(VERBS)} {generator.choice(OBJECTS)}."
        lines.append(line.capitalize() + ("\n" if number % 4 == 3 else ""))
    return "\n".join(lines)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """One record per text, with the ids d0, d1, ..."""
    lines = [json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(texts)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def make_tiny_corpus(directory: Path, *, documents: int = 60, seed: int = 0, vocabulary: str = "bytes") -> Path:
    """Build a train and a validation split of generated documents in `directory`, which comes back.

    About 400 bytes a document, several shards a split; `vocabulary` is a tokenizer kind: bytes, unigram or bpe.
    """
    generator = random.Random(seed)
    texts = [make_text(generator, generator.randint(2, 20)) for _ in range(documents)]
    source = write_jsonl(directory.with_name(f".{directory.name}-text") / "text.jsonl", texts)
    config = CorpusConfig(
        input=(source,),
        output=directory,
        validation_fraction=0.2,
        shard_bytes=6000,
        threads=1,
        tokenizer=TokenizerConfig(kind=vocabulary, vocab_size=TINY_VOCABULARIES[vocabulary]),  # type: ignore[arg-type]
    )
    build_corpus(config)
    return directory
