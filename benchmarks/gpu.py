"""`python -m benchmarks gpu`: the fused kernel against other attention, and a step of a 1.3B model.

B lanes, L queries, M memory rows, C = M + L keys, N heads, H head width.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measure import (
    Benchmark,
    Comparison,
    Measurement,
    Section,
    add_report_arguments,
    run_benchmarks,
    timed,
)
from benchmarks.model.training import training_step
from data_pipeline.errors import UserError
from pretrain.config.run import DataConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.costs.devices import DEVICES
from pretrain.costs.flops import cost_of
from pretrain.costs.throughput import measured_matmul_peak
from pretrain.model.attention_paths import (
    AttentionPath,
    DistanceTerms,
    Visibility,
    WeightDropout,
    path_for,
    plain_attention,
)
from pretrain.model.transformer_xl import TransformerXL

# Head width -> how fast compared with flash attention, which has no relative term.
FLASH_GOALS = {128: 1 / 2.0, 64: 1 / 2.2}
PLAIN_GOAL = 5.0
MEMORY_GOAL = 12.0
MFU_GOAL = 0.40
ROUNDS = 10
STEPS, WARM_UP = 6, 2  # of the large model: kernels are compiled and the memory fills in two
ERROR_MARGIN = 1.5  # times the error of plain operations in the same precision


@dataclass(frozen=True)
class Shape:
    """One attention: B lanes, L queries after M memory rows, N heads of width H."""

    B: int
    L: int
    M: int
    N: int
    H: int

    def __str__(self) -> str:
        sizes = f"segment {self.L}, memory {self.M}, {self.N} heads, {self.B} lanes"
        return f"head width {self.H}, {sizes}"


SHAPES = (Shape(B=4, L=2048, M=2048, N=16, H=128), Shape(B=4, L=2048, M=2048, N=32, H=64))
CHECKED = Shape(B=2, L=200, M=150, N=4, H=64)  # against float64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_report_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; return 0 if every goal is reached within its tolerance."""
    if not torch.cuda.is_available():
        raise UserError(
            "found no CUDA device; run 'make bench-gpu' on a machine with an NVIDIA GPU"
        )
    device, dtype = torch.device("cuda"), torch.bfloat16
    name = torch.cuda.get_device_name(device)
    peak = measured_matmul_peak(device, dtype, seconds=1.0)
    version = torch.__version__
    heading = f"{name}, torch {version}; matrix products reach {peak / 1e12:.0f} TFLOP/s"
    return run_benchmarks(
        arguments, heading, benchmarks(device, dtype, promised_flops(name) or peak)
    )


def benchmarks(device: torch.device, dtype: torch.dtype, peak: float) -> list[Benchmark]:
    """Return all benchmarks; `peak` is the FLOP/s that MFU is a fraction of."""
    memory = [
        Section(f"device memory of attention, {shape}", partial(_memory, shape, device, dtype))
        for shape in SHAPES
    ]
    return [
        Section("errors against float64", lambda _: errors(CHECKED, device, dtype)),
        *(each for shape in SHAPES for each in attention_comparisons(shape, device, dtype)),
        *memory,
        Section("training step of a 1.3B model", lambda _: [step_mfu(device, dtype, peak)]),
    ]


def promised_flops(device_name: str) -> float | None:
    """Return the data sheet's dense bf16 rate of a GPU of this name, if known."""
    return next((device.bf16 for name, device in DEVICES.items() if name in device_name), None)


