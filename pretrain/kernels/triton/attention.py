"""Relative attention (section 3.3 of the paper) in fused kernels, without an [L, C] tensor.

Letters of shapes as in `pretrain.model`; X are tiles or shares of the lanes.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.kernels.triton.kernels import (
    content_bias_kernel,
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    position_gradient_kernel,
    query_gradient_kernel,
)
from pretrain.kernels.triton.settings import DROPOUT_LEVELS, Variant
from pretrain.kernels.triton.tiling import (
    WORKSPACE_BYTES,
    Chunk,
    Tile,
    Tiles,
    backward_workspace,
    tiles_for,
)

SUM_TILE = Tile(16, 64)  # for kernels that only sum
# The window if all keys are seen. A constant, because Triton compiles kernels anew for some values.
UNLIMITED = 1 << 30


class Inputs(NamedTuple):
    """The differentiable arguments. Their gradients come in the same order."""

    query_BLNH: Tensor
    key_BCGH: Tensor
    value_BCGH: Tensor
    position_CNH: Tensor | None
    content_bias_NH: Tensor | None
    position_bias_NH: Tensor | None
    distance_bias_CN: Tensor | None
    sinks_N: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a call that have no gradient."""

    window: int
    first_keys_BL: Tensor | None  # the first key that each query sees
    query_ends_BC: Tensor | None  # the end of the range of queries that see each key
    dropout_keys_B: Tensor | None
    drop_threshold: int
    deterministic: bool
    tiles: Tiles
    workspace_bytes: int


class Call:
    """The sizes of a call, its variant of the kernels, and the arguments that all kernels take."""

    def __init__(self, inputs: Inputs, options: Options) -> None:
        self.inputs, self.options = inputs, options
        self.B, self.L, self.N, self.H = inputs.query_BLNH.shape
        self.C, self.G = inputs.key_BCGH.shape[1:3]
        self.arguments = self._arguments()

    def _arguments(self) -> dict[str, Any]:
        query, key, value, position, u, v, distance_bias, _ = self.inputs
        scale = self.variant(SUM_TILE).scale
        # To add u and v here costs little. Added in the kernels, they would keep queries from going
        # directly from memory to the tensor cores.
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
            "distance_biases": present(
                None if distance_bias is None else (distance_bias.float().T / scale).contiguous()
            ),
            "first_keys": present(options.first_keys_BL),
            "dropout_keys": present(options.dropout_keys_B),
            "key_lane": key.stride(0),
            "value_lane": value.stride(0),
            "key_head": key.stride(2),
            "value_head": value.stride(2),
            "L": self.L,
            "M": self.C - self.L,
            "window": options.window,
        }

    def variant(
        self, tile: Tile, *, adds_positions: bool = False, heads_per_program: int = 1
    ) -> Variant:
        return Variant(
            num_heads=self.N,
            num_groups=self.G,
            head_width=self.H,
            key_row=self.inputs.key_BCGH.stride(1),
            value_row=self.inputs.value_BCGH.stride(1),
            rows=tile.rows,
            columns=tile.columns,
            has_position=self.inputs.position_CNH is not None,
            has_starts=self.options.first_keys_BL is not None,
            has_distance_bias=self.inputs.distance_bias_CN is not None,
            has_sinks=self.inputs.sinks_N is not None,
            drop_threshold=self.options.drop_threshold,
            adds_positions=adds_positions,
            heads_per_program=heads_per_program,
            precision="ieee" if self.inputs.query_BLNH.dtype == torch.float32 else "tf32",
        )

    def launch(
        self,
        kernel: Any,
        programs: int,
        tile: Tile,
        *,
        adds_positions: bool = False,
        heads_per_program: int = 1,
        **outputs: Any,
    ) -> None:
        """Run `kernel` with the arguments that all kernels take and its own."""
        variant = self.variant(
            tile, adds_positions=adds_positions, heads_per_program=heads_per_program
        )
        with self._device():
            kernel[(programs,)](
                **self.arguments,
                **outputs,
                VARIANT=variant,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )

    def deltas(self, output_BLNH: Tensor, gradient_BLNH: Tensor) -> Tensor:
        """Return the sums over H of output times gradient of the output: [B, N, L]."""
        deltas_BNL = self.float32(self.B, self.N, self.L)
        grid = (cdiv(self.L, SUM_TILE.rows) * self.B * self.N,)
        with self._device():
            delta_kernel[grid](
                output_BLNH, gradient_BLNH, deltas_BNL, self.L, VARIANT=self.variant(SUM_TILE)
            )
        return deltas_BNL

    def sum_keys(self, score_sums_BNC: Tensor) -> Tensor:
        """Return the sum over lanes and keys of the keys weighted with `score_sums_BNC`: [N, H]."""
        num_tiles = cdiv(self.C, SUM_TILE.columns)
        sums_BNXH = self.float32(self.B, self.N, num_tiles, self.variant(SUM_TILE).padded_width)
        key = self.inputs.key_BCGH
        arguments = (key, score_sums_BNC, sums_BNXH, key.stride(0), key.stride(2), self.C)
        with self._device():
            grid = (num_tiles * self.B * self.N,)
            content_bias_kernel[grid](*arguments, VARIANT=self.variant(SUM_TILE))
        return sums_BNXH.sum((0, 2))[:, : self.H]

    def float32(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.inputs.query_BLNH.device)

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        # Triton launches on the current device, which may not be the tensors' device.
        device = self.inputs.query_BLNH.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launch_forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output [B, L, N, H] and log2 of the softmax's denominators [B, N, L]."""
    call = Call(inputs, options)
    tile = options.tiles.forward
    output_BLNH = inputs.query_BLNH.new_empty(inputs.query_BLNH.shape)
    log_sums_BNL = call.float32(call.B, call.N, call.L)
    programs = cdiv(call.L, tile.rows) * call.B * call.N
    sinks_N = _sinks_log2(inputs)
    call.launch(
        forward_kernel,
        programs,
        tile,
        sinks=output_BLNH if sinks_N is None else sinks_N,  # it does not read absent ones
        outputs=output_BLNH,
        log_sums=log_sums_BNL,
    )
    return output_BLNH, log_sums_BNL


