"""Arguments, grids and outputs of the fused kernels, and the sums that complete the gradients.

Letters of shapes as in `pretrain.model`; X are tiles or shares of the lanes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.kernels.triton.backward_keys import content_bias_kernel, key_gradient_kernel
from pretrain.kernels.triton.backward_positions import position_gradient_kernel
from pretrain.kernels.triton.backward_queries import query_gradient_kernel
from pretrain.kernels.triton.forward import forward_kernel
from pretrain.kernels.triton.settings import Tile, Tiles, Variant

ENOUGH_PROGRAMS = 264  # two for each multiprocessor of the largest GPU the tiles are chosen for
SUM_TILE = Tile(16, 64)  # of the kernel that only sums


class Inputs(NamedTuple):
    """The differentiable arguments; gradients and flags for them have the same order."""

    query_BLNH: Tensor
    key_BCGH: Tensor
    value_BCGH: Tensor
    position_CNH: Tensor | None
    content_bias_NH: Tensor | None
    position_bias_NH: Tensor | None
    key_bias_BNC: Tensor | None
    distance_bias_CN: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a call that have no gradient."""

    window: int
    first_keys_BL: Tensor | None  # the first key each query sees
    query_ends_BC: Tensor | None  # the end of the queries that see each key
    dropout_keys_B: Tensor | None
    drop_threshold: int
    deterministic: bool
    tiles: Tiles


class Call:
    """The sizes of a call, its variant of the kernels, and the arguments that all kernels take."""

    def __init__(self, inputs: Inputs, options: Options) -> None:
        self.inputs, self.options = inputs, options
        self.B, self.L, self.N, self.H = inputs.query_BLNH.shape
        self.C, self.G = inputs.key_BCGH.shape[1:3]
        self.arguments = self._arguments()

    def _arguments(self) -> dict[str, Any]:
        query, key, value, position, u, v, key_bias, distance_bias = self.inputs
        scale = self.variant(SUM_TILE).scale
        # Added here, u and v cost little. In the kernels they would break the direct path from
        # memory to the tensor cores.
        content_query = (query if u is None else (query + u).to(query.dtype)).contiguous()
        options = self.options

        def present(tensor: Tensor | None) -> Tensor:
            return content_query if tensor is None else tensor  # no kernel reads an absent one

        return {
            "content_queries": content_query,
            "position_queries": present(
                None if v is None else (query + v).to(query.dtype).contiguous()
            ),
            "keys": key,
            "values": value,
            "positions": present(position),
            # The kernels add biases before they scale.
            "key_biases": present(
                None if key_bias is None else (key_bias.float() / scale).contiguous()
            ),
            "distance_biases": present(
                None if distance_bias is None else (distance_bias.float().T / scale).contiguous()
            ),
            "first_keys": present(options.first_keys_BL),
            "dropout_keys": present(options.dropout_keys_B),
            "key_lane": key.stride(0),
            "value_lane": value.stride(0),
            "L": self.L,
            "M": self.C - self.L,
            "window": options.window,
        }

    def variant(self, tile: Tile, adds_positions: bool = False) -> Variant:
        return Variant(
            num_heads=self.N,
            num_groups=self.G,
            head_width=self.H,
            key_row=self.inputs.key_BCGH.stride(1),
            key_head=self.inputs.key_BCGH.stride(2),
            value_row=self.inputs.value_BCGH.stride(1),
            value_head=self.inputs.value_BCGH.stride(2),
            rows=tile.rows,
            columns=tile.columns,
            has_position=self.inputs.position_CNH is not None,
            has_starts=self.options.first_keys_BL is not None,
            has_key_bias=self.inputs.key_bias_BNC is not None,
            has_distance_bias=self.inputs.distance_bias_CN is not None,
            drop_threshold=self.options.drop_threshold,
            adds_positions=adds_positions,
            precision="ieee" if self.inputs.query_BLNH.dtype == torch.float32 else "tf32",
        )

    def launch(
        self,
        kernel: Any,
        programs: int,
        tile: Tile,
        *,
        adds_positions: bool = False,
        **outputs: Any,
    ) -> None:
        """Run `kernel` on the shared arguments and its own."""
        with self._device():
            kernel[(programs,)](
                **self.arguments,
                **outputs,
                VARIANT=self.variant(tile, adds_positions),
                num_warps=tile.warps,
                num_stages=tile.stages,
            )

    def sum_keys(self, score_sums_BNC: Tensor) -> Tensor:
        """Return the sum over lanes and keys of the keys weighted with `score_sums_BNC`: [N, H]."""
        num_tiles = cdiv(self.C, SUM_TILE.columns)
        sums_BNXH = self.float32(self.B, self.N, num_tiles, self.variant(SUM_TILE).padded_width)
        key = self.inputs.key_BCGH
        arguments = (key, score_sums_BNC, sums_BNXH, key.stride(0), self.C)
        with self._device():
            grid = (num_tiles * self.B * self.N,)
            content_bias_kernel[grid](*arguments, VARIANT=self.variant(SUM_TILE))
        return sums_BNXH.sum((0, 2))[:, : self.H]

    def float32(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.inputs.query_BLNH.device)

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        # Triton launches on the current device, which may not be that of the tensors.
        device = self.inputs.query_BLNH.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launch_forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output [B, L, N, H] and log2 of the softmax's denominators [B, N, L]."""
    call = Call(inputs, options)
    tile = options.tiles.forward
    output_BLNH = inputs.query_BLNH.new_empty(inputs.query_BLNH.shape)
    log_sums_BNL = call.float32(call.B, call.N, call.L)
    programs = cdiv(call.L, tile.rows) * call.B * call.N
    call.launch(forward_kernel, programs, tile, outputs=output_BLNH, log_sums=log_sums_BNL)
    return output_BLNH, log_sums_BNL


