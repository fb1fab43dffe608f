"""The directory of one run: its identity, settings, metrics, ledger and locks. Torch-free.

RUN/run.json          identity; written last, so that the rest exists if it does
RUN/config.yaml       every setting, resolved; a copy: since the first start the ledger has them
RUN/metrics.jsonl     one line per measurement     RUN/ledger.jsonl   one line per event, synced
RUN/tensorboard/      RUN/logs/      RUN/heartbeats/      RUN/checkpoints/step-00000100/
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.files import (
    make_directory,
    named_errors,
    own_file,
    read_json,
    read_text,
    remove_leftovers,
    sha256_of,
    write_json,
    write_text,
)
from foundation.settings import differences, load_config, parse_config
from foundation.typed_values import Line, from_tree, to_tree
from foundation.yaml_files import dump_yaml
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.facts import Past
from pretrain.checkpoint.storage_retry import StorageRetry, with_retries
from pretrain.checkpoint.verify import latest_step, steps_that_count
from pretrain.config.phases import settings_at
from pretrain.config.run import RunConfig
from pretrain.rundir import heartbeat
from pretrain.rundir.attempt_files import START, list_attempts
from pretrain.rundir.changed_settings import describe_course, describe_rate, refused_changes
from pretrain.rundir.evaluated_text import EvaluatedText
from pretrain.rundir.events import Event, Forecast, ResumeFrom, SettingsChanged, TrainingBegan
from pretrain.rundir.forecast import check_subject
from pretrain.rundir.history import (
    attempt_history,
    find_events,
    past_of,
    recorded_settings,
    setting_changes,
)
from pretrain.rundir.ledger import Ledger
from pretrain.rundir.lock import Lock, read_lock, run_lock
from pretrain.rundir.metrics_file import read_measurements
from pretrain.rundir.ownership import make_run_directory, refuse_links
from pretrain.rundir.run_paths import RUN_FILE, advice_on

logger = logging.getLogger(__name__)

FORMAT = 2
_RESTORE = (
    'put back a copy of run.json, or write {"name": ..., "id": ...} into it, as a checkpoint\'s '
    'index.json has them ("config" and "run"); without a checkpoint, start again in a new directory'
)
_PROBE_BYTES = 1 << 16  # an attempt writes less before its first step

# What may be there before run.json, besides an empty directory of checkpoints: left by a crash, or
# by a launcher that submitted the run.
_BEFORE_IDENTITY = (
    "attempt", "config.yaml", "heartbeats", "ledger.jsonl", "logs", "slurm", "*.lock", ".*.tmp",
)  # fmt: skip


@dataclass(frozen=True)
class RunIdentity:
    """The run that a directory holds; `id` tells two runs of the same name apart."""

    name: str
    id: Line  # messages and checkpoints repeat it
    created: str = ""  # UTC, ISO 8601
    format: int = FORMAT


class RunDir:
    """The paths of a run, and what is written there.

    The constructor touches nothing; `create` and `open` do. `retry` is for all that is
    written here while the run trains.
    """

    def __init__(self, path: Path, retry: StorageRetry | None = None) -> None:
        self.path = Path(path)
        self.retry = retry or StorageRetry()
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = Ledger(self.path / "ledger.jsonl", self.retry)
        self.evaluations = self.path / "evaluations.jsonl"  # of kept checkpoints, by other jobs
        self.tensorboard = self.path / "tensorboard"
        self.logs = self.path / "logs"
        self.wandb = self.path / "wandb"
        self.traces = self.path / "traces"
        self.heartbeats = self.path / heartbeat.DIRECTORY
        self._identity_file = self.path / RUN_FILE
        self.config_file = self.path / "config.yaml"

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDir:
        """Create the directory of a new run; ConfigError if it contains anything else already."""
        run_dir = cls(path)
        assert not run_dir.exists(), path
        run_dir.refuse_other_files()
        make_run_directory(run_dir.path)
        for directory in (run_dir.checkpoints, run_dir.logs):
            make_directory(directory)
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        write_text(run_dir.config_file, dump_yaml(to_tree(config)), mode=0o600)
        identity = RunIdentity(config.name, secrets.token_hex(6), created)
        write_json(run_dir._identity_file, asdict(identity))
        return run_dir

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open the directory of an existing run; ConfigError if it is not one of this format."""
        run_dir = cls(path)
        if not run_dir.exists():
            advice = _RESTORE if run_dir.checkpoints.is_dir() else advice_on(path)
            raise ConfigError(f"{path} holds no run: it has no run.json; {advice}")
        _ = run_dir.identity
        return run_dir

    @classmethod
    def create_or_resume(cls, path: Path, config: RunConfig) -> RunDir:
        """Open the run that `config` describes; create it unless it exists.

        ConfigError if a setting differs that a resume may not change. `change_settings` changes the
        others.
        """
        for folder in (path, cls(path).checkpoints):  # the caller has the run's lock
            remove_leftovers(folder)
        if not cls(path).exists():
            return cls.create(path, config)
        run_dir = cls.open(path)
        run_dir.refuse_other_run(config)
        return run_dir

    def change_settings(self, config: RunConfig, step: int) -> None:
        """Give the run the settings of `config` from `step` on; log and record what that changes.

        ConfigError, with nothing written, unless all of it may change.
        """
        settings, held = to_tree(config), self.settings_at(max(0, step - 1))
        if changes := differences(to_tree(self.config), settings):
            self.refuse_other_run(config, step)
            for key, (old, new) in changes.items():
                logger.info("changed setting  %s: %s -> %s", key, old, new)
            self.ledger.append(SettingsChanged(changes=changes, step=step, run_settings=settings))
            after = self.settings_at(step)
            if rate := describe_rate(held, after, step):
                logger.warning(rate + describe_course(held, after))
        if read_text(self.config_file) != (text := dump_yaml(settings)):
            write_text(self.config_file, text, mode=0o600)

    def exists(self) -> bool:
        """Return whether the directory holds a run."""
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

    @property
    def identity(self) -> RunIdentity:
        """The run's name and id; ConfigError, with the way out, if run.json is damaged."""
        try:
            tree = read_json(self._identity_file)
            if not isinstance(version := tree.get("format"), int) or version == FORMAT:
                return from_tree(RunIdentity, tree)
        except (ValueError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{self._identity_file} is damaged ({reason}); {_RESTORE}") from None
        raise ConfigError(
            f"{self._identity_file} has format {version}, this version reads format {FORMAT}; "
            "resume with the version that started the run"
        )

    @property
    def config(self) -> RunConfig:
        """The settings of the run, resolved."""
        return self._config_by(self.ledger.read())

    def _config_by(self, ledger: Sequence[Event]) -> RunConfig:
        if not self.config_file.exists() and self.exists():
            raise ConfigError(
                f"{self.config_file} is missing; put back a copy of it, or write into it what a "
                'checkpoint\'s index.json has as "config"'
            )
        if settings := recorded_settings(ledger):
            return parse_config(RunConfig, settings, str(self.ledger.path))
        return load_config(RunConfig, self.config_file)

    def settings_at(self, step: int) -> RunConfig:
        """Return the settings that the run had after `step` updates, with all phases."""
        ledger = self.ledger.read()
        return settings_at(self._config_by(ledger), step, setting_changes(ledger))

    def past(self, mirror: str | None = None) -> Past:
        """Return what the ledger says to a start, which may be about to change the `mirror`."""
        ledger = self.ledger.read()
        own = self._config_by(ledger).checkpoint.mirror if mirror is None else mirror
        base = own.rstrip("/")
        store = f"{base}/{self.identity.name}" if base else ""
        return past_of(ledger, str(self.checkpoints), store)

    def ask_to_resume_from(self, step: int) -> None:
        """Record that a user gives up what the run has published after `step`."""
        if not self.exists():
            raise ConfigError(f"{self.path} holds no run yet; start it without --from-step")
        past, steps = self.past(), [0, *steps_that_count(self.checkpoints)]
        is_elsewhere = step > 0 and (past.stores or self.config.checkpoint.local)
        is_kept = step in past.saved and step_directory(self.checkpoints, step).is_dir()
        if step not in steps and not is_kept and not is_elsewhere:
            near = sorted(steps, key=lambda other: abs(other - step))[:2]
            advice = f"give --from-step {' or '.join(map(str, sorted(near)))}"
            raise ConfigError(f"{self.path} has no checkpoint of step {step}; {advice}")
        self.ledger.append(ResumeFrom(step=step))

    def sign_forecast(self, card: Path, config: RunConfig) -> None:
        """Record the forecast of a run that has not begun, unless it is recorded already; `config`
        has its vocabulary.
        """
        check_subject(card, config)
        ledger, sha256 = self.ledger.read(), sha256_of(card)
        if sha256 in [event.sha256 for event in find_events(ledger, Forecast)]:
            return
        if find_events(ledger, TrainingBegan):
            raise ConfigError(
                f"{self.path} has begun: --forecast is for a run before its first start"
            )
        self.ledger.append(Forecast(sha256=sha256, file=str(card)))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all measurements, oldest first; damaged lines are skipped with a warning."""
        return list(read_measurements(self.metrics))

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Return what other jobs measured of kept checkpoints: the latest line of each text that
        was scored after each step that the run has not gone back behind since.

        A step's lines are together, the one on the most tokens last.
        """
        stands, lines = attempt_history(self.ledger.read()).stands, {}
        for line in read_measurements(self.evaluations):  # earlier versions wrote no attempt
            if "attempt" not in line or stands(line["step"], line["attempt"]):
                text = EvaluatedText.of_line(line)
                lines[line["step"], text.tokens, text.part_tokens] = line
        return [lines[key] for key in sorted(lines)]

    @contextlib.contextmanager
    def locked(self, holder: str = "train", is_fenced: bool = False) -> Iterator[None]:
        """Keep a second `holder` out of this directory; see `run_lock`.

        A launcher holds its own lock while the rank 0 that it started holds the lock `train`.
        """
        refuse_links(self.path)
        make_run_directory(self.path)
        path = self.path / f"{holder}.lock"
        # If storage fails, a job waits, since nobody sees its error. A user at a terminal sees it.
        retry = self.retry if is_fenced else StorageRetry()
        with contextlib.ExitStack() as stack:
            lock = partial(run_lock, path, holder, is_fenced)
            with_retries(retry, lambda: stack.enter_context(lock()))
            yield

    def locks(self) -> list[Lock]:
        """Return who took the locks of a launcher and of rank 0 last."""
        paths = (self.path / f"{holder}.lock" for holder in ("launcher", "train"))
        return [lock for path in paths if (lock := read_lock(path))]

    def remove_unused(self) -> None:
        """Delete the directory if no run came into being: it holds only locks and logs."""
        attempts = list_attempts(self.logs)
        logs = [log for attempt in attempts for log in attempt.logged_ranks().values()]
        starts = [attempt.directory / START for attempt in attempts]
        beats = self.heartbeats.glob("ranks-from-*.jsonl")
        for path in (*logs, *starts, *beats, *self.path.glob("*.lock")):
            path.unlink(missing_ok=True)
        folders = (attempt.directory for attempt in attempts)
        for directory in (*folders, self.logs, self.heartbeats, self.path):
            if directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()

    def refuse_other_run(
        self, config: RunConfig, step: int | None = None, given: Sequence[str] | None = None
    ) -> None:
        """Raise ConfigError unless the run may have `config` from `step` on, by default from the
        step of the next start. `given` has the overrides of a command, see `refused_changes`."""
        if step is None:
            asked = self.past().asked
            step = latest_step(self.checkpoints) if asked is None else asked
        held = self.settings_at(max(0, step - 1))
        if refused := refused_changes(self.config, config, step, held, given):
            raise ConfigError(
                f"{self.path} holds the run {self.identity.name!r} with other settings:\n  "
                + "\n  ".join(f"{key}: {change}" for key, change in refused.items())
                + f"\n'launcher resume {self.path}' keeps its settings; say what shall change; for "
                f"another run: pretrain branch {self.path}@last NEW, or start one with name=NEW"
            )

    def refuse_other_files(self) -> None:
        """Raise ConfigError if something else than a run is there."""
        if not self.path.exists() or self.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(
                f"{self.path} is a file, expected a directory; choose another run directory"
            )
        names = {entry.name for entry in self.path.iterdir()}
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            names.remove(self.checkpoints.name)
        others = [
            name
            for name in sorted(names)
            if not any(fnmatch.fnmatch(name, known) for known in _BEFORE_IDENTITY)
        ]
        if others:
            advice = _RESTORE if self.checkpoints.is_dir() else "choose an empty run directory"
            raise ConfigError(
                f"{self.path} holds other files and no run ({', '.join(others[:5])}); {advice}"
            )
