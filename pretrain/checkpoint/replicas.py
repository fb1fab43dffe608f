"""What every save checks before it starts: equal replicas, and finite values.

Before every save all ranks compare the values that each of them holds whole: everything under ZeRO
0, and below stage 3 the weights that the model computes with. As long as all ranks compute
correctly, these are equal bit for bit. A rank that drifts spoils the others' gradients. And a
checkpoint has a part from each rank: it would mix two models.

A checkpoint with NaN or inf is useless: every update after it would be skipped. So each rank also
looks for them in the values that it is about to write, or has just read.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foundation.typed_values import json_text
from pretrain.checkpoint.tensor_layout import SplitTensors
from pretrain.distributed.collectives import gather_present, gather_values
from pretrain.distributed.messages import max_over_ranks
from pretrain.engines.ema import EMA
from pretrain.engines.engine import Engine
from pretrain.errors import CheckpointError
from pretrain.state import TrainState

# Bytes per value -> the integer type that reads a value's bits.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 1 << 22  # elements that are summed at once
NOTHING = torch.empty(0, dtype=torch.int64)
COUNTERS = "step, tokens, updates and loss scale"


def require_equal_replicas(engine: Engine, state: TrainState) -> None:
    """Raise CheckpointError on all ranks if replicas differ, naming the ranks in the minority.

    A collective. It compares the sum of each tensor's bits as integers, which any single difference
    changes, and reads every replicated tensor once.
    """
    if engine.world.world_size == 1:
        return
    replicas = dict(replicated_values(engine))
    sums = [_sum_of_bits(value) for value in replicas.values()]
    own = torch.cat([torch.stack(sums).cpu() if sums else NOTHING, _counters(engine, state)])
    # The largest x and the largest -x: they add up to zero where all ranks have the same.
    extremes = max_over_ranks(torch.cat([own, -own]))
    high, low = extremes.chunk(2)
    odd = (high + low).nonzero().flatten().tolist()
    if odd:
        names = [*replicas, COUNTERS]
        ranks = odd_ranks(gather_values(own[odd].tolist(), list[int]))
        raise CheckpointError(_difference(state.step, ranks, [names[index] for index in odd]))


def replicated_values(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of all values that every rank holds whole, in the same order."""
    seen: set[int] = set()
    for fragment in engine.fragments():
        if fragment.replicated:
            for kind, value in fragment.values.items():
                seen.add(value.data_ptr())
                yield f"{fragment.name} ({kind})", value
    for name, weight in engine.whole_weights():
        if weight.data_ptr() not in seen:  # in fp32 the weights are the master weights
            yield name, weight


def odd_ranks(values_R: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks that differ from the commonest value; all ranks if two are as common."""
    by_count = Counter(map(tuple, values_R)).most_common(2)
    if len(by_count) > 1 and by_count[0][1] == by_count[1][1]:
        return list(range(len(values_R)))
    return [rank for rank, values in enumerate(values_R) if tuple(values) != by_count[0][0]]


def _difference(step: int, ranks: list[int], names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    which = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    return (
        f"step {step} was not saved: {which} differ{'s' if len(ranks) == 1 else ''} in "
        f"{names[0]}{more}, expected the same on all ranks; check the hardware there, then rerun "
        "the command to resume from the latest checkpoint, which is whole"
    )


def _sum_of_bits(value: Tensor) -> Tensor:
    bits = value.detach().reshape(-1).view(_INTEGERS[value.element_size()])
    # In blocks, because a CPU first copies all that it sums to int64.
    return torch.stack([block.sum(dtype=torch.int64) for block in bits.split(BLOCK)]).sum()


def _counters(engine: Engine, state: TrainState) -> Tensor:
    scale = engine.loss_scaler.to_tree() if engine.loss_scaler is not None else None
    counters = [state.step, state.tokens_seen, engine.optimizer_step_count(), scale]
    digest = hashlib.sha256(json_text(counters).encode()).digest()
    return torch.tensor([int.from_bytes(digest[:7], "little")])


class NonFiniteError(CheckpointError):
    """Values that are not finite, which are not saved; `problem` says where."""

    def __init__(self, step: int, problem: str) -> None:
        super().__init__(
            f"step {step} was not saved: {problem}; rerun the command to resume from the latest "
            "checkpoint, or lower optim.learning_rate in a new run"
        )
        self.problem = problem


def require_finite(engine: Engine, step: int, tensors: SplitTensors) -> None:
    """Raise NonFiniteError on all ranks if any has NaN or inf in its `tensors`; it names one rank.

    A collective.
    """
    name = non_finite_name(engine, tensors)
    own = f"rank {engine.world.rank} has NaN or inf in {name}" if name else None
    for problem in gather_present(own, str):
        raise NonFiniteError(step, problem)


def non_finite_name(engine: Engine, tensors: SplitTensors) -> str:
    """Return which of the tensors of a checkpoint's file has NaN or inf; '' if none has.

    A weight that becomes inf in the type that the model computes with counts, too. Reads every
    value once, and waits for the device once.
    """
    computes_in = next(engine.module.parameters()).dtype
    names, extremes = [], []
    for key, pieces in tensors.items():
        name, _, kind = key.partition("|")
        kind = kind.rpartition("|")[2]
        for piece in pieces:
            if not piece.is_floating_point() or not piece.numel():
                continue
            ends = torch.stack(torch.aminmax(piece.detach()))
            names.append(f"{name.partition('+')[0]} ({kind})" if kind else name)
            extremes.append((ends.to(computes_in) if kind in ("weight", EMA) else ends).double())
    if not extremes:
        return ""
    device = extremes[0].device
    are_finite = torch.stack([ends.to(device) for ends in extremes]).isfinite().all(1)
    return next((name for name, ok in zip(names, are_finite.tolist(), strict=True) if not ok), "")
