"""What can happen to a run, as data: the events that its ranks write. Torch-free.

A frozen dataclass per kind of event; `launch_events.py` has those of the launcher. `ledger.py`
stores them in
RUN/ledger.jsonl and reads them back. `description` renders an event for people; no code parses it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event(ABC):
    """One line of the ledger. `time` is set when the event is written: seconds since 1970."""

    time: float = field(default=0.0, compare=False)

    @classmethod
    def name(cls) -> str:
        """`AttemptEnded` is stored as `attempt_ended`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    @abstractmethod
    def description(self) -> str:
        """What happened, as a sentence for a reader who does not know the names of fields."""


@dataclass(frozen=True, kw_only=True)
class TrainingBegan(Event):
    """Base of Started and Resumed.

    `attempt` is the token of its fence: JOB.RESTART.NUMBER.RANDOM on Slurm.
    """

    step: int
    world_size: int
    start_seconds: float = 0.0  # from the launcher's start to this event
    attempt: str = ""
    code: str = ""  # version of the source code
    environment: dict[str, str] = field(default_factory=dict)  # versions, devices, threads
    tokenizer: str = ""  # fingerprint of the corpus' tokenizer
    validation: str = ""  # hash of the validation split's manifest
    sets: dict[str, str] = field(default_factory=dict)  # of each set's, by its name
    corpora: dict[str, str] = field(default_factory=dict)  # path or URL -> manifest_hash

    @property
    def _ranks(self) -> str:
        return f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"


class Started(TrainingBegan):
    """Training began from initial weights."""

    @property
    def description(self) -> str:
        return f"started on {self._ranks}"


@dataclass(frozen=True, kw_only=True)
class Resumed(TrainingBegan):
    """Training continued from the checkpoint of `step`, or from the ranks' `local` ones.

    It was without memories if `rebuilt_steps`, from which they were computed, are not 0.
    `changes` are those of the environment since the attempt before: name -> [old, new]. With any,
    results are no longer bitwise those of an uninterrupted run.
    """

    changes: dict[str, tuple[str, str]] = field(default_factory=dict)
    local: bool = False
    rebuilt_steps: int = 0

    @property
    def description(self) -> str:
        which = "the local checkpoints of " if self.local else ""
        resumed = f"resumed from {which}step {self.step} on {self._ranks}"
        if self.rebuilt_steps:
            resumed += f", memories rebuilt from the {self.rebuilt_steps} steps before"
        return f"{resumed}; {self.not_bitwise}" if self.changes else resumed

    @property
    def not_bitwise(self) -> str:
        changes = [f"{name} {old} -> {new}" for name, (old, new) in self.changes.items()]
        return f"not bitwise from here: {', '.join(changes)}"


@dataclass(frozen=True, kw_only=True)
class TrainingEnded(Event):
    """Base of Stopped, Finished and PhaseFinished: where training ended, and what its lanes had
    read by then."""

    step: int
    world_size: int = 0
    attempt: str = ""
    lanes: int = 0
    lane_seed: int = 0
    segment_length: int = 0
    tokens_of_corpora: dict[str, int] = field(default_factory=dict)
    save_seconds: float = 0.0  # of waiting for saves since the last metrics
    evaluation_seconds: float = 0.0  # of an evaluation that a stop request cut off


class Stopped(TrainingEnded):
    @property
    def description(self) -> str:
        return f"stopped on request after step {self.step} and saved a checkpoint"


class Finished(TrainingEnded):
    @property
    def description(self) -> str:
        return f"finished after step {self.step}"


class PhaseFinished(TrainingEnded):
    @property
    def description(self) -> str:
        return f"finished a phase after step {self.step}"


@dataclass(frozen=True, kw_only=True)
class SettingsChanged(Event):
    """Settings that differ from those the run had so far: name -> [old, new]."""

    changes: dict[str, tuple[Any, Any]]

    @property
    def description(self) -> str:
        changes = [f"{key} from {old} to {new}" for key, (old, new) in self.changes.items()]
        return f"settings changed: {', '.join(changes)}"


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Event):
    """Written by the rank that ran out of memory.

    `settings` are those that a rank's need depends on.
    """

    rank: int
    micro_batch_lanes: int
    settings: dict[str, Any] = field(default_factory=dict)
    message: str = ""  # of the allocator

    @property
    def description(self) -> str:
        lanes = f"{self.micro_batch_lanes} lanes per forward pass"
        return f"rank {self.rank} ran out of memory with {lanes}; the next start halves them"


