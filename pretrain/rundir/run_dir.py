"""The directory of one run: its identity, settings, metrics, ledger and locks. Torch-free.

RUN/run.json          identity; written last, so that the rest exists if it does
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.checked_fields import Fields, InvalidField
from data_pipeline.config_loader import differences, load_config, parse_config, to_tree
from data_pipeline.errors import ConfigError
from data_pipeline.files import named_errors, own_file, read_json, write_json, write_text
from data_pipeline.patience import Patience, outlast
from data_pipeline.yaml_files import dump_yaml
from pretrain.checkpoint.directory import INDEX, step_directory
from pretrain.checkpoint.marker import latest_step
from pretrain.config.resolve import with_absolute_paths
from pretrain.config.resume_rules import may_change
from pretrain.config.run import RunConfig
from pretrain.rundir import heartbeat_files
from pretrain.rundir.attempt_files import attempts_of
from pretrain.rundir.ledger import Ledger
from pretrain.rundir.lock import Lock, exclusive_lock, read_lock
from pretrain.rundir.metrics_file import cut_measurements_after, read_measurements
from pretrain.rundir.own_names import make_run_directory, refuse_links
from pretrain.rundir.run_paths import advice_on
from pretrain.rundir.training_events import SettingsChanged

logger = logging.getLogger(__name__)

FORMAT = 2
_PROBE_BYTES = 1 << 16  # what an attempt writes before its first step, and more

# What may be there before run.json: left by a crash, or by a launcher that submitted the run.
_BEFORE_IDENTITY = (
    "attempt",
    "config.yaml",
    "ledger.jsonl",
    "logs",
    "slurm",
    "*.lock",
    "*.owner",
    ".*.tmp",
)


@dataclass(frozen=True)
class RunIdentity:
    """The run that a directory holds; `id` tells two runs of the same name apart."""

    name: str
    id: str
    created: str  # UTC, ISO 8601
    format: int = FORMAT


class RunDir:
    """Paths of a run and what is written there.

    The constructor touches nothing; `create` and `open` do. `patience` is for the ledger, and for
    what else is written here while the run trains.
    """

    def __init__(self, path: Path, patience: Patience | None = None) -> None:
        self.path = Path(path)
        self.patience = patience or Patience()
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = Ledger(self.path / "ledger.jsonl", self.patience)
        self.tensorboard = self.path / "tensorboard"
        self.logs = self.path / "logs"
        self.matmul_peaks = self.path / "matmul_peaks.json"  # that MFU refers to
        self.wandb = self.path / "wandb"
        self.traces = self.path / "traces"
        self.heartbeats = self.path / heartbeat_files.DIRECTORY
        self._identity_file = self.path / "run.json"
        self.config_file = self.path / "config.yaml"

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    # ------------------------------------------------------------------------- making and opening

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDir:
        """Create the directory of a new run.

        ConfigError if it contains a run or anything else already.
        """
        run_dir = cls(path)
        if run_dir.exists():
            name = run_dir.identity.name
            raise ConfigError(
                f"{path} already holds the run {name!r}; "
                "choose another run directory or resume that run"
            )
        run_dir.refuse_strangers()
        make_run_directory(run_dir.path)
        for directory in (run_dir.checkpoints, run_dir.logs):
            directory.mkdir(exist_ok=True)
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        write_text(run_dir.config_file, dump_yaml(to_tree(config)), mode=0o600)
        write_json(
            run_dir._identity_file, asdict(RunIdentity(config.name, secrets.token_hex(6), created))
        )
        return run_dir

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open the directory of an existing run.

        ConfigError if it is not one, or has another format.
        """
        run_dir = cls(path)
        if not run_dir.exists():
            advice = run_dir._way_back(otherwise=advice_on(path))
            raise ConfigError(f"{path} holds no run: it has no run.json; {advice}")
        _ = run_dir.identity
        return run_dir

    @classmethod
    def create_or_resume(cls, path: Path, config: RunConfig) -> RunDir:
        """The directory of the run that `config` describes, created unless it exists.

        Logs settings that differ from the run's as `old -> new`; ConfigError unless each may
        change.
        """
        if not cls(path).exists():
            return cls.create(path, config)
        run_dir = cls.open(path)
        run_dir._accept(config)
        return run_dir

    def exists(self) -> bool:
        """Whether the directory holds a run."""
        return self._identity_file.is_file()

    def check_writable(self) -> None:
        """Raise OSError unless a small file can be written."""
        probe = self.path / f".writable.{os.getpid()}.tmp"
        with named_errors(self.path, probe):
            try:
                with open(probe, "wb", opener=own_file) as file:
                    file.write(b"x" * _PROBE_BYTES)
            finally:
                with contextlib.suppress(OSError):
                    probe.unlink()

    # ----------------------------------------------------------------------------------- contents

    @property
    def identity(self) -> RunIdentity:
        """Who the run is; ConfigError, with the way out, if run.json is damaged."""
        try:
            tree = read_json(self._identity_file)
            if not isinstance(found := tree.get("format"), int) or found == FORMAT:
                identity = parse_config(RunIdentity, tree, source="run.json")
                Fields(asdict(identity)).text("id")  # messages and checkpoints repeat it
                return identity
        except (ValueError, AttributeError, ConfigError, InvalidField) as error:
            reason = str(error).partition("\n")[0]
            advice = self._way_back("no checkpoint is valid: start again in a new run directory")
            raise ConfigError(f"{self._identity_file} is damaged ({reason}); {advice}") from None
        raise ConfigError(
            f"{self._identity_file} has format {found}, this version reads format {FORMAT}; "
            "resume with the version that started the run"
        )

    @property
    def config(self) -> RunConfig:
        """The settings of the run, resolved."""
        if not self.config_file.exists() and (step := latest_step(self.checkpoints)):
            index = step_directory(self.checkpoints, step) / INDEX
            raise ConfigError(
                f"{self.config_file} is missing; put back a copy of it, or write into it what "
                f'{index} has as "config"'
            )
        return load_config(RunConfig, self.config_file)

    def cut_metrics_after(self, step: int) -> int:
        """Remove every measurement after `step`, and lines that are damaged or cut short; returns
        how many.

        A resumed run repeats and measures those steps, so that each is measured once in the end.
        """
        return cut_measurements_after(self.metrics, step)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All measurements, oldest first; damaged lines are skipped with a warning."""
        return read_measurements(self.metrics)

    @contextlib.contextmanager
    def locked(self, holder: str = "train", is_fenced: bool = False) -> Iterator[None]:
        """Keep a second `holder` out of this directory; see `exclusive_lock`.

        `launcher` and `train` are two locks: a launcher holds its own while the rank 0 it started
        holds the other.
        """
        refuse_links(self.path)
        make_run_directory(self.path)
        path = self.path / f"{holder}.lock"
        # Nobody sees the error of a job, so it waits; whoever starts a run by hand reads it.
        patience = self.patience if is_fenced else Patience()
        with contextlib.ExitStack() as stack:
            lock = partial(exclusive_lock, path, holder, is_fenced)
            outlast(patience, lambda: stack.enter_context(lock()))
            yield

    def locks(self) -> list[Lock]:
        """Who took the locks of a launcher and of rank 0 last."""
        paths = (self.path / f"{holder}.lock" for holder in ("launcher", "train"))
        return [lock for path in paths if (lock := read_lock(path))]

    def remove_unused(self) -> None:
        """Delete the directory if no run came into being: it holds only locks and logs."""
        attempts = attempts_of(self.logs)
        logs = [log for attempt in attempts for log in attempt.logged_ranks().values()]
        for path in (*logs, *self.path.glob("*.lock")):
            path.unlink()
        for directory in (*(attempt.directory for attempt in attempts), self.logs, self.path):
            if directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()

    # ------------------------------------------------------------------------------------- checks

    def refuse_other_run(self, config: RunConfig) -> None:
        """Raise ConfigError unless this run may resume with the settings of `config`."""
        if refused := self.other_settings(config):
            name = self.identity.name
            whose = (
                f"another run, {name!r} (not {config.name!r})"
                if name != config.name
                else f"the run {name!r}"
            )
            raise ConfigError(
                f"{self.path} holds {whose} with other settings:\n  "
                + "\n  ".join(f"{key}: {change}" for key, change in refused.items())
                + "\nuse its settings to resume it; for another run, give name=NEW or --run-dir DIR"
            )

    def other_settings(self, config: RunConfig, own: RunConfig | None = None) -> dict[str, str]:
        """Return the settings by which `config` is another run than this one: `old -> new`.

        `own` are this run's, where it has not begun and has no config.yaml. A vocabulary size that
        either leaves to the corpus is none of them.
        """
        trees = (to_tree(with_absolute_paths(each)) for each in (own or self.config, config))
        changes = differences(*trees)
        step = latest_step(self.checkpoints) if "data.phases" in changes else 0
        refusals = {key: _refusal(key, old, new, step) for key, (old, new) in changes.items()}
        return {key: reason for key, reason in refusals.items() if reason}

    def _way_back(self, otherwise: str) -> str:
        """How to get run.json back, which the latest checkpoint knows; without one, `otherwise`."""
        step = latest_step(self.checkpoints) if self.checkpoints.is_dir() else 0
        saved = read_json(step_directory(self.checkpoints, step) / INDEX) if step else {}
        name = saved.get("config", {}).get("name")
        if not name:
            return otherwise
        identity = RunIdentity(name, saved["run"], created="")
        return (
            f"the checkpoints, up to step {step}, and {self.config_file.name} are other files: put "
            f"back a copy of run.json, or write into it {json.dumps(asdict(identity))}"
        )

    def refuse_strangers(self) -> None:
        """Raise ConfigError if something else than a run is there."""
        if not self.path.exists() or self.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(
                f"{self.path} is a file, expected a directory; choose another run directory"
            )
        names = sorted(entry.name for entry in self.path.iterdir())
        strangers = [
            name
            for name in names
            if not any(fnmatch.fnmatch(name, known) for known in _BEFORE_IDENTITY)
        ]
        if strangers:
            advice = self._way_back(otherwise="choose an empty run directory")
            raise ConfigError(
                f"{self.path} holds other files and no run ({', '.join(strangers[:5])}); {advice}"
            )

    def _accept(self, config: RunConfig) -> None:
        changes = differences(to_tree(self.config), to_tree(config))
        if not changes:
            return
        self.refuse_other_run(config)
        for key, (old, new) in changes.items():
            logger.info("changed setting  %s: %s -> %s", key, old, new)
        self.ledger.append(SettingsChanged(changes=changes))
        write_text(self.config_file, dump_yaml(to_tree(config)), mode=0o600)


def _refusal(key: str, old: Any, new: Any, step: int) -> str:
    """Why a run that has reached `step` may not resume with this change; empty if it may."""
    change = f"{old} -> {new}"
    if not may_change(RunConfig, key):
        return "" if key == "model.vocab_size" and not (old and new) else change
    if key == "optim.steps" and new < old:
        # More steps stretch the schedule; fewer would need a learning rate that was never
        # scheduled.
        return f"{change} (may only grow)"
    if key == "data.phases":
        started = [
            [phase for phase in phases if phase["from_step"] < step] for phases in (old, new)
        ]
        if started[0] != started[1]:
            change = f"{started[0]} -> {started[1]}"
            return f"{change} (before step {step}; only later phases may change)"
    return ""