def launch_backward(
    inputs: Inputs,
    options: Options,
    output_BLNH: Tensor,
    log_sums_BNL: Tensor,
    output_gradient_BLNH: Tensor,
    *,
    needs_position: bool,
    needs_distance_bias: bool,
) -> Inputs:
    """Return the gradients of all inputs; of positions and distance biases only if needed."""
    call = Call(inputs, options)
    call.arguments.update(
        output_gradients=output_gradient_BLNH,
        log_sums=log_sums_BNL,
        deltas=torch.empty_like(log_sums_BNL),
    )
    # The kernel of the queries can add the positions' gradient atomically. The kernel for positions
    # is needed for a fixed order, and for distance biases, which it sums on the way.
    adds_positions = needs_position and not needs_distance_bias and not options.deterministic
    query_gradient, query_sum_NH, position_gradient = _launch_queries(
        call, output_BLNH, adds_positions
    )
    key_gradient, value_gradient, score_sums_BNC = _launch_keys(call)
    distance_bias_gradient = None
    if needs_distance_bias or (needs_position and not adds_positions):
        position_gradient, distance_bias_gradient = _launch_positions(call)
    u_gradient = v_gradient = None
    if inputs.content_bias_NH is not None:
        u_gradient = call.sum_keys(score_sums_BNC)
        # The gradient of the queries, summed, is that of u (through keys) plus that of v.
        v_gradient = query_sum_NH - u_gradient
    relative = (position_gradient, u_gradient, v_gradient)
    biases = (score_sums_BNC, distance_bias_gradient)
    gradients = Inputs(query_gradient, key_gradient, value_gradient, *relative, *biases)
    return Inputs(
        *(_like(gradient, argument) for gradient, argument in zip(gradients, inputs, strict=True))
    )


def _launch_queries(
    call: Call, output_BLNH: Tensor, adds_positions: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradient of the queries, its sum [N, H], and that of the positions if added."""
    tile = call.options.tiles.query_gradient
    num_tiles = cdiv(call.L, tile.rows)
    gradient_BLNH = torch.empty_like(output_BLNH)
    sums_BNXH = call.float32(call.B, call.N, num_tiles, call.variant(tile).padded_width)
    position_gradient_CNH = call.float32(call.C, call.N, call.H).zero_() if adds_positions else None
    call.launch(
        query_gradient_kernel,
        num_tiles * call.B * call.N,
        tile,
        adds_positions=adds_positions,
        outputs=output_BLNH,
        query_gradients=gradient_BLNH,
        query_sums=sums_BNXH,
        position_gradients=sums_BNXH if position_gradient_CNH is None else position_gradient_CNH,
    )
    return gradient_BLNH, sums_BNXH.sum((0, 2))[:, : call.H], position_gradient_CNH


def _launch_keys(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of keys and values, and the sums of score gradients [B, N, C]."""
    tile = call.options.tiles.key_gradient
    key = call.inputs.key_BCGH
    key_gradient_BCGH, value_gradient_BCGH = key.new_empty(key.shape), key.new_empty(key.shape)
    score_sums_BNC = call.float32(call.B, call.N, call.C)
    query_ends_BC = call.options.query_ends_BC
    call.launch(
        key_gradient_kernel,
        cdiv(call.C, tile.columns) * call.B * call.G,
        tile,
        query_ends=key if query_ends_BC is None else query_ends_BC,
        key_gradients=key_gradient_BCGH,
        value_gradients=value_gradient_BCGH,
        score_sums=score_sums_BNC,
    )
    return key_gradient_BCGH, value_gradient_BCGH, score_sums_BNC


def _launch_positions(call: Call) -> tuple[Tensor, Tensor]:
    """Return the gradients of positions and distance biases, summed over shares in fixed order."""
    tile = call.options.tiles.position_gradient
    programs = cdiv(call.C, tile.columns) * call.N
    num_shares = max(1, min(call.B, cdiv(ENOUGH_PROGRAMS, programs)))
    gradient_XCNH = call.float32(num_shares, call.C, call.N, call.H)
    bias_gradient_XNC = call.float32(num_shares, call.N, call.C)
    call.launch(
        position_gradient_kernel,
        programs * num_shares,
        tile,
        position_gradients=gradient_XCNH,
        distance_bias_gradients=bias_gradient_XNC,
        B=call.B,
        num_shares=num_shares,
    )
    return gradient_XCNH.sum(0), bias_gradient_XNC.sum(0).T


def _like(gradient: Tensor | None, argument: Tensor | None) -> Tensor | None:
    return None if gradient is None or argument is None else gradient.to(argument.dtype)


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)
