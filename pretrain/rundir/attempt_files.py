"""Where the files of each attempt are. Torch-free.

RUN/logs/attempt-3/rank-12.log    what rank 12 wrote      rank-12.status    how it ended (Slurm)
                   srun.log       the same of its srun    meeting/port      where rank 0 listens
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.files import folder_below

_DIRECTORY = re.compile(r"attempt-(\d+)")
_RANK_LOG = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True)
class AttemptFiles:
    """The files of attempt `number` of the run with these `logs`."""

    logs: Path
    number: int

    @property
    def directory(self) -> Path:
        return self.logs / f"attempt-{self.number}"

    @property
    def srun_log(self) -> Path:
        return self.directory / "srun.log"

    @property
    def port(self) -> Path:
        """In a directory of its own: all ranks list it until rank 0 has written the file."""
        return self.directory / "meeting" / "port"

    def rank_log(self, rank: int | str) -> Path:
        """The log of a rank; `{rank}` is a place for its number."""
        return self.directory / f"rank-{rank}.log"

    def rank_logs(self, num_ranks: int) -> list[Path]:
        return [self.rank_log(rank) for rank in range(num_ranks)]

    def create(self) -> None:
        """Create the directory; DataError if a link leads there."""
        folder_below(self.logs.parent, f"{self.logs.name}/{self.directory.name}")

    def create_meeting(self) -> None:
        """Create the directory of the port, which no rank has written yet."""
        self.create()
        folder_below(self.directory, self.port.parent.name)
        self.port.unlink(missing_ok=True)

    def logged_ranks(self) -> dict[int, Path]:
        """The logs that ranks have begun, by rank."""
        found = {}
        for path in self.directory.glob("rank-*.log"):
            if match := _RANK_LOG.fullmatch(path.name):
                found[int(match[1])] = path
        return dict(sorted(found.items()))


def attempts_of(logs: Path) -> list[AttemptFiles]:
    """The attempts that left files, oldest first."""
    names = (_DIRECTORY.fullmatch(path.name) for path in logs.glob("attempt-*"))
    numbers = sorted(int(name[1]) for name in names if name)
    return [AttemptFiles(logs, number) for number in numbers]
