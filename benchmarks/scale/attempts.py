"""What the supervisor does between two attempts: read how every rank ended, and say why."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scale.costs import RANKS, Cost, Row
from benchmarks.scale.instruments import counted_files
from launcher.slurm.rank_statuses import RankEnds, first_failure
from pretrain.processes.local_ranks import describe_failure
from pretrain.rundir.attempt_files import AttemptFiles

SECONDS = 3.0
AT_A_TIME, OPEN_SECONDS = 32, 0.005  # of a network file system, assumed
LOG = "".join(f"INFO 12:00:{second:02} rank 0: step {second}\n" for second in range(60))


def attempt_costs(directory: Path) -> Iterator[Row]:
    """Yield what it costs to learn how an attempt ended in which one rank was killed."""
    opened, seconds = {}, {}
    for ranks in RANKS:
        attempt = AttemptFiles(directory / f"{ranks}" / "logs", 0)
        attempt.directory.mkdir(parents=True)
        write_ends(attempt, ranks)
        with counted_files(attempt.directory) as counts:
            start = time.process_time()
            explain(attempt, ranks)
            seconds[ranks] = time.process_time() - start
        opened[ranks] = counts["opened"]
    waits = opened[RANKS[-1]] / AT_A_TIME * OPEN_SECONDS
    yield Cost(
        name="after an attempt: status files and logs opened", measured=opened,
        at_most=RANKS[-1] + 2,
        detail=f"{AT_A_TIME} at a time: {waits:.2g} s more where an open takes 5 ms (reasoned)",
    )  # fmt: skip
    yield Cost(
        name="after an attempt: time until its failure is explained", unit="s of CPU",
        measured=seconds, at_most=SECONDS,
    )  # fmt: skip


def write_ends(attempt: AttemptFiles, ranks: int) -> None:
    """Write what the tasks of an attempt leave, of which rank 3 was killed and ended the others."""
    for rank, log in enumerate(attempt.rank_logs(ranks)):
        log.write_text(LOG)
        status = -(signal.SIGKILL if rank == 3 else signal.SIGTERM)
        log.with_suffix(".status").write_text(str(int(status)))


def explain(attempt: AttemptFiles, ranks: int) -> None:
    """Do what the supervisor does when srun has ended."""
    logs = attempt.rank_logs(ranks)
    ends = RankEnds(logs)
    ends.look()
    ends.read_rest()
    first = first_failure(ends.found, ranks, "")
    text = describe_failure(ends.statuses(), logs, first_failure=first)
    assert text.startswith("rank 3 was killed"), text
