"""A run whose engine is a number, and a store that is a folder: all else is the real code.

The number after a step follows from all tokens that the run has read, in order: a step lost, made
twice, or made from another checkpoint changes it, and every element of the weights has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast, get_type_hints
from unittest import mock

import torch
import yaml
from torch import Tensor

import foundation.settings
import pretrain.metrics.recorder
import pretrain.recovery.rewind
import pretrain.recovery.start_record
import pretrain.run
import pretrain.rundir.run_dir
from data_pipeline.corpora import fetch, stores
from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.checkpoint import object_store, resume_point
from pretrain.config.run import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    MetricsConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from pretrain.distributed.collectives import sum_over_ranks
from pretrain.distributed.world import World
from pretrain.engines.engine import StepResult
from pretrain.optim.parameter_groups import Fragment
from tests.histories.jobs import current_job, jobs_in_this_process

ELEMENTS, LARGEST = 12, 1 << 20
BUCKET = "s3://bucket"
SDK = "streaming.base.storage"


def toy_config(corpus: Path, **checkpoint: Any) -> RunConfig:
    return RunConfig(
        name="toy",
        model=ModelConfig(vocab_size=300, num_layers=1, d_model=4, num_heads=1, memory_length=0),
        data=DataConfig(path=corpus, lanes=6, segment_length=2),
        optim=OptimConfig(steps=1000),
        engine=EngineConfig(kind="torch", precision="fp32"),
        checkpoint=CheckpointConfig(
            interval=3, asynchronous=False, storage_patience_seconds=0, **checkpoint
        ),
        evaluation=EvaluationConfig(interval=0),
        metrics=MetricsConfig(interval=1, tensorboard=False),
    )


@dataclasses.dataclass
class Plan:
    """What happens to the next start, and what it is observed to do."""

    steps: int = 0  # made by it before it ends
    is_killed: bool = False  # there, instead of asked to stop
    poison: range = range(0)  # segments with a loss of 50
    after_step: Callable[[int, int, int], None] = lambda segment, step, value: None
    made: int = 0
    segments: dict[int, int] = dataclasses.field(default_factory=dict)  # that ranks read last


class ToyEngine:
    """An engine of ELEMENTS numbers, of which each rank holds an equal part."""

    loss_scaler = None

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self._plan = world, plan
        self.module = torch.nn.Linear(1, 1)
        self._updates = self._tokens = 0
        size = ELEMENTS // world.world_size
        self._start = world.rank * size
        self._weight, self._moment = torch.zeros(size), torch.zeros(size)
        self._set(0)

    def _set(self, value: int) -> None:
        torch.arange(value + self._start, value + self._start + len(self._weight), out=self._weight)
        self._moment.fill_(value)

    @property
    def value(self) -> int:
        return int(self._moment[0])

    def forward_backward(self, slot: SegmentBatch, memory: Any, step: int) -> tuple[Tensor, Any]:
        self._tokens = int(slot.tokens_BL.sum())
        segment = self._plan.segments[self.world.rank]
        loss = 50.0 if segment in self._plan.poison else 3.0 + segment % 7 / 1000
        return torch.tensor(loss), memory

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        job, plan = current_job(), self._plan
        assert job is not None
        total = int(sum_over_ranks(torch.tensor(self._tokens)))
        self._set((self.value * 31 + total + 1) % LARGEST)
        self._updates += 1
        if self.world.is_main:
            plan.after_step(plan.segments[0], self._updates, self.value)
            plan.made += 1
            if plan.made >= plan.steps:
                if plan.is_killed:
                    job.kill()
                job.handlers[0](signal.SIGTERM, None)
        job.tick()
        return StepResult(grad_norm=1.0, skipped=False)

    def fragments(self) -> Iterator[Fragment]:
        values = {"weight": self._weight, "exp_avg": self._moment}
        yield Fragment("w", self._start, values, owned=True, master=self._weight, offset=0)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def optimizer_step_count(self) -> int:
        return self._updates

    def after_load(self, step_count: int) -> None:
        """Check that all that was loaded is of one step."""
        self._updates, first = step_count, self.value
        low = first + self._start
        expected = torch.arange(low, low + len(self._weight), dtype=torch.float32)
        assert torch.equal(self._weight, expected), "loaded parts of several checkpoints"
        assert bool((self._moment == first).all()), "loaded parts of several checkpoints"

    def close(self) -> None:
        pass


class ToyBatches:
    """The prefetcher, without a thread that reads ahead."""

    wait_seconds = 0.0

    def __init__(self, stream: Any, plan: Plan) -> None:
        self._stream, self._plan = iter(stream), plan

    def __iter__(self) -> ToyBatches:
        return self

    def __next__(self) -> SegmentBatch:
        batch, job = next(self._stream), current_job()
        assert job is not None
        cursor = batch.cursor
        self._plan.segments[job.rank] = int(cursor.positions_B[0]) // cursor.segment_length - 1
        return batch

    def __enter__(self) -> ToyBatches:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class NoHeartbeat:
    """A heartbeat without a thread and a file."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> NoHeartbeat:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def beat(self, *arguments: Any) -> None:
        pass

    repeat = beat


