"""What each step and each start costs a rank: exchanges, descriptors."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scale.costs import RANKS, Cost, Row
from benchmarks.scale.growth import growth_of
from benchmarks.scale.ranks import STEP_SECONDS
from data_pipeline.own_programs import own_command
from pretrain.distributed.descriptors import LAZY_VARIABLE, needed_descriptors

SIZES = (2, 4, 8, 16)
MOST_MILLISECONDS = 1.0


def process_costs(_: Path) -> Iterator[Row]:
    """Yield the costs of ranks that gloo connects."""
    done = subprocess.run(
        own_command("benchmarks.scale.ranks", *map(str, SIZES)),
        env={**os.environ, LAZY_VARIABLE: "1"},  # as from 65 ranks on
        capture_output=True,
        text=True,
        check=True,
    )
    tree = json.loads(done.stdout.splitlines()[-1])
    found = {size: tree[str(size)] for size in SIZES}

    def of(name: str, factor: float = 1.0) -> dict[int, float]:
        return {size: factor * measured[name] for size, measured in found.items()}

    exchange = of("exchange", 1e3)
    yield Cost(
        name="stop request: from asking to the answer, nothing beside it", unit="ms",
        measured=exchange, detail="gloo, the shortest tenth; ranks share the cores of one machine",
    )  # fmt: skip
    behind = 1e3 * STEP_SECONDS
    growth, waits = growth_of(exchange), of("wait", 1e3)
    yield Cost(
        name="stop request: a step's wait for the answer", unit="ms", measured=waits,
        expected={ranks: max(min(waits.values()), growth.at(ranks) - behind) for ranks in RANKS},
        at_most=MOST_MILLISECONDS,
        detail=f"shortest quarter of the waits; asked {behind:g} ms before it is needed, so what "
        "the row above has beyond them",
    )  # fmt: skip
    yield Cost(
        name="stop request: CPU time of a rank's main thread per step", unit="ms",
        measured=of("cpu", 1e3), at_most=MOST_MILLISECONDS,
    )  # fmt: skip
    limit = needed_descriptors(0, RANKS[-1], is_mesh=False)
    yield Cost(
        name="descriptors of rank 0", measured=of("rank 0"), at_most=limit,
        detail="the limit is raised as far as these need, or one line names it",
    )  # fmt: skip
    limit = needed_descriptors(1, RANKS[-1], is_mesh=False)
    yield Cost(name="descriptors of another rank", measured=of("rank 1"), at_most=limit)