@dataclass(frozen=True, kw_only=True)
class MirrorEvent(Event):
    """Base of what happens between the run and the object store at `url`."""

    step: int
    url: str


@dataclass(frozen=True, kw_only=True)
class Mirrored(MirrorEvent):
    """The checkpoint of `step` is in the store, read back and compared."""

    seconds: float = 0.0

    @property
    def description(self) -> str:
        return f"the checkpoint of step {self.step} is in {self.url}"


@dataclass(frozen=True, kw_only=True)
class MirrorFailed(MirrorEvent):
    """The checkpoint of `step` is not in the store yet; the upload is tried again."""

    problem: str

    @property
    def description(self) -> str:
        return f"the checkpoint of step {self.step} is not in {self.url}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Restored(MirrorEvent):
    """The run directory was made from the store, to resume from the checkpoint of `step`."""

    @property
    def description(self) -> str:
        return f"restored the checkpoint of step {self.step} from {self.url}"


@dataclass(frozen=True, kw_only=True)
class Straggler(Event):
    """A rank that needed `ratio` times as long as the others for its own part of a step."""

    step: int
    rank: int
    seconds: float
    ratio: float

    @property
    def description(self) -> str:
        return f"rank {self.rank} took {self.ratio:.1f} times as long as the others"


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """Steps until `step` took `seconds` longer than usual, because of `rank` if it was one."""

    step: int
    seconds: float
    rank: int | None = None

    @property
    def description(self) -> str:
        who = "the ranks" if self.rank is None else f"rank {self.rank}"
        return f"{who} stood still for {self.seconds:.0f} s"


def describe_spike(first: int, last: int, loss: float | None, usual: float | None) -> str:
    """Steps `first` to `last` had losses up to `loss`, or None if all were skipped."""
    steps = f"steps {first} to {last}"
    if loss is None or usual is None:
        return f"{steps} were all skipped"
    return f"{steps} had losses up to {loss:.3f} where {usual:.3f} was usual"


def describe_skipped(skipped: int, first: int, last: int) -> str:
    """Of the updates of steps `first` to `last`, `skipped` were skipped."""
    return f"{skipped} of the {last - first + 1} updates of steps {first} to {last} were skipped"


@dataclass(frozen=True, kw_only=True)
class SpikeEvent(Event):
    """Base of Rewind and GaveUp: the loss spike, of which `step` is the last step."""

    first_step: int
    step: int
    # None if every step was skipped. The default matters: None is left out of the file.
    loss: float | None = None
    usual_loss: float | None = None

    @property
    def spike(self) -> str:
        return describe_spike(self.first_step, self.step, self.loss, self.usual_loss)


@dataclass(frozen=True, kw_only=True)
class Rewind(SpikeEvent):
    """The run goes back to `to_step` and skips the `segments` [start, stop) of every lane."""

    to_step: int
    segments: tuple[int, int]

    @property
    def description(self) -> str:
        start, stop = self.segments
        skipped = f"skipping segments {start} to {stop - 1} of every lane"
        return f"{self.spike}: rewound to step {self.to_step}, {skipped}"


@dataclass(frozen=True, kw_only=True)
class WindowDropped(Event):
    """The run, now without recovery, reads `segments` after all: it had not reached them."""

    step: int
    segments: tuple[int, int]

    @property
    def description(self) -> str:
        start, stop = self.segments
        return f"recovery is off: segments {start} to {stop - 1} are no longer skipped"


@dataclass(frozen=True, kw_only=True)
class GaveUp(SpikeEvent):
    """A spike that the run cannot rewind from, or too many `skipped` updates among these steps."""

    skipped: int | None = None

    @property
    def spike(self) -> str:
        if self.skipped is None:
            return super().spike
        return describe_skipped(self.skipped, self.first_step, self.step)

    @property
    def description(self) -> str:
        return f"gave up: {self.spike}"


@dataclass(frozen=True, kw_only=True)
class SuspectDocument:
    """A document of the skipped segments, with its mean loss under the weights from before the
    spike."""

    document: str
    lane: int
    loss: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.document} (lane {self.lane}, loss {self.loss:.2f})"


@dataclass(frozen=True, kw_only=True)
class SuspectDocuments(Event):
    """The documents of a rewind's segments that are hardest to predict, hardest first."""

    segments: tuple[int, int]
    documents: tuple[SuspectDocument, ...]

    @property
    def description(self) -> str:
        return f"hardest to predict of what was skipped: {', '.join(map(str, self.documents[:3]))}"
