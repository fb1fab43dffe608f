"""Attention alone: our backward pass with several workspaces, and the time of PyTorch's kernels.

B lanes, L queries, M memory rows, C = M + L keys, N heads, G key heads, H head width.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.findings import Context, wait_for
from benchmarks.gpu.processes import INTERPRETER
from benchmarks.measure import in_turns, timed
from pretrain.model.attention_backends import (
    AttentionBackend,
    ScoreTerms,
    WeightDropout,
    fused_attention,
    sdpa_attention,
)
from pretrain.model.visibility import Visibility


@dataclass(frozen=True)
class Shape:
    """One attention: B lanes, L queries after M memory rows, N heads of width H, G key heads."""

    B: int
    L: int
    M: int
    N: int
    H: int
    G: int

    def __str__(self) -> str:
        sizes = f"segment {self.L}, memory {self.M}, {self.N} heads ({self.G}), {self.B} lanes"
        return f"head width {self.H}, {sizes}"


# The shape of a model of 1.3B parameters, one with grouped queries, and one with narrow heads.
SHAPES = (
    Shape(B=4, L=2048, M=2048, N=16, H=128, G=16),
    Shape(B=4, L=2048, M=2048, N=32, H=128, G=8),
    Shape(B=4, L=2048, M=2048, N=32, H=64, G=32),
)
DRY_SHAPES = (Shape(B=2, L=12, M=7, N=2, H=16, G=1),)
# Head width -> the most times that FlashAttention-2 takes, which has no relative term.
GOALS = {128: 2.0, 64: 1.6}
PROGRAMS = (160, 640, 2560, 1 << 20)  # of the keys' kernel in one workspace; the default is 640
OURS, FLASH = "ours", "FlashAttention-2"
Way = Callable[[], Tensor]


class AttentionInputs:
    """Random inputs of one shape with gradients, and the ways of computing attention from them."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        B, L, N, H, C = shape.B, shape.L, shape.N, shape.H, shape.M + shape.L
        generator = torch.Generator(device).manual_seed(L)

        def random(*sizes: int) -> Tensor:
            values = torch.randn(*sizes, device=device, generator=generator)
            return values.to(dtype).requires_grad_()

        self.query_BLNH = random(B, L, N, H)
        self.key_value_BC2GH = random(B, C, 2, shape.G, H)
        self.position_CNH = random(C, N, H)
        self.biases_NH = [random(N, H) for _ in range(2)]
        self.square_query_BNCH = random(B, N, C, H)
        # The output's gradient, by the number of queries.
        self.gradients = {rows: random(B, rows, N, H).detach() for rows in (L, C)}
        self._visibility = Visibility(num_queries=L, num_keys=C, dtype=dtype, device=device)
        self._mask = create_block_mask(
            lambda _b, _h, i, j: j <= i + shape.M, None, None, L, C, device=device.type
        )

    @property
    def leaves(self) -> list[Tensor]:
        return [self.query_BLNH, self.key_value_BC2GH, self.position_CNH, *self.biases_NH]

    def relative(self, path: AttentionBackend) -> Tensor:
        """Return the paper's attention [B, L, N, H] by one of the paths."""
        terms = ScoreTerms(
            position_CNH=self.position_CNH,
            content_bias_NH=self.biases_NH[0],
            position_bias_NH=self.biases_NH[1],
        )
        return self._by(path, terms)

    def without_positions(self) -> Tensor:
        """Return attention as a model with rope computes it, [B, L, N, H]."""
        return self._by(sdpa_attention, ScoreTerms())

    def _by(self, path: AttentionBackend, terms: ScoreTerms) -> Tensor:
        no_dropout = WeightDropout(rate=0.0, layer=0, stream=None)
        return path(self.query_BLNH, [self.key_value_BC2GH], terms, self._visibility, no_dropout)

    def square(self, backend: SDPBackend) -> Tensor:
        """Return attention [B, C, N, H] of C queries and C keys: all kernels have this mask."""
        key_BGCH, value_BGCH = self.key_value_BC2GH.permute(2, 0, 3, 1, 4)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                self.square_query_BNCH, key_BGCH, value_BGCH, is_causal=True, enable_gqa=True
            ).transpose(1, 2)

    def flex(self, attend: Callable[..., Tensor], is_relative: bool) -> Tensor:
        """Return attention [B, L, N, H] by FlexAttention, without or with the relative term."""
        u_NH, v_NH = self.biases_NH
        query_BLNH, L, C = self.query_BLNH, self.shape.L, len(self.position_CNH)
        score_mod: Callable[..., Tensor] | None = None
        if is_relative:
            query_BLNH = self.query_BLNH + u_NH
            products_BNLC = torch.einsum(
                "blnh,cnh->bnlc", (self.query_BLNH + v_NH) * self.shape.H**-0.5, self.position_CNH
            )

            def with_position(score, b, n, i, j):
                return score + products_BNLC[b, n, i, (L - 1 - i + j) % C]

            score_mod = with_position

        key_BGCH, value_BGCH = self.key_value_BC2GH.permute(2, 0, 3, 1, 4)
        return attend(
            query_BLNH.transpose(1, 2), key_BGCH, value_BGCH, score_mod=score_mod,
            block_mask=self._mask, enable_gqa=True,
        ).transpose(1, 2)  # fmt: skip

    def forward_and_backward(self, attention: Way) -> Callable[[], None]:
        """Return a function that runs both passes and waits for the device."""

        def work() -> None:
            output = attention()
            output.backward(self.gradients[output.shape[1]])
            for leaf in (*self.leaves, self.square_query_BNCH):
                leaf.grad = None
            wait_for(self.query_BLNH.device)

        return work

    def forward(self, attention: Way) -> Callable[[], None]:
        """Return a function that runs the forward pass and waits for the device."""
        return lambda: (attention(), wait_for(self.query_BLNH.device))[1]


