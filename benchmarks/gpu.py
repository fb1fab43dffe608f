"""`python -m benchmarks model --gpu`: the fused kernel against other attention, and a step of a 1.3B model.

B lanes, L queries, M memory rows, C = M + L keys, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.compare import Comparison
from pretrain.config.run import DataConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.model.attention_paths import (
    AttentionPath,
    DistanceTerms,
    WeightDropout,
    path_for,
    plain_attention,
)
from pretrain.model.dropout import DropoutStream
from pretrain.model.masks import Visibility
from pretrain.model.memory import Memory
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.groups import build_optimizer

FLASH_GOALS = {
    128: 1 / 2.0,
    64: 1 / 2.2,
}  # head width -> how fast compared with flash, which has no relative term
PLAIN_GOAL = 5.0
MEMORY_GOAL = 12.0
MFU_GOAL = 0.40
ROUNDS = 10


@dataclass(frozen=True)
class Shape:
    """One attention: B lanes, L queries behind M memory rows, N heads of width H."""

    B: int
    L: int
    M: int
    N: int
    H: int

    @property
    def name(self) -> str:
        return f"head width {self.H}, segment {self.L}, memory {self.M}, {self.N} heads, {self.B} lanes"


SHAPES = (Shape(B=4, L=2048, M=2048, N=16, H=128), Shape(B=4, L=2048, M=2048, N=32, H=64))
CHECKED = Shape(B=2, L=200, M=150, N=4, H=64)  # against float64


class AttentionInputs:
    """Random inputs of one shape with gradients, and the ways of computing attention from them."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        keys = shape.M + shape.L
        generator = torch.Generator(device).manual_seed(shape.L)

        def random(*sizes: int) -> Tensor:
            return (
                torch.randn(*sizes, device=device, generator=generator).to(dtype).requires_grad_()
            )

        self.query_BLNH = random(shape.B, shape.L, shape.N, shape.H)
        self.key_value_BC2NH = random(shape.B, keys, 2, shape.N, shape.H)
        self.position_CNH = random(keys, shape.N, shape.H)
        self.biases_NH = [random(shape.N, shape.H) for _ in range(2)]
        self.gradient_BLNH = random(shape.B, shape.L, shape.N, shape.H).detach()
        self._visibility = Visibility(
            num_queries=shape.L, num_keys=keys, dtype=dtype, device=device
        )

    @property
    def leaves(self) -> list[Tensor]:
        return [self.query_BLNH, self.key_value_BC2NH, self.position_CNH, *self.biases_NH]

    def relative(self, path: AttentionPath) -> Tensor:
        """The paper's attention [B, L, N, H] by one of the paths."""
        terms = DistanceTerms(
            position_CNH=self.position_CNH,
            content_bias_NH=self.biases_NH[0],
            position_bias_NH=self.biases_NH[1],
        )
        none = WeightDropout(rate=0.0, layer=0, stream=None)
        return path(self.query_BLNH, [self.key_value_BC2NH], terms, self._visibility, none)

    def without_positions(self) -> Tensor:
        """The same attention without its relative term, [B, L, N, H], by PyTorch; on a GPU by flash attention."""
        query, (key, value) = (
            self.query_BLNH.transpose(1, 2),
            self.key_value_BC2NH.permute(2, 0, 3, 1, 4),
        )
        on_gpu = query.device.type == "cuda"
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if on_gpu else nullcontext():
            mask = causal_lower_right(self.shape.L, self.shape.M + self.shape.L)
            return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    def forward_and_backward(self, attention: Callable[[], Tensor]) -> Callable[[], None]:
        """One whole call, ended when the device has done it."""

        def work() -> None:
            attention().backward(self.gradient_BLNH)
            for leaf in self.leaves:
                leaf.grad = None
            wait_for(self.query_BLNH.device)

        return work


