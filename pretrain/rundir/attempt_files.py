"""The files of each attempt of a run. Torch-free.

RUN/logs/attempt-3/rank-12.log    what rank 12 wrote      rank-12.status    how it ended (Slurm)
                   srun.log       what its srun wrote     meeting/port      where rank 0 listens
                   start.json     when it began, and the node of each rank
                   nccl-rank-12   the last collectives of a rank that hung, by torch's flight
                   gloo-rank-12   recorder; `torchfrtrace` reads them
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from foundation.files import folder_below, read_value, write_json
from foundation.progress import duration
from pretrain.rundir.events import AttemptEnded, Event, TrainingBegan
from pretrain.rundir.heartbeat import HeartbeatRecord
from pretrain.rundir.history import last_event

SRUN_LOG, START = "srun.log", "start.json"
LATE_SECONDS = 60.0
MOST_NAMED = 3  # late ranks
ATTEMPT_FILES = "PRETRAIN_ATTEMPT_FILES"  # the launcher sets it to LOGS/attempt-3


@dataclass(frozen=True)
class AttemptStart:
    """When an attempt began, and the node of each rank."""

    time: float
    nodes: tuple[str, ...]

    def describe(self, beats: Sequence[HeartbeatRecord], now: float) -> str:
        """Return how long it has been starting and, after LATE_SECONDS, which ranks are missing."""
        text, late = f"starting for {duration(max(0.0, now - self.time))}", self.late_ranks(beats)
        if not late or now - self.time < LATE_SECONDS:
            return text
        names = [f"rank {rank} on {self.nodes[rank]}".removesuffix(" on ") for rank in late]
        more = f" and {len(late) - MOST_NAMED} more" if len(late) > MOST_NAMED else ""
        verb = "has" if len(late) == 1 else "have"
        return f"{text}, {', '.join(names[:MOST_NAMED])}{more} {verb} not come"

    def late_rank(self, heartbeats: Sequence[HeartbeatRecord]) -> int | None:
        """Return the first late rank, if all late ranks are on one node and other ranks came."""
        late = self.late_ranks(heartbeats)
        nodes = {self.nodes[rank] or rank for rank in late}
        return late[0] if len(nodes) == 1 and len(late) < len(self.nodes) else None

    def late_ranks(self, heartbeats: Sequence[HeartbeatRecord]) -> list[int]:
        """Return the ranks that have not come to the meeting, by their heartbeats."""
        known = (beat for beat in heartbeats if beat.written >= self.time)
        come = {beat.rank for beat in known if beat.phase != "launch"}
        return [rank for rank in range(len(self.nodes)) if rank not in come]


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
        return self.directory / SRUN_LOG

    @property
    def port(self) -> Path:
        """Its directory has no other file: ranks list it until rank 0 has written this one."""
        return self.directory / "meeting" / "port"

    def rank_log(self, rank: int | str) -> Path:
        """Return the log of a rank; `rank` may be the placeholder `{rank}`."""
        return self.directory / f"rank-{rank}.log"

    def rank_logs(self, num_ranks: int) -> list[Path]:
        return [self.rank_log(rank) for rank in range(num_ranks)]

    def create(self) -> None:
        """Create the directory; DataError if a link leads there."""
        folder_below(self.logs.parent, f"{self.logs.name}/{self.directory.name}")

    def write_start(self, nodes: Sequence[str]) -> None:
        """Write the node of each rank, before any rank starts; '' is this machine.

        Only `launcher status` reads it, so a full disk does not matter.
        """
        with contextlib.suppress(OSError):
            write_json(self.directory / START, asdict(AttemptStart(time.time(), tuple(nodes))))

    def read_start(self) -> AttemptStart | None:
        """Return when and where the attempt began, if that was written."""
        with contextlib.suppress(OSError, ValueError):
            return read_value(AttemptStart, self.directory / START)
        return None

    def create_meeting(self) -> None:
        """Create the directory of the port, which no rank has written yet."""
        self.create()
        folder_below(self.directory, self.port.parent.name)
        self.port.unlink(missing_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variable that tells ranks where their files go."""
        return {ATTEMPT_FILES: str(self.directory)}

    def traces(self) -> dict[str, list[int]]:
        """Return prefix -> ranks of the files that torch's flight recorder left."""
        prefixes = ("gloo-rank-", "nccl-rank-")
        traces = {prefix: list(_numbered(self.directory, f"{prefix}*")) for prefix in prefixes}
        return {prefix: ranks for prefix, ranks in traces.items() if ranks}

    def logged_ranks(self) -> dict[int, Path]:
        """Return the logs that ranks have begun, by rank."""
        return _numbered(self.directory, "rank-*.log")


def list_attempts(logs: Path) -> list[AttemptFiles]:
    """Return the attempts that left files, oldest first."""
    return [AttemptFiles(logs, number) for number in _numbered(logs, "attempt-*")]


def unfinished_start(logs: Path, ledger: Sequence[Event]) -> AttemptStart | None:
    """Return the start of the latest attempt, if it has neither begun to train nor ended."""
    attempts = list_attempts(logs)
    start = attempts[-1].read_start() if attempts else None
    turn = last_event(ledger, TrainingBegan, AttemptEnded)
    return start if start and (turn is None or turn.time < start.time) else None


def _numbered(directory: Path, form: str) -> dict[int, Path]:
    """Return the paths with a number where the form has `*`, by that number."""
    before, _, after = form.partition("*")
    paths = {path.name[len(before) :].removesuffix(after): path for path in directory.glob(form)}
    return dict(sorted((int(name), path) for name, path in paths.items() if name.isdecimal()))


def trace_prefix(logs: Path, backend: str, environment: Mapping[str, str]) -> str:
    """Return a trace's path up to the rank's number; without a launcher, it is in attempt 0."""
    return f"{environment.get(ATTEMPT_FILES) or AttemptFiles(logs, 0).directory}/{backend}-rank-"