def run(context: Context) -> None:
    """Time our backward pass with each workspace, then all ways, shape by shape."""
    if context.is_dry:
        os.environ[INTERPRETER] = "1"  # read when the kernels are imported
    for shape in context.size(SHAPES, DRY_SHAPES):
        inputs = AttentionInputs(shape, context.device, context.dtype)
        for programs in PROGRAMS:
            context.add(
                f"{programs} programs, {shape}", **workspace_values(inputs, programs, context)
            )
        compare(inputs, context)


def workspace_values(inputs: AttentionInputs, programs: int, context: Context) -> dict[str, float]:
    """Return the time of our backward pass if `programs` fill a device, and its workspace."""
    from pretrain.kernels.triton import tiling
    from pretrain.kernels.triton.attention import fused_relative_attention

    built_in, tiling.FILLING_PROGRAMS = tiling.FILLING_PROGRAMS, programs
    key_value = inputs.key_value_BC2GH.unbind(2)
    arguments = (inputs.query_BLNH, *key_value, inputs.position_CNH, *inputs.biases_NH)
    output = fused_relative_attention(*arguments, workspace_bytes=16 << 30)
    gradient = inputs.gradients[inputs.shape.L]

    def backward() -> None:
        torch.autograd.grad(output, inputs.leaves, gradient, retain_graph=True)
        wait_for(context.device)

    backward()  # compiles
    on_gpu = context.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ms = milliseconds({OURS: backward}, context.size(10, 1))[OURS]
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    tiling.FILLING_PROGRAMS = built_in
    return {"backward_ms": ms, "peak_mib": peak / 2**20}


def compare(inputs: AttentionInputs, context: Context) -> None:
    """Report the times of all ways; scale square ones to the shape's pairs of query and key."""
    shape = inputs.shape
    working, refused = runnable(ways(inputs, context.is_dry), inputs)
    C, rounds = shape.M + shape.L, context.size(10, 1)
    pairs = (shape.L * shape.M + shape.L * (shape.L + 1) / 2) / (C * (C + 1) / 2)
    times = {}
    for name, passes in {
        "forward_ms": inputs.forward,
        "both_ms": inputs.forward_and_backward,
    }.items():
        by_way = {way: passes(attention) for way, attention in working.items()}
        times[name] = {
            way: ms * (pairs if way.endswith("square") else 1)
            for way, ms in milliseconds(by_way, rounds).items()
        }
    ratio = times["both_ms"][OURS] / times["both_ms"][FLASH]
    context.add(str(shape), over_flash=ratio, goal=GOALS.get(shape.H), **times, refused=refused)


def ways(inputs: AttentionInputs, is_dry: bool = False) -> dict[str, Way]:
    """Return the ways to compute attention, by name; only two of them have the relative term."""
    # Without the compiler, which takes most of a minute on a CPU.
    flex = flex_attention if is_dry else torch.compile(flex_attention, dynamic=False)
    return {
        OURS: partial(inputs.relative, fused_attention),
        FLASH: inputs.without_positions,
        "FlashAttention-2, square": partial(inputs.square, SDPBackend.FLASH_ATTENTION),
        "cuDNN, square": partial(inputs.square, SDPBackend.CUDNN_ATTENTION),
        "FlexAttention": partial(inputs.flex, flex, is_relative=False),
        "FlexAttention, relative": partial(inputs.flex, flex, is_relative=True),
    }


def runnable(
    ways: dict[str, Way], inputs: AttentionInputs
) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the ways that run here, and for the others the reason that PyTorch gives."""
    reasons: dict[str, str] = {}
    for name, way in ways.items():
        try:
            inputs.forward_and_backward(way)()
        except Exception as error:  # PyTorch's compiler raises many kinds
            if name in (OURS, FLASH):
                raise
            reasons[name] = f"{type(error).__name__}: {error}"[:200]
    return {name: way for name, way in ways.items() if name not in reasons}, reasons


def milliseconds(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median time of each, measured in turns."""
    seconds = in_turns({name: timed(work) for name, work in works.items()}, rounds)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
