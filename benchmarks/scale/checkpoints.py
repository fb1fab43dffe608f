"""What a checkpoint of many ranks costs: its files, publishing, verifying and reading it.

Names, index and marker are those of a real one; a rank's engine file has a hundred elements.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.scale.costs import RANKS, Cost
from benchmarks.scale.instruments import counted_files
from data_pipeline.lanes.segment_batch import LaneCursor
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import retention
from pretrain.checkpoint.disk import publish
from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.load import FragmentReader
from pretrain.checkpoint.pieces import piece_key, piece_report
from pretrain.checkpoint.transfer import RankReports
from pretrain.checkpoint.verify import rank_share
from tests.helpers.checkpoints import index_of, publish_step

SIZES = (16, 64, 256)
ELEMENTS = 100  # of a rank's file
MOST_FILES = RANKS[-1] + 2  # one for each rank, index and marker
# Tensors of a model of 70B parameters, and what a checkpoint with Adam has of each.
PARAMETERS, STATE = 961, ("exp_avg", "exp_avg_sq", "weight")
SECONDS = 2.0  # the most from the last byte to the published checkpoint
MOST_OF_SHARE = 2.0  # times the mean; a rank hashes whole files, so shares differ


def checkpoint_costs(directory: Path) -> Iterator[Cost]:
    """Yield the costs of one checkpoint."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for ranks in SIZES:
        for name, value in costs_of(directory, ranks):
            found[name][ranks] = value
    yield Cost(
        name="checkpoint: files", measured=found["files"], at_most=MOST_FILES,
        detail="one per rank, index and marker",
    )  # fmt: skip
    yield Cost(
        name="publication: from the last report to the published checkpoint", unit="s",
        measured={ranks: publication_seconds(directory, ranks) for ranks in RANKS},
        at_most=SECONDS, detail=f"real reports of {PARAMETERS} parameters under ZeRO-3, over a "
        "real store; elapsed, on a local disk",
    )  # fmt: skip
    yield Cost(
        name="restore: bytes that the busiest rank hashes, over all bytes / ranks", unit="x",
        measured=found["share"], at_most=MOST_OF_SHARE,
    )  # fmt: skip
    yield Cost(
        name="restore: files that a rank opens for its weights, ranks as saved",
        measured=found["opened"], at_most=1,
    )  # fmt: skip


def publication_seconds(root: Path, ranks: int) -> float:
    """Return the seconds in which rank 0 gathers the reports of all ranks and publishes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def reports_of(rank: int) -> RankReports:
        return RankReports("save", rank, ranks, store)

    names = [f"layers.{n // 12}.attention.weight_{n % 12}" for n in range(PARAMETERS)]
    pieces = piece_report(
        {piece_key(name, 0, kind): ELEMENTS for name in names for kind in STATE}, 0
    )
    cursor = LaneCursor(
        seed=1, num_lanes=ranks, manifest_hash="0" * 64, lanes=range(1), segment_length=2048,
        epochs_B=np.zeros(1, int), positions_B=np.zeros(1, int), checks_B=np.zeros(1, int),
    ).to_tree()  # fmt: skip
    for rank in range(ranks):
        report = {"first_lane": rank, "num_lanes": 1, "cursor": cursor}
        reports_of(rank).post({**report, "bytes": 1, "sha256": "0" * 64}, pieces)
    partial = files.partial_directory(root, ranks, "publication")
    partial.mkdir()
    for rank in range(ranks):
        (partial / files.rank_file(rank)).write_bytes(b"x")
    start = time.perf_counter()
    reports = reports_of(0).collect(lambda: None)
    final = files.step_directory(root, ranks)
    publish(partial, final, index_of(ranks, ranks), reports)
    seconds = time.perf_counter() - start
    assert len(read_index(final).pieces) == PARAMETERS
    retention.remove(final)
    return seconds


def costs_of(directory: Path, ranks: int) -> Iterator[tuple[str, float]]:
    """Yield name and value of each cost of a checkpoint of `ranks` ranks."""
    path = publish_step(directory, ranks, num_ranks=ranks)
    yield "files", len(list(path.iterdir()))
    checkpoint = read_index(path)
    sizes = [content.bytes for content in checkpoint.files.values()]
    shares = [rank_share(sizes, rank, ranks) for rank in range(ranks)]
    assert list(chain(*shares)) == list(range(ranks)), "every file by one rank"
    hashed = [sum(sizes[number] for number in share) for share in shares]
    yield "share", max(hashed) * ranks / sum(hashed)
    with counted_files(path) as counts, FragmentReader(checkpoint) as reader:
        reader.copy_into(torch.empty(ELEMENTS), "w", ELEMENTS * (ranks // 2), "weight")
    yield "opened", counts["opened"]
    retention.remove(path)
