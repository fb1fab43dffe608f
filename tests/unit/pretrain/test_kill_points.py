"""A thousand power cuts at random file operations: checkpoints, lane cursors and metrics.

What a run has learned is stood in for by one hash per lane over every token it was ever given, in
order: a token lost, doubled or given twice in another order changes it.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import load_file

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneCursor, LaneStream
from foundation.files import atomic_write
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.config.run import DataConfig, ModelConfig, RunConfig, lanes_of_rank
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.metrics_file import cut_measurements_after
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import index_of, rank_content, report_of_file
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.metrics import train_line

KILLS = 1000
STEPS, INTERVAL = 60, 3
RUN = RunConfig(model=ModelConfig(vocab_size=300), data=DataConfig(lanes=4, segment_length=8))
OPERATIONS = ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync")


class PowerCut(BaseException):
    """Nothing happens after it: no handler gets to do anything to the disk."""


class Power:
    """Counts file operations and cuts the power before one; a file not yet synced is truncated."""

    def __init__(self, operations_left: float, generator: random.Random) -> None:
        self._left = operations_left
        self._generator = generator
        self.last_operation = ""

    def use(self, operation: str, descriptor: int = -1) -> None:
        """One operation: PowerCut when none are left, and at each one after that."""
        if self._left > 0:
            self._left -= 1
            return
        if not self.last_operation:
            self.last_operation = operation
            if (
                operation == "fsync"
                and (size := os.fstat(descriptor).st_size)
                and _is_written_to(descriptor)
            ):
                os.ftruncate(descriptor, self._generator.randrange(size))
        raise PowerCut

    @contextmanager
    def on(self) -> Iterator[None]:
        """File operations of the block use this power. No fsync runs: no real power is cut."""
        with ExitStack() as stack:
            for name in OPERATIONS:
                stack.enter_context(
                    mock.patch.object(os, name, self._powered(name, getattr(os, name)))
                )
            yield

    def _powered(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def powered(*arguments: Any, **options: Any) -> Any:
            self.use(name, arguments[0] if name == "fsync" else -1)
            return call(*arguments, **options) if name != "fsync" else None

        return powered


def _is_written_to(descriptor: int) -> bool:
    flags = int(
        Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0], 8
    )
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


class Run:
    """One start of a run: its ranks take turns in this process."""

    def __init__(self, run_dir: RunDir, corpus: Corpus, world_size: int, power: Power) -> None:
        self.run_dir = run_dir
        self.world_size = world_size
        self.power = power
        self.step = 0
        self.hashes = [b""] * RUN.data.lanes
        cursor = self._restore()
        cut_measurements_after(run_dir.metrics, self.step)
        self.streams = [
            LaneStream(
                corpus,
                RUN.data.lanes,
                RUN.seed,
                RUN.data.segment_length,
                lanes,
                cursor.take(lanes) if cursor else None,
            )
            for lanes in (lanes_of_rank(RUN, rank, world_size) for rank in range(world_size))
        ]

    def _restore(self) -> LaneCursor | None:
        files.remove_partial(self.run_dir.checkpoints)
        found = marker.latest_valid(self.run_dir.checkpoints, say=_never_rejected)
        if found is None:
            return None
        self.step = found.step
        for name in found.files:
            state = load_file(found.directory / name)["state"].tobytes()
            for lane, digest in json.loads(state).items():
                self.hashes[int(lane)] = bytes.fromhex(digest)
        reports = found.rank_reports
        return LaneCursor.join([LaneCursor.from_tree(report["cursor"]) for report in reports])

    def train(self) -> None:
        """To the last step, saving at the interval."""
        while self.step < STEPS:
            batches = [next(stream) for stream in self.streams]
            for batch in batches:
                for row, lane in enumerate(batch.lanes):
                    given = np.stack([batch.tokens_BL[row], batch.targets_BL[row]]).tobytes()
                    self.hashes[lane] = hashlib.sha256(self.hashes[lane] + given).digest()
            self.step += 1
            self.power.use("step")
            with open(self.run_dir.metrics, "a") as file:
                file.write(json.dumps(train_line(self.step, **self.seen())) + "\n")
            if self.step % INTERVAL == 0:
                self.save([batch.cursor for batch in batches])

    def save(self, cursors: list[LaneCursor]) -> None:
        """Save as the ranks do: each its file, then its report, in any order; rank 0 publishes."""
        partial = files.partial_directory(self.run_dir.checkpoints, self.step, "attempt")
        partial.mkdir(parents=True, exist_ok=True)
        reports: dict[int, dict[str, Any]] = {}
        for rank in random.Random(self.step).sample(range(self.world_size), self.world_size):
            held = {
                lane: self.hashes[lane].hex() for lane in lanes_of_rank(RUN, rank, self.world_size)
            }
            with atomic_write(partial / files.rank_file(rank)) as file:
                file.write(rank_content(self.step, rank, json.dumps(held).encode()))
            lanes = lanes_of_rank(RUN, rank, self.world_size)
            report = {"first_lane": lanes.start, "num_lanes": len(lanes)}
            report["cursor"] = cursors[rank].to_tree()
            reports[rank] = report | report_of_file(partial, rank)
        final = files.step_directory(self.run_dir.checkpoints, self.step)
        in_order = [reports[rank] for rank in range(self.world_size)]
        marker.publish(partial, final, index_of(self.step, self.world_size), in_order)
        root = self.run_dir.checkpoints
        files.prune(root, marker.steps_that_count(root), keep_last=2)

    def seen(self) -> dict[str, int]:
        """What each lane has read, as measurements are: numbers."""
        return {
            f"lane.{lane}": int(digest.hex()[:32], 16) for lane, digest in enumerate(self.hashes)
        }


def _never_rejected(text: str) -> None:
    raise AssertionError(f"a kill left a checkpoint that looks corrupted: {text}")


def test_no_token_is_lost_or_doubled_over_a_thousand_kill_points(tmp_path):
    corpus = Corpus.open(make_tiny_corpus(tmp_path / "corpus") / "train")
    generator = random.Random(7)
    undisturbed = Run(
        RunDir.create(tmp_path / "undisturbed", RUN), corpus, 1, Power(float("inf"), generator)
    )
    undisturbed.train()
    expected = undisturbed.run_dir.read_metrics()
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))
    killed_in: collections.Counter[str] = collections.Counter()
    number_of_runs = 0
    while killed_in.total() < KILLS:
        number_of_runs += 1
        run_dir = RunDir.create(tmp_path / f"run-{number_of_runs}", RUN)
        published = 0
        while True:
            power = Power(generator.randrange(250), generator)
            try:
                with power.on():
                    Run(run_dir, corpus, generator.choice((1, 2, 4)), power).train()
                break
            except PowerCut:
                killed_in[power.last_operation] += 1
            latest = max(files.steps_on_disk(run_dir.checkpoints), default=0)
            assert latest >= published, "a published checkpoint was lost"
            published = latest
        assert run_dir.read_metrics() == expected
    print(f"{killed_in.total()} kills in {number_of_runs} runs: {dict(killed_in)}")
    assert set(killed_in) == {*OPERATIONS, "step"}


def test_what_a_power_cut_must_not_take_back_is_synced_before_it_is_told(tmp_path, monkeypatch):
    """The directory of a checkpoint's rename and the file of an event; no power is cut."""
    corpus = Corpus.open(make_tiny_corpus(tmp_path / "corpus") / "train")
    run_dir = RunDir.create(tmp_path / "run", RUN)
    run = Run(run_dir, corpus, 1, Power(float("inf"), random.Random(7)))
    done: list[Path] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append(Path(new)), rename(old, new)))
    monkeypatch.setattr(
        os, "fsync", lambda number: done.append(Path(os.readlink(f"/proc/self/fd/{number}")))
    )
    run.step = INTERVAL
    run.save([next(stream).cursor for stream in run.streams])
    final = files.step_directory(run_dir.checkpoints, INTERVAL)
    assert run_dir.checkpoints in done[done.index(final) :]
    run_dir.ledger.append(TrainingBegan(step=0, world_size=1))
    assert done[-1] == run_dir.ledger.path