def wait_for(device: torch.device) -> None:
    """Until the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attention_comparisons(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> Iterator[Comparison]:
    """Against flash attention without the relative term, and against plain operations with it."""
    inputs = AttentionInputs(shape, device, dtype)
    ours = inputs.forward_and_backward(
        lambda: inputs.relative(path_for("auto", device, dtype, shape.H))
    )
    yield Comparison(
        name=f"fused attention against flash without positions, {shape.name}",
        goal=FLASH_GOALS.get(shape.H, min(FLASH_GOALS.values())),
        baseline=inputs.forward_and_backward(inputs.without_positions),
        candidate=ours,
        rounds=ROUNDS,
    )
    yield Comparison(
        name=f"fused attention against plain operations, {shape.name}",
        goal=PLAIN_GOAL,
        baseline=inputs.forward_and_backward(lambda: inputs.relative(plain_attention)),
        candidate=ours,
        rounds=ROUNDS,
    )


def memory_ratio(shape: Shape, device: torch.device, dtype: torch.dtype) -> float:
    """How many times the memory of the fused path plain operations take at their peak, inputs not counted."""
    inputs = AttentionInputs(shape, device, dtype)

    def peak(path: AttentionPath) -> int:
        work = inputs.forward_and_backward(lambda: inputs.relative(path))
        work()  # the first call compiles
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before

    return peak(plain_attention) / peak(path_for("auto", device, dtype, shape.H))


def errors_against_float64(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> dict[str, tuple[float, float]]:
    """Relative errors (2-norm) of output and gradients: of the device's path, and of plain operations in `dtype`."""
    inputs = AttentionInputs(shape, device, dtype)
    exact = AttentionInputs(shape, device, torch.float64)
    with torch.no_grad():
        for mine, its in zip(exact.leaves, inputs.leaves, strict=True):
            mine.copy_(its)
        exact.gradient_BLNH.copy_(inputs.gradient_BLNH)
    expected = _output_and_gradients(exact, plain_attention)
    ours = _output_and_gradients(inputs, path_for("auto", device, dtype, shape.H))
    plain = _output_and_gradients(inputs, plain_attention)
    names = ("output", "query", "keys and values", "positions", "u", "v")
    return {
        name: (_relative_error(one, right), _relative_error(other, right))
        for name, right, one, other in zip(names, expected, ours, plain, strict=True)
    }


def _output_and_gradients(inputs: AttentionInputs, path: AttentionPath) -> list[Tensor]:
    output = inputs.relative(path)
    return [output.detach(), *torch.autograd.grad(output, inputs.leaves, inputs.gradient_BLNH)]


def _relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def large_run(lanes: int = 4) -> RunConfig:
    """The 1.3B model of the goals: 24 layers of width 2048, 16 heads, vocabulary 32,000, segment = memory = 2048."""
    model = ModelConfig(
        vocab_size=32_000,
        num_layers=24,
        d_model=2048,
        num_heads=16,
        memory_length=2048,
        norm_position="pre",
    )
    return RunConfig(model=model, data=DataConfig(lanes=lanes, segment_length=2048))


def training_step(run: RunConfig, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """One step with memory, gradient clipping and fused Adam; activations of the layers are recomputed."""
    model = TransformerXL(run.model, "full", "auto", logits_chunk_tokens=2048).to(device, dtype)
    optimizer = build_optimizer(model, OptimConfig())
    shape = (run.data.lanes, run.data.segment_length + 1)
    tokens_BT = torch.randint(
        run.model.vocab_size, shape, generator=torch.Generator().manual_seed(1)
    ).to(device)
    memory: list[Memory | None] = [None]

    def work() -> None:
        stream = (
            DropoutStream(seed=1, step=1, lanes=range(run.data.lanes))
            if run.model.dropout
            else None
        )
        nll_BL, memory[0] = model(tokens_BT[:, :-1], tokens_BT[:, 1:], memory[0], dropout=stream)
        nll_BL.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        wait_for(device)

    return work
