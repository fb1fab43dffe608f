"""Histories of a run's checkpoints: what a run has published is never given up in silence.

Rules do what happens to a run: it trains, is killed between two changes of files, loses or gets
back files and whole destinations, moves to other ranks and machines. All of it is the real code but
for the engine and the SDK of the object store (`toy_run.py`). Beside it a model notes what was
published where, and what became of it. `problem` ends a history with what the code did wrong.
"""

import argparse
import contextlib
import errno
import json
import logging
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

import pretrain.run
from launcher.run_state import read_state
from pretrain.checkpoint.directory import INDEX, REFUSED, STEP_NAME, step_directory
from pretrain.checkpoint.load import FragmentReader
from pretrain.checkpoint.verify import latest_valid
from pretrain.commands.checkpoint import run_verify
from pretrain.distributed.world import World
from pretrain.rundir.events import Event, Mirrored, Published, ResumeFrom, Rewind, TrainingBegan
from pretrain.rundir.ledger import Ledger
from pretrain.rundir.metrics_file import read_measurements
from pretrain.rundir.restore import restore_run
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import flip_a_bit, rewrite_index
from tests.helpers.corpora import make_tiny_corpus
from tests.histories.jobs import Clock, End, Job
from tests.histories.runner import MEMORY, HistoryMachine, Problem, kept_folder, told_rule
from tests.histories.toy_run import BUCKET, Plan, ToyStore, toy_config, toy_runs

CHANGES_UNTIL_TOLD = 4  # of files, after a rename: by then the ledger has what was published
WHAT_TO_DO = re.compile(
    r"\b(use|choose|bring|give|free|check|repair|remove|rerun|run|start|resume|lower|wait|set|put|"
    r"allow|delete|fetch)\b"
)
DESTINATIONS = {"run directory": "shared", "nodes' disks": "local"}
ONLY_SET = {"change_ranks", "change_settings", "set_clock", "poison", "slow_down", "fail"}  # rules
NUMBERS = st.integers(0, 99)  # choose one of what there is, by the remainder


@cache
def corpus() -> Path:
    """A corpus for all histories of this process."""
    return make_tiny_corpus(kept_folder() / "corpus", documents=12)


@dataclass
class Copy:
    """A published checkpoint at one place; on a node's disk, one rank's part."""

    step: int
    start: str  # of the run, that published it
    world_size: int
    is_whole: bool = True
    is_other_version: bool = False
    has_flipped: bool = False  # a bit, so that sizes are right
    stands: bool = True  # no rewind, or start from before, has undone it
    backup: Path | None = None


