"""A whole training step of the published 12-layer model (d_model 512) against the original's way of taking it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.compare import Comparison
from pretrain.config.run import DataConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.costs.flops import cost_of
from pretrain.model.dropout import DropoutStream
from pretrain.model.memory import Memory
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.groups import build_optimizer

LANES = 8
GOALS = {128: (1.5, 4), 512: (3.0, 2)}  # segment = memory -> ratio, rounds


def training_comparisons() -> list[Comparison]:
    """One for every segment length. The models are built at the first call: both of one size take a gigabyte."""
    return [_comparison(length, goal, rounds) for length, (goal, rounds) in GOALS.items()]


def run_config(length: int) -> RunConfig:
    """The published model for enwik8 with the vocabulary that other implementations were measured with."""
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


def _comparison(length: int, goal: float, rounds: int) -> Comparison:
    run = run_config(length)
    generator = torch.Generator().manual_seed(length)
    tokens_BT = torch.randint(run.model.vocab_size, (LANES, length + 1), generator=generator)
    return Comparison(
        name=f"12-layer training step, segment = memory = {length}",
        goal=goal,
        baseline=_built_at_first_call(lambda: _reference(run, tokens_BT)),
        candidate=_built_at_first_call(lambda: _ours(run, tokens_BT)),
        rounds=rounds,
        flops=cost_of(run).flops_per_token * run.tokens_per_step,
    )


def _built_at_first_call(build: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    built: list[Callable[[], object]] = []

    def work() -> object:
        if not built:
            built.append(build())
        return built[0]()

    return work


def _ours(run: RunConfig, tokens_BT: Tensor) -> Callable[[], Tensor]:
    model = TransformerXL(run.model)
    optimizer = build_optimizer(model, OptimConfig())
    memory: list[Memory | None] = [None]

    def work() -> Tensor:
        dropout = DropoutStream(seed=1, step=1, lanes=range(LANES))
        optimizer.zero_grad()
        nll_BL, memory[0] = model(tokens_BT[:, :-1], tokens_BT[:, 1:], memory[0], dropout=dropout)
        loss = nll_BL.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.detach()

    return work


def _reference(run: RunConfig, tokens_BT: Tensor) -> Callable[[], Tensor]:
    from tests.helpers.reference_training import ReferenceTrainer, ReferenceTransformerXL

    settings = run.model
    model = ReferenceTransformerXL(
        settings.vocab_size,
        settings.num_layers,
        settings.num_heads,
        settings.d_model,
        settings.inner_width,
        settings.dropout,
    )
    trainer = ReferenceTrainer(model, settings.memory_length)
    tokens_TB = tokens_BT.t().contiguous()
    return lambda: trainer.step(tokens_TB[:-1], tokens_TB[1:])
