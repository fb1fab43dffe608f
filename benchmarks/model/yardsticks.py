"""A training step beside what people would pick instead: a plain GPT, and a class of transformers.

All sides train on as many tokens a step with fused AdamW and clipping. The GPT reads one causal
context with as many keys per query (`benchmarks.gpu.gpt.yardstick`); hybrids are compared per
parameter. Seconds are CPU seconds of this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.gpu.gpt import GPT
from benchmarks.measure import Comparison, timed
from benchmarks.model.training import training_step
from pretrain.config.model import ModelConfig
from pretrain.config.run import OptimConfig
from pretrain.model.transformer_xl import TransformerXL

LANES, STEPS, ROUNDS = 6, 3, 5
SHAPES = (("8M", 128), ("8M", 256), ("8M", 512), ("30M", 256))  # size, segment = memory
GPT_GOAL, RELATIVE_GOAL, TRANSFORMERS_GOAL = 1.0, 0.8, 2.5
OPTIM = OptimConfig(learning_rate=1e-3, clip_norm=1.0)
ROPE = ModelConfig(
    vocab_size=8192,
    num_layers=8,
    d_model=256,
    num_heads=4,
    num_key_heads=2,
    positions="rope",
    norm="rmsnorm",
    norm_position="pre",
    feed_forward="swiglu",
    query_key_norm=True,
)
SIZES = {"8M": ROPE, "30M": replace(ROPE, d_model=512, num_heads=8, num_key_heads=4)}
HYBRID = ("deltanet", "deltanet", "deltanet", "attention")

TrainingStep = Callable[[Tensor], object]


def yardstick_comparisons() -> list[Comparison]:
    """Return the comparisons with the GPT by shape, compiled or not, and of the hybrid's peers."""
    shapes = [(size, length, compiles) for size, length in SHAPES for compiles in (False, True)]
    return [
        *(_beside_gpt(*shape, kinds) for kinds in ((), HYBRID) for shape in shapes),
        _comparison(
            "the paper's relative positions over rope",
            RELATIVE_GOAL,
            lambda: _ours(_model("8M", 256, ())),
            lambda: _ours(replace(_model("8M", 256, ()), positions="relative")),
            256,
        ),
        _comparison(
            "8M hybrid over transformers' Qwen3-Next",
            TRANSFORMERS_GOAL,
            lambda: _with_adamw(Qwen3Next(_model("8M", 256, HYBRID))),
            lambda: _ours(_model("8M", 256, HYBRID)),
            256,
            context=3 * 256,
        ),
    ]


def _beside_gpt(size: str, length: int, compiles: bool, kinds: tuple[str, ...]) -> Comparison:
    model = _model(size, length, kinds)
    gpt = replace(model, layer_kinds=(), memory_length=0)
    name = f"{size} {'hybrid per parameter' if kinds else 'Transformer-XL'} over a plain GPT"
    with torch.device("meta"):
        sizes = [_parameters(each) for each in (TransformerXL(model), GPT(gpt, False))]
    return _comparison(
        f"{name}, segment = memory = {length}{', both compiled' if compiles else ''}",
        GPT_GOAL,
        lambda: _with_adamw(GPT(gpt, compiles)),
        lambda: _ours(model, compiles),
        length,
        context=3 * length,
        work=sizes[0] / sizes[1] if kinds else 1.0,
    )


def _comparison(
    name: str,
    goal: float,
    baseline: Callable[[], TrainingStep],
    ours: Callable[[], TrainingStep],
    length: int,
    *,
    context: int = 0,
    work: float = 1.0,
) -> Comparison:
    """Return the comparison of two steps; `context` is the baseline's, if it is no segment."""
    tokens_BT = _tokens(LANES, length)
    others_BT = _tokens(LANES * length // context, context) if context else tokens_BT
    sides = [cache(baseline), cache(ours)]  # built at the first call
    seconds = [
        timed(lambda step=step, tokens=tokens: _repeat(step(), tokens), time.process_time)
        for step, tokens in zip(sides, (others_BT, tokens_BT), strict=True)
    ]
    return Comparison(name, goal, *seconds, rounds=ROUNDS, candidate_work=work)


def _repeat(step: TrainingStep, tokens_BT: Tensor) -> None:
    for _ in range(STEPS):
        step(tokens_BT)


def _model(size: str, length: int, kinds: tuple[str, ...]) -> ModelConfig:
    return replace(SIZES[size], memory_length=length, layer_kinds=kinds)


def _tokens(lanes: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(ROPE.vocab_size, (lanes, length + 1), generator=generator)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _ours(model: ModelConfig, compiles: bool = False) -> TrainingStep:
    torch.manual_seed(0)
    return training_step(TransformerXL(model, compiles=compiles), OPTIM)


def _with_adamw(module: nn.Module) -> TrainingStep:
    """Return a step of a module from tokens and targets to losses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=OPTIM.learning_rate, fused=True)

    def step(tokens_BT: Tensor) -> Tensor:
        loss = module(tokens_BT[:, :-1], tokens_BT[:, 1:]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), OPTIM.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Qwen3Next(nn.Module):
    """The class of transformers in the hybrid's shape, dense, with tied embeddings."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

        heads, width = model.num_heads, model.head_width
        config = Qwen3NextConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.d_model,
            intermediate_size=model.inner_width,
            num_hidden_layers=model.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=model.key_heads,
            head_dim=width,
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=width,
            linear_value_head_dim=2 * width,
            mlp_only_layers=list(range(model.num_layers)),
            num_experts=0,
            tie_word_embeddings=True,
            use_cache=False,
        )
        self.model = Qwen3NextForCausalLM(config)

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        logits_BLV = self.model(input_ids=tokens_BL, use_cache=False).logits
        return cross_entropy(logits_BLV.float().transpose(1, 2), targets_BL)
