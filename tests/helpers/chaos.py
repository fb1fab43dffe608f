"""A two-rank run killed again and again at random moments, compared bitwise with the same run left
alone.

    python -m tests.helpers.chaos --kills 30 [--corpus CORPUS] [--work-dir DIR] [--seed S]

Ranks are forked (`forked_ranks`), so that the kills fall into what a run does rather than into its
imports. Half of the kills wait for a save to be under way; the rest fall anywhere, also before the
first step. One rank is killed first and the other up to 50 ms later, as when nodes go one after the
other.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.cli import main
from pretrain.commands.same_run import differing_losses, differing_state, summary
from pretrain.rundir.run_dir import RunDir
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.forked_ranks import all_ended, fork_ranks, import_everything

RANKS = 2
STEPS_PER_KILL = 15
SETTINGS = (
    "model.num_layers=2", "model.d_model=32", "model.num_heads=2", "model.memory_length=8",
    "model.dropout=0.1", "data.lanes=4", "data.segment_length=8",
    "engine.micro_batch_lanes=1", "engine.zero_stage=2", "engine.threads=1",
    "checkpoint.interval=3", "checkpoint.keep_last=2",
    "evaluation.interval=20", "evaluation.max_tokens=400",
    "metrics.interval=5", "metrics.tensorboard=false",
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When to kill: so many seconds after the start, or after the n-th save of this start began."""

    seconds: float
    save: int
    first_rank: int
    seconds_between: float


@dataclass(frozen=True)
class Kill:
    step: int  # of the newest checkpoint then
    phase: str


def random_moments(generator: random.Random) -> Iterator[Moment]:
    """Half of them in a save, a quarter between saves, a quarter at any time from the start on."""
    while True:
        rank, between = (
            generator.randrange(RANKS),
            generator.choice((0.0, generator.uniform(0.0, 0.05))),
        )
        longest, save = generator.choice(((0.03, 1), (0.03, 1), (1.0, 1), (5.0, 0)))
        yield Moment(
            generator.uniform(0.0, longest), save and generator.randint(1, 6), rank, between
        )


def start_ranks(run_dir: RunDir, arguments: list[str], logs: Path) -> list[int]:
    """The ranks of one start; their process ids."""
    return fork_ranks(
        RANKS, lambda: main(["train", *arguments, "--run-dir", str(run_dir.path)]), logs
    )


def run_until(pids: list[int], run_dir: RunDir, moment: Moment | None) -> Kill | None:
    """Wait for the ranks' end, or kill them at the moment; None if they had ended before it."""
    since = time.monotonic()
    left_behind = _partial(run_dir)
    saves: set[str] = set()
    while not all_ended(pids):
        if new := _partial(run_dir) - saves - left_behind:
            saves |= new
            since = time.monotonic() if moment is not None and len(saves) <= moment.save else since
        if (
            moment is not None
            and len(saves) >= moment.save
            and time.monotonic() - since >= moment.seconds
        ):
            return _kill(pids, run_dir, moment, left_behind)
        time.sleep(0.001)
    return None


def _partial(run_dir: RunDir) -> set[str]:
    return {
        path.name
        for path in run_dir.checkpoints.glob(".partial-*")
        if not path.name.endswith("-removed")
    }


def _kill(pids: list[int], run_dir: RunDir, moment: Moment, left_behind: set[str]) -> Kill:
    step = max(files.steps_on_disk(run_dir.checkpoints), default=0)
    killed = Kill(
        step, "in a save" if _partial(run_dir) - left_behind else _heard_from(pids[0], run_dir)
    )
    os.kill(pids[moment.first_rank], signal.SIGKILL)
    time.sleep(moment.seconds_between)
    os.kill(pids[1 - moment.first_rank], signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return killed


def _heard_from(pid: int, run_dir: RunDir) -> str:
    """Where the process was at its last heartbeat."""
    with contextlib.suppress(OSError, ValueError):
        beat = json.loads((run_dir.heartbeats / "rank-00000.json").read_text())
        if beat["pid"] == pid:
            return f"in {beat['phase']}"
    return "before the first sign of life"


def kill_often(
    run_dir: RunDir, arguments: list[str], logs: Path, num_kills: int, seed: int
) -> list[Kill]:
    """Train to the end through so many kills."""
    kills: list[Kill] = []
    moments = random_moments(random.Random(seed))
    while len(kills) < num_kills:
        kill = run_until(start_ranks(run_dir, arguments, logs), run_dir, next(moments))
        if kill is None:
            raise SystemExit(
                f"the run ended after {len(kills)} of {num_kills} kills; give it more steps"
            )
        kills.append(kill)
        print(
            f"kill {len(kills)}: {kill.phase} after the checkpoint of step {kill.step}", flush=True
        )
    run_until(start_ranks(run_dir, arguments, logs), run_dir, None)
    return kills


def differences(left: RunDir, right: RunDir, step: int) -> list[str]:
    """Every loss of every step, every evaluation, and every byte of the last checkpoint."""
    evaluations = [
        [line for line in run.read_metrics() if line["kind"] == "evaluation"]
        for run in (left, right)
    ]
    ends = [marker.verify(files.step_directory(run.checkpoints, step)) for run in (left, right)]
    problems = differing_losses(left, right) + differing_state(*ends)
    return problems if evaluations[0] == evaluations[1] else [*problems, "evaluations differ"]


def run() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="default: a tiny one, made now")
    parser.add_argument("--work-dir", type=Path, help="default: a temporary directory, which stays")
    options = parser.parse_args()
    work = options.work_dir or Path(tempfile.mkdtemp(prefix="chaos-"))
    corpus = options.corpus or make_tiny_corpus(work / "corpus")
    (work / "tiny.yaml").write_text(f"data: {{path: {corpus}}}\n")
    steps = STEPS_PER_KILL * options.kills
    arguments = [str(work / "tiny.yaml"), *SETTINGS, f"optim.steps={steps}"]
    undisturbed, killed = RunDir(work / "undisturbed"), RunDir(work / "killed")
    import_everything()
    began = time.monotonic()
    run_until(start_ranks(undisturbed, arguments, work), undisturbed, None)
    print(f"undisturbed: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)
    kills = kill_often(killed, arguments, work, options.kills, options.seed)
    counts = collections.Counter(kill.phase for kill in kills).items()
    print(
        f"{len(kills)} kills, {time.monotonic() - began:.0f} s in all: "
        f"{', '.join(f'{n} {p}' for p, n in counts)}"
    )
    problems = differences(undisturbed, killed, steps)
    print(
        f"different:\n{summary(problems)}"
        if problems
        else f"identical: {steps} losses, evaluations, final state"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(run())
