"""What assembling the batches of lanes costs, beside a bare memory map and the stock readers of both formats.

CPU time of this process per token; all tokens are in the page cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.data_measure import Row, medians
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import Manifest, ShardInfo
from data_pipeline.files import sha256_of
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.shards.shards import ShardFormat, shard_name, write_index, write_shard

DTYPE = "uint16"
FLAT_NAME = "flat.bin"
MDS_GOAL, WEBDATASET_GOAL = 2.0, 2.5


@dataclass(frozen=True)
class ReadingSize:
    """How much is read: documents of lognormal lengths, most of them of a few hundred tokens."""

    shards: int = 6
    shard_tokens: int = 4_000_000
    lanes: int = 16
    segment_length: int = 512
    rounds: int = 5

    @property
    def steps(self) -> int:
        return self.shards * self.shard_tokens // (self.lanes * self.segment_length) - 2


def reading_rows(directory: Path, size: ReadingSize) -> list[Row]:
    """Ratios to the bare memory map for lanes of both formats and for the stock readers."""
    for shard_format in ("mds", "webdataset"):
        _write_corpus(directory / shard_format, shard_format, size)
    costs = medians(
        {
            "memmap": lambda: _memmap(directory / "mds" / FLAT_NAME, size),
            "mds": lambda: _lanes(directory / "mds", size, check_hashes=False),
            "webdataset": lambda: _lanes(directory / "webdataset", size, check_hashes=False),
            "mds checked": lambda: _lanes(directory / "mds", size, check_hashes=True),
        },
        size.rounds,
    )
    stock = medians(
        {
            "StreamingDataset": lambda: _per_token(lambda: _streaming_dataset(directory / "mds")),
            "WebDataset": lambda: _per_token(lambda: _webdataset(directory / "webdataset")),
        },
        rounds=1,
    )
    what = f"batches of {size.lanes} lanes x {size.segment_length} from"
    bare = costs["memmap"]
    return [
        Row(
            "copying the same slices out of a bare memory map", 1e9 * bare, 0, "ns of CPU per token"
        ),
        Row(f"{what} MDS, over that", costs["mds"] / bare, MDS_GOAL, "x"),
        Row(f"{what} WebDataset tars, over that", costs["webdataset"] / bare, WEBDATASET_GOAL, "x"),
        Row(
            f"{what} MDS with SHA-256 of every shard, over that",
            costs["mds checked"] / bare,
            0,
            "x",
        ),
        Row(
            "StreamingDataset, documents in order, over that",
            stock["StreamingDataset"] / bare,
            0,
            "x",
        ),
        Row(
            "webdataset.WebDataset, documents in order, over that",
            stock["WebDataset"] / bare,
            0,
            "x",
        ),
    ]


def _write_corpus(directory: Path, shard_format: ShardFormat, size: ReadingSize) -> None:
    """The same documents in either format, and all tokens as one flat file."""
    directory.mkdir()
    generator = np.random.default_rng(0)
    infos, entries = [], []
    with open(directory / FLAT_NAME, "wb") as flat:
        for number in range(size.shards):
            path = directory / shard_name(number, shard_format)
            documents = list(_documents(generator, size.shard_tokens))
            entries.append(write_shard(path, documents, directory / "scratch"))
            lengths = [len(tokens) for _, tokens in documents]
            file_size, digest = path.stat().st_size, sha256_of(path)
            infos.append(
                ShardInfo(
                    path.name, len(lengths), sum(lengths), max(lengths), file_size, digest, 0, 0
                )
            )
            flat.writelines(tokens.tobytes() for _, tokens in documents)
    write_index(directory, entries)
    Manifest(
        dtype=DTYPE, tokenizer="none", end_id=0, vocab_size=1 << 16, shards=tuple(infos)
    ).write(directory)


def _documents(generator: np.random.Generator, num_tokens: int) -> Iterator[tuple[str, np.ndarray]]:
    number = 0
    while num_tokens > 0:
        length = min(int(generator.lognormal(6.0, 1.0)) + 5, 20_000, num_tokens)
        yield f"document {number}", generator.integers(0, 1 << 16, length, DTYPE)
        number, num_tokens = number + 1, num_tokens - length


def _lanes(directory: Path, size: ReadingSize, check_hashes: bool) -> float:
    corpus = Corpus.open(directory, check_hashes=check_hashes)
    begin = time.process_time()
    stream = LaneStream(corpus, size.lanes, 1, size.segment_length, range(size.lanes))
    for _ in range(size.steps):
        next(stream)
    return (time.process_time() - begin) / (size.steps * size.lanes * size.segment_length)


def _memmap(path: Path, size: ReadingSize) -> float:
    """Each lane a contiguous stretch; a segment and the token ahead, as int64, as training takes them."""
    tokens = np.memmap(path, DTYPE, "r")
    places = [len(tokens) // size.lanes * lane for lane in range(size.lanes)]
    begin = time.process_time()
    for _ in range(size.steps):
        batch = np.empty((size.lanes, size.segment_length + 1), np.int64)
        for lane, place in enumerate(places):
            batch[lane] = tokens[place : place + size.segment_length + 1]
            places[lane] += size.segment_length
    return (time.process_time() - begin) / (size.steps * size.lanes * size.segment_length)


def _per_token(read: Callable[[], Iterator[np.ndarray]]) -> float:
    begin, num_tokens = time.process_time(), 0
    for tokens in read():
        num_tokens += len(tokens)
    return (time.process_time() - begin) / num_tokens


def _streaming_dataset(directory: Path) -> Iterator[np.ndarray]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    for sample in StreamingDataset(local=str(directory), shuffle=False, batch_size=1):
        yield sample["tokens"]


def _webdataset(directory: Path) -> Iterator[np.ndarray]:
    import webdataset

    paths = sorted(str(path) for path in directory.glob("*.tar"))
    for sample in webdataset.WebDataset(paths, shardshuffle=False).decode():  # type: ignore[attr-defined]
        yield sample["tokens.npy"]
