"""A copy of a run's metrics.jsonl on Weights & Biases, made by a process beside rank 0. Torch-free.

    python -m pretrain.metrics.wandb_writer RUN < PIPE

The process reads what is on disk, so it cannot slow down or end training, nor lose what training
keeps, and the library's exit hooks and its search for settings are not in the rank. It ends when
the pipe does: a byte before the end says that the attempt ended normally.

    RUN/wandb/sent.json    what was sent (`Sent`); the id is that of run.json
    RUN/wandb/...          what the library itself writes
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError, os_error_text
from foundation.files import read_json, write_json
from foundation.locks import exclusive_lock
from foundation.own_programs import own_command
from foundation.records import from_json
from foundation.settings import to_tree
from pretrain.rundir.events import Rewind
from pretrain.rundir.ledger import events_of
from pretrain.rundir.metric_names import scalars_of
from pretrain.rundir.metrics_file import latest_measurements, measurements_of
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.log import set_up_logging

# How long the end of an attempt waits for the last upload. A preempted job has little time left,
# and by then its checkpoint is saved.
END_SECONDS = 20.0
AT_MOST_SECONDS = 180  # that the process lives on
POLL_SECONDS = 2.0
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
    "init_timeout": float(os.environ.get("WANDB_INIT_TIMEOUT") or 60),
    "finish_timeout": 60.0,  # for the server; then the rest is on disk only
}

logger = logging.getLogger(__name__)


def check_wandb(project: str) -> None:
    """Raise ConfigError if the run asks for W&B and the library is not installed."""
    if project and find_spec("wandb") is None:
        raise ConfigError(
            "metrics.wandb_project needs wandb; `pip install 'xl-pretrain[wandb]'`, or leave it out"
        )


@contextlib.contextmanager
def wandb_writer(run_dir: RunDir, project: str) -> Iterator[None]:
    """Copy metrics.jsonl to W&B during the block, if the run asks for that; never wait for it.

    If this process is killed, the copying one still sends what is on disk and ends.
    """
    if not project:
        yield
        return
    try:
        process = subprocess.Popen(
            own_command("pretrain.metrics.wandb_writer", str(run_dir.path.resolve())),
            cwd="/",  # the library obeys ./wandb/settings, which may be another user's
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C and the end of the ranks' group leave it time
        )
    except OSError as error:  # no more processes, or no memory for one
        logger.warning("Weights & Biases gets nothing of this attempt: %s", os_error_text(error))
        yield
        return
    assert process.stdin is not None
    with process.stdin as pipe:
        yield
        with contextlib.suppress(BrokenPipeError):
            pipe.write(b"\n")
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning(
            "Weights & Biases has not taken everything within %.0f s; what it lacks is in %s",
            END_SECONDS, run_dir.wandb,
        )  # fmt: skip


@dataclass
class Sent:
    """How far a run was sent. Kept in RUN/wandb/sent.json from one attempt to the next.

    A row of W&B has the number of its step. Rows only grow, but steps are repeated after a crash,
    with the same results, and after a rewind, with other data. So a line that was sent is sent
    again only after a rewind, when rows continue after the last one. Charts are drawn over the
    metric `step`, which goes back.
    """

    row: int = 0
    step: int = 0
    is_evaluated: bool = False
    rewinds: int = 0
    takes_more: bool = False  # a row gets no more after its attempt, or a rewind

    def lacks(self, line: Mapping[str, Any]) -> bool:
        """Whether a line was not sent yet."""
        return _position(line) > (self.step, self.is_evaluated)

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line as sent, in the row that is then the last one."""
        step, is_evaluated = _position(line)
        self.row = max(self.row + step - self.step, self.row + (not self.takes_more))
        self.step, self.is_evaluated, self.takes_more = step, is_evaluated, True

    def note_rewinds(self, to_steps: Sequence[int]) -> None:
        """Take the steps that all rewinds of the run went back to, in their order."""
        for to_step in to_steps[self.rewinds :]:
            last, self.takes_more = (self.step, self.is_evaluated), False
            self.step, self.is_evaluated = min(last, (to_step, True))
        self.rewinds = len(to_steps)


def _position(line: Mapping[str, Any]) -> tuple[int, bool]:
    return line["step"], line["kind"] == "evaluation"


class Session:
    """One attempt's part of the W&B run."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._state_file = run_dir.wandb / "sent.json"
        self._sent = Sent()
        if self._state_file.exists():
            found = from_json(Sent, read_json(self._state_file))
            self._sent = replace(found, takes_more=False)
        self._inode = -1
        self.run = _start(run_dir)

    def copy(self) -> None:
        """Send what is new on disk."""
        path, before = self._run_dir.metrics, replace(self._sent)
        inode = path.stat().st_ino if path.exists() else 0
        if inode != self._inode:  # the first look, or a start has cut the file
            self._inode = inode
            rewinds = events_of(self._run_dir.ledger.read(), Rewind)
            self._sent.note_rewinds([event.to_step for event in rewinds])
            lines = filter(self._sent.lacks, measurements_of(path))
        else:
            lines = reversed(list(takewhile(self._sent.lacks, latest_measurements(path))))
        for line in lines:
            self._sent.add(line)
            where = {"step": line["step"], "rewinds": self._sent.rewinds}
            self.run.log({**where, **scalars_of(line)}, step=self._sent.row)
        if self._sent != before:
            write_json(self._state_file, asdict(self._sent))


def _start(run_dir: RunDir) -> Any:
    """Start the session, on disk alone if no server takes it."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of the library's own crashes
    import wandb

    config = run_dir.config
    known = {name: value for name, value in QUIET.items() if name in wandb.Settings.model_fields}

    def start(mode: Any = None) -> Any:
        return wandb.init(
            project=config.metrics.wandb_project,
            id=run_dir.identity.id,
            name=config.name,
            config=to_tree(config),
            dir=str(run_dir.path),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(**known),
        )

    try:
        run = start()
    except (wandb.Error, OSError) as error:
        wandb.teardown()  # the library's own process takes an id once
        logger.warning(
            "Weights & Biases: %s; this attempt is kept in %s; upload it with `wandb sync`",
            _reason(error), run_dir.wandb,
        )  # fmt: skip
        run = start("offline")
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


def follow(run_dir: RunDir, pipe: int) -> None:
    """Copy until the other end of the pipe closes."""
    run_dir.wandb.mkdir(exist_ok=True)
    with exclusive_lock(run_dir.wandb / ".lock", AT_MOST_SECONDS):
        session, last = Session(run_dir), None
        while last is None:
            if select.select([pipe], [], [], POLL_SECONDS)[0]:
                last = os.read(pipe, 1)
                signal.alarm(AT_MOST_SECONDS)
            session.copy()
        session.run.finish(exit_code=0 if last else 1)


def main() -> int:
    """Follow the run of the directory in the first argument; 1 if that fails."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the run, which closes the pipe then
    set_up_logging("wandb")
    try:
        follow(RunDir.open(Path(sys.argv[1])), sys.stdin.fileno())
    except Exception as error:  # training goes on without this process
        logger.warning("Weights & Biases gets no more of this attempt: %s", _reason(error))
        return 1
    return 0


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