def _sinks_log2(inputs: Inputs) -> Tensor | None:
    """Return the sinks to base 2, as the kernels compute: exp2(x log2 e) is exp(x)."""
    return None if inputs.sinks_N is None else inputs.sinks_N.float() * math.log2(math.e)


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
    deltas_BNL = call.deltas(output_BLNH, output_gradient_BLNH)
    # The kernel of queries can add the gradient of positions atomically, in no fixed order. The
    # kernel of positions adds in a fixed order, and it alone sums the gradients of distance biases.
    adds_positions = needs_position and not needs_distance_bias and not options.deterministic
    backward = Backward(call, adds_positions)
    for chunk in backward.chunks:
        # One workspace serves all chunks, since the launches run in order.
        backward.launch_keys(chunk, output_gradient_BLNH, log_sums_BNL, deltas_BNL)
        backward.launch_queries(chunk)
        if needs_distance_bias or (needs_position and not adds_positions):
            backward.launch_positions(chunk)
    u_gradient = v_gradient = None
    if inputs.content_bias_NH is not None:
        u_gradient = call.sum_keys(backward.score_sums_BNC)
        # The gradients of u (through keys) and v add up to the queries' gradient.
        v_gradient = backward.query_sums_BNXH.sum((0, 2))[:, : call.H] - u_gradient
    sinks_N, sinks_gradient_N = _sinks_log2(inputs), None
    if sinks_N is not None:  # a sink's value is zero, so its gradient is minus weight times delta
        weights_BNL = torch.exp2(sinks_N[:, None] - log_sums_BNL)
        sinks_gradient_N = -(weights_BNL * deltas_BNL).sum((0, 2))
    gradients = Inputs(
        backward.query_BLNH,
        *(_summed(gradient, call.G) for gradient in backward.key_gradients),
        backward.position_CNH,
        u_gradient,
        v_gradient,
        backward.distance_bias_NC.T,
        sinks_gradient_N,
    )
    return Inputs(
        *(_like(gradient, argument) for gradient, argument in zip(gradients, inputs, strict=True))
    )


