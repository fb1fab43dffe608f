"""The list of a build's unusable records, with which none is lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

from data_pipeline.builder.records import Reject
from data_pipeline.errors import DataError

REJECTS_NAME = "rejects.jsonl"


class RejectList:
    """Lists unusable records in a file; DataError when there are more than allowed."""

    def __init__(self, file: BinaryIO, limit: int, path: Path) -> None:
        self._file, self._limit, self._path = file, limit, path
        self.count = 0
        self.first: Reject | None = None

    @property
    def example(self) -> str:
        """The tail of an error message, where there are any."""
        first = self.first
        return (
            f"; the first of {self.count} unusable records is {first.source}: {first.reason}"
            if first
            else ""
        )

    def add(self, reject: Reject) -> None:
        self.count += 1
        self.first = self.first or reject
        line = json.dumps({"source": reject.source, "reason": reject.reason})
        self._file.write(line.encode() + b"\n")
        if self.count > self._limit:
            self._file.flush()
            raise DataError(
                f"more than max_rejects={self._limit} unusable records, the last one {reject.source}: {reject.reason}; "
                f"they are listed in {self._path}: put them right or raise max_rejects"
            )
