"""What is recorded, and what has to be true of each state that it can leave: a run, and builds."""

import contextlib
import functools
import io
import logging
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pretrain.run as run_module
import pretrain.rundir.run_dir as run_dir_module
from data_pipeline.builder import parallel_build as parts
from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.web_requests import RetryPolicy, StoreError
from data_pipeline.corpora.writable_store import WritableStore
from foundation.files import Content
from foundation.settings import load_config
from foundation.typed_values import to_tree
from pretrain.checkpoint import object_store
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.facts import Past
from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.verify import step_directory
from pretrain.config.resolve import resolve
from pretrain.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    MetricsConfig,
    OptimConfig,
    RecoveryConfig,
    RunConfig,
)
from pretrain.distributed.world import init_world
from pretrain.metrics.writers import MetricsFile
from pretrain.recovery import faults
from pretrain.recovery import rewind as rewinds
from pretrain.recovery.faulty_engine import FaultyEngine
from pretrain.rundir import trained_data
from pretrain.rundir.events import Event, Rewind, TrainingEnded
from pretrain.rundir.heartbeat import Heartbeat
from pretrain.rundir.history import find_events
from pretrain.rundir.ledger import Ledger, event_line
from pretrain.rundir.metrics_file import parse_measurement
from pretrain.rundir.run_dir import RunDir
from tests.crash_states.recorder import Recorder
from tests.crash_states.states import Tree
from tests.helpers.corpora import contents, some_texts
from tests.helpers.stores import CREDENTIALS, make_bucket, s3_server
from tests.helpers.tiny_runs import tiny_run


class Subject(ABC):
    """Something to record below `root`; what is not part of it is in `beside`."""

    def __init__(self, root: Path, beside: Path) -> None:
        self.root = root
        beside.mkdir(parents=True)

    @abstractmethod
    def record(self, recorder: Recorder) -> None: ...

    @abstractmethod
    def problems(self, tree: Tree, told: list[Any]) -> Iterator[str]:
        """Start from the state below `root`, and say what is wrong; `told` had been told."""
        ...


# -------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was published, with the run's lines of metrics until its step."""

    step: int
    sha256: str
    metrics: tuple[bytes, ...]
    rewinds: int  # before it
    is_shared: bool  # a rewind goes back to no other


@dataclass(frozen=True)
class GoesBack:
    """A rewind is about to remove what was saved from this step on."""

    step: int


@dataclass(frozen=True)
class Line:
    """An event, by its line in the ledger."""

    line: bytes
    event: Event


@dataclass(frozen=True)
class Stored:
    """What is in the object store, by URL."""

    objects: dict[str, bytes]


@dataclass(frozen=True)
class Finished:
    """The end of training, with all lines of metrics."""

    metrics: tuple[bytes, ...]


class Started(BaseException):
    """A start has found what to continue from; nothing is trained."""

    def __init__(self, found: Checkpoint | None) -> None:
        super().__init__()
        self.found = found


_read_ledger = Ledger.read


class _Objects:
    """A store with what was in the recorded one at a moment."""

    def __init__(self, url: str, objects: dict[str, bytes]) -> None:
        self.retry_policy = RetryPolicy(attempts=1)
        self.url, self._objects = url, objects

    def download(self, name: str, path: Path, size: int) -> None:
        content = self._objects.get(f"{self.url}/{name}")
        if content is None:
            raise StoreError(f"no {name}", is_final=True, is_absent=True)
        path.write_bytes(content)

    def version(self, name: str) -> str:
        return ""


def _no_engine(*_: Any, **__: Any) -> io.BytesIO:
    """Something that can be closed."""
    return io.BytesIO()


def _lines(path: Path, step: int) -> tuple[bytes, ...]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return tuple(
        line for line in lines if (parse_measurement(line) or {"step": 1e9})["step"] <= step
    )


