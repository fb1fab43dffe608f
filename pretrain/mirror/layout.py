"""What a run's mirror holds, and which of it is kept: pure functions of names, steps and hashes.

URL/                                  checkpoint.mirror/NAME
    mirror.json                       which checkpoints there are; replaced as a whole, last
    step-00000100-5b1c.../            named by step and hash of its index: contents never change
        engine-00000.safetensors ...  the files of the checkpoint, then index.json, then COMPLETE
        run.json config.yaml ledger.jsonl metrics.jsonl    the run as it was then

A folder that mirror.json does not name does not exist for a reader, whatever is in it. Torch-free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.corpora.writable_store import Content
from foundation.errors import CheckpointError
from foundation.files import parse_json, sha256_of
from foundation.records import Fields, InvalidField
from pretrain.checkpoint.directory import INDEX, MARKER, best_of, steps_to_prune
from pretrain.config.run import CheckpointConfig

FORMAT = 1
ROOT = "mirror.json"
LARGEST_ROOT_BYTES = 1 << 24
LARGEST_INDEX_BYTES = 1 << 28
MOST_STEPS = 99_999_999  # a step has eight digits in names
# What goes along with a checkpoint, and how many bytes of it are read back.
RUN_FILES = {
    "run.json": 1 << 20,
    "config.yaml": 1 << 20,
    "ledger.jsonl": 1 << 36,
    "metrics.jsonl": 1 << 36,
}
_IN_A_STEP = re.compile(r"(step-(\d{8})-[0-9a-f]{16})/[^/]+")


@dataclass(frozen=True)
class ListedContent:
    """What a file of a checkpoint has to contain: parts, one after the other."""

    parts: tuple[Content, ...]

    @classmethod
    def of(cls, parts: Iterable[Mapping[str, Any]]) -> ListedContent:
        """As an index lists the file."""
        return cls(tuple(Content(**part) for part in parts))

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def mismatch(self, path: Path) -> str | None:
        """Return how the file differs; None if it does not."""
        if (size := path.stat().st_size) != self.bytes:
            return f"{size} bytes arrived, expected {self.bytes}"
        start = 0
        for part in self.parts:
            if problem := part.hash_mismatch(sha256_of(path, start=start, num_bytes=part.bytes)):
                return problem
            start += part.bytes
        return None


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in the store: its index, and the run's files that were uploaded with it."""

    step: int
    index: Content
    run_files: dict[str, Content] = field(default_factory=dict)
    validation_loss: float | None = None

    @property
    def folder(self) -> str:
        """Where its files are, below the URL."""
        return f"step-{self.step:08d}-{self.index.sha256[:16]}"


@dataclass(frozen=True)
class MirrorIndex:
    """The contents of mirror.json: a run's id, and its checkpoints, oldest first."""

    run: str
    checkpoints: tuple[StoredCheckpoint, ...] = ()

    def to_bytes(self) -> bytes:
        """As `parse` reads it back; equal indexes give equal bytes."""
        tree = {
            "format": FORMAT,
            "run": self.run,
            "checkpoints": [
                {
                    "step": each.step,
                    "files": {
                        name: vars(content)
                        for name, content in {INDEX: each.index, **each.run_files}.items()
                    },
                    "validation_loss": each.validation_loss,
                }
                for each in self.checkpoints
            ],
        }
        return (json.dumps(tree, indent=1, sort_keys=True) + "\n").encode()

    def find(self, step: int, index: Content) -> StoredCheckpoint | None:
        """Return the checkpoint of the step if it is this one, and not an earlier try of it."""
        found = (each for each in self.checkpoints if (each.step, each.index) == (step, index))
        return next(found, None)


def parse(where: str, content: bytes) -> MirrorIndex:
    """Return the contents of mirror.json; CheckpointError unless all its fields are right."""
    try:
        fields = Fields(parse_json(content)).only(("format", "run", "checkpoints"))
        if (found := fields.integer("format")) != FORMAT:
            raise CheckpointError(
                f"{where}: found format {found}, expected format {FORMAT}; "
                "restore with the version that wrote it"
            )
        checkpoints = tuple(map(_checkpoint, fields.items("checkpoints")))
        steps = [each.step for each in checkpoints]
        if steps != sorted(set(steps)):
            raise InvalidField(f"its steps are not in order: {steps[:5]}")
        return MirrorIndex(fields.text("run"), checkpoints)
    except (ValueError, InvalidField) as error:
        raise CheckpointError(f"{where}: found no index of a mirror ({error})") from None


def _checkpoint(fields: Fields) -> StoredCheckpoint:
    fields.only(("step", "files", "validation_loss"))
    limits = {INDEX: LARGEST_INDEX_BYTES, **RUN_FILES}
    entries = fields.object("files").only(list(limits))
    files = {}
    for name, most in limits.items():
        entry = entries.object(name).only(("bytes", "sha256"))
        files[name] = Content(entry.integer("bytes", most=most), entry.sha256("sha256"))
    try:
        loss = fields.number("validation_loss")
    except InvalidField:
        loss = None  # it only says what is kept
    step = fields.integer("step", most=MOST_STEPS)
    return StoredCheckpoint(step, files.pop(INDEX), files, loss)


def share_of_rank(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Return the files that a rank uploads: ranks that each take theirs upload all, each once."""
    return sorted(names)[rank::world_size]


def until(stored: MirrorIndex, step: int) -> MirrorIndex:
    """Return the index without checkpoints after the one that a start resumes from.

    They belong to steps that are made again: a rewind, or an older disk, left them.
    """
    return MirrorIndex(stored.run, tuple(each for each in stored.checkpoints if each.step <= step))


def with_checkpoint(
    stored: MirrorIndex, new: StoredCheckpoint, on_disk: Collection[int], kept: CheckpointConfig
) -> MirrorIndex:
    """Return the index with the new checkpoint, and without what the run does not keep.

    What is still on disk is kept, too.
    """
    by_step = {each.step: each for each in stored.checkpoints} | {new.step: new}
    steps = sorted(by_step)
    best = best_of({step: by_step[step].validation_loss for step in steps}, kept.keep_best)
    old = steps_to_prune(steps, steps, kept.keep_last, kept.keep_every, best)
    left = [by_step[step] for step in steps if step not in old or step in on_disk]
    return MirrorIndex(stored.run, tuple(left))


def to_delete(names: Sequence[str], index: MirrorIndex) -> list[list[str]]:
    """Return the objects in folders of steps that the index does not name, their markers first.

    Also what interrupted uploads left, but for later steps than the last one named: those may be
    being uploaded. Nothing else under the URL is ever deleted.
    """
    kept = {each.folder for each in index.checkpoints}
    last = max((each.step for each in index.checkpoints), default=-1)
    matches = map(_IN_A_STEP.fullmatch, names)
    gone = [
        match[0] for match in matches if match and match[1] not in kept and int(match[2]) <= last
    ]
    markers = [name for name in gone if name.endswith(f"/{MARKER}")]
    return [part for part in (markers, [name for name in gone if name not in set(markers)]) if part]
