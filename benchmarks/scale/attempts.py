"""What the supervisor does between two attempts: read how every rank ended, explain the failure,
and find the latest checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scale.costs import RANKS, RANKS_OF_NODE, Cost
from benchmarks.scale.instruments import counted_files
from launcher.slurm.srun import RankEnds, first_failure
from pretrain.checkpoint.verify import latest_step
from pretrain.processes.local_ranks import describe_failure
from pretrain.rundir.attempt_files import AttemptFiles
from pretrain.rundir.events import AttemptEnded, AttemptReason, NextAction
from pretrain.rundir.ledger import Ledger
from tests.helpers.checkpoints import publish_step

SECONDS, PROGRESS_SECONDS, LEDGER_SECONDS = 3.0, 1.0, 1.0
ATTEMPTS = 1000
# Assumed of a network file system: requests at a time, and seconds of an open and of a size.
AT_A_TIME, OPEN_SECONDS, SIZE_SECONDS = 32, 0.005, 0.001
LOG = "".join(f"INFO 12:00:{second:02} rank 0: step {second}\n" for second in range(60))


def attempt_costs(directory: Path) -> Iterator[Cost]:
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
    sizes = RANKS[-1] + RANKS[-1] // RANKS_OF_NODE
    waits = sizes / AT_A_TIME * SIZE_SECONDS
    yield Cost(
        name="how far a run is: time to look at its latest checkpoint", unit="s of CPU",
        measured={ranks: progress_seconds(directory / f"{ranks}", ranks) for ranks in RANKS},
        at_most=PROGRESS_SECONDS,
        detail=f"`status`, and the supervisor around each attempt; {sizes:,} sizes, {AT_A_TIME} at "
        f"a time: {waits:.2g} s more where one takes 1 ms (reasoned)",
    )  # fmt: skip
    yield Cost(
        name=f"ledger: time to read {ATTEMPTS:,} failed attempts", unit="s of CPU",
        measured={ranks: ledger_seconds(directory, ranks) for ranks in RANKS},
        at_most=LEDGER_SECONDS, detail="it has each rank's exit status",
    )  # fmt: skip


def progress_seconds(root: Path, ranks: int) -> float:
    """Return the CPU seconds of finding the latest step on disk."""
    publish_step(root, 7, num_ranks=ranks)
    start = time.process_time()
    assert latest_step(root) == 7
    return time.process_time() - start


def ledger_seconds(directory: Path, ranks: int) -> float:
    """Return the CPU seconds of reading a ledger of many failed attempts."""
    ledger = Ledger(directory / f"ledger-{ranks}.jsonl")
    ledger.append(AttemptEnded(
        attempt_number=1, statuses=(-signal.SIGTERM,) * ranks, step_before=0, step=10, job="17",
        reason=AttemptReason.RANK_FAILED, next=NextAction.RETRY, first_failure=0,
    ))  # fmt: skip
    ledger.path.write_bytes(ledger.path.read_bytes() * ATTEMPTS)
    start = time.process_time()
    assert len(ledger.read()) == ATTEMPTS
    return time.process_time() - start


def write_ends(attempt: AttemptFiles, ranks: int) -> None:
    """Write the logs and statuses of an attempt in which rank 3 was killed, then the others."""
    for rank, log in enumerate(attempt.rank_logs(ranks)):
        log.write_text(LOG)
        status = -(signal.SIGKILL if rank == 3 else signal.SIGTERM)
        log.with_suffix(".status").write_text(str(int(status)))


def explain(attempt: AttemptFiles, ranks: int) -> None:
    """Do what the supervisor does when srun has ended."""
    logs = attempt.rank_logs(ranks)
    ends = RankEnds(logs)
    ends.read_listed()
    ends.read_rest()
    first = first_failure(ends.by_rank, ranks, "")
    text = describe_failure(ends.statuses(), logs, first_failure=first)
    assert text.startswith("rank 3 was killed"), text