class CheckpointHistory(HistoryMachine):
    """A run, what happens to it, and a model of what it has published."""

    def __init__(self) -> None:
        super().__init__()
        corpus()  # before anything is replaced
        self.folder = Path(tempfile.mkdtemp(prefix="history-", dir=MEMORY)).resolve()
        for name in ("tmp", "node", "store"):
            (self.folder / name).mkdir()
        logging.getLogger().addHandler(logging.NullHandler())  # what runs say is not shown
        self.stack = contextlib.ExitStack()
        self.stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.store, self.plan, self.clock = ToyStore(self.folder / "store"), Plan(), Clock()
        self.store.changed = self._on_store_change
        self.plan.after_step = self._on_step
        self.stack.enter_context(toy_runs(self.store, self.plan))
        self.stack.enter_context(mock.patch.object(tempfile, "tempdir", f"{self.folder}/tmp"))
        for home, name, seen in (
            (Ledger, "_write", self._writing),
            (pretrain.run, "_train", self._starting),
            (pretrain.run, "rewind", self._rewinding),
        ):
            real = getattr(home, name)
            self.stack.enter_context(
                mock.patch.object(home, name, lambda *a, seen=seen, real=real: seen(real, *a))
            )

        # What the history has set.
        self.run_number, self.world_size, self.steps_of_run = 0, 1, 1000
        self.kept = {"keep_last": 2, "keep_every": 0}
        self.has_local = self.has_mirror = True
        self.away: dict[Path, dict[Path, Copy]] = {}  # folders, with their copies
        self.faults: dict[Path, tuple[int, bool]] = {}
        self.delays: dict[str, int] = {}

        # What the run has done.
        self.copies: dict[Path, Copy] = {}  # on disks
        self.stored: dict[int, Copy] = {}  # in the store, as its index lists them
        self.unlisted: dict[int, Copy] = {}  # as an index listed them that was lost
        self.folders: dict[int, str] = {}  # of steps in the store
        self.index_is_whole = True
        self.facts: set[tuple[str, int]] = set()  # destination and step
        self.told_later: list[tuple[int, str, int]] = []  # number of a change, and such a fact
        self.values: dict[Any, int] = {}  # of the engine, by all that it depends on
        self.noted: Problem | None = None
        self.job: Job | None = None
        self.candidates: dict[str, int] = {}
        self.newest_fact = 0
        self.asked: int | None = None  # --from-step, until a start has done that
        self.told_by_ledger: set[int] = set()  # what is in the store
        self.rewound_from: int | None = None  # the first step of a spike, during a rewind
        self.began: list[int] = []  # steps of starts in the job
        self.windows: tuple[Any, ...] = ()

    def teardown(self) -> None:
        self.stack.close()

    # -------------------------------------------------------------------------------------- paths

    @property
    def run_dir(self) -> Path:
        return self.folder / f"run-{self.run_number}"

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def node(self) -> Path:
        return self.folder / "node"

    @property
    def url(self) -> str:
        return f"{BUCKET}/runs/toy"

    @property
    def store_folder(self) -> Path:
        return self.folder / "store" / "runs" / "toy"

    def _path_of(self, where: str) -> Path:
        paths = {"shared": self.checkpoints, "local": self.node, "store": self.store.root}
        return paths.get(where, self.run_dir)

    @property
    def _shared(self) -> dict[Path, Copy]:
        return {path: copy for path, copy in self.copies.items() if path.parent == self.checkpoints}

    def problem(self, kind: str, text: str) -> None:
        """End the history, also if what runs catches the error."""
        self.noted = self.noted or Problem(kind, text)
        raise self.noted

    # -------------------------------------------------------------------------------- observation

    def _destination(self, path: Path) -> str:
        if path.parent == self.checkpoints:
            return "shared"
        return "local" if self.node in path.parents else ""

    def _on_rename(self, event: str, path: Path, target: Path | None) -> None:
        assert target is not None
        if STEP_NAME.fullmatch(target.name) and (where := self._destination(target)):
            step, start = int(target.name[5:]), path.name.partition("-")[2].partition("-")[2]
            copy = Copy(step, start, self.world_size)
            self.copies[target] = copy
            if path.parent.name.startswith(".restore"):  # it came from the store
                copy.stands = self.stored[step].stands
            elif self.job is not None:
                self.told_later.append((self.job.changes, where, step))
        elif STEP_NAME.fullmatch(path.name) and target.name.endswith("-removed"):
            self._on_removal(path)

    def _on_removal(self, path: Path) -> None:
        """Check that retention, or a rewind, may remove it."""
        where, copy = self._destination(path), self.copies.pop(path, None)
        if where != "shared" or copy is None or not copy.is_whole or not copy.stands:
            return
        # A bit that has flipped counts until a start reads it.
        whole = [
            other.step
            for folder, other in self._shared.items()
            if other.is_whole or (other.has_flipped and not (folder / REFUSED).exists())
        ]
        is_rewound = self.rewound_from is not None and copy.step >= self.rewound_from
        if not self._is_old(copy.step, whole) and not is_rewound:
            self.problem("removed", f"step {copy.step} was removed; whole: {whole}")

    def _is_old(self, step: int, others: list[int]) -> bool:
        """Whether retention leaves the step out, beside these."""
        every, num_newer = self.kept["keep_every"], len([each for each in others if each > step])
        return num_newer >= self.kept["keep_last"] and not (every and step % every == 0)

    def _on_store_change(self, key: str) -> None:
        if key != "runs/toy/mirror.json":
            self._on_object_change(key)
            return
        if not (self.store_folder / "mirror.json").exists():
            return
        listed = self._listed()
        for step in self.stored.keys() - set(listed):
            copy = self.stored.pop(step)
            if copy.stands and copy.is_whole and not self._is_old(step, listed):
                self.problem("unlisted", f"the store lists {listed}, and {step} no more")
        for step in self.unlisted.keys() - set(listed):
            copy = self.unlisted[step]
            if copy.stands and copy.is_whole and not self._is_old(step, listed):
                self.problem("unlisted", f"the lost index had {step}, the new one {listed}")
        for step in set(listed) - self.stored.keys():
            self.stored[step] = self.unlisted.get(step) or Copy(step, "", 0)
            self.facts.add(("store", step))
        self.unlisted = {}
        newest = max(listed)
        if not self.stored[newest].stands:  # made again
            self.stored[newest] = Copy(newest, "", 0)
            self.facts.add(("store", newest))
        self.index_is_whole = True

    def _listed(self) -> list[int]:
        tree = json.loads((self.store_folder / "mirror.json").read_text())
        self.folders = {
            each["step"]: f"step-{each['step']:08d}-{each['files'][INDEX]['sha256'][:16]}"
            for each in tree["checkpoints"]
        }
        return [each["step"] for each in tree["checkpoints"]]

    def _on_object_change(self, key: str) -> None:
        folder = key.split("/")[2]
        for step, copy in self.stored.items():
            if (
                self.folders.get(step) == folder
                and copy.stands
                and copy.is_whole
                and not (self.store_folder / key.removeprefix("runs/toy/")).exists()
            ):
                self.problem("unlisted", f"an object of step {step}, which is listed, was removed")

    def _tell(self) -> None:
        """Take what was published some changes ago for known."""
        assert self.job is not None
        for entry in list(self.told_later):
            if self.job.changes - entry[0] >= CHANGES_UNTIL_TOLD:
                self.told_later.remove(entry)
                self.facts.add(entry[1:])

    def _undo(self, after: int) -> None:
        """The run goes back to a step."""
        self.facts = {(where, step) for where, step in self.facts if step <= after}
        self.told_by_ledger = {step for step in self.told_by_ledger if step <= after}
        self.told_later = [entry for entry in self.told_later if entry[2] <= after]
        hidden = [copy for copies in self.away.values() for copy in copies.values()]
        known = (*self.copies.values(), *self.stored.values(), *self.unlisted.values())
        for copy in (*known, *hidden):
            copy.stands &= copy.step <= after

    def _starting(self, real: Callable[..., Any], *arguments: Any) -> Any:
        if self.job is not None and self.job.rank == 0:
            self._tell()
            self.candidates = self._whole()
            known = {"shared", "store"} if self._is_store_there() else {"shared"}
            steps = {step for where, step in self.facts if where in known} | self.told_by_ledger
            self.newest_fact = max(steps, default=0)
        return real(*arguments)

    def _is_store_there(self) -> bool:
        """Whether a start knows the store, and can read its index."""
        is_known = self.has_mirror or bool(self.told_by_ledger)
        return is_known and self.index_is_whole and (self.store_folder / "mirror.json").exists()

    def _whole(self, below: int = 1 << 62) -> dict[str, int]:
        """The latest step that every destination has whole, for a start on these ranks."""
        shared = {
            copy.step
            for path, copy in self._shared.items()
            if copy.is_whole and copy.stands and path.is_dir()
        }
        parts: Counter[tuple[int, str]] = Counter()
        for path, copy in self.copies.items():
            if (
                self.node in path.parents
                and copy.is_whole and copy.stands and path.is_dir()
                and int(path.parent.name[5:]) < self.world_size == copy.world_size
            ):  # fmt: skip
                parts[copy.step, copy.start] += 1
        local = {step for (step, _), count in parts.items() if count == self.world_size}
        stored = {copy.step for copy in self.stored.values() if copy.is_whole and copy.stands}
        found = {
            "shared": shared,
            "local": local if self.has_local else set(),
            "store": stored if self._is_store_there() else set(),
        }
        return {
            name: max((step for step in steps if step < below), default=0)
            for name, steps in found.items()
        }

    def _rewinding(self, real: Callable[..., Any], *arguments: Any) -> Any:
        spike = arguments[3]
        self.rewound_from = spike.first_step
        before = self._whole(below=spike.first_step)
        try:
            return real(*arguments)
        except Exception as error:
            newest = max(before["shared"], before["store"])
            if newest and "no checkpoint from before" in str(error):
                self.problem("no-rewind", f"{error}; whole before: {before}")
            raise
        finally:
            self.rewound_from = None

    def _writing(self, real: Callable[..., Any], ledger: Ledger, event: Event) -> None:
        size = ledger.path.stat().st_size if ledger.path.exists() else 0
        try:
            real(ledger, event)
        finally:  # killed before it was synced, it may be there
            if ledger.path.exists() and ledger.path.stat().st_size > size:
                self._on_event(event)

    def _on_event(self, event: Event) -> None:
        """The ledger has this event."""
        if isinstance(event, TrainingBegan):
            self._on_began(event.step)
        elif isinstance(event, ResumeFrom):
            self.asked = event.step
        elif isinstance(event, Mirrored) and not event.problem:
            self.told_by_ledger.add(event.step)
        elif isinstance(event, Published):
            self.facts.add((DESTINATIONS[event.destination.value], event.step))
        elif isinstance(event, Rewind):
            self._undo(event.to_step)
            self.windows = (*self.windows, event.segments)

    def _on_began(self, step: int) -> None:
        """Check which step a start has taken."""
        self.began.append(step)
        newest, asked, self.asked = max(self.candidates.values()), self.asked, None
        if asked is not None:
            if step != asked:
                self.problem("not-asked", f"began at {step}, asked for {asked}")
        elif step < self.newest_fact:
            self.problem("below-fact", f"began at {step}, published: {sorted(self.facts)}")
        elif step < newest and not self.faults:
            self.problem("not-newest", f"began at {step}, whole: {self.candidates}")
        elif step > newest:
            self.problem("not-whole", f"began at {step}, whole: {self.candidates}")
        self._undo(step)

    def _on_step(self, segment: int, step: int, value: int) -> None:
        """Check that the engine's value is what it was when this step was made before."""
        before = tuple(window for window in self.windows if window[0] <= segment)
        known = self.values.setdefault((before, segment, step), value)
        if known != value:
            self.problem("value", f"step {step} has the value {value}, before it was {known}")

    # ---------------------------------------------------------------------------------- what runs

    def _config(self) -> Any:
        more: dict[str, Any] = dict(self.kept)
        if self.has_local:
            more |= {"local": self.node, "local_interval": 1}
        if self.has_mirror:
            more["mirror"] = f"{BUCKET}/runs"
        config = toy_config(corpus(), **more)
        return replace(config, optim=replace(config.optim, steps=self.steps_of_run))

    def _new_job(self, world_size: int = 1, **more: Any) -> Job:
        return Job(
            self.folder, world_size, self.clock, observer=self._on_rename, faults=self.faults,
            delays=self.delays, **more,
        )  # fmt: skip

    def _run(self, job: Job, program: Callable[[int], int]) -> list[End]:
        outer, self.job = self.job, job
        ends = job.run(program)
        for error in (self.noted, *(end.error for end in ends)):
            if isinstance(error, AssertionError):
                raise error
        if not job.is_dead:
            for end in ends:
                if end.error is not None:
                    self.problem("traceback", f"{end.error!r}; {[each.report for each in ends]}")
                if end.status == 2 and not WHAT_TO_DO.search(end.report):
                    self.problem("no-advice", end.report)
        self._tell()
        if not job.is_dead and self.run_dir not in self.faults:
            self.facts |= {entry[1:] for entry in self.told_later}
        self.told_later.clear()
        self.job = outer
        return ends

    def _train(
        self, steps: int, is_killed: bool, kill_before: int, asked: int | None = None
    ) -> list[End]:
        plan, config, ranks = self.plan, self._config(), self.world_size
        plan.steps, plan.is_killed, plan.made = steps, is_killed, 0
        self.began = []
        cpu = torch.device("cpu")
        return self._run(
            self._new_job(ranks, kill_before=kill_before),
            lambda rank: pretrain.run.run_training(
                config, self.run_dir, World(rank, ranks, rank, cpu), asked
            ),
        )

    # -------------------------------------------------------------------------------------- rules

    @told_rule(steps=st.integers(1, 7), is_killed=st.booleans())
    def train(self, steps: int, is_killed: bool = False) -> None:
        """Start or resume the run; it is stopped, or killed, after some steps."""
        is_asked = self.asked is not None  # by a start that was killed
        ends = self._train(steps, is_killed, 0)
        if self.began or self.faults or self.away or is_asked:
            return
        if ends[0].status != 2 or any(copy.is_other_version for copy in self.copies.values()):
            return
        if max(self.candidates.values()) >= self.newest_fact:
            self.problem("refused", f"{ends[0].report}; whole: {self.candidates}")
        if "--from-step" not in ends[0].report:
            self.problem("no-way-out", ends[0].report)

    @precondition(lambda self: bool(self.copies))
    @told_rule(choice=NUMBERS, kill_before=st.integers(0, 60))
    def give_up(self, choice: int, kill_before: int) -> None:
        """Continue from a step that the user names, whatever was published after it."""
        steps = sorted({0, *(step for _, step in self.facts)})
        self._train(4, True, kill_before, steps[choice % len(steps)])

    @told_rule(kill_before=st.integers(1, 250))
    def train_and_kill(self, kill_before: int) -> None:
        """The same, killed before one of its changes of files."""
        self._train(7, True, kill_before)

    @precondition(lambda self: bool(self.copies))
    @told_rule(after=st.integers(0, 3), length=st.integers(2, 5))
    def poison(self, after: int, length: int) -> None:
        """Let some of the next segments have losses that may become a spike."""
        first = self.plan.segments.get(0, 0) + 1 + after
        self.plan.poison = range(first, first + length)

    @told_rule(world_size=st.sampled_from((1, 2, 3)))
    def change_ranks(self, world_size: int) -> None:
        self.world_size = world_size

    @told_rule(
        keep_last=st.integers(1, 3),
        keep_every=st.sampled_from((0, 6)),
        has_local=st.booleans(),
        has_mirror=st.booleans(),
        longer=st.booleans(),
    )
    def change_settings(
        self,
        keep_last: int = 2,
        keep_every: int = 0,
        has_local: bool = True,
        has_mirror: bool = True,
        longer: bool = False,
    ) -> None:
        self.kept = {"keep_last": keep_last, "keep_every": keep_every}
        self.has_local, self.has_mirror = has_local, has_mirror
        self.steps_of_run += longer

    @told_rule(days=st.sampled_from((-1, 1)))
    def set_clock(self, days: int) -> None:
        self.clock.wall += days * 86400

    @precondition(lambda self: bool(self.copies))
    @told_rule(
        where=NUMBERS, how=st.sampled_from(("delete", "flip", "truncate", "format")), file=NUMBERS
    )
    def damage(self, where: int, how: str, file: int) -> None:
        """Delete or damage a file, or the folder, of a checkpoint anywhere."""
        places = self._places()
        if not places:
            return
        folder, copy = places[where % len(places)]
        self._back_up(folder, copy)
        files = sorted(
            path
            for path in folder.iterdir()
            if path.name in ("COMPLETE", INDEX) or path.suffix == ".safetensors"
        )
        if not self._destination(folder):  # the store's copy of the marker is read by nobody
            files = [path for path in files if path.name != "COMPLETE"]
        copy.is_whole, number = False, file % (len(files) + 1)
        if how == "format" and self._destination(folder):
            rewrite_index(folder, lambda index: index.update(format=99))
            copy.is_other_version = True
        elif number == len(files):
            shutil.rmtree(folder)
        elif how == "delete":
            files[number].unlink()
        elif how == "flip":
            flip_a_bit(files[number])
            copy.has_flipped = files[number].suffix == ".safetensors"
        else:
            files[number].write_bytes(files[number].read_bytes()[:-1])

    @precondition(lambda self: bool(self.copies))
    @told_rule(where=st.sampled_from(("shared", "local", "store", "index")))
    def empty(self, where: str) -> None:
        """Delete all checkpoints of a destination, or the store's index."""
        if where == "index":
            with contextlib.suppress(FileNotFoundError):
                (self.store_folder / "mirror.json").unlink()
                self.index_is_whole = False
                self.unlisted = dict(self.stored)  # until an upload lists it again
                self.stored.clear()  # what the index does not name is not there for a reader
            return
        for folder, copy in self._places(where):
            self._back_up(folder, copy)
            copy.is_whole = False
            shutil.rmtree(folder)

    @precondition(lambda self: bool(self.copies))
    @told_rule(where=NUMBERS)
    def put_back(self, where: int) -> None:
        """Bring back a checkpoint as it was before it was damaged."""
        lost = [
            entry
            for entry in self._places(lost=True)
            if entry[1].backup is not None and entry[1].stands and entry[0].parent.is_dir()
        ]
        if lost:
            folder, copy = lost[where % len(lost)]
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(str(copy.backup), folder)
            copy.is_whole, copy.has_flipped, copy.is_other_version = True, False, False
            copy.backup = None

    @precondition(lambda self: bool(self.copies))
    @told_rule(where=st.sampled_from(("shared", "local", "store")))
    def go_away(self, where: str) -> None:
        """Take a destination away, or bring it back."""
        path = self._path_of(where)
        hidden = path.with_name(f"{path.name}-away")
        if path in self.away:
            if path.exists():  # made anew meanwhile
                shutil.rmtree(path)
            hidden.rename(path)
            anew = [other for other in self.copies if path in other.parents]
            for other in anew:
                del self.copies[other]
            self.copies |= self.away.pop(path)
        elif path.exists():
            path.rename(hidden)
            self.away[path] = {
                other: replace(copy) for other, copy in self.copies.items() if path in other.parents
            }

    @told_rule(
        where=st.sampled_from(("shared", "local", "store", "run")),
        how=st.sampled_from((errno.ENOSPC, errno.EROFS, errno.EIO, 0)),
    )
    def fail(self, where: str, how: int) -> None:
        """Let a destination be full, read-only or broken from now on; 0: all work again."""
        self.faults = {self._path_of(where): (how, how == errno.EIO)} if how else {}

    @told_rule(uploads=st.integers(0, 8), removals=st.integers(0, 3))
    def slow_down(self, uploads: int, removals: int) -> None:
        """Let uploads, and removals of old checkpoints, take some steps."""
        self.delays = {
            name: ticks for name, ticks in (("mirror", uploads), ("removal", removals)) if ticks
        }

    @precondition(lambda self: bool(self.copies))
    @told_rule(elsewhere=st.booleans(), choice=st.none() | NUMBERS, kill_before=st.integers(0, 60))
    def fetch(self, elsewhere: bool, choice: int | None = None, kill_before: int = 0) -> None:
        """Fetch a step from the store: on another machine, or to repair one where the run is."""
        if self.faults or self.checkpoints in self.away or not self.stored:
            return
        steps = sorted(self.stored)
        step = None if choice is None else steps[choice % len(steps)]
        wanted = step or steps[-1]
        self.run_number += elsewhere
        got: list[int] = []
        (end,) = self._run(
            self._new_job(kill_before=kill_before),
            lambda rank: got.append(restore_run(self.url, self.run_dir, step=step)) or 0,
        )
        if got and got[0] != wanted:
            self.problem("fetched-other", f"fetched {got[0]}, asked for {step} of {steps}")
        if got and not self.copies[step_directory(self.checkpoints, got[0])].is_whole:
            self.problem("fetched-damaged", f"step {got[0]}, {end}")
        if elsewhere and (self.run_dir / "run.json").exists():
            self.told_by_ledger.add(wanted)  # with the event that the run came from there
            self.asked = None  # the request is in the ledger of the directory that is left
            self._undo(wanted)
            for copy in (
                self.copies[step_directory(self.checkpoints, wanted)],
                *self.stored.values(),
            ):
                copy.stands = copy.step <= wanted  # a new directory knows of nothing undone
        elif elsewhere:
            self.run_number -= 1

    @precondition(lambda self: bool(self.copies))
    @told_rule(meanwhile_before=st.integers(0, 30), steps=st.integers(1, 7))
    def read(self, meanwhile_before: int, steps: int) -> None:
        """Verify all checkpoints, then load the newest, while the run trains on."""
        if not self.began or self.faults or self.away:
            return
        shared = self._shared
        whole = {path.name for path, copy in shared.items() if copy.is_whole and copy.stands}
        damaged = any(not copy.is_whole for copy in shared.values())

        def train() -> None:
            if meanwhile_before and not damaged:
                self.began, began = [], self.began
                self._train(steps, False, 0)
                self.began = began

        arguments = argparse.Namespace(run=self.run_dir, json=True)
        job = self._new_job(meanwhile=train, meanwhile_before=meanwhile_before)
        answers: list[Any] = []
        self._run(job, lambda rank: answers.append(run_verify(arguments)) or 0)
        for found in answers[0].values if answers else []:
            name = step_directory(Path(), found["step"]).name
            if found["problem"] and name in whole:
                self.problem("called-damaged", f"{found}, which was whole")
        if not whole:
            return

        def load(rank: int) -> int:
            found = latest_valid(RunDir.open(self.run_dir).checkpoints, lambda line: None)
            assert found is not None
            with FragmentReader(found) as reader:
                reader.whole("w", "weight")
            return 0

        job = self._new_job(meanwhile=train, meanwhile_before=meanwhile_before)
        (end,) = self._run(job, load)
        is_other = any(copy.is_other_version for copy in self.copies.values())
        if end.status == 2 and not is_other:  # that is a refusal by its own name
            self.problem("called-damaged", end.report)

    # --------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        if self.history and self.history[-1][0] not in ONLY_SET:
            self._check_metrics()
            self._check_status()

    def _check_metrics(self) -> None:
        lines = read_measurements(self.run_dir / "metrics.jsonl")
        steps = [line["step"] for line in lines if line["kind"] == "train"]
        if twice := [step for step, count in Counter(steps).items() if count > 1]:
            self.problem("metrics", f"steps twice: {twice}")
        saved = self._whole()["shared"]
        if missing := set(range(1, saved + 1)) - set(steps):
            self.problem("metrics", f"step {saved} is saved, metrics lack {sorted(missing)}")

    def _check_status(self) -> None:
        is_open = (self.run_dir / "run.json").exists() and self.asked is None
        if not is_open or self.away or self.faults:
            return
        with self._new_job().is_current():
            state = read_state(self.run_dir)
        shared = self._whole()["shared"]
        if (state.checkpoint or 0) < shared:
            self.problem("status", f"status has checkpoint {state.checkpoint}, {shared} is whole")

    # ------------------------------------------------------------------------------------ damages

    def _places(self, where: str = "", lost: bool = False) -> list[tuple[Path, Copy]]:
        """The folders of checkpoints everywhere, by their names."""
        disks = [(path, copy) for path, copy in self.copies.items() if self._destination(path)]
        stored = [
            (self.store_folder / self.folders[step], copy)
            for step, copy in self.stored.items()
            if step in self.folders
        ]
        found = {
            "shared": list(self._shared.items()),
            "local": [e for e in disks if self._destination(e[0]) == "local"],
            "store": stored,
        }
        entries = found[where] if where else [*disks, *stored]
        entries = [e for e in entries if e[1].is_whole != lost and (lost or e[0].is_dir())]
        return sorted(entries, key=lambda entry: str(entry[0]))

    def _back_up(self, folder: Path, copy: Copy) -> None:
        if copy.backup is None:
            copy.backup = Path(tempfile.mkdtemp(dir=self.folder / "tmp")) / folder.name
            shutil.copytree(folder, copy.backup)