class ToyStore:
    """S3's part in a folder: what mosaicml-streaming and boto3 do for `data_pipeline.corpora`.

    `changed` is called with the key of each object after it was written or removed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changed: Callable[[str], None] = lambda key: None

    def path(self, key: str) -> Path:
        self.require()
        return self.root / key

    def require(self) -> None:
        if not self.root.is_dir():
            raise ConnectionError("the endpoint does not answer")

    def write(self, key: str, content: bytes) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrived = path.with_name(f".{path.name}")
        arrived.write_bytes(content)
        os.replace(arrived, path)
        self.changed(key)

    def remove(self, key: str) -> None:
        path = self.path(key)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        self.changed(key)

    # as the SDKs call it

    def download(self, url: str, path: str, timeout: float) -> None:
        source = self.path(_key(url))
        if not source.is_file():
            raise FileNotFoundError(f"{url} not found")
        shutil.copyfile(source, path)

    def upload_file(self, path: str, bucket: str, key: str) -> None:
        self.write(key, Path(path).read_bytes())

    def get_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        path = self.path(Key)
        if not path.is_file():
            raise _NoSuchKey
        return {"Body": open(path, "rb"), "ContentLength": path.stat().st_size}

    def delete_objects(self, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        for entry in Delete["Objects"]:
            self.remove(entry["Key"])
        return {}

    def uploader(self, url: str) -> Any:
        prefix = _key(url)

        def names() -> list[str]:
            self.require()
            files = (path for path in (self.root / prefix).rglob("*") if path.is_file())
            return [str(path.relative_to(self.root)) for path in files if path.name[0] != "."]

        return types.SimpleNamespace(s3=self, list_objects=names)


def _key(url: str) -> str:
    return url.removeprefix(f"{BUCKET}/")


class _NoSuchKey(Exception):
    def __init__(self) -> None:
        self.response = {"Error": {"Code": "NoSuchKey", "Message": "no such key"}}


@contextlib.contextmanager
def toy_runs(store: ToyStore, plan: Plan) -> Iterator[None]:
    """Let `run_training` in jobs of this process train toys, with the store at BUCKET."""
    sdk = types.SimpleNamespace(
        CloudDownloader=types.SimpleNamespace(get=lambda url: store),
        CloudUploader=types.SimpleNamespace(get=lambda where, **options: store.uploader(where[1])),
    )
    patched: list[tuple[Any, str, Any]] = [
        (pretrain.run, "build_engine", lambda config, world, draws=True: ToyEngine(world, plan)),
        (pretrain.run, "Prefetcher", lambda stream: ToyBatches(stream, plan)),
        (pretrain.run, "Heartbeat", NoHeartbeat),
        (pretrain.run, "_evaluator", lambda *arguments: lambda: {"loss": 3.0}),
        (pretrain.run, "check_host_memory", lambda *arguments: None),
        (pretrain.run, "gc", types.SimpleNamespace(collect=lambda: None)),
        (pretrain.metrics.recorder, "measured_matmul_peak", lambda *arguments: 1e9),
        (pretrain.metrics.recorder.SlownessMeter, "_tick", lambda *arguments: None),
        (pretrain.recovery.start_record, "own_environment", lambda *_: {"hosts of NCCL": "toy"}),
        (pretrain.recovery.start_record, "code_version", lambda *arguments: "toy"),
        (foundation.settings, "get_type_hints", cache(get_type_hints)),
        (pretrain.rundir.run_dir, "load_config", _cached_load_config),
        # A spike is found after few steps: histories are short.
        (pretrain.recovery.rewind, "WINDOW", 3),
        (pretrain.recovery.rewind, "SPIKE_STEPS", 3),
        (resume_point, "threading", types.SimpleNamespace(Thread=_DoneThread)),
        (stores, "with_timeout", _directly),
        (fetch, "with_timeout", _directly),
        (object_store, "in_parallel", lambda task, items, *rest: [task(item) for item in items]),
    ]
    with contextlib.ExitStack() as stack:
        # Not `patch.dict`: it would forget what else is imported meanwhile.
        before = sys.modules.pop(SDK, None)
        stack.callback(
            lambda: sys.modules.update({SDK: before}) if before else sys.modules.pop(SDK)
        )
        sys.modules[SDK] = cast("types.ModuleType", sdk)
        for home, name, own in patched:
            stack.enter_context(mock.patch.object(home, name, own))
        stack.enter_context(jobs_in_this_process())
        yield


def _directly(seconds: float, task: Callable[[], None]) -> None:
    task()


class _DoneThread:
    """A thread whose work is done when `start` returns."""

    def __init__(self, target: Callable[[], None], **options: Any) -> None:
        self.start = target

    def is_alive(self) -> bool:
        return False


def _cached_load_config(schema: type[Any], path: Path) -> Any:
    return _parsed(schema, path.read_text())


@cache
def _parsed(schema: type[Any], text: str) -> Any:
    return foundation.settings.parse_config(schema, yaml.safe_load(text), "config.yaml")
