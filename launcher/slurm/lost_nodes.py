"""The nodes of a job, and what follows when some are lost: spare ones replace them, a guard
requeues the job if its first node is lost, and empty Slurm steps use up old step numbers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import ConfigError, exit_status_of
from foundation.programs import own_command
from foundation.settings import load_config
from launcher.restart_policy import StartAgain
from launcher.slurm.client import Slurm, SlurmUnreachable, node_names
from launcher.slurm.former_starts import node_to_exclude
from launcher.slurm.job_exit import ThisJob
from launcher.slurm.sbatch import Snapshot, usable_nodes
from launcher.slurm.srun import BLIND, PROGRAM, SILENT, Probe, Step, kill_silently, task_command
from pretrain.checkpoint.storage_retry import Clock
from pretrain.config.cluster import load_cluster
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.processes.local_ranks import set_parent_death_signal
from pretrain.rundir.events import (
    Event,
    JobEnded,
    JobEndReason,
    JobStarted,
    NodeReplaced,
    NodesUnready,
    ReplacedBecause,
    TrainingBegan,
)
from pretrain.rundir.history import last_event
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.text import counted

_POLL_SECONDS = 10.0
# Empty steps to run, more than a start runs: per attempt a probe, the ranks and perhaps a guard.
_OLD_STEPS = 24
_EMPTY_STEPS_SECONDS = 60.0  # the limit for all of them together
_NODE_LOST = (JobEndReason.FIRST_NODE_LOST, JobEndReason.NODE_FAILED)
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # seconds between two probes
_LONGEST_WAIT_UNTRAINED = 300.0  # seconds, for a new run: its nodes may share no disk at all
_REASONS = {BLIND: ReplacedBecause.RUN_DIRECTORY_UNSEEN, SILENT: ReplacedBecause.NOT_RESPONDING}
_log = logging.getLogger(__name__)

NodeProbe = Callable[[Step, Path, Callable[[], None]], Probe]


@dataclass(frozen=True)
class JobNodes:
    """Nodes that train, in rank order, and spare ones to replace them."""

    training: tuple[str, ...]
    spare: tuple[str, ...] = ()

    def without(self, node: str) -> JobNodes | None:
        """Return the nodes without this one, a spare one in its place; None if no spare is left."""
        if node not in self.training:
            return JobNodes(self.training, tuple(name for name in self.spare if name != node))
        if not self.spare:
            return None
        first, *others = self.spare
        training = tuple(first if name == node else name for name in self.training)
        return JobNodes(training, tuple(others))


class NodePool:
    """The nodes of this start of the job that train, and spare ones that replace them.
    `excludable` returns which of some nodes the job can exclude."""

    def __init__(
        self,
        job: ThisJob,
        num_spare: int,
        run_dir: RunDir,
        excludable: Callable[[Sequence[str]], list[str]],
        slurm: Slurm,
        probe: NodeProbe,
        clock: Clock,
    ) -> None:
        self._job, self._run_dir, self._excludable = job, run_dir, excludable
        self._slurm = slurm
        self._outlives_nodes = num_spare > 0  # a job without spare nodes ends if it loses a node
        snapshot = Snapshot(run_dir.path)
        self._cluster = load_cluster(snapshot.cluster)
        config = load_config(RunConfig, snapshot.experiment)
        self.nodes = first_nodes(config, self._cluster.tasks_per_node, job.nodes, num_spare)
        for node in replaced_nodes(run_dir.ledger.read(), job):
            self.nodes = self.nodes.without(node) or self.nodes
        self._probe, self._clock = probe, clock

    def next_step(self, meanwhile: Callable[[], None]) -> Step:
        """Wait until all nodes can run ranks; return the step of the next attempt.

        Calls `meanwhile` often. Raises StartAgain if a node stays unready longer than a run may
        wait for storage, and ConfigError if other nodes would not help, either.
        """
        if self._outlives_nodes:
            self._replace_failed()
        ledger, node_of = self._run_dir.ledger.read(), self._step.node_of
        if node := node_to_exclude(ledger, self._job.id, node_of):
            self._replace(node, ReplacedBecause.RANKS_FAILED)
        since, pause, before = self._clock.now(), _FIRST_PAUSE, Probe({})
        while (probe := self._probe(self._step, self._run_dir.path, meanwhile)).problems:
            if probe.needs_new_start:
                raise StartAgain(JobEndReason.NO_STEPS)
            if self._replace_unready(probe):
                continue
            event = NodesUnready(job=self._job.id, problems=probe.problems)
            is_again = probe.problems == before.problems
            if not is_again:
                self._run_dir.ledger.append(event)
                _log.warning("%s; trying again", event.description)
                for line in probe.errors:
                    _log.error("probe of the nodes: %s", line)
            self._leave_unready(event, is_again, self._clock.now() - since)
            deadline = self._clock.now() + pause
            while self._clock.now() < deadline:
                meanwhile()
                self._clock.sleep(min(1.0, pause))
            pause, before = min(2 * pause, _LONGEST_PAUSE), probe
        return self._step

    def _replace_unready(self, probe: Probe) -> bool:
        """Replace nodes that are not ready by spare ones; return whether anything changed."""
        before = self.nodes
        for node, problem in probe.problems.items():
            reasons = (reason for text, reason in _REASONS.items() if problem.startswith(text))
            self._replace(node, next(reasons, ReplacedBecause.UNREADY))
        return self.nodes != before

    def _leave_unready(self, event: NodesUnready, is_again: bool, waited: float) -> None:
        """Raise StartAgain or ConfigError if there is no point in waiting any longer."""
        problems, cause = event.problems, event.cause
        has_trained = last_event(self._run_dir.ledger.read(), TrainingBegan) is not None
        lacks_program = set(problems.values()) == {PROGRAM}
        are_all = len(problems) == self._step.num_nodes
        if lacks_program and are_all and not has_trained:
            raise ConfigError(
                f"the ranks' program does not start on any node ({', '.join(problems)}); "
                f"'launcher logs {self._run_dir.path} --errors' says why"
            )
        retry = self._run_dir.retry.seconds
        retry = retry if has_trained else min(retry, _LONGEST_WAIT_UNTRAINED)
        # The program is there on other nodes and still not on these: waiting will not change that.
        is_lasting = lacks_program and is_again and not are_all
        if waited < retry and not is_lasting:
            return
        excludable = self._excludable(list(problems))
        if len(problems) == len(excludable) or waited >= retry:
            if not (excludable or has_trained):
                raise ConfigError(f"{cause}; all nodes have to share the disk and the environment")
            raise StartAgain(JobEndReason.NOT_STARTED, cause, excludable)

    @property
    def _step(self) -> Step:
        ranks = len(self.nodes.training) * self._cluster.tasks_per_node
        return Step(nodes=self.nodes.training, ranks=ranks, cluster=self._cluster)

    def _replace_failed(self) -> None:
        """Replace nodes that Slurm has taken from the job or out of service."""
        fields = self._slurm.answered(self._slurm.details, self._job.id)
        left = node_names(fields.get("NodeList", "")) or self._job.nodes
        # Spare nodes first, so that no lost spare node becomes a replacement.
        for node in [*self.nodes.spare, *self.nodes.training]:
            if node not in left:
                self._replace(node, ReplacedBecause.NODE_FAILED)
        known = [*self.nodes.spare, *self.nodes.training]
        states = self._slurm.answered(self._slurm.node_states, known)
        for node in known:
            if is_taken_out(states.get(node, "")):
                self._replace(node, ReplacedBecause.NOT_RESPONDING)

    def _replace(self, node: str, reason: ReplacedBecause) -> None:
        after = self.nodes.without(node)
        if after is None:
            if reason is ReplacedBecause.NODE_FAILED:
                raise StartAgain(JobEndReason.NODE_FAILED, nodes=[node])
            if reason is ReplacedBecause.RANKS_FAILED and self._excludable([node]):
                raise StartAgain(JobEndReason.NODE_EXCLUDED, nodes=[node])
            return
        left = counted(len(after.spare), "spare node")
        if node in self.nodes.training:
            spare = self.nodes.spare[0]
            event = NodeReplaced(job=self._job.id, node=node, spare=spare, reason=reason)
            self._run_dir.ledger.append(event)
            _log.warning("%s; %s left", event.description, left)
        elif after != self.nodes:
            _log.warning("spare node %s is not used (%s); %s left", node, reason.value, left)
        self.nodes = after


def first_nodes(
    config: RunConfig, ranks_per_node: int, names: tuple[str, ...], num_spare: int
) -> JobNodes:
    """Return the nodes of a start: the training ones share the lanes evenly, others are spare."""
    most = len(names) - num_spare
    count = usable_nodes(config, ranks_per_node, most)
    if not count:
        for phase in runs_of_phases(config):
            accumulation_steps(phase, most * ranks_per_node)  # its error names what does not divide
    if count < most:
        _log.warning(
            "using %d of %d nodes so that data.lanes=%d divides", count, most, config.data.lanes
        )
    return JobNodes(names[:count], names[count:])


def is_taken_out(state: str) -> bool:
    """Return whether Slurm or an administrator has taken a node in this state out of service."""
    return state.lower().startswith(("down", "drain", "fail"))


def replaced_nodes(ledger: Sequence[Event], job: ThisJob) -> list[str]:
    """Return the nodes that spare ones replaced in this start of the job, in order; they are in the
    ledger even if the supervisor that replaced them was killed."""
    nodes: list[str] = []
    restart = None
    for event in ledger:
        if isinstance(event, JobStarted) and event.job == job.id:
            restart = event.restart
        elif isinstance(event, NodeReplaced) and (event.job, restart) == (job.id, job.restart):
            nodes.append(event.node)
    return nodes


class FirstNodeGuard:
    """A process on the job's last node that requeues the job if its first node is lost.

    A job with spare nodes outlives any of its nodes (`--no-kill`), also the one that runs the batch
    script. Slurm 22.05 then keeps the others allocated until the time limit, with nothing running.
    The process ends when this start of the job or its supervisor ends. A context manager.
    """

    def __init__(self, job: ThisJob) -> None:
        self._job = job
        self._srun: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FirstNodeGuard:
        return self

    def __exit__(self, *_: object) -> None:
        # Send no signal to the step, which Slurm finds by its number: if this node was cut off, the
        # job has restarted elsewhere, and a step there may have the same number.
        if self._srun is not None and self._srun.poll() is None:
            kill_silently(self._srun.pid)
            self._srun.wait()

    def ensure_running(self, nodes: Sequence[str]) -> None:
        """Start the process on the last of these nodes, unless it is running."""
        others = [node for node in nodes if node != self._job.nodes[0]]
        if not others or (self._srun is not None and self._srun.poll() is None):
            return
        guard = own_command("launcher.slurm.lost_nodes", self._job.id, str(self._job.restart))
        parent, nowhere = os.getpid(), subprocess.DEVNULL
        self._srun = subprocess.Popen(
            task_command(others[-1], *guard, flags=["--cpus-per-task=1"]),
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            preexec_fn=lambda: set_parent_death_signal(parent),
        )


def use_up_old_numbers(
    ledger: Sequence[Event], job: ThisJob, meanwhile: Callable[[], None]
) -> None:
    """Run empty steps if an earlier start of the job has lost a node, to use up its step numbers.

    A requeued job numbers its steps from 0 again. Up to a minute after a lost node is back, Slurm
    may deliver a signal for an old step, which would end the new step of the same number. srun has
    no option to choose a number. An exception of `meanwhile` ends the empty steps.
    """
    if not any(_loses_a_node(event) for event in ledger if getattr(event, "job", "") == job.id):
        return
    _log.info("the job lost a node: running empty steps, so that no rank reuses an old step number")
    srun, no = task_command(job.nodes[0], "true", flags=["--quiet"]), subprocess.DEVNULL
    steps = [subprocess.Popen(srun, stdin=no, stdout=no, stderr=no) for _ in range(_OLD_STEPS)]
    deadline = time.monotonic() + _EMPTY_STEPS_SECONDS
    try:
        while any(step.poll() is None for step in steps) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.1)
    finally:
        for step in steps:  # a step that fails has used up its number, too
            step.kill()
            step.wait()


def _loses_a_node(event: Event) -> bool:
    is_end = isinstance(event, JobEnded) and event.reason in _NODE_LOST
    return is_end or isinstance(event, NodeReplaced)


def main() -> int:
    """`launcher.slurm.lost_nodes JOB RESTART`, as a step of the job."""
    (job, restart), slurm = sys.argv[1:], Slurm()
    while True:
        time.sleep(_POLL_SECONDS)
        try:
            fields = slurm.details(job)
            if fields.get("Restarts") != restart or not fields.get("NodeList"):
                return 0
            first, nodes = fields.get("BatchHost"), node_names(fields["NodeList"])
            if fields.get("JobState") == "RUNNING" and first and first not in nodes:
                slurm.requeue(job, int(restart))  # the job has lost the node of its batch script
                return 0
        except SlurmUnreachable:
            continue


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
