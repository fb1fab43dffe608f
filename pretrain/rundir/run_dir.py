"""The directory of one run: its identity, settings, metrics, ledger and locks. Torch-free.

RUN/run.json          identity; written last, so that the rest exists if it does
RUN/config.yaml       every setting, resolved
RUN/metrics.jsonl     one line per measurement     RUN/ledger.jsonl   one line per event, synced
RUN/tensorboard/      RUN/logs/      RUN/heartbeats/      RUN/checkpoints/step-00000100/

Where runs are unless a flag says otherwise, and how they are named on a command line.

What a run keeps in its directory, that nothing there leads out of it, and whose it is.
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import hashlib
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError, DataError
from foundation.files import (
    SMALL_FILE_BYTES,
    YAML_SUFFIXES,
    make_directory,
    named_errors,
    own_file,
    read_json,
    read_regular,
    remove_leftovers,
    url_of,
    write_json,
    write_text,
)
from foundation.own_programs import installed_version
from foundation.ownership import is_of_another_user, refuse_foreign, refuse_open_parents
from foundation.records import Fields, InvalidField
from foundation.retry import Patience, outlast
from foundation.settings import differences, load_config, parse_config, to_tree
from foundation.yaml_files import did_you_mean, dump_yaml
from pretrain.checkpoint.facts import Past
from pretrain.checkpoint.verify import latest_step
from pretrain.config.resolve import with_absolute_paths
from pretrain.config.run import RunConfig, may_change
from pretrain.rundir import heartbeat
from pretrain.rundir.attempt_files import START, attempts_of
from pretrain.rundir.events import Restored, ResumeFrom, SettingsChanged, TrainingBegan
from pretrain.rundir.ledger import Ledger, asked_step, facts_of, history_of, last_of, last_stored
from pretrain.rundir.lock import Lock, exclusive_lock, read_lock
from pretrain.rundir.metrics_file import measurements_of

RUNS = Path("runs")
EXPORTED_WEIGHTS = "model.safetensors"  # in the directory of an export
_MOST_SHOWN = 6  # runs of a sweep in an error message


def run_path(text: str | Path) -> Path:
    """The `type` of every argument RUN: a path, or that name in runs/.

    The name in runs/ is meant where the path does not exist: NAME, or SWEEP/CELL.
    """
    path = Path(text)
    return RUNS / path if not path.exists() and (RUNS / path).exists() else path


def runs_below(path: Path) -> list[Path]:
    """The runs directly in `path`, as in the directory of a sweep, by their names."""
    return sorted(file.parent for file in path.glob("*/run.json"))


def advice_on(path: Path) -> str:
    """What to do about a path that holds no run, for the end of an error message."""
    if path.suffix in YAML_SUFFIXES:
        return "name the run's directory, by default runs/NAME"
    if (path / EXPORTED_WEIGHTS).is_file():
        return "it is an export, which 'pretrain evaluate' and 'pretrain generate' take"
    if cells := runs_below(path):
        shown = ", ".join(map(str, cells[:_MOST_SHOWN]))
        more = ", ..." if len(cells) > _MOST_SHOWN else ""
        return f"it is a sweep; its runs are {shown}{more} (name one)"
    runs = [run.name for folder in (path.parent, RUNS) for run in runs_below(folder)]
    hint = did_you_mean(path.name, [name for name in runs if name != str(path)])
    return hint.removeprefix("; ") if "did you mean" in hint else "check the path or start a run"


_NAMES = {
    *("run.json", "config.yaml", "ledger.jsonl", "metrics.jsonl", "attempt"),
    *("checkpoints", "heartbeats", "logs", "slurm", "tensorboard", "traces", "wandb"),
}


# What a command that starts or ends the run does what is said in.
_OBEYED = ("ledger.jsonl", "config.yaml", "slurm")


def make_run_directory(run_dir: Path) -> None:
    """Create the directory of a run, which nobody else may write whatever the umask."""
    make_directory(run_dir, 0o755)


class ForeignRun(ConfigError):
    """Others can have written what the run does."""


def refuse_foreign_run(run_dir: Path) -> None:
    """Raise ForeignRun unless only this user and root can have written what the run does.

    For commands that start or end a run by what its directory says. Reading one is safe.
    """
    run_dir = run_dir.resolve()
    try:
        refuse_open_parents(run_dir)
        refuse_foreign(run_dir, with_contents=False)
        for name in _OBEYED:
            refuse_foreign(run_dir / name)
    except DataError as error:
        raise ForeignRun(str(error)) from None


def refuse_foreign_urls(config_file: Path, config: RunConfig) -> None:
    """Raise ConfigError if these are another user's settings and name a server to ask."""
    parts = (part.path for part in config.data.all_parts)
    paths = (config.data.path, *parts, *config.evaluation.sets.values())
    url = next(filter(None, map(url_of, paths)), None)
    if url is not None and is_of_another_user(config_file):
        raise ConfigError(
            f"{config_file} is another user's, whose settings do not choose what is contacted; if "
            f"you want to ask that server, say so: data.path={url}"
        )


def refuse_links(run_dir: Path) -> None:
    """Raise ConfigError if one of the run's own names is a link: a run writes in its directory.

    One that came from elsewhere could make it overwrite any file of the user.
    """
    for name in sorted(_NAMES):
        if (run_dir / name).is_symlink():
            raise ConfigError(
                f"{run_dir / name} is a link, expected a part of the run; move what it leads to "
                "into its place, or remove it"
            )


logger = logging.getLogger(__name__)

FORMAT = 2
_RESTORE = (
    'put back a copy of run.json, or write {"name": ..., "id": ...} into it, as a checkpoint\'s '
    'index.json has them ("config" and "run"); without a checkpoint, start again in a new directory'
)
_PROBE_BYTES = 1 << 16  # what an attempt writes before its first step, and more