class AttentionInputs:
    """Random inputs of one shape with gradients, and the ways of computing attention from them."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        keys = shape.M + shape.L
        generator = torch.Generator(device).manual_seed(shape.L)

        def random(*sizes: int) -> Tensor:
            values = torch.randn(*sizes, device=device, generator=generator)
            return values.to(dtype).requires_grad_()

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
        """Return the paper's attention [B, L, N, H] by one of the paths."""
        terms = DistanceTerms(
            position_CNH=self.position_CNH,
            content_bias_NH=self.biases_NH[0],
            position_bias_NH=self.biases_NH[1],
        )
        none = WeightDropout(rate=0.0, layer=0, stream=None)
        return path(self.query_BLNH, [self.key_value_BC2NH], terms, self._visibility, none)

    def without_positions(self) -> Tensor:
        """Return attention without its relative term, [B, L, N, H]: flash attention on a GPU."""
        query_BNLH = self.query_BLNH.transpose(1, 2)
        key_BNCH, value_BNCH = self.key_value_BC2NH.permute(2, 0, 3, 1, 4)
        on_gpu = query_BNLH.device.type == "cuda"
        mask = causal_lower_right(self.shape.L, self.shape.M + self.shape.L)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if on_gpu else nullcontext():
            return scaled_dot_product_attention(
                query_BNLH, key_BNCH, value_BNCH, attn_mask=mask
            ).transpose(1, 2)

    def forward_and_backward(self, attention: Callable[[], Tensor]) -> Callable[[], None]:
        """Return a function that runs both passes and waits for the device."""

        def work() -> None:
            attention().backward(self.gradient_BLNH)
            for leaf in self.leaves:
                leaf.grad = None
            _wait_for(self.query_BLNH.device)

        return work


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attention_comparisons(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> Iterator[Comparison]:
    """Yield ours against flash attention without the relative term and against plain operations."""
    inputs = AttentionInputs(shape, device, dtype)
    fused = path_for("auto", device, dtype, shape.H)
    ours = timed(inputs.forward_and_backward(lambda: inputs.relative(fused)))
    yield Comparison(
        name=f"fused attention against flash without positions, {shape}",
        goal=FLASH_GOALS.get(shape.H, min(FLASH_GOALS.values())),
        baseline=timed(inputs.forward_and_backward(inputs.without_positions)),
        candidate=ours,
        rounds=ROUNDS,
    )
    yield Comparison(
        name=f"fused attention against plain operations, {shape}",
        goal=PLAIN_GOAL,
        baseline=timed(inputs.forward_and_backward(lambda: inputs.relative(plain_attention))),
        candidate=ours,
        rounds=ROUNDS,
    )


def _memory(
    shape: Shape, device: torch.device, dtype: torch.dtype, _: Path
) -> Iterator[Measurement]:
    """Yield the peak device memory of plain operations over the fused path's, without inputs."""
    inputs = AttentionInputs(shape, device, dtype)

    def peak(path: AttentionPath) -> int:
        work = inputs.forward_and_backward(lambda: inputs.relative(path))
        work()  # the first call compiles
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before

    ratio = peak(plain_attention) / peak(path_for("auto", device, dtype, shape.H))
    name = f"device memory of plain operations over the fused path's, {shape}"
    yield Measurement(name, [ratio], at_least=MEMORY_GOAL)


def errors(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Measurement]:
    """Yield relative errors (2-norm) of the device's path against float64, of output and gradients.

    None may be much larger than that of plain operations in the same precision.
    """
    inputs = AttentionInputs(shape, device, dtype)
    exact = AttentionInputs(shape, device, torch.float64)
    with torch.no_grad():
        for leaf, rounded in zip(exact.leaves, inputs.leaves, strict=True):
            leaf.copy_(rounded)
        exact.gradient_BLNH.copy_(inputs.gradient_BLNH)
    expected = _output_and_gradients(exact, plain_attention)
    ours = _output_and_gradients(inputs, path_for("auto", device, dtype, shape.H))
    plain = _output_and_gradients(inputs, plain_attention)
    names = ("output", "query", "keys and values", "positions", "u", "v")
    for name, right, *found in zip(names, expected, ours, plain, strict=True):
        error, plain_error = (
            float((each.double() - right).norm() / right.norm()) for each in found
        )
        yield Measurement(
            f"error of {name} against float64, {shape}",
            [error],
            unit="",
            at_most=ERROR_MARGIN * plain_error,
            tolerance=0.0,
            detail=f"plain operations {plain_error:.1e}",
        )


def _output_and_gradients(inputs: AttentionInputs, path: AttentionPath) -> list[Tensor]:
    output = inputs.relative(path)
    return [output.detach(), *torch.autograd.grad(output, inputs.leaves, inputs.gradient_BLNH)]


def large_run(lanes: int = 4) -> RunConfig:
    """Return 24 layers of width 2048, 16 heads, vocabulary 32,000, segment = memory = 2048."""
    model = ModelConfig(
        vocab_size=32_000,
        num_layers=24,
        d_model=2048,
        num_heads=16,
        memory_length=2048,
        norm_position="pre",
    )
    return RunConfig(model=model, data=DataConfig(lanes=lanes, segment_length=2048))


def large_step(run: RunConfig, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that trains one step; the layers' activations are recomputed."""
    model = TransformerXL(run.model, "full", "auto", logits_chunk_tokens=2048).to(device, dtype)
    step = training_step(model, OptimConfig())
    shape = (run.data.lanes, run.data.segment_length + 1)
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(run.model.vocab_size, shape, generator=generator).to(device)

    def work() -> None:
        step(tokens_BT)
        _wait_for(device)

    return work


def step_mfu(device: torch.device, dtype: torch.dtype, peak: float) -> Measurement:
    """Return the MFU of a training step of the large model."""
    run = large_run()
    step, cost = timed(large_step(run, device, dtype)), cost_of(run)
    seconds = [step() for _ in range(STEPS)][WARM_UP:]
    median = statistics.median(seconds)
    return Measurement(
        f"MFU of a training step, {cost.parameters / 1e9:.2f}B parameters",
        [cost.flops_per_token * cost.tokens_per_step / each / peak for each in seconds],
        unit="",
        at_least=MFU_GOAL,
        detail=f"{median:.3f} s, {cost.tokens_per_step / median:,.0f} tokens/s",
    )