class Run(Subject):
    """A run of one rank that saves, also locally and to a store, evaluates, rewinds and ends."""

    NAN_STEPS = (12, 13)

    def __init__(self, root: Path, beside: Path) -> None:
        super().__init__(root, beside)
        self._world = init_world()  # this process as the only rank
        self.run_dir = RunDir(root / "runs" / "run")
        self._bucket = f"runs-{uuid.uuid4().hex}"  # servers of one process share them
        kept = CheckpointConfig(
            interval=6,
            keep_last=2,
            local=root / "node",
            local_interval=4,
            mirror=f"s3://{self._bucket}",
        )
        self._config: RunConfig = resolve(
            replace(
                tiny_run(beside, OptimConfig(steps=22)),
                checkpoint=kept,
                evaluation=EvaluationConfig(interval=7, max_tokens=60),
                metrics=MetricsConfig(interval=1, tensorboard=True),
                recovery=RecoveryConfig(spike_threshold=6.0),
            )
        )
        self._saved: list[Saved] = []
        self._stored: dict[str, bytes] = {}  # by URL; what a start gets from the store
        # What a start computes again from the same bytes, each time the same, is kept.
        self._loaded: dict[bytes, Any] = {}
        self._parsed: dict[bytes, list[Event]] = {}
        self._trees: dict[int, tuple[Any, Any]] = {}
        names = ("tokenizer_of", "split_hash", "corpus_hash")
        self._of_the_corpus: dict[str, Any] = {
            name: functools.cache(getattr(trained_data, name)) for name in names
        }
        self._heartbeat = Heartbeat(beside / "heartbeats", 0, 0)
        self._heartbeat._closing.set()  # no thread and no process of its own

    @contextlib.contextmanager
    def _quick(self) -> Iterator[None]:
        """A spike of two steps after ten losses."""
        with contextlib.ExitStack() as stack:
            for name, value in {"SPIKE_STEPS": 2, "WINDOW": 10, "MOST_SKIPPED": 1.0}.items():
                stack.enter_context(mock.patch.object(rewinds, name, value))
            yield

    def record(self, recorder: Recorder) -> None:
        metrics = self.run_dir.metrics
        num_rewinds = 0

        def publish(disk: Disk, index: dict[str, Any], reports: Any) -> None:
            step = index["step"]
            original_publish(disk, index, reports)
            marker = step_directory(disk.root, step) / "COMPLETE"
            lines = _lines(metrics, step)
            self._saved.append(
                Saved(step, marker.read_text(), lines, num_rewinds, disk.root.name == "checkpoints")
            )
            recorder.tell(self._saved[-1])

        def go_back(config: RunConfig, run_dir: RunDir, world: Any, spike: Any, *more: Any) -> None:
            nonlocal num_rewinds
            recorder.tell(GoesBack(spike.first_step))
            original_rewind(config, run_dir, world, spike, *more)
            num_rewinds += 1

        def append(file: Ledger, event: Event) -> None:
            original_append(file, event)
            recorder.tell(Line(event_line(event), event))
            if isinstance(event, TrainingEnded):
                recorder.tell(Finished(_lines(metrics, event.step)))

        def affect(engine: Any, _module: Any, _inputs: Any, hidden_BLD: Any) -> Any:
            if engine._steps in self.NAN_STEPS and not num_rewinds:
                hidden_BLD = hidden_BLD.clone()
                hidden_BLD[0] = float("nan")
            return hidden_BLD

        def put(store: WritableStore, name: str, path: Path, content: Content) -> None:
            original_put(store, name, path, content)
            stored[f"{store.url}/{name}"] = path.read_bytes()
            recorder.tell(Stored(dict(stored)))

        def delete(store: WritableStore, names: list[str]) -> None:
            original_delete(store, names)
            for name in names:
                del stored[f"{store.url}/{name}"]
            recorder.tell(Stored(dict(stored)))

        stored: dict[str, bytes] = {}
        original_put, original_delete = WritableStore.put, WritableStore.delete
        original_publish, original_append = Disk.publish, Ledger._write
        original_rewind = run_module.rewind
        with contextlib.ExitStack() as stack:
            for where, name, value in (
                (Disk, "publish", publish),
                (Ledger, "_write", append),
                (WritableStore, "put", put),
                (WritableStore, "delete", delete),
                (run_module, "rewind", go_back),
                (run_module, "fault_from_environment", lambda: faults.Fault(1, "nan")),
                (FaultyEngine, "_affect", affect),
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            endpoint = stack.enter_context(s3_server())
            make_bucket(endpoint, self._bucket)
            variables = {**CREDENTIALS, "S3_ENDPOINT_URL": endpoint}
            stack.enter_context(mock.patch.dict(os.environ, variables))
            stack.enter_context(self._quick())
            stack.enter_context(recorder.on())
            assert run_module.run_training(self._config, self.run_dir.path, self._world) == 0
        assert num_rewinds == 1
        assert any(name.endswith("/mirror.json") for name in stored)

    def problems(self, tree: Tree, told: list[Any]) -> Iterator[str]:
        before = self.run_dir.ledger.path
        ledger = before.read_bytes() if before.exists() else b""
        self._stored = next((t.objects for t in reversed(told) if isinstance(t, Stored)), {})
        found = self._start()
        events = self._events(self.run_dir.ledger)
        lines = _lines(self.run_dir.metrics, 1 << 40)
        step = found.step if found else 0
        least, finished = 0, ()
        for each in told:
            match each:
                case Saved():
                    least = each.step
                case GoesBack():
                    shared = [s.step for s in self._saved if s.is_shared and s.step < each.step]
                    least = max(shared, default=0)
                case Line() if each.line not in ledger:
                    yield f"the ledger lacks {each.line!r}"
                case Finished():
                    finished = each.metrics
                case _:
                    pass
        if step < least:
            yield f"starts from step {step}, told was {least}"
        if finished and lines != finished:
            yield f"ended with {len(finished)} lines of metrics, {len(lines)} are left"
        if found is None:
            return
        marker = (found.directory / "COMPLETE").read_text()
        saved = next((each for each in self._saved if each.sha256 == marker), None)
        if saved is None:
            yield f"step {step} is no checkpoint that was saved"
            return
        if lines[: len(saved.metrics)] != saved.metrics:
            yield f"step {step} was saved with {len(saved.metrics)} lines, {len(lines)} are left"
        gone_back = find_events(events, Rewind)[saved.rewinds :]
        if any(step > event.to_step for event in gone_back):
            yield f"starts from step {step}, from before the run went back"

    def _load(self, kind: Any, path: Path) -> Any:
        """Settings of the run; parsing them is most of the time that a start takes."""
        content = path.read_bytes()
        if content not in self._loaded:
            self._loaded[content] = load_config(kind, path)
        return self._loaded[content]

    def _tree_of(self, config: Any) -> Any:
        if id(config) not in self._trees:
            self._trees[id(config)] = config, to_tree(config)
        return self._trees[id(config)][1]

    def _events(self, ledger: Ledger) -> list[Event]:
        content = ledger.path.read_bytes() if ledger.path.exists() else b""
        if content not in self._parsed:
            self._parsed[content] = _read_ledger(Ledger(ledger.path))
        return list(self._parsed[content])

    def _start(self) -> Checkpoint | None:
        """What a start continues from, with the metrics cut as it does; nothing is trained."""

        def train_from(*arguments: Any) -> None:
            found = next((each for each in arguments if isinstance(each, Checkpoint)), None)
            step = found.step if found else 0
            MetricsFile(self.run_dir, step, lambda: None)
            past = next(each for each in arguments if isinstance(each, Past))
            rewinds.inherited_windows(past, self._world, step)
            raise Started(found)

        with (
            self._quick(),
            mock.patch.object(run_module, "_train_from", train_from),
            mock.patch.object(run_module, "build_engine", _no_engine),
            mock.patch.object(run_dir_module, "load_config", self._load),
            mock.patch.object(run_dir_module, "to_tree", self._tree_of),
            mock.patch.object(Ledger, "read", lambda ledger: self._events(ledger)),
            mock.patch.object(
                object_store, "store_at", lambda url, *_: _Objects(url, self._stored)
            ),
            mock.patch.multiple(trained_data, **self._of_the_corpus),
        ):
            try:
                run_module.run_training(
                    self._config, self.run_dir.path, self._world, heartbeat=self._heartbeat
                )
            except Started as started:
                return started.found
        raise AssertionError("nothing was started")


# ------------------------------------------------------------------------------------------ builds


def _in_turn(task: Callable[..., Any], config: CorpusConfig, num_parts: int, report: Any) -> None:
    for part in range(1, num_parts + 1):
        task(config, part, num_parts, report)


class Build(Subject):
    """A build of a corpus, in so many parts, one after the other in this process."""

    def __init__(
        self, root: Path, beside: Path, processes: int = 1, shuffles: bool = False
    ) -> None:
        super().__init__(root, beside)
        folder = beside / "text"
        folder.mkdir()
        for number, text in enumerate(some_texts(24, seed=4)):
            (folder / f"{number:04d}.txt").write_text(text)
        self._processes = processes
        self._config = CorpusConfig(
            input=(folder,),
            output=root / "corpora" / "out",
            validation_fraction=0.2,
            shard_bytes=1500,
            tokenizer=TokenizerConfig(kind="characters"),
            threads=1,
            shuffle_seed=1 if shuffles else -1,
            shuffle_bytes=20000,
        )
        self._expected: dict[Any, Any] = {}

    def record(self, recorder: Recorder) -> None:
        with recorder.on():
            self._build()
        self._expected = contents(self._config.output)

    def problems(self, tree: Tree, told: list[Any]) -> Iterator[str]:
        self._build()
        if contents(self._config.output) != self._expected:
            yield "the resumed build has other bytes"

    def _build(self) -> None:
        if self._processes == 1:
            build_corpus(self._config)
            return
        with mock.patch.object(parts, "_run_parts", _in_turn):
            parts.build_in_processes(self._config, self._processes)


def put(tree: Tree, root: Path) -> None:
    """Make the state below `root`, and nothing else; what is there already stays."""
    root.mkdir(parents=True, exist_ok=True)
    there: Tree = {}
    todo = [""]
    while todo:
        folder = todo.pop()
        for entry in list(os.scandir(root / folder)):
            path = folder + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if path not in tree or is_folder != (tree[path] is None):
                shutil.rmtree(entry.path) if is_folder else os.unlink(entry.path)
            elif is_folder:
                there[path] = None
                todo.append(f"{path}/")
            else:
                with open(entry.path, "rb") as file:
                    there[path] = file.read()
    for path in sorted(tree):
        content = tree[path]
        if content is None and path not in there:
            os.mkdir(root / path, 0o700)
        elif content is not None and there.get(path) != content:
            with open(root / path, "wb") as file:
                file.write(content)


def no_sync(_: int) -> None:
    """In place of an fsync of what no power failure will be recorded of."""


def silenced() -> None:
    """Starts say much, thousands of times."""
    logging.disable(logging.CRITICAL)
