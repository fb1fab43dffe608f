"""Starts attempts as steps of the surrounding job, on nodes that work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from launcher.restart_policy import no_rank_started, node_to_exclude
from launcher.slurm import client as slurm
from launcher.slurm.job_checks import describe_evenly, usable_nodes
from launcher.slurm.job_exit import ThisJob
from launcher.slurm.snapshot import Snapshot
from launcher.slurm.srun import (
    SlurmRanks,
    Step,
    nodes_that_cannot_start,
    nodes_that_miss,
    nodes_without_launch,
    training_command,
)
from launcher.slurm.staging import with_staged_program
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.costs.cluster import load_cluster
from pretrain.rundir.fence import VARIABLE
from pretrain.rundir.launch_events import (
    JobEndReason,
    JobStarted,
    NodeReplaced,
    ReplacedBecause,
)
from pretrain.rundir.ledger import last_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Event, TrainingBegan
from pretrain.terminal.text import counted

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobNodes:
    """Nodes that train, in rank order, and spare ones to replace them."""

    training: tuple[str, ...]
    spare: tuple[str, ...] = ()

    def without(self, node: str) -> JobNodes | None:
        """The nodes without this one: the first spare node takes its place, all others keep theirs.

        None if no spare node is left for it.
        """
        if node not in self.training:
            return JobNodes(self.training, tuple(each for each in self.spare if each != node))
        if not self.spare:
            return None
        first, *others = self.spare
        training = tuple(first if each == node else each for each in self.training)
        return JobNodes(training, tuple(others))


class LeaveNode(Exception):
    """The job should start again, without this node: it failed, or its ranks did."""

    def __init__(self, node: str, reason: JobEndReason) -> None:
        super().__init__(node)
        self.node = node
        self.reason = reason


class AttemptStarter:
    """Starts attempts; before each it replaces nodes that failed by spare ones.

    `can_exclude`: whether the job could start without a node; `claim`: claims the run for an
    attempt and returns its token; `check_fence` raises StaleAttempt.
    """

    def __init__(
        self,
        job: ThisJob,
        num_spare: int,
        run_dir: RunDir,
        can_exclude: Callable[[str], bool],
        claim: Callable[[int], str],
        check_fence: Callable[[], None],
    ) -> None:
        snapshot = Snapshot(run_dir.path)
        self._job, self._run_dir, self._outlives_nodes = job, run_dir, num_spare > 0
        self._can_exclude, self._claim, self._check_fence = can_exclude, claim, check_fence
        self._cluster = load_cluster(snapshot.cluster)
        self._nodes = _first_nodes(
            load_config(RunConfig, snapshot.experiment),
            self._cluster.tasks_per_node,
            job.nodes,
            num_spare,
        )
        self._ranks: SlurmRanks | None = None  # of the last attempt
        for node in replaced_nodes(run_dir.ledger.read(), job):
            self._nodes = self._nodes.without(node) or self._nodes
        self._replace_failed()
        self._step = self._checked_step()

    def start(self, number: int) -> SlurmRanks:
        """The ranks of attempt `number`; LeaveNode if the job lacks a node that works."""
        before = self._nodes.training
        self._replace_failed()
        if node := node_to_blame(self._run_dir, self._job, self._step):
            self._replace(node, ReplacedBecause.RANKS_FAILED)
        if self._nodes.training != before:
            self._step = self._checked_step()
        step = self._step
        shared = {VARIABLE: self._claim(number)}
        where = ", ".join(step.nodes)
        _log.info("attempt %d: %s on %s", number, counted(step.ranks, "rank"), where)
        command = training_command(step.code, self._run_dir.path)
        self._ranks = SlurmRanks(
            command,
            step,
            self._run_dir,
            number,
            shared,
            self._check_fence,
            can_lose_nodes=bool(self._nodes.spare),
        )
        return self._ranks

    def _replace_failed(self) -> None:
        """Use spare nodes for those that Slurm has taken from the job, or that do not respond."""
        if not self._outlives_nodes:  # Slurm ends the job with any of its nodes
            return
        fields = slurm.retry_until_reachable(lambda: slurm.details(self._job.id))
        left = slurm.node_names(fields["NodeList"]) if fields.get("NodeList") else self._job.nodes
        known = (*self._nodes.spare, *self._nodes.training)  # first the spare: they are to replace
        for node in [each for each in known if each not in left]:
            self._replace(node, ReplacedBecause.NODE_FAILED)
        if not self._nodes.spare:  # then one may come back, or Slurm takes it
            return
        for node in self._unusable((*self._nodes.spare, *self._nodes.training)):
            if self._nodes.without(node) is not None:
                self._replace(node, ReplacedBecause.NOT_RESPONDING)

    def _unusable(self, known: Sequence[str]) -> list[str]:
        """Those of the nodes that were taken out, or on which no task can be launched.

        sinfo's word that a node does not respond is a reason to try. It comes late, minutes after
        the end of a node, and also for healthy nodes: the answers of several nodes to one message
        come together, so one that is gone keeps those of others back.
        """
        states = slurm.retry_until_reachable(lambda: slurm.node_states(known))
        named = self._ranks.failed_nodes if self._ranks is not None else []
        out = [node for node in known if slurm.is_taken_out(states.get(node, ""))]
        doubtful = [
            node for node in known if slurm.is_silent(states.get(node, "")) or node in named
        ]
        silent = nodes_without_launch([node for node in doubtful if node not in out])
        return [node for node in known if node in out or node in silent]

    def _replace(self, node: str, reason: ReplacedBecause) -> None:
        after = self._nodes.without(node)
        if after is None:
            if reason is ReplacedBecause.NODE_FAILED:
                raise LeaveNode(node, JobEndReason.NODE_FAILED)
            if reason is ReplacedBecause.RANKS_FAILED and self._can_exclude(node):
                raise LeaveNode(node, JobEndReason.NODE_EXCLUDED)
            return
        if node in self._nodes.training:
            spare = self._nodes.spare[0]
            event = NodeReplaced(job=self._job.id, node=node, spare=spare, reason=reason)
            self._run_dir.ledger.append(event)
            _log.warning("%s; %s left", event.description, counted(len(after.spare), "spare node"))
        elif after != self._nodes:
            left = counted(len(after.spare), "spare node")
            _log.warning("spare node %s is left out (%s); %s left", node, reason.value, left)
        self._nodes = after

    def _checked_step(self) -> Step:
        """The step on nodes that all see the run directory; ConfigError if those do not suffice."""
        while True:
            nodes = self._nodes.training
            ranks = len(nodes) * self._cluster.tasks_per_node
            step = Step(nodes=nodes, ranks=ranks, cluster=self._cluster)
            blind = nodes_that_miss(step, self._run_dir.path)
            for node in blind:
                self._replace(node, ReplacedBecause.RUN_DIRECTORY_UNSEEN)
            if not blind:
                return with_staged_program(step, self._run_dir.path)
            if left := [node for node in blind if node in self._nodes.training]:
                raise ConfigError(
                    f"{', '.join(left)} cannot see {self._run_dir.path}; "
                    "put the run on a disk that all nodes share"
                )


def _first_nodes(
    config: RunConfig, ranks_per_node: int, names: tuple[str, ...], num_spare: int
) -> JobNodes:
    """The nodes that train at first: as many as share the lanes evenly, but for the spare ones."""
    most = len(names) - num_spare
    count = usable_nodes(config, ranks_per_node, most)
    if not count:
        for phase in runs_of_phases(config):
            accumulation_steps(phase, most * ranks_per_node)  # says what does not divide
    if count < most:
        _log.warning("using %d of %d nodes so that %s", count, most, describe_evenly(config))
    return JobNodes(names[:count], names[count:])


def replaced_nodes(ledger: Sequence[Event], job: ThisJob) -> list[str]:
    """The nodes that spare ones replaced in this start of the job, in order.

    A supervisor that was killed may have replaced them; the one after it starts from all nodes.
    """
    nodes: list[str] = []
    restart = None
    for event in ledger:
        if isinstance(event, JobStarted) and event.job == job.id:
            restart = event.restart
        elif isinstance(event, NodeReplaced) and (event.job, restart) == (job.id, job.restart):
            nodes.append(event.node)
    return nodes


def node_to_blame(run_dir: RunDir, job: ThisJob, step: Step) -> str | None:
    """The node to leave out in the next attempt; ConfigError if no node at all can start ranks.

    Where the trainer was not even started, a container or an interpreter is missing. That is the
    fault of a node only if others have what it lacks.
    """
    ledger = run_dir.ledger.read()
    node = node_to_exclude(ledger, job.id, step.node_of)
    if not no_rank_started(ledger, job.id):
        return node
    unable = nodes_that_cannot_start(step, run_dir.path)
    if len(unable) == step.num_nodes and last_of(ledger, TrainingBegan) is None:
        raise ConfigError(
            f"the ranks' program does not start on any node ({', '.join(unable)}); "
            f"'launcher logs {run_dir.path} --errors' says why"
        )
    return node if node in unable else None
