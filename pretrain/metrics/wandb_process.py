"""The process that copies a run's metrics.jsonl to Weights & Biases, beside the rank that trains.

    python -m pretrain.metrics.wandb_process RUN < PIPE

It reads what is on disk, so it cannot slow down or end training, nor lose what training keeps. It
ends when the pipe closes: normally if it got END before. Torch-free.

    RUN/wandb/sent.json    what was sent (`wandb_steps`); the id is that of run.json
    RUN/wandb/...          what the library itself writes
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.config_loader import to_tree
from data_pipeline.file_lock import exclusive_lock
from data_pipeline.files import open_regular, read_json, write_json
from data_pipeline.typed_json import from_json
from pretrain.metrics.scalars import scalars_of
from pretrain.metrics.wandb_steps import SentSteps
from pretrain.rundir.ledger import events_of
from pretrain.rundir.metrics_file import measurement_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Rewind
from pretrain.terminal.log import set_up_logging

END = b"end\n"
POLL_SECONDS = 2.0
INIT_SECONDS, FINISH_SECONDS = 60.0, 60.0  # for the server; then the session is written to disk
AT_MOST_SECONDS = 180  # from the end of the pipe on
# Nothing but the run's settings and measurements: no console, code, host, packages or telemetry.
QUIET = {
    "console": "off",
    "silent": True,
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "host": "-",
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,
    "init_timeout": float(os.environ.get("WANDB_INIT_TIMEOUT") or INIT_SECONDS),
    "finish_timeout": FINISH_SECONDS,
}

logger = logging.getLogger(__name__)


class NewLines:
    """The lines that were appended to a file since the last look, or all of a replaced one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._inode = 0, -1

    def has_restarted(self) -> bool:
        """Whether the next lines are a file's first ones."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._offset, self._inode = 0, found.st_ino
            return True
        return False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), open_regular(self._path) as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # the rest is being written
                self._offset += len(line)
                if measured := measurement_of(line):
                    yield measured


class Session:
    """One attempt's part of the W&B run."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._state_file = run_dir.wandb / "sent.json"
        self._sent = SentSteps()
        if self._state_file.exists():
            self._sent = from_json(SentSteps, read_json(self._state_file))
        self._sent.start_session()
        self._lines = NewLines(run_dir.metrics)
        self._run = _start(run_dir)

    def copy(self) -> None:
        """Send what is new on disk."""
        if self._lines.has_restarted():
            rewinds = events_of(self._run_dir.ledger.read(), Rewind)
            self._sent.note_rewinds([event.to_step for event in rewinds])
        before = self._sent.last
        for line in self._lines:
            if (place := self._sent.place_of(line)) is not None:
                where = {"step": line["step"], "rewinds": self._sent.rewinds}
                self._run.log({**where, **scalars_of(line)}, step=place)
        if self._sent.last != before:
            write_json(self._state_file, asdict(self._sent))

    def finish(self, exit_code: int) -> None:
        """End the session: 0 if the attempt ended normally."""
        self._run.finish(exit_code=exit_code)


def _start(run_dir: RunDir) -> Any:
    """Start the session, on disk alone if no server takes it."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of the library's own crashes
    import wandb
    from wandb.errors import Error

    config = run_dir.config
    wanted = config.metrics.wandb
    known = {name: value for name, value in QUIET.items() if name in wandb.Settings.model_fields}

    def start(mode: Any) -> Any:
        return wandb.init(
            project=wanted.project,
            entity=wanted.entity or None,
            group=wanted.group or None,
            tags=wanted.tags or None,
            id=run_dir.identity.id,
            name=config.name,
            config=to_tree(config),
            dir=str(run_dir.path),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(**known),
        )

    try:
        run = start("offline" if wanted.offline else None)
    except (Error, OSError) as error:
        wandb.teardown()  # the library's own process takes an id once
        reason = " ".join(str(error).split())[:300]
        logger.warning(
            "Weights & Biases: %s; this attempt is kept in %s; upload it with `wandb sync`",
            reason, run_dir.wandb,
        )  # fmt: skip
        run = start("offline")
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


def follow(run_dir: RunDir, pipe: int) -> None:
    """Copy until the other end of the pipe closes."""
    run_dir.wandb.mkdir(exist_ok=True)
    with exclusive_lock(run_dir.wandb / ".lock", AT_MOST_SECONDS):
        session, said, is_open = Session(run_dir), b"", True
        while is_open:
            ready, _, _ = select.select([pipe], [], [], POLL_SECONDS)
            if ready:
                read = os.read(pipe, len(END))
                said, is_open = said + read, bool(read)
                if not is_open:
                    signal.alarm(AT_MOST_SECONDS)
            session.copy()
        session.finish(exit_code=0 if said.endswith(END) else 1)


def main() -> int:
    """Follow the run of the directory in the first argument; 1 if that fails."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the run, which closes the pipe then
    set_up_logging("wandb")
    try:
        follow(RunDir.open(Path(sys.argv[1])), sys.stdin.fileno())
    except Exception as error:  # training goes on without this process
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        logger.warning("Weights & Biases gets no more of this attempt: %s", reason)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
