"""The directory of one run: who it belongs to, its settings, its journal. Torch-free.

RUN/run.json          identity; written last when the directory is made, so with it the rest is there
RUN/config.yaml       every setting, resolved
RUN/metrics.jsonl     one line per measurement     RUN/ledger.jsonl   one line per event, synced
RUN/tensorboard/      RUN/logs/      RUN/heartbeats/      RUN/checkpoints/step-00000100/
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.config_loader import differences, load_config, parse_config, to_tree
from data_pipeline.errors import ConfigError
from data_pipeline.file_lock import try_lock
from data_pipeline.files import atomic_write, write_json, write_text
from data_pipeline.yaml_files import dump_yaml
from pretrain.checkpoint.directory import steps_on_disk
from pretrain.config.changes import may_change
from pretrain.config.run import RunConfig

logger = logging.getLogger(__name__)

FORMAT = 1

# What may be there before run.json: left by a crash, or by a launcher that submitted the run.
_BEFORE_IDENTITY = ("attempt", "config.yaml", "ledger.jsonl", "logs", "slurm", "*.lock", ".*.tmp")


@dataclass(frozen=True)
class RunIdentity:
    """Which run a directory holds; `id` tells two runs of the same name apart."""

    name: str
    id: str
    created: str  # UTC, ISO 8601
    format: int = FORMAT


class RunDir:
    """Paths of a run and what is written there. The constructor touches nothing; `create` and `open` do."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.logs = self.path / "logs"
        self.traces = self.path / "traces"
        self.heartbeats = self.path / "heartbeats"
        self._identity_file = self.path / "run.json"
        self.config_file = self.path / "config.yaml"

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    # ---------------------------------------------------------------------------------- making and opening

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDir:
        """A new run's directory; ConfigError if there is a run or anything else in it already."""
        run_dir = cls(path)
        if run_dir.exists():
            name = run_dir.identity.name
            raise ConfigError(
                f"{path} already holds the run {name!r}; choose another --run-dir or resume that run"
            )
        run_dir._refuse_strangers()
        for directory in (run_dir.path, run_dir.checkpoints, run_dir.logs):
            directory.mkdir(parents=True, exist_ok=True)
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        write_text(run_dir.config_file, dump_yaml(to_tree(config)))
        write_json(
            run_dir._identity_file, asdict(RunIdentity(config.name, secrets.token_hex(6), created))
        )
        return run_dir

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """The directory of an existing run; ConfigError if it is none, or one of another version."""
        run_dir = cls(path)
        if not run_dir.exists():
            raise ConfigError(
                f"{path} holds no run (there is no run.json in it); check the path or train one first"
            )
        if run_dir.identity.format != FORMAT:
            raise ConfigError(
                f"{run_dir._identity_file} has format {run_dir.identity.format}, this version reads format {FORMAT}; "
                "go on with the version that began the run"
            )
        return run_dir

    @classmethod
    def create_or_resume(cls, path: Path, config: RunConfig) -> RunDir:
        """The directory of the run that `config` describes, created unless it exists.

        Logs settings that differ from the run's as `old -> new`; ConfigError unless each may change.
        """
        if not cls(path).exists():
            return cls.create(path, config)
        run_dir = cls.open(path)
        run_dir._accept(config)
        return run_dir

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self._identity_file.is_file()

    # ------------------------------------------------------------------------------------------- contents

    @property
    def identity(self) -> RunIdentity:
        """Who the run is; ConfigError if run.json is damaged."""
        try:
            tree = json.loads(self._identity_file.read_text())
        except ValueError as error:
            raise ConfigError(
                f"{self._identity_file} is not JSON: {error}; use a new --run-dir"
            ) from None
        return parse_config(RunIdentity, tree, source=str(self._identity_file))

    @property
    def config(self) -> RunConfig:
        """The settings the run goes by, resolved."""
        return load_config(RunConfig, self.config_file)

    def cut_metrics_after(self, step: int) -> int:
        """Remove every measurement beyond `step`, and a line that a crash cut short; returns how many went.

        A resumed run measures those steps again, so afterwards none is missing or there twice.
        """
        if not self.metrics.exists():
            return 0
        lines = self.metrics.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _is_measured_until(line, step)]
        if len(kept) < len(lines):
            with atomic_write(self.metrics) as file:
                file.writelines(kept)
        return len(lines) - len(kept)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole measurements, oldest first; a line that a crash cut short is passed over."""
        if not self.metrics.exists():
            return []
        measurements = (_json_object(line) for line in self.metrics.read_bytes().splitlines())
        return [measurement for measurement in measurements if measurement is not None]

    def append_ledger(self, event: dict[str, Any]) -> None:
        """Add one event, with the time, to the journal; on disk when this returns."""
        time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, **event}).encode() + b"\n"
        descriptor = os.open(self.ledger, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a crash cut the last event short: keep this one readable
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read_ledger(self) -> list[dict[str, Any]]:
        """All whole events, oldest first."""
        if not self.ledger.exists():
            return []
        events = (_json_object(line) for line in self.ledger.read_bytes().splitlines())
        return [event for event in events if event is not None]

    @contextlib.contextmanager
    def locked(self, holder: str = "train", is_fenced: bool = False) -> Iterator[None]:
        """Keep a second `holder` out of this directory, at the latest until this process ends.

        Raises ConfigError, which says who has it. A holder that is fenced off goes on beside one of another host: that
        one may be cut off from the world, and then nothing but its attempt's token keeps it from writing.

        `launcher` and `train` are two locks: a launcher holds its own while the rank 0 it started holds the other.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / f"{holder}.lock"
        with open(path, "a+b") as file:
            if not try_lock(file):
                file.seek(0)
                owner = file.read().decode(errors="replace").strip() or "another process"
                if is_fenced and not owner.endswith(f" on {socket.gethostname()}"):
                    yield
                    return
                raise ConfigError(
                    f"{self.path} is in use by {owner}; wait for it, stop it, or choose another --run-dir"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} ({holder}) on {socket.gethostname()}\n".encode())
            file.flush()
            yield

    # --------------------------------------------------------------------------------------------- checks

    def refuse_other_run(self, config: RunConfig) -> None:
        """Raise ConfigError unless this run may go on with the settings of `config`."""
        changes = differences(to_tree(self.config), to_tree(config))
        step = max(steps_on_disk(self.checkpoints), default=0)
        refused = [
            reason
            for key, (old, new) in changes.items()
            if (reason := _refusal(key, old, new, step))
        ]
        if refused:
            name = self.identity.name
            whose = (
                f"another run, {name!r} (not {config.name!r})"
                if name != config.name
                else f"the run {name!r}"
            )
            raise ConfigError(
                f"{self.path} holds {whose} with other settings:\n  "
                + "\n  ".join(refused)
                + "\nuse its settings to go on with it, or choose another --run-dir"
            )

    def _refuse_strangers(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; --run-dir must be a directory")
        names = sorted(entry.name for entry in self.path.iterdir())
        strangers = [
            name
            for name in names
            if not any(fnmatch.fnmatch(name, known) for known in _BEFORE_IDENTITY)
        ]
        if strangers:
            raise ConfigError(
                f"{self.path} holds other files and no run ({', '.join(strangers[:5])}); choose an empty --run-dir"
            )

    def _accept(self, config: RunConfig) -> None:
        changes = differences(to_tree(self.config), to_tree(config))
        if not changes:
            return
        self.refuse_other_run(config)
        for key, (old, new) in changes.items():
            logger.info("changed setting  %s: %s -> %s", key, old, new)
        self.append_ledger({"event": "settings_changed", "changes": changes})
        write_text(self.config_file, dump_yaml(to_tree(config)))


def _refusal(key: str, old: Any, new: Any, step: int) -> str:
    """Why a run that has come to `step` may not go on with this change; empty if it may."""
    if not may_change(RunConfig, key):
        return f"{key}: {old} -> {new}"
    if key == "optim.steps" and new < old:
        # More steps go on from here (the schedule stretches); fewer would mean a learning rate never planned for.
        return f"{key}: {old} -> {new} (may only grow)"
    if key == "data.phases":
        begun = [[phase for phase in phases if phase["from_step"] < step] for phases in (old, new)]
        if begun[0] != begun[1]:
            return f"{key}: {begun[0]} -> {begun[1]} (begun before step {step}; only later ones may change)"
    return ""


def _is_measured_until(line: bytes, step: int) -> bool:
    measurement = _json_object(line) if line.endswith(b"\n") else None
    return measurement is not None and measurement.get("step", step + 1) <= step


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
