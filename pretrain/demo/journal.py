"""Which stages of the demo are done, in RUN/demo.json: a stage is kept as long as all it rests on is the same."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError
from data_pipeline.files import write_json

FORMAT = 1
NAME = "demo.json"
OWN_NAMES = {"demo.lock"}  # what is there before the journal


@dataclass
class Journal:
    """The stages' results by name. A stage's key is a hash of its inputs and of the key of the stage before."""

    directory: Path
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path, fresh: bool) -> Journal:
        """The journal in `directory`, made if absent, emptied if `fresh`; ConfigError if it holds other things."""
        path = directory / NAME
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"--run-dir {directory} is a file; give a directory")
        held = (
            {entry.name for entry in directory.iterdir()} - OWN_NAMES
            if directory.is_dir()
            else set()
        )
        if held and not path.exists():
            raise ConfigError(
                f"--run-dir {directory} holds other files and no demo; choose an empty or new directory"
            )
        if fresh:
            for entry in [directory / name for name in held]:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        directory.mkdir(parents=True, exist_ok=True)
        journal = cls(directory, _read(path))
        journal._write()
        return journal

    def finished(self, name: str, key: str) -> dict[str, Any] | None:
        """The result of a stage that has been finished with this key."""
        stage = self.stages.get(name, {})
        return stage.get("result") if stage.get("key") == key else None

    def begin(self, name: str, key: str) -> bool:
        """Note that a stage begins; returns True if it had begun before with the same key, so that it may go on."""
        goes_on = self.stages.get(name, {}).get("key") == key
        self.stages[name] = {"key": key}
        self._write()
        return goes_on

    def finish(self, name: str, result: dict[str, Any], seconds: float) -> None:
        """Note a stage's result."""
        self.stages[name] |= {"result": result, "seconds": round(seconds, 1)}
        self._write()

    def seconds(self) -> float:
        """What all finished stages took together."""
        return sum(stage.get("seconds", 0.0) for stage in self.stages.values())

    def _write(self) -> None:
        write_json(self.directory / NAME, {"format": FORMAT, "stages": self.stages})


def key_of(before: str, inputs: dict[str, Any]) -> str:
    """The key of a stage with these inputs after the stage with key `before`."""
    return hashlib.sha256(
        json.dumps([before, inputs], sort_keys=True, default=str).encode()
    ).hexdigest()[:16]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tree = json.loads(path.read_bytes())
        return tree["stages"] if tree["format"] == FORMAT else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}  # written by another version, or damaged: every stage is made again
