"""The output directory of a build in progress: its lock, its journal, and what a restart resumes.

OUTPUT/.build/lock            held by the build
OUTPUT/.build/journal.jsonl   one line with the recipe, then one per finished shard
OUTPUT/build.json             the recipe of the finished build

A build is deterministic, so the journal needs to record only which shards are finished: a resumed
build reads the input from its start, skips the documents that these shards hold, and continues
with the same bytes. The recipe is all that the bytes depend on; a build with another recipe is
rejected. `.build` is removed last, so a directory without it is complete.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from data_pipeline.builder.records import REJECTS_NAME, Reject
from data_pipeline.corpora.lengths import files_of
from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS, ShardInfo
from foundation.errors import ConfigError, DataError, UserError, shown
from foundation.files import (
    LARGEST_LIST_BYTES,
    append_whole,
    fsync_file,
    lines_of,
    make_directory,
    move,
    read_json,
    write_json,
)
from foundation.locks import held_lock
from foundation.settings import differences
from foundation.typed_values import from_tree, json_text, one_of, parse_json

logger = logging.getLogger(__name__)

BUILD_DIRECTORY = ".build"
DONE_DIRECTORY = ".build-done"
JOURNAL_NAME = "journal.jsonl"
RECIPE_NAME = "build.json"
MOST_NAMED = 5  # differing settings that a message names


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A shard on disk: its entry in the manifest, and in the index of the stock readers."""

    split: Annotated[str, one_of(*SPLITS)]
    info: ShardInfo
    index_entry: dict[str, Any]
    rejects: tuple[Reject, ...] = ()  # documents between its own that cannot be encoded