# What may be there before run.json, besides an empty directory of checkpoints: left by a crash, or
# by a launcher that submitted the run.
_BEFORE_IDENTITY = (
    "attempt",
    "config.yaml",
    "heartbeats",
    "ledger.jsonl",
    "logs",
    "slurm",
    "*.lock",
    ".*.tmp",
)


@dataclass(frozen=True)
class RunIdentity:
    """The run that a directory holds; `id` tells two runs of the same name apart."""

    name: str
    id: str
    created: str = ""  # UTC, ISO 8601
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
        self.wandb = self.path / "wandb"
        self.traces = self.path / "traces"
        self.heartbeats = self.path / heartbeat.DIRECTORY
        self._identity_file = self.path / "run.json"
        self.config_file = self.path / "config.yaml"

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    # ------------------------------------------------------------------------- making and opening

    @classmethod
    def create(cls, path: Path, config: RunConfig, branch_of: RunIdentity | None = None) -> RunDir:
        """Create the directory of a new run; with the id of the run whose checkpoints it takes.

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
            make_directory(directory)
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        write_text(run_dir.config_file, dump_yaml(to_tree(config)), mode=0o600)
        number = branch_of.id if branch_of else secrets.token_hex(6)
        write_json(run_dir._identity_file, asdict(RunIdentity(config.name, number, created)))
        return run_dir

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open the directory of an existing run.

        ConfigError if it is not one, or has another format.
        """
        run_dir = cls(path)
        if not run_dir.exists():
            advice = _RESTORE if run_dir.checkpoints.is_dir() else advice_on(path)
            raise ConfigError(f"{path} holds no run: it has no run.json; {advice}")
        _ = run_dir.identity
        return run_dir

    @classmethod
    def create_or_resume(cls, path: Path, config: RunConfig) -> RunDir:
        """The directory of the run that `config` describes, created unless it exists.

        Logs settings that differ from the run's as `old -> new`; ConfigError unless each may
        change.
        """
        for folder in (path, cls(path).checkpoints):  # whoever comes here has the run's lock
            remove_leftovers(folder)
        if not cls(path).exists():
            return cls.create(path, config)
        run_dir = cls.open(path)
        if changes := differences(to_tree(run_dir.config), to_tree(config)):
            run_dir.refuse_other_run(config)
            for key, (old, new) in changes.items():
                logger.info("changed setting  %s: %s -> %s", key, old, new)
            run_dir.ledger.append(SettingsChanged(changes=changes))
            write_text(run_dir.config_file, dump_yaml(to_tree(config)), mode=0o600)
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
            raise ConfigError(f"{self._identity_file} is damaged ({reason}); {_RESTORE}") from None
        raise ConfigError(
            f"{self._identity_file} has format {found}, this version reads format {FORMAT}; "
            "resume with the version that started the run"
        )

    @property
    def config(self) -> RunConfig:
        """The settings of the run, resolved."""
        if not self.config_file.exists() and self.exists():
            raise ConfigError(
                f"{self.config_file} is missing; put back a copy of it, or write into it what a "
                'checkpoint\'s index.json has as "config"'
            )
        return load_config(RunConfig, self.config_file)

    def past(self) -> Past:
        """Return what the run has published, and from where a user wants it to resume."""
        ledger = self.ledger.read()
        facts = facts_of(ledger, str(self.checkpoints))
        base = self.config.checkpoint.mirror.rstrip("/")
        stored = last_stored(ledger)
        urls = [f"{base}/{self.identity.name}"] if base else []
        urls += [stored.url] if stored else []
        if not last_of(ledger, TrainingBegan, Restored):
            urls = []  # a new run
        asked = asked_step(ledger)
        return Past(tuple(facts), history_of(ledger), asked, tuple(dict.fromkeys(urls)))

    def ask_to_resume_from(self, step: int) -> None:
        """Record that a user gives up what the run has published after `step`."""
        if step < 0:
            raise ConfigError(f"found --from-step {step}, expected a step from 0 on")
        if not self.exists():
            raise ConfigError(f"{self.path} holds no run yet; start it without --from-step")
        self.ledger.append(ResumeFrom(step=step))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All measurements, oldest first; damaged lines are skipped with a warning."""
        return list(measurements_of(self.metrics))

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
        starts = [attempt.directory / START for attempt in attempts]
        beats = self.heartbeats.glob("ranks-from-*.jsonl")
        for path in (*logs, *starts, *beats, *self.path.glob("*.lock")):
            path.unlink(missing_ok=True)
        folders = (attempt.directory for attempt in attempts)
        for directory in (*folders, self.logs, self.heartbeats, self.path):
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

    def refuse_strangers(self) -> None:
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
        strangers = [
            name
            for name in sorted(names)
            if not any(fnmatch.fnmatch(name, known) for known in _BEFORE_IDENTITY)
        ]
        if strangers:
            advice = _RESTORE if self.checkpoints.is_dir() else "choose an empty run directory"
            raise ConfigError(
                f"{self.path} holds other files and no run ({', '.join(strangers[:5])}); {advice}"
            )


def _refusal(key: str, old: Any, new: Any, step: int) -> str:
    """Why a run that has reached `step` may not resume with this change; empty if it may."""
    change = f"{old} -> {new}"
    if not may_change(key):
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


PACKAGES = ("data_pipeline", "foundation", "pretrain")  # all that a rank runs


def code_version() -> str:
    """Return `VERSION+DIGEST`.

    Equal digests mean equal source files, whether committed, copied or installed.
    """
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            content = read_regular(path, SMALL_FILE_BYTES)
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return f"{installed_version()}+{digest.hexdigest()[:12]}"
