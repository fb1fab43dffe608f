"""The yardstick: a plain GPT in PyTorch of a model's size, with today's parts, and its training.

Weights are float32 under autocast, attention is `scaled_dot_product_attention` over one causal
context, and each block is compiled if the run says so. Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.training import lane_stream
from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World
from pretrain.engines.engine import Scorer, batch_tensors
from pretrain.model.memory import Memory
from pretrain.optim.schedule import learning_rate_at


def yardstick(run: RunConfig) -> RunConfig:
    """Return the GPT's run: no memory, as many tokens a step, and as many keys per query.

    A query of a segment L sees M rows of memory and on average (L + 1) / 2 keys of its segment: as
    many as in a causal context of 2 M + L.
    """
    context = 2 * run.model.longest_memory + run.data.segment_length
    data = replace(run.data, lanes=run.tokens_per_step // context, segment_length=context)
    assert data.lanes * context == run.tokens_per_step, (data.lanes, context)
    return replace(run, model=replace(run.model, memory_length=0), data=data)


class Block(nn.Module):
    """Attention with rope and grouped queries, then SwiGLU, each after an RMSNorm."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        D, H, inner = model.d_model, model.head_width, model.inner_width
        self.sizes = [model.num_heads, model.key_heads, model.key_heads]
        self.head_width = H
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.query_norm, self.key_norm = nn.RMSNorm(H), nn.RMSNorm(H)
        self.projections = nn.Linear(D, sum(self.sizes) * H, bias=False)
        self.output = nn.Linear(self.sizes[0] * H, D, bias=False)
        self.gate_and_up = nn.Linear(D, 2 * inner, bias=False)
        self.down = nn.Linear(inner, D, bias=False)

    def forward(self, hidden_BLD: Tensor, angles_LX: Tensor) -> Tensor:
        projected = self.projections(self.attention_norm(hidden_BLD))
        heads = projected.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        query_BNLH, key_BGLH, value_BGLH = heads.split(self.sizes, dim=1)
        read_BNLH = F.scaled_dot_product_attention(
            rotated(self.query_norm(query_BNLH), angles_LX).to(value_BGLH.dtype),
            rotated(self.key_norm(key_BGLH), angles_LX).to(value_BGLH.dtype),
            value_BGLH, is_causal=True, enable_gqa=True,
        )  # fmt: skip
        hidden_BLD = hidden_BLD + self.output(read_BNLH.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.feed_forward_norm(hidden_BLD)).chunk(2, dim=-1)
        return hidden_BLD + self.down(F.silu(gate) * up)


def rotated(vectors: Tensor, angles_LX: Tensor) -> Tensor:
    """Return the vectors [..., L, H], each pair of halves turned by its position's angle."""
    left, right = vectors.chunk(2, dim=-1)
    cos, sin = angles_LX.cos(), angles_LX.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class GPT(nn.Module):
    """Tokens and targets [B, L] to the NLL [B, L]; input and output embeddings are one."""

    def __init__(self, model: ModelConfig, compiles: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.d_model)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        H = model.head_width
        self.rates_X = 10_000 ** (-torch.arange(0, H, 2) / H)
        self._output = torch.compile(self._nll_BL) if compiles else self._nll_BL
        if compiles:  # one block's code serves all
            for block in self.blocks:
                block.compile()

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        hidden_BLD = self.embedding(tokens_BL)
        positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        angles_LX = positions_L[:, None] * self.rates_X.to(tokens_BL.device)
        for block in self.blocks:
            hidden_BLD = block(hidden_BLD, angles_LX)
        return self._output(hidden_BLD, targets_BL)

    def _nll_BL(self, hidden_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        logits_BLV = F.linear(self.norm(hidden_BLD), self.embedding.weight)
        return F.cross_entropy(logits_BLV.transpose(1, 2).float(), targets_BL, reduction="none")


class GptTrainer(Scorer):
    """Trains a GPT on the lanes of a run; the part of a `Trainer` that is measured."""

    def __init__(self, run: RunConfig, corpus: Path, world: World) -> None:
        torch.manual_seed(run.seed)
        self.run, self.world = run, world
        self.module = GPT(run.model, run.engine.compiles).to(world.device)
        self.batches: Iterator[SegmentBatch] = lane_stream(run, corpus)
        optim, self._step = run.optim, 0
        self._optimizer = torch.optim.AdamW(
            self.module.parameters(), betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )

    def step(self) -> Tensor:
        """Train one step; returns its mean loss, on the device."""
        loss = self._nll_BL(next(self.batches)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.run.optim.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self.run.optim, self._step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1
        return loss.detach()

    @torch.no_grad()
    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int, num_tokens: int = 0
    ) -> tuple[Tensor, Memory]:
        """Return the NLL [B, L] of contexts without memory, as `evaluate` asks a scorer."""
        assert not memory
        assert not memory_length
        return self._nll_BL(batch), ()

    def _nll_BL(self, batch: SegmentBatch) -> Tensor:
        device = self.world.device
        tokens_BL, targets_BL, _ = batch_tensors(batch, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return self.module(tokens_BL, targets_BL)
