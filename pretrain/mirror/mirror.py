"""A run's mirror: which checkpoint is being uploaded, and how far. All ranks are in one state.

    IDLE --ready--> FILES --no rank busy--> INDEX --rank 0 not busy--> IDLE

Each rank uploads its share of a checkpoint in a thread; then rank 0 uploads what makes it count.
The ranks agree by three flags in the exchange of stop requests of each step, so no step waits for a
store, and nothing is written for each other to find. A store that fails keeps the state: its thread
tries again, until there is a newer checkpoint to upload instead.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from pathlib import Path
from tempfile import TemporaryDirectory

from data_pipeline.corpora.writable_store import WritableStore
from pretrain.checkpoint import directory as files
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World, broadcast_value, on_any_rank
from pretrain.mirror.upload import Check, Publication, Retried, upload_share
from pretrain.rundir.ledger import Ledger, last_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Event, Mirrored, MirrorFailed, Restored

logger = logging.getLogger(__name__)
MIB = 1 << 20
POLL_SECONDS = 0.1


class Phase(Enum):
    IDLE = auto()
    FILES = auto()  # each rank uploads its share
    INDEX = auto()  # rank 0 uploads the rest


def location(run: RunConfig) -> str:
    """The URL of the run's mirror; '' if it has none."""
    base = run.checkpoint.mirror.rstrip("/")
    return f"{base}/{run.name}" if base else ""


def step_in_store(ledger: Sequence[Event], url: str, step: int) -> int:
    """`step` if the store at `url` has its checkpoint as the run resumes from it, else 0."""
    last = last_of(ledger, Mirrored, Restored)
    return step if last is not None and (last.step, last.url) == (step, url) else 0


class Mirror:
    """Uploads checkpoints of one start of a run. All ranks call `agree` and `finish` together.

    A context manager: leaving it cancels an upload in progress, which the next start continues.
    Nothing here raises what a store does.
    """

    def __init__(
        self,
        run: RunConfig,
        run_dir: RunDir,
        world: World,
        resumed_step: int,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = location(run)
        self._settings, self._world = run.checkpoint, world
        self._root, self._ledger = run_dir.checkpoints, Ledger(run_dir.ledger.path)
        self._phase, self._step, self._began = Phase.IDLE, 0, 0.0
        self._last_step = resumed_step
        self._task: Retried | None = None
        self._store: WritableStore | None = None
        self._is_recorded = False  # the failure that lasts
        self._scratch: TemporaryDirectory[str] | None = None
        if self.url:
            known = (
                step_in_store(self._ledger.read(), self.url, resumed_step) if world.is_main else 0
            )
            self._step = broadcast_value(known, int)
            self._publication = Publication(
                run_dir.path, run_dir.identity.id, resumed_step, run.checkpoint, may_write
            )

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._scratch is not None:
            self._scratch.cleanup()

    def held(self) -> Collection[int]:
        """The step whose files on disk are needed."""
        return () if self._phase is Phase.IDLE else (self._step,)

    def flags(self, published_step: int) -> tuple[bool, bool, bool]:
        """Whether this rank is busy; its store fails; the checkpoint of this step is to be
        uploaded.

        `published_step` is 0 where the rank does not know of a published one.
        """
        if not self.url:
            return False, False, False
        task = self._task
        is_busy = task is not None and task.is_alive()
        return (
            is_busy,
            is_busy and bool(task and task.problem),
            published_step not in (0, self._step),
        )

    def agree(self, flags: Sequence[bool], last_step: int) -> None:
        """Do what follows from the flags that any rank has; `last_step` is that of the last save.

        Only rank 0 knows early that the last save is published, and only then is the flag set.
        """
        if not self.url:
            return
        any_busy, any_failing, any_ready = flags
        self._last_step = last_step
        if self._world.is_main and any_failing and not self._is_recorded:
            problem = (self._task.problem if self._task else "") or "see the logs of other ranks"
            self._ledger.append_soon(MirrorFailed(step=self._step, url=self.url, problem=problem))
            self._is_recorded = True
        if any_ready and (self._phase is Phase.IDLE or any_failing):
            self._begin(last_step)
        elif any_busy:
            pass
        elif self._phase is Phase.FILES:
            self._phase = Phase.INDEX
            if self._world.is_main:
                self._run(lambda store, scratch, check: self._publish(store, scratch, check))
        elif self._phase is Phase.INDEX:
            self._phase = Phase.IDLE
            if self._world.is_main:
                seconds = time.monotonic() - self._began
                self._ledger.append_soon(
                    Mirrored(step=self._step, url=self.url, seconds=round(seconds, 1))
                )
                self._is_recorded = False

    def finish(
        self,
        while_waiting: Callable[[], None] = lambda: None,
        stop_requests: Callable[[], int] = lambda: 0,
    ) -> None:
        """Return when the last checkpoint, which is published, is in the store, or time is over.

        A request to stop ends the wait.
        """
        if not self.url:
            return
        step = self._last_step
        deadline = time.monotonic() + self._settings.mirror_wait_seconds
        before, is_over = stop_requests(), False
        while True:
            *flags, is_over = on_any_rank([*self.flags(step), is_over])
            self.agree(flags, step)
            if self._phase is Phase.IDLE and not flags[2]:
                return
            if is_over:
                break
            while_waiting()
            time.sleep(POLL_SECONDS)
            is_over = time.monotonic() > deadline or stop_requests() > before
        if self._world.is_main:
            problem = self._task.problem if self._task is not None else ""
            reason = f"not uploaded when the run ended{f' ({problem})' if problem else ''}"
            failed = MirrorFailed(step=step, url=self.url, problem=reason)
            self._ledger.append_soon(failed)
            logger.warning("%s; it is on disk", failed.description)

    def _begin(self, step: int) -> None:
        if self._task is not None:
            self._task.cancel()
        self._phase, self._step, self._began = Phase.FILES, step, time.monotonic()
        directory, world = files.step_directory(self._root, step), self._world
        self._run(
            lambda store, scratch, check: upload_share(
                store, directory, world.rank, world.world_size, check
            )
        )

    def _publish(self, store: WritableStore, scratch: Path, check: Check) -> None:
        directory = files.step_directory(self._root, self._step)
        self._publication.publish(store, directory, scratch, check)

    def _run(self, task: Callable[[WritableStore, Path, Check], None]) -> None:
        def run(check: Check) -> None:
            if self._scratch is None:
                self._scratch = tempfile.TemporaryDirectory(
                    prefix="xl-pretrain-mirror-", ignore_cleanup_errors=True
                )
            scratch = Path(self._scratch.name)
            if self._store is None:  # here, because importing an SDK takes seconds
                rate = self._settings.mirror_mib_per_second * MIB / self._world.world_size
                store = WritableStore(self.url, scratch, bytes_per_second=rate)
                self._publication.read(store)  # the folder of another run gets no files
                self._store = store
            task(self._store, scratch, check)

        self._task = Retried(run, former=self._task)
        self._task.start()
