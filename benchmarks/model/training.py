"""A whole training step against the original's way, and how its cost grows with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import Comparison, Measurement, in_turns, timed
from pretrain.config.run import DataConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.costs.flops import run_cost, token_flops
from pretrain.model.dropout import DropoutStream
from pretrain.model.memory import Memory
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.optimizers import build_optimizer
from tests.helpers.reference_training import ReferenceTransformerXL

LANES = 8
GOALS = {128: (1.5, 4), 512: (3.0, 2)}  # segment = memory -> ratio, rounds
GROWTH_LANES, GROWTH_ROUNDS = 4, 4


def training_comparisons(peak: float) -> list[Comparison]:
    """Return one comparison of a step for every segment length."""
    return [
        _comparison(length, peak, *goal_and_rounds) for length, goal_and_rounds in GOALS.items()
    ]


def published_run(length: int) -> RunConfig:
    """Return the published enwik8 model with the vocabulary that other code was measured with."""
    model = ModelConfig(
        vocab_size=8192,
        num_layers=12,
        d_model=512,
        num_heads=8,
        d_inner=2048,
        memory_length=length,
        dropout=0.1,
    )
    return RunConfig(model=model, data=DataConfig(lanes=LANES, segment_length=length))


def training_step(model: TransformerXL, optim: OptimConfig) -> Callable[[Tensor], Tensor]:
    """Return a function that trains on tokens [B, L + 1] and returns their loss.

    The memory is carried from call to call. The rate is constant.
    """
    optimizer = build_optimizer(model, optim)
    for group in optimizer.param_groups:
        group["lr"] = optim.learning_rate
    memory: Memory | None = None
    drops = model.config.dropout or model.config.attention_dropout

    def step(tokens_BT: Tensor) -> Tensor:
        nonlocal memory
        stream = DropoutStream(seed=1, step=1, lanes=range(len(tokens_BT))) if drops else None
        nll_BL, memory = model(tokens_BT[:, :-1], tokens_BT[:, 1:], memory, dropout=stream)
        loss = nll_BL.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _comparison(length: int, peak: float, goal: float, rounds: int) -> Comparison:
    run = published_run(length)
    generator = torch.Generator().manual_seed(length)
    tokens_BT = torch.randint(run.model.vocab_size, (LANES, length + 1), generator=generator)
    # Models are built at the first call: with their moments, two of one size take a gigabyte.
    ours = cache(lambda: training_step(TransformerXL(run.model), OptimConfig()))
    reference = cache(lambda: _reference_step(run, tokens_BT))
    return Comparison(
        name=f"12-layer training step, segment = memory = {length}",
        goal=goal,
        baseline=timed(lambda: reference()()),
        candidate=timed(lambda: ours()(tokens_BT)),
        rounds=rounds,
        floor_seconds=run_cost(run).flops_per_token * run.tokens_per_step / peak,
    )


def _reference_step(run: RunConfig, tokens_BT: Tensor) -> Callable[[], Tensor]:
    settings = run.model
    model = ReferenceTransformerXL(
        settings.vocab_size,
        settings.num_layers,
        settings.num_heads,
        settings.d_model,
        settings.inner_width,
        settings.dropout,
    )
    trainer = _ReferenceTrainer(model, settings.longest_memory)
    tokens_TB = tokens_BT.t().contiguous()
    return lambda: trainer.step(tokens_TB[:-1], tokens_TB[1:])


class _ReferenceTrainer:
    """Segment after segment with memory carried over: forward, backward, clipping and Adam as in
    the original.
    """

    def __init__(self, model: ReferenceTransformerXL, memory_length: int) -> None:
        self._model = model
        self._memory_length = memory_length
        self._memory: list[Tensor] = []
        self._optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(self, tokens_LB: Tensor, targets_LB: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss, self._memory = self._model(tokens_LB, targets_LB, self._memory, self._memory_length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 0.25)
        self._optimizer.step()
        return loss.detach()


@dataclass(frozen=True)
class GrowthPoint:
    """One model and segment length."""

    name: str
    model: ModelConfig
    segment_length: int

    @property
    def flops_per_token(self) -> float:
        return token_flops(self.model, self.segment_length, GROWTH_LANES).training


def growth_points() -> list[GrowthPoint]:
    """Return a base, then points that each change one thing of it."""
    model = ModelConfig(vocab_size=4096, num_layers=4, d_model=256, num_heads=4, memory_length=128)
    base = GrowthPoint(
        "4 layers of width 256, segment = memory = 128, vocabulary 4,096", model, 128
    )
    changes = {
        "memory_length": ("memory", (0, 512)),
        "num_layers": ("layers", (2, 8)),
        "vocab_size": ("vocabulary", (1024, 16384)),
    }
    return [
        base,
        *(replace(base, name=f"segment {length}", segment_length=length) for length in (64, 256)),
        *(
            replace(base, name=f"{label} {value:,}", model=replace(model, **{setting: value}))
            for setting, (label, values) in changes.items()
            for value in values
        ),
    ]


def cost_growth(_: Path) -> Iterator[Measurement]:
    """Yield the cost of a token of the base, then of each change relative to it, beside its FLOPs.

    Each change takes turns with the base. If all shared one measurement of the base, a machine that
    was busy meanwhile would shift every row.
    """
    base, *others = growth_points()
    of_base = _token_seconds(base)
    alone = in_turns({base.name: of_base}, GROWTH_ROUNDS)[base.name]
    microseconds = [1e6 * each for each in alone]
    yield Measurement(f"cost of a trained token, {base.name}", microseconds, "us")
    for point in others:
        cases = {base.name: of_base, point.name: _token_seconds(point)}
        seconds = in_turns(cases, GROWTH_ROUNDS)
        ratios = [a / b for a, b in zip(seconds[point.name], seconds[base.name], strict=True)]
        predicted = point.flops_per_token / base.flops_per_token
        detail = f"{predicted:.2f}x by FLOPs"
        yield Measurement(f"the same with {point.name}, over that", ratios, detail=detail)


def _token_seconds(point: GrowthPoint) -> Callable[[], float]:
    """Return a function that times forward and backward with a full memory, per token."""
    torch.manual_seed(0)
    module = TransformerXL(point.model)
    tokens_BT = torch.randint(point.model.vocab_size, (GROWTH_LANES, point.segment_length + 1))
    memory: Memory | None = None

    def work() -> None:
        nonlocal memory
        while memory is None or memory[0].shape[1] < point.model.longest_memory:
            with torch.no_grad():
                _, memory = module(tokens_BT[:, :-1], tokens_BT[:, 1:], memory)
        nll_BL, memory = module(tokens_BT[:, :-1], tokens_BT[:, 1:], memory)
        nll_BL.mean().backward()

    seconds = timed(work)
    return lambda: seconds() / (GROWTH_LANES * point.segment_length)