class BuildJournal:
    """One line per finished shard, synced before the next shard is started."""

    def __init__(self, output: Path, recipe: dict[str, Any], modified: int) -> None:
        """Start a journal, or resume the one in `output`.

        `modified` is the time of the last change of any input file: an input that was edited after
        the build started is rejected.
        """
        self.output = output
        self.directory = output / BUILD_DIRECTORY
        self.shards: list[FinishedShard] = []
        self._path = self.directory / JOURNAL_NAME
        self._recipe = recipe
        self._header = {"recipe": recipe, "modified": modified}
        if self._path.exists():
            self._resume()
        else:
            self._append(self._header)

    def _resume(self) -> None:
        # A kill may have cut the last line, and a power failure may have removed the last shards.
        # All shards from the first damaged one on are built again.
        header, complete_bytes = None, 0
        for line in lines_of(self._path, LARGEST_LIST_BYTES):
            try:
                record = parse_json(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            if header is None:
                self._check_header(header := record)
            elif not self._add(self._shard_of(record)):
                break
            complete_bytes += len(line)
        os.truncate(self._path, complete_bytes)
        fsync_file(self._path)
        if header is None:
            self._append(self._header)

    def _check_header(self, header: dict[str, Any]) -> None:
        if header != self._header:
            raise ConfigError(
                f"{self.output} holds an unfinished build from other text or settings: "
                f"{_differing(header.get('recipe'), self._recipe)}; "
                "resume with those, choose another output, or remove it"
            )

    def _shard_of(self, record: dict[str, Any]) -> FinishedShard:
        try:
            return from_tree(FinishedShard, record)
        except ValueError as error:
            raise DataError(
                f"{self._path} is corrupted ({error}); remove {self.output} and build again"
            ) from None

    def _add(self, shard: FinishedShard) -> bool:
        """Add the shard if its files exist, and return whether they do.

        DataError if a file has another size.
        """
        for name, expected in files_of(shard.info).items():
            path = self.output / shard.split / name
            if not path.exists():
                logger.warning("shard %s is missing; it and later ones are built again", path)
                return False
            if (size := path.stat().st_size) != expected:
                raise DataError(
                    f"shard {path} of the unfinished build has {size} bytes, its journal expects "
                    f"{expected}; remove it to build it and later ones again"
                )
        self.shards.append(shard)
        return True

    def record(self, shard: FinishedShard) -> None:
        """Record a shard that is on disk, so that a restart keeps it."""
        self._append({**asdict(shard), "info": shard.info.tree()})
        self.shards.append(shard)

    def _append(self, record: dict[str, Any]) -> None:
        append_whole(self._path, json_text(record, sort_keys=True).encode() + b"\n", sync=True)

    def finish(self) -> None:
        """Mark the build as finished: write its recipe, then remove the journal."""
        write_json(self.output / RECIPE_NAME, self._recipe)
        # Rename before removing: a kill might remove the journal alone, and the directory would
        # look like a build without a finished shard, which starts again.
        move(self.directory, self.output / DONE_DIRECTORY)
        shutil.rmtree(self.output / DONE_DIRECTORY)


@contextlib.contextmanager
def claimed_output(output: Path, parts: Sequence[Path] = ()) -> Iterator[Path]:
    """Create and lock `output` for one build; ConfigError if it holds other things or is locked.

    After a user's error in a new build that has no shard yet, here or in `parts`, all but lists of
    rejects is removed, so that a build with other settings can start.
    """
    check_is_free(output)
    directory = output / BUILD_DIRECTORY
    if is_built(output):
        shutil.rmtree(output / DONE_DIRECTORY, ignore_errors=True)
        yield output
        return
    existed, was_started = output.exists(), is_started(output)
    make_directory(directory)
    with held_lock(directory / "lock") as lock:
        if lock is None:
            raise ConfigError(
                f"another build is writing to {output}; wait for it or choose another output"
            )
        remove_leftovers(output)
        try:
            yield output
        except UserError:
            directories = (output, *parts)
            shards = (build.glob(f"{split}/*") for build in directories for split in SPLITS)
            if not was_started and not any(map(any, shards)):
                for build in directories:
                    _remove_but_rejects(build)
                if existed:
                    make_directory(output)
            raise


def _remove_but_rejects(directory: Path) -> None:
    rejects = directory / BUILD_DIRECTORY / REJECTS_NAME
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif path != rejects or not path.stat().st_size:
            path.unlink()
    with contextlib.suppress(OSError):
        directory.rmdir()


def check_is_free(output: Path) -> None:
    """Raise ConfigError unless `output` is absent, empty, or holds a corpus or started build."""
    nearest = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not nearest.is_dir():
        inside = "" if nearest == output else f" lies in {nearest}, which"
        raise ConfigError(f"output {output}{inside} is a file; give a directory")
    has_build = (output / BUILD_DIRECTORY).exists() or is_built(output)
    if output.exists() and any(output.iterdir()) and not has_build:
        raise ConfigError(
            f"output {output} is not empty and does not hold a corpus; choose a new directory"
        )


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files that a killed `atomic_write` left."""
    for path in directory.rglob(".*.tmp"):
        path.unlink()


def is_built(output: Path) -> bool:
    """Whether a build in `output` was finished."""
    return (
        (output / "train" / MANIFEST_NAME).exists()
        and (output / RECIPE_NAME).exists()
        and not (output / BUILD_DIRECTORY).exists()
    )


def is_started(output: Path) -> bool:
    """Whether a build in `output` has recorded its recipe and is not finished."""
    return (output / BUILD_DIRECTORY / JOURNAL_NAME).exists()


def check_recipe(output: Path, recipe: dict[str, Any]) -> None:
    """Raise ConfigError unless the finished corpus in `output` was built by this recipe."""
    try:
        finished = read_json(output / RECIPE_NAME, LARGEST_LIST_BYTES)
    except ValueError:
        finished = None
    if finished != recipe:
        raise ConfigError(
            f"{output} holds a finished corpus from other text or settings: "
            f"{_differing(finished, recipe)}; choose another output or remove it"
        )


def _differing(found: Any, recipe: Mapping[str, Any]) -> str:
    """Name what differs between two recipes: settings with both values, parts, or the text."""
    if not isinstance(found, Mapping) or not isinstance(found.get("settings"), Mapping):
        return "its recipe cannot be read"
    changes = differences(found["settings"], recipe["settings"])
    if found.get("parts") != recipe.get("parts"):
        changes["number of parts"] = (found.get("parts", 1), recipe.get("parts", 1))
    texts = [f"{name} {shown(old)} -> {shown(new)}" for name, (old, new) in changes.items()]
    more = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "") or (
        "the input files have changed"
    )
