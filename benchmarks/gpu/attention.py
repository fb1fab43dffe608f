"""One attention with its options and random inputs, by every path, and its errors against float64.

B lanes, L queries, M memory rows, C = M + L keys, N heads, G key heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.context import wait_for
from pretrain.config.model import ModelConfig
from pretrain.kernels.triton.settings import DROPOUT_LEVELS
from pretrain.model.attention_paths import (
    AttentionPath,
    ScoreTerms,
    Visibility,
    WeightDropout,
    path_for,
    plain_attention,
    tiled_attention,
)
from pretrain.model.dropout import DropoutStream, Site
from tests.helpers.exact_attention import kept_weights

ERROR_MARGIN = 1.5  # times the error of plain operations in the same precision
NAMES = ("output", "query", "keys and values", "positions", "u", "v")


@dataclass(frozen=True)
class Shape:
    """One attention: B lanes, L queries after M memory rows, N heads of width H, and options."""

    B: int
    L: int
    M: int
    N: int
    H: int
    G: int = 0  # key heads; 0: as many as heads
    window: int = 0  # same_length; 0: all keys
    num_documents: int = 1  # of a lane; from 2 on they are isolated
    dropout: float = 0.0
    adds_distance_bias: bool = False  # instead of the paper's encodings, as alibi and t5 do

    def __str__(self) -> str:
        sizes = f"segment {self.L}, memory {self.M}, {self.N} heads, {self.B} lanes"
        return f"head width {self.H}, {sizes}"


def path_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> AttentionPath:
    """Return how a model with relative positions attends there: on a GPU in the fused kernel."""
    return path_for("auto", ModelConfig(d_head=shape.H), device, dtype)


class AttentionInputs:
    """Random inputs of one shape with gradients, and the ways of computing attention from them."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        masks: type[DropoutStream] = DropoutStream,
    ) -> None:
        self.shape = shape
        keys = shape.M + shape.L
        generator = torch.Generator(device).manual_seed(shape.L)

        def random(*sizes: int) -> Tensor:
            values = torch.randn(*sizes, device=device, generator=generator)
            return values.to(dtype).requires_grad_()

        self.query_BLNH = random(shape.B, shape.L, shape.N, shape.H)
        self.key_value_BC2GH = random(shape.B, keys, 2, shape.G or shape.N, shape.H)
        self.position_CNH = random(keys, shape.N, shape.H)
        self.biases_NH = [random(shape.N, shape.H) for _ in range(2)]
        self.distance_bias_CN = random(keys, shape.N)
        self.gradient_BLNH = random(shape.B, shape.L, shape.N, shape.H).detach()
        lengths = torch.arange(keys, device=device, dtype=torch.int32)
        documents_BC = (lengths * shape.num_documents // keys).expand(shape.B, keys).contiguous()
        self._visibility = Visibility(
            num_queries=shape.L,
            num_keys=keys,
            window=shape.window,
            documents_BC=documents_BC if shape.num_documents > 1 else None,
            dtype=dtype,
            device=device,
        )
        stream = masks(seed=1, step=1, lanes=range(shape.B)) if shape.dropout else None
        self._dropout = WeightDropout(rate=shape.dropout, layer=0, stream=stream)

    @property
    def leaves(self) -> list[Tensor]:
        inputs = [self.query_BLNH, self.key_value_BC2GH]
        if self.shape.adds_distance_bias:
            return [*inputs, self.distance_bias_CN]
        return [*inputs, self.position_CNH, *self.biases_NH]

    def relative(self, path: AttentionPath) -> Tensor:
        """Return the paper's attention [B, L, N, H] by one of the paths."""
        if self.shape.adds_distance_bias:
            terms = ScoreTerms(distance_bias_CN=self.distance_bias_CN)
        else:
            terms = ScoreTerms(
                position_CNH=self.position_CNH,
                content_bias_NH=self.biases_NH[0],
                position_bias_NH=self.biases_NH[1],
            )
        parts = [self.key_value_BC2GH]
        return path(self.query_BLNH, parts, terms, self._visibility, self._dropout)

    def without_positions(self, backend: SDPBackend = SDPBackend.MATH) -> Tensor:
        """Return attention without its relative term, [B, L, N, H], as PyTorch's kernels do it."""
        query_BNLH = self.query_BLNH.transpose(1, 2)
        key_BNCH, value_BNCH = self.key_value_BC2GH.permute(2, 0, 3, 1, 4)
        mask = causal_lower_right(self.shape.L, self.shape.M + self.shape.L)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                query_BNLH, key_BNCH, value_BNCH, attn_mask=mask
            ).transpose(1, 2)

    def forward(self, attention: Callable[[], Tensor]) -> Callable[[], None]:
        """Return a function that runs the forward pass and waits for the device."""

        def work() -> None:
            attention()
            wait_for(self.query_BLNH.device)

        return work

    def forward_and_backward(self, attention: Callable[[], Tensor]) -> Callable[[], None]:
        """Return a function that runs both passes and waits for the device."""

        def work() -> None:
            attention().backward(self.gradient_BLNH)
            for leaf in self.leaves:
                leaf.grad = None
            wait_for(self.query_BLNH.device)

        return work


def errors(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Return relative errors (2-norm) of the device's path against float64, by tensor.

    None may be much larger than that of plain operations in the same precision.
    """
    path = path_of(shape, device, dtype)
    masks = DropoutStream if path in (plain_attention, tiled_attention) else FusedMasks
    inputs = AttentionInputs(shape, device, dtype, masks)
    exact = AttentionInputs(shape, device, torch.float64, masks)
    with torch.no_grad():
        for leaf, rounded in zip(exact.leaves, inputs.leaves, strict=True):
            leaf.copy_(rounded)
        exact.gradient_BLNH.copy_(inputs.gradient_BLNH)
    expected = output_and_gradients(exact, plain_attention)
    ours = output_and_gradients(inputs, path)
    plain = output_and_gradients(inputs, plain_attention)
    names = (*NAMES[:3], "distance bias") if shape.adds_distance_bias else NAMES
    found = {}
    for name, right, *both in zip(names, expected, ours, plain, strict=True):
        error, plain_error = (float((x.double() - right).norm() / right.norm()) for x in both)
        passed = error <= ERROR_MARGIN * plain_error
        found[name] = {"passed": passed, "error": error, "plain": plain_error}
    return found


class FusedMasks(DropoutStream):
    """Drops, by plain operations, the attention weights that the fused kernels drop."""

    def drop(
        self, values: Tensor, rate: float, site: Site, layer: int = 0, lane_axis: int = 0
    ) -> Tensor:
        """Return the weights [N, B, L, C] without those that the kernels drop, rescaled."""
        keys_B = self.lane_keys(site, layer, values.device)
        threshold = round(rate * DROPOUT_LEVELS)
        N, _, L, C = values.shape
        keep_BNLC = kept_weights(keys_B.tolist(), N, L, C, threshold).to(values)
        return values * keep_BNLC.movedim(0, lane_axis) / (1 - threshold / DROPOUT_LEVELS)


def output_and_gradients(inputs: AttentionInputs, path: AttentionPath) -> list[Tensor]:
    """Return the output, and the gradients of `inputs.leaves`."""
    output = inputs.relative(path)
    return [output.detach(), *torch.autograd.grad(output, inputs.leaves, inputs.gradient_BLNH)]
