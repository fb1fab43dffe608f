"""Which documents of the validation split are in the training split, too."""

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.corpora.corpus import Corpus


def copied_documents(corpus: Path) -> int:
    """Return how many documents of the training split are copies of validation documents.

    Exact copies only, by a hash of their tokens; memory holds the hashes of the smaller split.
    """
    held_out = set(_hashes(corpus / "validation"))
    return sum(digest in held_out for digest in _hashes(corpus / "train"))


def _hashes(split: Path) -> Iterator[int]:
    import xxhash

    opened = Corpus.open(split)
    for index in range(len(opened.manifest.shards)):
        shard = opened.shard(index)
        for number in range(len(shard)):
            yield xxhash.xxh3_64_intdigest(shard.tokens(number).tobytes())
