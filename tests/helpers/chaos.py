"""A two-rank run killed again and again at random moments, compared with an uninterrupted one.

    python -m tests.helpers.chaos --kills 30 [--corpus CORPUS] [--work-dir DIR] [--seed S]

Ranks are forked (`forked_ranks`), so that kills hit what a run does rather than its imports. Half
of the kills wait for a save to be in progress; the rest hit at any time, also before the first
step. One rank is killed first and the other up to 50 ms later, as when nodes fail one by one.

Before most kills the same attempt has to outlast something, during a save or soon after it: a full
disk, a directory that cannot be written, or a process that is stopped and continues.
"""

import argparse
import collections
import contextlib
import itertools
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pretrain.checkpoint import directory as files
from pretrain.cli import main
from pretrain.rundir.compare_runs import difference_lines, run_differences
from pretrain.rundir.heartbeat import read_heartbeats
from pretrain.rundir.run_dir import RunDir
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.forked_ranks import ForkedRanks

RANKS = 2
STEPS_PER_KILL = 30
OUTLASTED_SECONDS = (0.2, 0.6)
# Lanes carry rows of memory, a deltanet's state and memory tokens; the optimizer has two states.
SETTINGS = (
    "model.num_layers=2", "model.d_model=32", "model.num_heads=2", "model.memory_length=8",
    "model.layer_kinds=[deltanet, attention]", "model.memory_tokens=1",
    "optim.gradient_segments=2", "optim.name=muon", "model.dropout=0.1", "data.lanes=4",
    "data.segment_length=8", "engine.micro_batch_lanes=1", "engine.zero_stage=2",
    "checkpoint.interval=3", "checkpoint.keep_last=2",
    "evaluation.interval=20", "evaluation.max_tokens=400", "metrics.interval=5",
    "metrics.tensorboard=false",
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When to kill: `seconds` after the start, or after the start of its n-th `save`."""

    seconds: float
    save: int
    first_rank: int
    seconds_between: float


@dataclass(frozen=True)
class Trouble:
    """What to outlast: after the start of an attempt's n-th `save`, for so many `seconds`."""

    kind: str
    delay: float
    save: int
    seconds: float
    rank: int


def random_troubles(generator: random.Random) -> Iterator[Trouble]:
    """All kinds in turn."""
    for kind in itertools.cycle(TROUBLES):
        yield Trouble(
            kind,
            delay=generator.choice((0.0, generator.uniform(0.0, 0.2))),
            save=generator.randint(1, 2),
            seconds=generator.uniform(*OUTLASTED_SECONDS),
            rank=generator.randrange(RANKS),
        )


@contextlib.contextmanager
def disk_full(pids: list[int], trouble: Trouble, run_dir: RunDir) -> Iterator[None]:
    """No file can grow: writes fail at the same calls as on a full disk."""
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    yield
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


@contextlib.contextmanager
def unwritable(pids: list[int], trouble: Trouble, run_dir: RunDir) -> Iterator[None]:
    """A file is where the directory of checkpoints was. (Root may write whatever the mode is.)"""
    away = run_dir.path / "checkpoints-away"
    run_dir.checkpoints.rename(away)
    run_dir.checkpoints.touch()
    yield
    run_dir.checkpoints.unlink()
    away.rename(run_dir.checkpoints)


@contextlib.contextmanager
def suspended(pids: list[int], trouble: Trouble, run_dir: RunDir) -> Iterator[None]:
    """One rank is stopped, and continues."""
    os.kill(pids[trouble.rank], signal.SIGSTOP)
    yield
    os.kill(pids[trouble.rank], signal.SIGCONT)


TROUBLES = {"disk full": disk_full, "unwritable": unwritable, "suspended": suspended}


@dataclass(frozen=True)
class Kill:
    step: int  # of the latest checkpoint then
    phase: str


def random_moments(generator: random.Random) -> Iterator[Moment]:
    """Half of them during a save, a quarter between saves, a quarter at any time."""
    while True:
        rank = generator.randrange(RANKS)
        between = generator.choice((0.0, generator.uniform(0.0, 0.05)))
        longest, save = generator.choice(((0.03, 1), (0.03, 1), (1.0, 1), (5.0, 0)))
        seconds = generator.uniform(0.0, longest)
        yield Moment(seconds, save and generator.randint(1, 6), rank, between)


def start_ranks(run_dir: RunDir, arguments: list[str], logs: Path) -> ForkedRanks:
    command = ["train", *arguments, "--run-dir", str(run_dir.path)]
    return ForkedRanks(RANKS, partial(main, command), logs)


def all_ended(ranks: ForkedRanks) -> bool:
    """Whether all ranks ended with status 0; SystemExit if one ended with another."""
    if failed := set(ranks.statuses) - {None, 0}:
        raise SystemExit(f"a rank ended by itself with status {failed}; see its log")
    return None not in ranks.statuses


def outlast_trouble(ranks: ForkedRanks, run_dir: RunDir, trouble: Trouble) -> None:
    """Let the ranks meet the trouble; SystemExit if they end before it or because of it."""
    left_behind = _partial(run_dir)
    saves: set[str] = set()
    while len(saves) < trouble.save:
        if all_ended(ranks):
            raise SystemExit("the run ended before its trouble; give it more steps")
        saves |= _partial(run_dir) - left_behind
        time.sleep(0.001)
    time.sleep(trouble.delay)
    with TROUBLES[trouble.kind](ranks.pids, trouble, run_dir):
        time.sleep(trouble.seconds)


def run_until(ranks: ForkedRanks, run_dir: RunDir, moment: Moment | None) -> Kill | None:
    """Wait until the ranks exit, or kill them at the moment; None if they exited before it."""
    since = time.monotonic()
    left_behind = _partial(run_dir)
    saves: set[str] = set()
    while not all_ended(ranks):
        if new := _partial(run_dir) - saves - left_behind:
            saves |= new
            since = time.monotonic() if moment is not None and len(saves) <= moment.save else since
        is_armed = moment is not None and len(saves) >= moment.save
        if is_armed and time.monotonic() - since >= moment.seconds:
            return _kill(ranks, run_dir, moment, left_behind)
        time.sleep(0.001)
    return None


def _partial(run_dir: RunDir) -> set[str]:
    names = {path.name for path in run_dir.checkpoints.glob(".partial-*")}
    return {name for name in names if not name.endswith("-removed")}


def _kill(ranks: ForkedRanks, run_dir: RunDir, moment: Moment, left_behind: set[str]) -> Kill:
    step = max(files.steps_on_disk(run_dir.checkpoints), default=0)
    is_saving = _partial(run_dir) - left_behind
    killed = Kill(step, "in a save" if is_saving else _last_phase(ranks.pids[0], run_dir))
    ranks.processes[moment.first_rank].kill()
    time.sleep(moment.seconds_between)
    ranks.processes[1 - moment.first_rank].kill()
    ranks.wait()
    return killed


def _last_phase(pid: int, run_dir: RunDir) -> str:
    """The phase of the process at its last heartbeat."""
    for beat in read_heartbeats(run_dir.heartbeats):
        if beat.pid == pid:
            return f"in {beat.phase}"
    return "before the first heartbeat"


def kill_often(
    run_dir: RunDir, arguments: list[str], logs: Path, num_kills: int, seed: int
) -> list[Kill]:
    """Train to the end through `num_kills` kills and almost as many troubles."""
    kills: list[Kill] = []
    moments = random_moments(random.Random(seed))
    troubles = random_troubles(random.Random(seed))
    while len(kills) < num_kills:
        ranks, moment, before = start_ranks(run_dir, arguments, logs), next(moments), ""
        if moment.save:  # else it may come before the first step
            trouble = next(troubles)
            outlast_trouble(ranks, run_dir, trouble)
            before = f"{trouble.kind} for {trouble.seconds:.1f} s, then "
        kill = run_until(ranks, run_dir, moment)
        if kill is None:
            raise SystemExit(f"the run ended after {len(kills)} kills; give it more steps")
        kills.append(kill)
        what = f"{before}killed {kill.phase} after the checkpoint of step {kill.step}"
        print(f"kill {len(kills)}: {what}", flush=True)
    run_until(start_ranks(run_dir, arguments, logs), run_dir, None)
    return kills


def differing_runs(left: RunDir, right: RunDir, step: int) -> list[str]:
    """Where losses, evaluations or a byte of the last checkpoint differ."""
    evaluations = [
        [{**line, "seconds": 0} for line in run.read_metrics() if line["kind"] == "evaluation"]
        for run in (left, right)
    ]
    same = evaluations[0] == evaluations[1]
    return run_differences(left, right, step) + ([] if same else ["evaluations differ"])


def run(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="default: build a tiny one")
    parser.add_argument("--work-dir", type=Path, help="default: a temporary one, which is kept")
    options = parser.parse_args(arguments)
    work = options.work_dir or Path(tempfile.mkdtemp(prefix="chaos-"))
    corpus = options.corpus or make_tiny_corpus(work / "corpus")
    (work / "tiny.yaml").write_text(f"data: {{path: {corpus}}}\n")
    steps = STEPS_PER_KILL * options.kills
    settings = [str(work / "tiny.yaml"), *SETTINGS, f"optim.steps={steps}"]
    uninterrupted, killed = RunDir(work / "uninterrupted"), RunDir(work / "killed")
    started = time.monotonic()
    run_until(start_ranks(uninterrupted, settings, work), uninterrupted, None)
    print(f"uninterrupted: {steps} steps in {time.monotonic() - started:.0f} s", flush=True)
    kills = kill_often(killed, settings, work, options.kills, options.seed)
    counts = collections.Counter(kill.phase for kill in kills).items()
    phases = ", ".join(f"{count} {phase}" for phase, count in counts)
    print(f"{len(kills)} kills, {time.monotonic() - started:.0f} s in total: {phases}")
    problems = differing_runs(uninterrupted, killed, steps)
    same = f"identical: {steps} losses, evaluations, final state"
    print(f"different:\n{difference_lines(problems)}" if problems else same)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(run())
