"""What each step and each start costs a rank: exchanges, descriptors."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.scale.costs import RANKS, Cost
from benchmarks.scale.growth import growth_of
from benchmarks.scale.ranks import STEP_SECONDS
from foundation.programs import own_command
from pretrain.distributed.messages import num_rounds
from pretrain.distributed.rendezvous import LAZY_VARIABLE, MOST_DESCRIPTORS

SIZES = (2, 4, 8, 16)
MOST_MILLISECONDS = 1.0
MOST_MILLISECONDS_OF_A_SAVE = 50.0


def process_costs(_: Path) -> Iterator[Cost]:
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

    yield from _stop_requests(of)
    yield _saves(of("saving", 1e3))
    yield from _descriptors(of("rank 0"), of("rank 1"))


def _descriptors(of_main: dict[int, float], of_another: dict[int, float]) -> Iterator[Cost]:
    """Yield the open descriptors of rank 0, with the store's connections, and of another rank."""
    store = growth_of({size: count - of_another[size] for size, count in of_main.items()})
    another = growth_of(of_another)
    yield Cost(
        name="descriptors of rank 0", measured=of_main, at_most=MOST_DESCRIPTORS,
        expected={ranks: round(store.at(ranks) + another.at(ranks)) for ranks in RANKS},
        detail=f"from 64 on another rank's and {store.describe('ranks')}; the limit is raised as "
        "far as the hard one allows",
    )  # fmt: skip
    yield Cost(name="descriptors of another rank", measured=of_another, at_most=MOST_DESCRIPTORS)


def _saves(measured: dict[int, float]) -> Cost:
    """Return how long the loop waits for other ranks at a save, without the copy of its tensors.

    For more ranks than cores it is predicted by rounds, as for stop requests.
    """
    return Cost(
        name="save: exchanges that the loop waits for", unit="ms", measured=measured,
        expected={ranks: num_rounds(ranks) * measured[2] for ranks in RANKS},
        at_most=MOST_MILLISECONDS_OF_A_SAVE,
        detail="10th percentile of four exchanges in log2(ranks) rounds and two broadcasts; from "
        "64 on computed as in the second row",
    )  # fmt: skip


def _stop_requests(of: Callable[..., dict[int, float]]) -> Iterator[Cost]:
    """Yield what each step's exchange costs.

    Two ranks have a core each, and one round. More ranks share the machine's cores, so the measured
    growth is that of all ranks' work. On nodes of their own, only the number of rounds would grow.
    """
    rounds = {size: float(num_rounds(size)) for size in SIZES}
    yield Cost(
        name="stop request: rounds of its exchange", measured=rounds,
        detail="counted; in each a rank sends and receives one message",
    )  # fmt: skip
    exchange, waits = of("exchange", 1e3), of("wait", 1e3)
    expected = {ranks: num_rounds(ranks) * exchange[2] for ranks in RANKS}
    yield Cost(
        name="stop request: from asking to the answer, nothing beside it", unit="ms",
        measured=exchange, expected=expected,
        detail="gloo, 10th percentile; from 64 on rounds times the time of 2 ranks, as more share "
        "cores; a network adds latency",
    )  # fmt: skip
    behind = 1e3 * STEP_SECONDS
    yield Cost(
        name="stop request: a step's wait for the answer", unit="ms", measured=waits,
        expected={ranks: max(min(waits.values()), expected[ranks] - behind) for ranks in RANKS},
        at_most=MOST_MILLISECONDS,
        detail=f"lower quartile; asked {behind:g} ms before the answer is needed",
    )  # fmt: skip
    yield Cost(
        name="stop request: CPU time of a rank's main thread per step", unit="ms",
        measured=of("cpu", 1e3), at_most=MOST_MILLISECONDS,
    )  # fmt: skip
