"""The directory of a build in progress: who may write there, what is finished, and what a restart goes on from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.corpora.manifest import MANIFEST_NAME, ShardInfo
from data_pipeline.errors import ConfigError, DataError, UserError
from data_pipeline.file_lock import try_lock
from data_pipeline.files import named_errors, write_json

BUILD_DIRECTORY = ".build"  # gone when the build is finished
DONE_DIRECTORY = ".build-done"
JOURNAL_NAME = "journal.jsonl"
RECIPE_NAME = "build.json"  # how a finished corpus was made


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A shard that is on disk: what the manifest says of it and what the index of the stock readers says."""

    split: str
    info: ShardInfo
    index_entry: dict[str, Any]


class BuildJournal:
    """One line per finished shard, each on disk before the next shard is begun; a torn last line is ignored."""

    def __init__(self, output: Path, recipe: dict[str, Any], modified: int) -> None:
        """`modified`: when the youngest input file was last written; later edits must not mix into a begun build."""
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
        lines = self._path.read_bytes().splitlines(keepends=True)
        records, whole_bytes = [], 0
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:
                break
            if not line.endswith(b"\n"):
                records.pop()
                break
            whole_bytes += len(line)
        os.truncate(self._path, whole_bytes)
        if not records:
            return self._append(self._header)
        if records[0] != self._header:
            raise ConfigError(
                f"{self.output} holds an unfinished build from other text or settings; "
                "go on with those, choose another output, or remove it"
            )
        for record in records[1:]:
            self._add(
                FinishedShard(record["split"], ShardInfo(**record["info"]), record["index_entry"])
            )
        return None

    def _add(self, shard: FinishedShard) -> None:
        path = self.output / shard.split / shard.info.path
        found = path.stat().st_size if path.exists() else None
        if found != shard.info.size:
            raise DataError(
                f"shard {path} of the unfinished build has {found} bytes, its journal says {shard.info.size}; "
                f"remove {self.output} and build again"
            )
        self.shards.append(shard)

    def record(self, shard: FinishedShard) -> None:
        """Make a shard that is on disk survive a restart."""
        self._append(
            {"split": shard.split, "info": asdict(shard.info), "index_entry": shard.index_entry}
        )
        self.shards.append(shard)

    def _append(self, record: dict[str, Any]) -> None:
        with named_errors(self._path), open(self._path, "ab") as file:
            file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, counts: dict[str, int]) -> None:
        """Leave nothing but the corpus, its recipe, and the counts of what the build did beside writing documents."""
        write_json(self.output / RECIPE_NAME, {**self._recipe, "counts": counts})
        # Renamed first: a directory that lost only its journal would look like a build that has not begun.
        self.directory.rename(self.output / DONE_DIRECTORY)
        shutil.rmtree(self.output / DONE_DIRECTORY)


@contextlib.contextmanager
def claimed_output(output: Path) -> Iterator[Path]:
    """`output`, which exists and which no other build writes to meanwhile; ConfigError if it holds other things."""
    check_is_free(output)
    directory = output / BUILD_DIRECTORY
    if is_finished(output):
        shutil.rmtree(output / DONE_DIRECTORY, ignore_errors=True)
        yield output
        return
    existed = output.exists()
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        if not try_lock(lock):
            raise ConfigError(
                f"another build is writing to {output}; wait for it or choose another output"
            )
        remove_leftovers(output)
        try:
            yield output
        except UserError:
            if [entry.name for entry in output.iterdir()] == [
                BUILD_DIRECTORY
            ]:  # refused before anything was made
                shutil.rmtree(directory)
                if not existed:
                    output.rmdir()
            raise


def check_is_free(output: Path) -> None:
    """ConfigError if `output` is no directory, or holds other things than a corpus or a begun build of one."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output {output} is a file; give a directory")
    has_build = (output / BUILD_DIRECTORY).exists() or is_finished(output)
    if output.exists() and any(output.iterdir()) and not has_build:
        raise ConfigError(
            f"output {output} is not empty and holds no corpus; choose a new directory"
        )


def remove_leftovers(directory: Path) -> None:
    """Files that a kill left half-written beside their final names."""
    for path in directory.rglob(".*.tmp"):
        path.unlink()


def is_finished(output: Path) -> bool:
    """Whether a build came to its end here."""
    return (
        (output / "train" / MANIFEST_NAME).exists()
        and (output / RECIPE_NAME).exists()
        and not (output / BUILD_DIRECTORY).exists()
    )


def has_begun(output: Path) -> bool:
    """Whether a build in `output` has noted what it is made of, and is not finished."""
    return (output / BUILD_DIRECTORY / JOURNAL_NAME).exists()


def check_recipe(output: Path, recipe: dict[str, Any]) -> None:
    """Nothing, if the finished corpus in `output` was made from this text with these settings; else ConfigError."""
    try:
        found = json.loads((output / RECIPE_NAME).read_bytes())
        del found["counts"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != recipe:
        raise ConfigError(
            f"{output} holds a finished corpus from other text or settings, or another number of parts; "
            "choose another output or remove it"
        )


def read_counts(output: Path) -> dict[str, int]:
    """The counts with which the build in `output` was finished."""
    return json.loads((output / RECIPE_NAME).read_bytes())["counts"]
