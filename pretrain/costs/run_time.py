"""How long a run takes: training by phase, its evaluations, saves and failures. Torch-free.

Ranks compute at an assumed part of their peak. Failures of all nodes together come at a constant
rate, M seconds apart on average. A run trains for t seconds, pauses for p to save, and trains while
the checkpoint is written, for w. After a failure nothing runs for d (detection, requeueing), then
ranks start and restore for s; after a failure during s, d begins again. What was trained after the
latest published checkpoint is trained again. On average

    goodput = t e^(-w/M) / ((e^((t+p)/M) - 1) e^(s/M) (M + d)),

which for w = d = 0 is Daly's equation 13 ("A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22, 2006). Its maximum is where
(1 - t/M) e^((t+p)/M) = 1, whatever w, d and s are: his equation 37, whose goodput is within 0.2% of
the highest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.corpora.manifest import MANIFEST_NAME, read_manifest
from foundation.paths import url_of
from pretrain.config.cluster import ClusterConfig
from pretrain.config.evaluation_sets import evaluated_split, evaluation_sets
from pretrain.config.model import ModelConfig
from pretrain.config.phases import spans_of_phases
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import largest_footprint
from pretrain.costs.flops import computed_step_flops, token_flops
from pretrain.costs.hardware import Hardware

# Part of the speed that training loses while a checkpoint is being written. Assumed: copies,
# hashing and writing take host memory's bandwidth, cores and the network.
SLOWER_WHILE_WRITING = 0.05
RESTART_SECONDS = 600.0  # from a failure to training again, without reading the checkpoint
_LONGEST_PERIOD = 700.0  # in mean times between failures; exp of a longer one overflows


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of a run and what they are spent on; evaluation is None if it is not known."""

    of_step: tuple[float, ...]  # by phase
    training: float
    evaluation: float | None
    evaluations: int
    tokens: int | None  # tokens of the run's own validation split that the last one scores
    sets: int  # other validation sets


def run_time(run: RunConfig, world_size: int, flops_per_second: float) -> RunTime:
    """Return the time of a run on ranks that compute this many FLOPs per second each."""
    spans = spans_of_phases(run, range(run.optim.steps))
    of_step = [
        computed_step_flops(phase, world_size) / (world_size * flops_per_second)
        for phase, _ in spans
    ]
    counts = _evaluations(run)
    # The run's own split is scored with memory and without; other sets only with memory.
    models = [run.model]
    if run.model.longest_memory:
        models.append(replace(run.model, memory_length=0, compressed_length=0, same_length=False))
    paths = [(run.data.path, models)]
    paths += [
        (chosen.path, [run.model])
        for chosen in evaluation_sets(run)  # a part may have no validation split
        if chosen.path != run.data.path
        and (not chosen.is_part or url_of(chosen.path) or split_here(chosen.path))
    ]
    between, last = (
        [(scored_tokens(run, path, is_last), models) for path, models in paths]
        for is_last in (False, True)
    )
    evaluation = None
    if None not in (tokens for tokens, _ in last):
        measured = [
            (phase, count, between) for (phase, _), count in zip(spans, counts, strict=True)
        ]
        evaluation = sum(
            count * evaluation_flops(phase, tokens or 0, world_size, models) / flops_per_second
            for phase, count, splits in [*measured, (spans[-1][0], 1, last)]
            for tokens, models in splits
        )
    return RunTime(
        of_step=tuple(of_step),
        training=sum(count * seconds for (_, count), seconds in zip(spans, of_step, strict=True)),
        evaluation=evaluation,
        evaluations=sum(counts) + 1,
        tokens=last[0][0],
        sets=len(last) - 1,
    )


def evaluation_flops(
    run: RunConfig, tokens: int, world_size: int, models: Sequence[ModelConfig]
) -> float:
    """Return the FLOPs of the busiest rank for the losses of these models on the tokens.

    Ranks beyond the number of lanes do not shorten an evaluation. A lane has whole documents: where
    a few long ones leave other lanes empty, the evaluation takes longer than this.
    """
    lanes, length = run.evaluation.lanes, run.data.segment_length
    batches, own = -(-tokens // (lanes * length)), -(-lanes // world_size)
    return batches * own * length * sum(token_flops(model, length, own).forward for model in models)


def _evaluations(run: RunConfig) -> list[int]:
    """Return how many evaluations each phase has, without the last one, at the run's end."""
    steps, interval = run.optim.steps, run.evaluation.interval
    counts, start = [], 0
    for _, count in spans_of_phases(run, range(steps)):
        stop = start + count
        counts.append(stop // interval - start // interval if interval else 0)
        start = stop
    counts[-1] -= bool(interval) and steps % interval == 0
    return counts


def scored_tokens(run: RunConfig, path: Path, is_last: bool = True) -> int | None:
    """Return how many tokens of a split are scored; None for all of a split that is not here."""
    asked, split = run.evaluation.scored_tokens(is_last) or None, split_here(path)
    if split is None:
        return asked
    there = read_manifest(split).tokens
    return min(asked or there, there)


def split_here(path: Path) -> Path | None:
    """Return the split of an evaluation, if it is on this machine."""
    if url_of(path) is not None:  # its shards would be fetched
        return None
    split = evaluated_split(Path(path))
    return split if (split / MANIFEST_NAME).is_file() else None


@dataclass(frozen=True, kw_only=True)
class FailureCosts:
    """How often a run fails and what saves and restarts cost it, in seconds."""

    between_failures: float  # on average, of all nodes together
    pause: float  # while a save keeps the loop from training
    write: float = 0.0  # from the pause until the checkpoint is published; training continues
    down: float = 0.0  # detection and requeueing: nothing runs that could fail
    start: float = 0.0  # start of the ranks, reading the checkpoint

    def goodput(self, interval: float) -> float:
        """Return the part of the time that goes into training that is not done again.

        A save waits for the previous one, so an interval shorter than `write` takes as long.
        """
        mean = self.between_failures
        period = (max(interval, self.write) + self.pause) / mean
        if period > _LONGEST_PERIOD:
            return 0.0
        kept = interval / mean * math.exp(-self.write / mean) / math.expm1(period)
        return kept * math.exp(-self.start / mean) / (1 + self.down / mean)

    @property
    def best_interval(self) -> float:
        """The seconds of training between two saves with the highest goodput."""
        mean, x = self.between_failures, self.pause / (2 * self.between_failures)
        best = math.sqrt(2 * self.pause * mean) * (1 + math.sqrt(x) / 3 + x / 9) - self.pause
        return max(best if x < 1 else mean, self.write)


def failure_costs(run: RunConfig, hardware: Hardware) -> FailureCosts | None:
    """Return what failures cost the run there; None if it is not known how often nodes fail.

    Every node reads and writes its part of a checkpoint at `disk_mib_per_second`.
    """
    node = hardware.node
    if node is None or not node.mtbf_hours:
        return None
    saved = largest_footprint(run, hardware.world_size, hardware.on_gpu).checkpoint
    return costs_on(node, hardware.nodes, saved, run.checkpoint.asynchronous)


def costs_on(
    node: ClusterConfig, nodes: int, checkpoint_bytes: float, in_background: bool = True
) -> FailureCosts:
    """Return what failures cost a run with checkpoints of that size on such nodes."""
    transfer = checkpoint_bytes / nodes / (node.disk_mib_per_second * (1 << 20))
    return FailureCosts(
        between_failures=3600 * node.mtbf_hours / nodes,
        pause=SLOWER_WHILE_WRITING * transfer if in_background else transfer,
        write=transfer if in_background else 0.0,
        down=RESTART_SECONDS,
        start=transfer,
    )