class Backward:
    """The outputs of the backward kernels, and their launches on one chunk of heads.

    `workspace` holds the gradients of a chunk's scores, a row for each query and a column for each
    key. The kernel of keys writes them, so the other kernels need not compute the scores again.
    """

    def __init__(self, call: Call, adds_positions: bool) -> None:
        self.call, self.adds_positions = call, adds_positions
        tiles, inputs = call.options.tiles, call.inputs
        query_tiles = cdiv(call.L, tiles.query_gradient.rows)
        padded_width = call.variant(tiles.query_gradient).padded_width
        self.query_BLNH = inputs.query_BLNH.new_empty(inputs.query_BLNH.shape)
        self.query_sums_BNXH = call.float32(call.B, call.N, query_tiles, padded_width)
        self.score_sums_BNC = call.float32(call.B, call.N, call.C)
        self.position_CNH = call.float32(call.C, call.N, call.H).zero_()
        self.distance_bias_NC = call.float32(call.N, call.C).zero_()
        needed = backward_workspace(
            lanes=call.B,
            queries=call.L,
            keys=call.C,
            heads=call.N,
            groups=call.G,
            head_width=call.H,
            tiles=tiles,
            element_bytes=inputs.query_BLNH.element_size(),
            limit=call.options.workspace_bytes,
        )
        self.chunks, self.score_row = needed.chunks, needed.score_row
        self.workspace = inputs.query_BLNH.new_empty(needed.elements)
        self.heads_per_program = needed.heads_per_program
        is_split = needed.summed_elements > 0
        shape = (call.B, call.C, call.N if is_split else call.G, call.H)
        dtype = torch.float32 if is_split else inputs.key_BCGH.dtype
        # The gradients of keys and of values, summed over the heads of a program.
        self.key_gradients = [inputs.key_BCGH.new_empty(shape, dtype=dtype) for _ in range(2)]

    def launch_keys(
        self, chunk: Chunk, output_gradient_BLNH: Tensor, log_sums_BNL: Tensor, deltas_BNL: Tensor
    ) -> None:
        tile = self.call.options.tiles.key_gradient
        query_ends_BC = self.call.options.query_ends_BC
        self._launch(
            key_gradient_kernel,
            cdiv(self.call.C, tile.columns)
            * chunk.lanes
            * (self._heads(chunk) // self.heads_per_program),
            tile,
            chunk,
            heads_per_program=self.heads_per_program,
            query_ends=deltas_BNL if query_ends_BC is None else query_ends_BC,
            output_gradients=output_gradient_BLNH,
            log_sums=log_sums_BNL,
            deltas=deltas_BNL,
            key_gradients=self.key_gradients[0],
            value_gradients=self.key_gradients[1],
            score_sums=self.score_sums_BNC,
        )

    def launch_queries(self, chunk: Chunk) -> None:
        tile = self.call.options.tiles.query_gradient
        self._launch(
            query_gradient_kernel,
            cdiv(self.call.L, tile.rows) * chunk.lanes * self._heads(chunk),
            tile,
            chunk,
            adds_positions=self.adds_positions,
            query_gradients=self.query_BLNH,
            query_sums=self.query_sums_BNXH,
            position_gradients=self.position_CNH,
        )

    def launch_positions(self, chunk: Chunk) -> None:
        tile = self.call.options.tiles.position_gradient
        self._launch(
            position_gradient_kernel,
            cdiv(self.call.C, tile.columns) * self._heads(chunk),
            tile,
            chunk,
            position_gradients=self.position_CNH,
            distance_bias_gradients=self.distance_bias_NC,
            chunk_lanes=chunk.lanes,
        )

    def _heads(self, chunk: Chunk) -> int:
        return chunk.groups * (self.call.N // self.call.G)

    def _launch(
        self, kernel: Any, programs: int, tile: Tile, chunk: Chunk, **arguments: Any
    ) -> None:
        self.call.launch(
            kernel,
            programs,
            tile,
            score_gradients=self.workspace,
            score_row=self.score_row,
            first_lane=chunk.first_lane,
            first_group=chunk.first_group,
            chunk_groups=chunk.groups,
            **arguments,
        )


def _summed(gradient_BCNH: Tensor, num_groups: int) -> Tensor:
    """Return the sums over the heads of each group, [B, C, G, H], unless the kernel has summed."""
    if gradient_BCNH.shape[2] == num_groups:
        return gradient_BCNH
    return gradient_BCNH.unflatten(2, (num_groups, -1)).sum(3)


def _like(gradient: Tensor | None, argument: Tensor | None) -> Tensor | None:
    return None if gradient is None or argument is None else gradient.to(argument.dtype)


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def fused_relative_attention(
    query_BLNH: Tensor,
    key_BCGH: Tensor,
    value_BCGH: Tensor,
    position_CNH: Tensor | None,
    content_bias_NH: Tensor | None,
    position_bias_NH: Tensor | None,
    *,
    max_distance: int | None = None,
    documents_BC: Tensor | None = None,
    dropout_keys_B: Tensor | None = None,
    dropout: float = 0.0,
    distance_bias_CN: Tensor | None = None,
    sinks_N: Tensor | None = None,
    deterministic: bool = True,
    tiles: Tiles | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Return the softmax of the scores, times the values: [B, L, N, H].

    The scores are [(q_i + u) . k_j + (q_i + v) . r_ij] / sqrt(H) + biases. The queries belong to
    the last L of the C keys. `position_CNH` are the projected encodings W_R R, with row j for
    distance C - 1 - j; `distance_bias_CN` has the same order. Without positions, u and v are None.
    `sinks_N` are scores that each row's softmax includes, with a value of zero.

    A query does not see keys after it, keys at `max_distance` or farther (`same_length`), and keys
    of other documents; ids `documents_BC` must not decrease along C. `dropout` is a pure function
    of (the lane's `dropout_keys_B`, head, query, key). `deterministic` runs one more kernel;
    without it the gradient of positions is summed by atomic additions, in no fixed order. The
    backward pass processes at once the heads whose score gradients fit into `workspace_bytes`, but
    at least one group of heads of one lane.

    Query, key, value and position have one dtype. Call `unsupported_reason` first.
    """
    relative = (position_CNH, content_bias_NH, position_bias_NH)
    inputs = Inputs(query_BLNH, key_BCGH, value_BCGH, *relative, distance_bias_CN, sinks_N)
    _check(inputs)
    assert dropout == 0.0 or dropout_keys_B is not None, "dropout needs a key per lane"
    L = query_BLNH.shape[1]
    first_keys_BL, query_ends_BC = _document_bounds(documents_BC, L)
    if tiles is None:
        device, capability = query_BLNH.device, (9, 0)  # for the interpreter any with tiles
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
        is_timed = position_CNH is not None and not dropout
        tiles = tiles_for(query_BLNH.shape[-1], capability, is_timed)
    options = Options(
        window=UNLIMITED if max_distance is None else min(max_distance, UNLIMITED),
        first_keys_BL=first_keys_BL,
        query_ends_BC=query_ends_BC,
        dropout_keys_B=dropout_keys_B if dropout else None,
        drop_threshold=min(round(dropout * DROPOUT_LEVELS), DROPOUT_LEVELS - 1),
        deterministic=deterministic,
        tiles=tiles,
        workspace_bytes=workspace_bytes,
    )
    return _FusedAttention.apply(options, *inputs)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, *arguments: Tensor | None) -> Tensor:
        inputs = _laid_out(Inputs(*arguments))  # type: ignore[arg-type]
        output_BLNH, log_sums_BNL = launch_forward(inputs, options)
        ctx.save_for_backward(*inputs, output_BLNH, log_sums_BNL)
        ctx.options = options
        return output_BLNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output_BLNH, log_sums_BNL = ctx.saved_tensors
        needs = Inputs(*ctx.needs_input_grad[1:])
        gradients = launch_backward(
            Inputs(*inputs),
            ctx.options,
            output_BLNH,
            log_sums_BNL,
            output_gradients[0].contiguous(),
            needs_position=bool(needs.position_CNH),
            needs_distance_bias=bool(needs.distance_bias_CN),
        )
        return (None, *gradients)


def _check(inputs: Inputs) -> None:
    """Assert that shapes and types are consistent; they are the caller's, never the user's."""
    query, key, value, position, u, v, distance_bias, sinks = inputs
    B, L, N, H = query.shape
    C, G = key.shape[1:3]
    assert key.shape == value.shape == (B, C, G, H), (query.shape, key.shape, value.shape)
    assert C >= L, (query.shape, key.shape)
    assert N % G == 0, (query.shape, key.shape)
    assert (position is None) == (u is None) == (v is None), "positions, u and v come together"
    for tensor, shape in (
        (position, (C, N, H)),
        (u, (N, H)),
        (v, (N, H)),
        (distance_bias, (C, N)),
        (sinks, (N,)),
    ):
        assert tensor is None or tensor.shape == shape, (tuple(tensor.shape), shape)
    assert key.dtype == value.dtype == query.dtype, (query.dtype, key.dtype, value.dtype)
    assert position is None or position.dtype == query.dtype, (query.dtype, position.dtype)


def _document_bounds(
    documents_BC: Tensor | None, num_queries: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return each query's first key [B, L], and the end of the queries that see each key [B, C]."""
    if documents_BC is None:
        return None, None
    documents_BC = documents_BC.contiguous()
    of_queries_BL = documents_BC[:, -num_queries:].contiguous()
    first_keys_BL = torch.searchsorted(documents_BC, of_queries_BL, out_int32=True)
    ends_BC = torch.searchsorted(of_queries_BL, documents_BC, right=True, out_int32=True)
    return first_keys_BL, ends_BC


def _laid_out(inputs: Inputs) -> Inputs:
    """Make heads contiguous, as the kernels' loads require, and positions as a whole."""
    key, value, position = inputs.key_BCGH, inputs.value_BCGH, inputs.position_CNH
    return inputs._replace(
        key_BCGH=key if key.stride(-1) == 1 else key.contiguous(),
        value_BCGH=value if value.stride(-1) == 1 else value.contiguous(),
        position_CNH=None if position is None else position.contiguous(),
    )
