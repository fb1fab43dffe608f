"""A thousand kills at random file operations, and what is synced before it is told.

After a kill the file in whose fsync it came is cut short; all others keep what was written.

What a run has learned is stood in for by one hash per lane over every token it was ever given, in
order: a token lost, doubled or given twice in another order changes it.
"""

import collections
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.segment_batch import LaneCursor
from foundation.files import atomic_write
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import retention
from pretrain.checkpoint.disk import publish
from pretrain.checkpoint.verify import latest_valid, steps_that_count
from pretrain.config.resolve import resolve
from pretrain.config.run import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MetricsConfig,
    ModelConfig,
    OptimConfig,
    RecoveryConfig,
    RunConfig,
    lanes_of_rank,
)
from pretrain.errors import TrainingError
from pretrain.recovery import rewind
from pretrain.run import run_training
from pretrain.rundir.metrics_file import cut_measurements_after
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import index_of, rank_content, report_of_file
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.metrics import train_line
from tests.helpers.tiny_runs import tiny_run

KILLS = 1000
STEPS, INTERVAL = 60, 3
RUN = RunConfig(model=ModelConfig(vocab_size=300), data=DataConfig(lanes=4, segment_length=8))
OPERATIONS = ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync")


class Killed(BaseException):
    """Nothing happens after it: no handler gets to do anything to the disk."""


class Kills:
    """Counts file operations and kills before one; a file in its fsync is truncated."""

    def __init__(self, operations_left: float, generator: random.Random) -> None:
        self._left = operations_left
        self._generator = generator
        self.last_operation = ""

    def use(self, operation: str, descriptor: int = -1) -> None:
        """One operation: Killed when none are left, and at each one after that."""
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
        raise Killed

    @contextmanager
    def on(self) -> Iterator[None]:
        """File operations of the block are counted. No fsync runs: the machine stays up."""
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

    def __init__(self, run_dir: RunDir, corpus: Corpus, world_size: int, kills: Kills) -> None:
        self.run_dir = run_dir
        self.world_size = world_size
        self.kills = kills
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
        retention.remove_partial(self.run_dir.checkpoints)
        found = latest_valid(self.run_dir.checkpoints, say=_never_rejected)
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
            self.kills.use("step")
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
            report: dict[str, Any] = {"first_lane": lanes.start, "num_lanes": len(lanes)}
            report["cursor"] = cursors[rank].to_tree()
            reports[rank] = report | report_of_file(partial, rank)
        final = files.step_directory(self.run_dir.checkpoints, self.step)
        in_order = [reports[rank] for rank in range(self.world_size)]
        publish(partial, final, index_of(self.step, self.world_size), in_order)
        root = self.run_dir.checkpoints
        retention.prune(root, steps_that_count(root), keep_last=2)

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
        RunDir.create(tmp_path / "undisturbed", RUN), corpus, 1, Kills(float("inf"), generator)
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
            kills = Kills(generator.randrange(250), generator)
            try:
                with kills.on():
                    Run(run_dir, corpus, generator.choice((1, 2, 4)), kills).train()
                break
            except Killed:
                killed_in[kills.last_operation] += 1
            latest = max(files.steps_on_disk(run_dir.checkpoints), default=0)
            assert latest >= published, "a published checkpoint was lost"
            published = latest
        assert run_dir.read_metrics() == expected
    print(f"{killed_in.total()} kills in {number_of_runs} runs: {dict(killed_in)}")
    assert set(killed_in) == {*OPERATIONS, "step"}


def test_what_a_power_cut_must_not_take_back_is_synced_before_it_is_told(
    tmp_path, monkeypatch, world
):
    """A real run that saves, also locally, rewinds and ends; nothing is cut."""
    monkeypatch.setattr(rewind, "SPIKE_STEPS", 2)
    monkeypatch.setattr(rewind, "WINDOW", 10)
    kept = CheckpointConfig(interval=4, local=tmp_path / "node", local_interval=3)
    run = replace(
        tiny_run(tmp_path, OptimConfig(steps=16)),
        checkpoint=kept,
        evaluation=EvaluationConfig(interval=5, max_tokens=100),
        metrics=MetricsConfig(interval=1, tensorboard=False),
        recovery=RecoveryConfig(skip_grad_norm=1e-9, max_rewinds=1),
    )
    monkeypatch.setattr(rewind, "MOST_SKIPPED", 1.0)
    run_dir = RunDir(tmp_path / "run")
    metrics, ledger, root = run_dir.metrics, run_dir.ledger.path, run_dir.checkpoints
    synced: dict[Path, bytes] = {}  # what each file had when it was synced last
    named: set[Path] = set()  # synced since a name in them changed last
    told: list[str] = []
    rename = os.rename

    def sync(number: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if path.is_dir():
            return named.add(path)
        is_new = path == ledger and path not in synced
        synced[path] = path.read_bytes()
        event = path == ledger and json.loads(synced[path].splitlines()[-1])["event"]
        if event in ("rewind", "training_ended"):
            told.append(event)
            if event == "rewind":
                assert root in named, "the removal is synced"
            else:
                assert synced[metrics] == metrics.read_bytes()
        if is_new:
            named.discard(path.parent)
        return None

    def move(old: Path | str, new: Path | str, **where: Any) -> None:
        new = Path(new)
        rename(old, new, **where)
        named.discard(new.parent)
        if step := files.STEP_NAME.fullmatch(new.name):
            told.append(new.name)
            lines = list(map(json.loads, synced[metrics].splitlines()))
            steps = [line["step"] for line in lines if line["kind"] == "train"]
            assert steps == [*range(1, int(step[1]) + 1)]
            assert [*range(5, steps[-1] + 1, 5)] == [
                line["step"] for line in lines if line["kind"] == "evaluation"
            ]
            assert run_dir.path in named

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", move)
    with pytest.raises(TrainingError, match="max_rewinds=1"):
        run_training(resolve(run), run_dir.path, world)
    off = replace(run, recovery=RecoveryConfig(spike_threshold=0.0))
    assert run_training(resolve(off), run_dir.path, world) == 0
    saves = [f"step-{step:08d}" for step in (3, 4, 6, 8, 9)]
    assert told[: len(saves) + 1] == [*saves, "rewind"]
    assert told[-1] == "training_ended"
