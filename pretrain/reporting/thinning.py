"""A run's measurements, thinned to what a chart can show, in memory that does not grow with the
run. Torch-free. B marks buckets: stretches of the run with as many steps each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.rundir.metrics_summary import TimeSums

MOST_BUCKETS = 2000  # a run of fewer steps is kept whole

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Measurements:
    """What is kept of metrics.jsonl; sums and counts are of all steps."""

    train: list[
        Line
    ]  # of each bucket the last one, the last of an interval, and those that stand out
    evaluations: list[Line]
    loss_steps_B: np.ndarray  # of buckets with a loss: where the last one was
    loss_sums_B: np.ndarray
    num_losses_B: np.ndarray
    num_skipped: int
    clipped: ClipCount
    sums: TimeSums


@dataclass
class ClipCount:
    """How many updates after the warm-up had gradients above `limit`; 0: there is none."""

    limit: float = 0.0
    warmup_steps: int = 0
    clipped: int = 0
    updates: int = 0

    def add(self, line: Line) -> None:
        norm = line["grad_norm"]
        if norm is None or line["skipped"] or line["step"] <= self.warmup_steps:
            return
        self.updates += 1
        self.clipped += 0 < self.limit < norm


class _Bucket:
    """Steps in a row."""

    def __init__(self, line: Line) -> None:
        loss, norm = line["loss"], line["grad_norm"]
        self.kept = {
            "last": line,
            "interval": line if "tokens_per_second" in line else None,
            "loss": line if loss is not None else None,
            "grad_norm": line if norm is not None else None,
            "skipped": line if line["skipped"] else None,
        }
        self.loss_step = line["step"] if loss is not None else None
        self.loss_sum = loss or 0.0
        self.num_losses = int(loss is not None)

    def add(self, later: _Bucket) -> None:
        """Extend this bucket by the one that follows it."""
        for name, line in later.kept.items():
            held = self.kept[name]
            is_peak = name in ("loss", "grad_norm")
            if line is not None and not (is_peak and held and held[name] >= line[name]):
                self.kept[name] = line
        self.loss_step = self.loss_step if later.loss_step is None else later.loss_step
        self.loss_sum += later.loss_sum
        self.num_losses += later.num_losses

    @property
    def lines(self) -> list[Line]:
        """What is kept, by step."""
        kept = {id(line): line for line in self.kept.values() if line is not None}
        return sorted(kept.values(), key=lambda line: line["step"])


def thinned(
    measurements: Iterable[Line],
    most_buckets: int = MOST_BUCKETS,
    clipped: ClipCount | None = None,
) -> Measurements:
    """Read all measurements once, oldest first; `clipped` counts on."""
    clipped = clipped or ClipCount()
    buckets: list[_Bucket] = []
    evaluations: list[Line] = []
    size, filled = 1, 1  # steps in a full bucket, and in the last one
    num_skipped, sums = 0, TimeSums()
    for line in measurements:
        sums.add(line)
        if line["kind"] != "train":
            evaluations.append(line)
            continue
        num_skipped += line["skipped"]
        clipped.add(line)
        if buckets and filled < size:
            buckets[-1].add(_Bucket(line))
            filled += 1
            continue
        if len(buckets) == most_buckets:
            for first, second in zip(buckets[::2], buckets[1::2], strict=True):
                first.add(second)
            buckets, size = buckets[::2], 2 * size
        buckets.append(_Bucket(line))
        filled = 1
    with_loss = [bucket for bucket in buckets if bucket.num_losses]
    return Measurements(
        train=[line for bucket in buckets for line in bucket.lines],
        evaluations=evaluations,
        loss_steps_B=np.array([bucket.loss_step for bucket in with_loss], float),
        loss_sums_B=np.array([bucket.loss_sum for bucket in with_loss], float),
        num_losses_B=np.array([bucket.num_losses for bucket in with_loss], int),
        num_skipped=num_skipped,
        clipped=clipped,
        sums=sums,
    )
