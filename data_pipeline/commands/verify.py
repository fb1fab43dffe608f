"""Whether a corpus on disk is what its manifests say, and what it looks like: for people, as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from data_pipeline.corpora.corpus import Corpus, LocalShards, split_directory
from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS, check_shard, read_manifest
from data_pipeline.errors import DataError
from data_pipeline.lanes.lane_check import check_lanes
from data_pipeline.lanes.lane_tokens import plan_of
from data_pipeline.tokenizer import Tokenizer

SAMPLE_TOKENS = 120


def splits_of(path: Path) -> list[Path]:
    """`path` if it is a split, else the splits below it; DataError when there is none, or one without manifest."""
    if (path / MANIFEST_NAME).exists():
        return [path]
    found = [path / split for split in SPLITS if (path / split).is_dir()]
    if not found:
        read_manifest(path)  # raises with the reason
    for split in found:
        if not (split / MANIFEST_NAME).exists():
            read_manifest(
                split
            )  # raises: a split whose manifest is missing is no split that is not there
    return found


def verify_split(path: Path, report: Callable[[str], None]) -> list[str]:
    """Read every byte of a split; what is wrong comes back, one line per shard, and `report` gets the progress."""
    manifest = read_manifest(path)
    problems = []
    for number, info in enumerate(manifest.shards):
        try:
            check_shard(path / info.path, info)
            Corpus(path, manifest, LocalShards(path, check_hashes=False)).shard(number)
        except DataError as error:
            problems.append(str(error))
        report(f"{path.name}: {number + 1}/{len(manifest.shards)} shards")
    problems += _tokenizer_problems(path, manifest.tokenizer)
    return problems


def _tokenizer_problems(path: Path, expected: str) -> list[str]:
    directory = path.parent / "tokenizer"
    try:
        found = Tokenizer.load(directory).fingerprint
    except DataError as error:
        return [str(error)]
    if found != expected:
        return [
            f"tokenizer {directory} has fingerprint {found[:16]}, {path / MANIFEST_NAME} expects {expected[:16]}"
        ]
    return []


def describe_split(path: Path, num_lanes: int, seed: int) -> Iterator[str]:
    """Sizes, tokenizer, a sample of the text, and how even `num_lanes` lanes would be (0: leave that out)."""
    corpus = Corpus.open(split_directory(path))
    manifest = corpus.manifest
    size = sum(shard.size for shard in manifest.shards)
    tokenizer = Tokenizer.load(corpus.tokenizer_directory)
    yield f"{corpus.place}"
    yield f"  documents        {manifest.documents:,}; the longest has {manifest.longest_document:,} tokens"
    yield f"  tokens           {manifest.tokens:,} as {manifest.dtype}"
    yield (
        f"  text             {manifest.text_bytes:,} bytes, {manifest.characters:,} characters, "
        f"{manifest.text_bytes / manifest.tokens:.2f} bytes per token"
    )
    yield f"  shards           {len(manifest.shards):,}, {size / 1e6:.1f} MB"
    yield f"  tokenizer        {tokenizer.kind}, {tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint[:16]}"
    yield f"  manifest hash    {manifest.hash[:16]}"
    if num_lanes:
        yield f"  lanes            {_lane_spread(corpus, num_lanes, seed)}"
    reader = corpus.shard(0)
    sample = tokenizer.decode(reader.tokens(0)[:SAMPLE_TOKENS])
    yield f"  sample           {reader.document_id(0)}: {sample!r}"


def _lane_spread(corpus: Corpus, num_lanes: int, seed: int) -> str:
    plan = plan_of(corpus, num_lanes, seed)
    advice = check_lanes(plan, corpus.manifest.longest_document)
    lengths = plan.lane_lengths(0)
    spread = f"{num_lanes} of {lengths.min():,} to {lengths.max():,} tokens, mean {lengths.mean():,.0f} (epoch 0)"
    return f"{spread}; {advice}" if advice else spread
