"""What reading the batches of lanes costs, compared with a bare memory map and the stock readers.

CPU time of this process per token; all tokens are in the page cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import Measurement, in_turns
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.lengths import write_lengths
from data_pipeline.corpora.manifest import Manifest, ShardInfo
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.shards.shards import ShardFormat, shard_name, write_index, write_shard
from foundation.files import sha256_of

DTYPE = "uint16"
FLAT_NAME = "flat.bin"
MDS_GOAL, WEBDATASET_GOAL = 2.0, 2.5

Document = tuple[str, np.ndarray]


@dataclass(frozen=True)
class ReadingSize:
    """How much is read: documents of lognormal lengths, most of a few hundred tokens."""

    shards: int = 6
    shard_tokens: int = 4_000_000
    lanes: int = 16
    segment_length: int = 512
    rounds: int = 5

    @property
    def steps(self) -> int:
        return self.shards * self.shard_tokens // (self.lanes * self.segment_length) - 2

    @property
    def tokens(self) -> int:
        return self.steps * self.lanes * self.segment_length


def reading_costs(directory: Path, size: ReadingSize) -> Iterator[Measurement]:
    """Yield the cost of a bare memory map, then what our and the stock readers cost over it."""
    mds, tars = directory / "mds", directory / "webdataset"
    flat = directory / FLAT_NAME
    write_corpus(mds, "mds", _shards(size, flat))
    write_corpus(tars, "webdataset", _shards(size, flat))
    costs = in_turns(
        {
            "memmap": lambda: _memmap(flat, size),
            "MDS": lambda: _lanes(mds, size, check_hashes=False),
            "tars": lambda: _lanes(tars, size, check_hashes=False),
            "MDS, hashed": lambda: _lanes(mds, size, check_hashes=True),
        },
        size.rounds,
    ) | in_turns(
        {
            "StreamingDataset": lambda: _per_token(lambda: _streaming_dataset(mds)),
            "WebDataset": lambda: _per_token(lambda: _webdataset(tars)),
        },
        rounds=1,
    )
    bare = statistics.median(costs["memmap"])

    def over_bare(name: str, case: str, goal: float | None = None) -> Measurement:
        return Measurement(f"{name}, over that", [c / bare for c in costs[case]], at_most=goal)

    what = f"batches of {size.lanes} lanes x {size.segment_length} from"
    yield Measurement(
        "copying the same slices out of a bare memory map",
        [1e9 * cost for cost in costs["memmap"]],
        "ns of CPU per token",
    )
    yield over_bare(f"{what} MDS", "MDS", MDS_GOAL)
    yield over_bare(f"{what} WebDataset tars", "tars", WEBDATASET_GOAL)
    yield over_bare(f"{what} MDS with SHA-256 of every shard", "MDS, hashed")
    yield over_bare("StreamingDataset, documents in order", "StreamingDataset")
    yield over_bare("webdataset.WebDataset, documents in order", "WebDataset")


def write_corpus(
    directory: Path, shard_format: ShardFormat, shards: Iterable[list[Document]]
) -> Manifest:
    """Write one shard for each list of documents, and their manifest."""
    directory.mkdir(parents=True)
    infos, entries = [], []
    for number, documents in enumerate(shards):
        path = directory / shard_name(number, shard_format)
        entries.append(write_shard(path, documents, directory / "scratch"))
        lengths = [len(tokens) for _, tokens in documents]
        totals = len(lengths), sum(lengths), max(lengths)
        sha256 = sha256_of(path)
        listed = write_lengths(path, sha256, lengths)
        infos.append(ShardInfo(path.name, *totals, path.stat().st_size, sha256, 0, 0, listed))
    write_index(directory, entries)
    manifest = Manifest(
        dtype=DTYPE, tokenizer="0" * 64, end_id=0, vocab_size=1 << 16, shards=tuple(infos)
    )
    manifest.write(directory)
    return manifest


def _shards(size: ReadingSize, flat: Path) -> Iterator[list[Document]]:
    """Yield the documents of each shard, the same at every call; write all tokens into one file."""
    generator = np.random.default_rng(0)
    with flat.open("wb") as file:
        for _ in range(size.shards):
            documents = list(_documents(generator, size.shard_tokens))
            file.writelines(tokens.tobytes() for _, tokens in documents)
            yield documents


def _documents(generator: np.random.Generator, num_tokens: int) -> Iterator[Document]:
    number = 0
    while num_tokens > 0:
        length = min(int(generator.lognormal(6.0, 1.0)) + 5, 20_000, num_tokens)
        yield f"document {number}", generator.integers(0, 1 << 16, length, DTYPE)
        number, num_tokens = number + 1, num_tokens - length


def _lanes(directory: Path, size: ReadingSize, check_hashes: bool) -> float:
    corpus = Corpus.open(directory, check_hashes=check_hashes)
    start = time.process_time()
    stream = LaneStream(corpus, size.lanes, 1, size.segment_length, range(size.lanes))
    for _ in range(size.steps):
        next(stream)
    return (time.process_time() - start) / size.tokens


def _memmap(path: Path, size: ReadingSize) -> float:
    """Copy segments as training takes them: int64, each lane contiguous, with the next token."""
    tokens = np.memmap(path, DTYPE, "r")
    offsets = [len(tokens) // size.lanes * lane for lane in range(size.lanes)]
    start = time.process_time()
    for _ in range(size.steps):
        batch = np.empty((size.lanes, size.segment_length + 1), np.int64)
        for lane, offset in enumerate(offsets):
            batch[lane] = tokens[offset : offset + size.segment_length + 1]
            offsets[lane] += size.segment_length
    return (time.process_time() - start) / size.tokens


def _per_token(read: Callable[[], Iterator[np.ndarray]]) -> float:
    start, num_tokens = time.process_time(), 0
    for tokens in read():
        num_tokens += len(tokens)
    return (time.process_time() - start) / num_tokens


def _streaming_dataset(directory: Path) -> Iterator[np.ndarray]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    for sample in StreamingDataset(local=str(directory), shuffle=False, batch_size=1):
        yield sample["tokens"]


def _webdataset(directory: Path) -> Iterator[np.ndarray]:
    import webdataset

    paths = sorted(str(path) for path in directory.glob("*.tar"))
    dataset = webdataset.WebDataset(paths, shardshuffle=False)  # type: ignore[attr-defined]
    for sample in dataset.decode():
        yield sample["tokens.npy"]
