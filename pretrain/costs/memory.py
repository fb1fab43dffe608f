"""What a run occupies: memory of a rank's device by part and of its host, and disk. Torch-free.

P parameters, R ranks, w bytes of a weight, c bytes in which gradients are summed over the ranks;
DeepSpeed 0.19.8 decides by stage, precision and offloading. Tests compare these functions with the
optimizer that results and with the bytes of real steps:

    optimizer                      gradients in the backward pass      they are summed
    (none), FP16_UnfusedOptimizer  w P                                 after it
    BF16_Optimizer                 4 P, and 2 P until the update       after it
    DeepSpeedZeroOptimizer         stage 1: 4 P + 4 P / R              after it
    DeepSpeedZeroOptimizer         stage 2: 4 P / R                    bucket by bucket in it
    DeepSpeedZeroOptimizer_Stage3  4 P / R                             bucket by bucket in it

On a GPU stages 2 and 3 sum a bucket on a stream of its own while the pass goes on (overlap_comm).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Literal

from foundation.errors import ConfigError
from foundation.settings import assert_never
from pretrain.config.choices import (
    FEED_FORWARDS,
    POSITIONS,
    LayerKind,
)
from pretrain.config.engine import Attention, attention_in
from pretrain.config.lane_parts import lane_parts
from pretrain.config.model import ModelConfig
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.costs.devices import GIB
from pretrain.costs.flops import (
    DeltaNetCosts,
    bins_of,
    lanes_of_pass,
    moment_bytes,
    parameters_of,
    tokens_of_pass,
)
from pretrain.kernels.triton.tiling import built_in_tiles
from pretrain.kernels.triton.workspace import workspace_of

MASTER_BYTES = 4
EMA_BYTES = 4
LOGIT_COPIES = 3  # logits, their float32 softmax, its gradient
TILE_CAPABILITY = (9, 0)  # whose tiles round the workspace's rows; those of other GPUs are as wide
TILE_ROWS = 128  # queries of a tile on a CPU; keys after them are skipped


def memory_parts(run: RunConfig, world_size: int, on_gpu: bool = False) -> dict[str, float]:
    """Return the bytes of one rank's memory at its peak under the run's settings, by part."""
    pass_rows = tokens_of_pass(run, world_size)
    rows = min(run.engine.logits_chunk_tokens or pass_rows, pass_rows)
    bins = bins_of(run.model)
    logits = LOGIT_COPIES * MASTER_BYTES * rows * (bins[0][0] + len(bins) - 1)
    if rows < pass_rows and _width(run) == 2:  # gradients are summed over chunks in float32
        logits += MASTER_BYTES * sum(size * (width + 1) for size, width in bins)
    buffers = buffers_of(run, world_size, on_gpu)
    gradients = buffers.gradients
    if _has_segments(run) and stage_of(run) == 3:
        # A gradient is complete, and can be reduced, when the first segment's is there.
        gradients += _width(run) * parameters_of(run.model).total
    return {
        **_weights_and_optimizer(run, world_size),
        "gradients": gradients,
        "gradient buckets": buffers.buckets,
        "recurrent memory": _recurrent_memory(run, world_size, on_gpu),
        "activations": _activations(run, world_size, on_gpu, logits, buffers.gradients),
        "logits": logits,
    }


def device_bytes(run: RunConfig, world_size: int, on_gpu: bool = False) -> float:
    """Return the bytes of one rank's memory at its peak under the run's settings."""
    return sum(memory_parts(run, world_size, on_gpu).values())


def largest_phase(run: RunConfig, world_size: int, on_gpu: bool = False) -> RunConfig:
    """Return the run in the phase in which a rank needs the most memory."""
    phases = runs_of_phases(run)
    if len(phases) == 1:
        return phases[0]
    return max(phases, key=lambda phase: device_bytes(phase, world_size, on_gpu))


def largest_micro_batch(
    run: RunConfig, world_size: int, capacity: float, on_gpu: bool = False
) -> int:
    """Return the most lanes of one forward pass that fit into `capacity` bytes, or 0."""
    own = len(lanes_of_rank(run, 0, world_size))
    for lanes in range(own, 0, -1):
        if own % lanes == 0:
            tried = replace(run, engine=replace(run.engine, micro_batch_lanes=lanes))
            if device_bytes(tried, world_size, on_gpu) <= capacity:
                return lanes
    return 0


def checkpoint_bytes(run: RunConfig) -> float:
    """Return the bytes of weights, moments, the EMA if there is one, and every lane's memory.

    File headers and the random-number state of each rank (5 kB) come on top.
    """
    parameters = parameters_of(run.model).total
    elements = float(MASTER_BYTES + _ema_bytes(run)) * parameters
    elements += moment_bytes(run.model, run.optim, parameters)
    return elements + run.data.lanes * lane_bytes(run)


def lane_bytes(run: RunConfig) -> int:
    """Return the bytes that each lane carries from segment to segment when its memory is full."""
    return lane_parts(run.model).num_bytes(_width(run))


def offloaded_bytes(run: RunConfig, world_size: int) -> float:
    """Return the bytes of a rank's host memory for what its GPU offloads, 0 if it does not."""
    needed = buffers_of(run, world_size, on_gpu=True).offloaded
    if run.engine.offload_memories:
        kept = replace(run, engine=replace(run.engine, offload_memories=False))
        needed += _recurrent_memory(kept, world_size, on_gpu=True)
    return needed


def check_host_memory(run: RunConfig, world_size: int, ranks_on_node: int, on_gpu: bool) -> None:
    """Raise ConfigError if this node cannot hold the weights that its ranks draw, in float32."""
    if on_gpu and stage_of(run) == 3:
        return  # each parameter goes to the GPUs before the next one is drawn
    parameters = parameters_of(run.model).total
    drawn = parameters * ranks_on_node / (world_size if stage_of(run) == 3 else 1)
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if MASTER_BYTES * drawn > room:
        raise ConfigError(
            f"a model of {parameters:,} parameters takes {MASTER_BYTES * drawn / GIB:,.1f} GiB of "
            f"this node's host memory, found {room / GIB:,.1f} GiB; use a smaller model, or "
            "engine.zero_stage=3 on more nodes"
        )


def _has_segments(run: RunConfig) -> bool:
    return run.optim.gradient_segments > 1


def _checkpoints_all(run: RunConfig) -> bool:
    repeated = run.engine.activation_checkpointing
    return repeated == "full" and run.engine.checkpoint_every_n_layers == 1


def _weights_and_optimizer(run: RunConfig, world_size: int) -> dict[str, float]:
    parameters, stage, width = parameters_of(run.model), stage_of(run), _width(run)
    # float32 weights that ZeRO does not shard are their own masters.
    master = 0 if width == 4 and stage == 0 else MASTER_BYTES
    moments = moment_bytes(run.model, run.optim, parameters.total)
    optimizer = (master + _ema_bytes(run)) * parameters.total + moments
    weights = float(width * parameters.total)
    if stage == 3:  # it gathers a layer for its use, and prefetches the next one
        gathered = 2 * parameters.body / run.model.num_layers + largest_parameter(run.model)
        sharers = run.engine.secondary_shard_ranks
        shares = 1 / world_size + (1 / sharers if sharers > 1 else 0)
        if _has_segments(run) and not _checkpoints_all(run):
            # DeepSpeed frees what it gathered for the last segment, and not for those before.
            gathered = parameters.total
        weights = width * (parameters.total * shares + gathered)
    is_offloaded = run.engine.offload_optimizer
    return {
        "weights": weights,
        "optimizer": 0.0 if is_offloaded else optimizer / (world_size if stage else 1),
    }


def _recurrent_memory(run: RunConfig, world_size: int, on_gpu: bool) -> float:
    of_one_lane = lane_parts(run.model).num_bytes(_width(run))
    lanes_at_once = lanes_of_pass(run, world_size)
    # Between the segments of a step; kept for the backward pass.
    between = (run.optim.gradient_segments - 1) * of_one_lane * lanes_at_once
    if run.engine.offload_memories and on_gpu:  # on a CPU, host memory is what is counted
        return 3 * of_one_lane * lanes_at_once + between  # old, new, on its way to the host
    return 2 * of_one_lane * len(lanes_of_rank(run, 0, world_size)) + between  # old and new


def _activations(
    run: RunConfig, world_size: int, on_gpu: bool, logits: float, gradients: float
) -> float:
    """Return what is kept for the backward pass, plus what that pass of one layer needs."""
    segments = run.optim.gradient_segments
    width, every = _width(run), run.engine.checkpoint_every_n_layers
    lanes, compressed = lanes_of_pass(run, world_size), run.model.compressed_length
    numbered = enumerate(run.model.memory_lengths())
    made = cache(partial(LayerActivations, run, lanes, width, on_gpu))
    layers = [made(run.model.layer_kind(index), each + compressed) for index, each in numbered]
    checkpointed = layers[::every]
    freed = kept = segments * sum(layer.kept for layer in layers)
    working = max(layer.working for layer in layers)
    repeated = run.engine.activation_checkpointing
    if repeated == "full":
        tokens = segments * lanes * run.model.read_tokens(run.data.segment_length)
        inputs = len(checkpointed) * tokens * run.model.d_model * width
        kept -= segments * sum(layer.kept for layer in checkpointed)
        freed = kept = inputs + kept
        # A layer runs again when the logits are already freed, so only what exceeds them adds to
        # the peak.
        working = max(0.0, max(layer.kept + layer.working for layer in checkpointed) - logits)
    else:
        if repeated == "selective":
            weights = [layer.weights for layer in checkpointed]
            kept -= segments * sum(weights) - max(weights)
        freed = kept - layers[-1].kept
    is_unsharded = run.engine.kind != "deepspeed"
    if is_unsharded and width == 4 and accumulation_steps(run, world_size) == 1:
        # The backward pass allocates gradients while it frees activations, so the two do not peak
        # together.
        kept -= min(gradients, freed)
    return kept + working


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer from the forward to the backward pass, counted tensor by tensor.

    Cached, because plans ask of thousands of settings, each for all layers of a kind.
    """

    run: RunConfig
    lanes: int
    width: int  # bytes of an element
    on_gpu: bool
    kind: LayerKind
    memory: int  # M, rows that the layer remembers

    @cached_property
    def kept(self) -> float:
        """From forward to backward."""
        return self._rows + self.weights + self._masks

    @cached_property
    def weights(self) -> float:
        """What selective checkpointing computes again: attention's weights, the delta rule."""
        if self.kind != "attention":
            return self.lanes * self._deltanet.kept_by_rule(self.width)
        return self._pairs * (1 + self._drops_weights * self._is_plain)

    @cached_property
    def working(self) -> float:
        """During its backward pass only: about the gradients of what was kept."""
        if self.kind != "attention":  # the delta rule's tensors are freed as its gradients come
            return self._rows - self.width * self.lanes * self._deltanet.kept_elements
        return self._rows + self._pairs * self._is_plain + self.workspace

    @cached_property
    def workspace(self) -> float:
        """Gradients of the scores of some heads, which the fused kernels pass to each other."""
        if self._attention is not Attention.FUSED or self.kind != "attention":
            return 0.0
        model, T = self.run.model, self._tokens
        needed = workspace_of(
            lanes=self.lanes,
            queries=T,
            keys=T + self.memory,
            heads=model.num_heads,
            groups=model.key_heads,
            head_width=model.head_width,
            tiles=built_in_tiles(model.head_width, TILE_CAPABILITY),
            element_bytes=self.width,
        )
        return float(needed.num_bytes(self.width))

    @cached_property
    def _rows(self) -> float:
        """All tensors with a row per token, key or distance; a deltanet's joined weights."""
        model, T, M = self.run.model, self._tokens, self.memory
        d, h = model.d_model, model.num_heads * model.head_width
        k = model.key_heads * model.head_width
        tokens, keys = T * self.lanes, (T + M) * self.lanes
        # Input, its sum with attention, both norms (pre: of memory too).
        normed = keys if model.norm_position == "pre" and self.kind == "attention" else tokens
        elements = (3 * tokens + normed) * d
        elements += (model.norm == "rmsnorm") * (tokens + normed) * d
        inner_tensors = FEED_FORWARDS[model.feed_forward].inner_tensors + bool(model.dropout)
        elements += tokens * model.inner_width * inner_tensors
        if self.kind != "attention":
            elements += self.lanes * self._deltanet.kept_elements + self._deltanet.joined_elements
            return float(self.width * elements)
        elements += 2 * tokens * h + 2 * keys * k  # queries and what they read; keys and values
        if model.query_key_norm:
            elements += 2 * tokens * h + 3 * keys * k
        if model.softmax_scaling == "log_length":
            elements += tokens * h
        if POSITIONS[model.positions].projects_encodings:
            elements += (T + M) * h
        return self.width * elements

    @cached_property
    def _pairs(self) -> float:
        """Attention's weights."""
        T, M, heads = self._tokens, self.memory, self.run.model.num_heads
        if self._attention in (Attention.SDPA, Attention.FUSED):
            return 4.0 * T * heads * self.lanes  # they keep one number per query
        keys = T + M if self._is_plain else M + (T + min(T, TILE_ROWS)) / 2
        return float(self.width * T * keys * heads * self.lanes)

    @property
    def _masks(self) -> float:
        """Dropout's masks, a byte per element; a GPU draws them again in the backward pass."""
        if self.on_gpu:
            return 0.0
        model, T = self.run.model, self._tokens
        rows = 2 * model.d_model + model.inner_width if model.dropout else 0
        drops = self._drops_weights and self.kind == "attention"
        pairs = model.num_heads * (T + self.memory) if drops else 0
        return T * self.lanes * (rows + pairs)

    @property
    def _drops_weights(self) -> bool:
        return bool(self.run.model.attention_dropout)

    @property
    def _tokens(self) -> int:
        """Of a segment, with its memory tokens."""
        return self.run.model.read_tokens(self.run.data.segment_length)

    @property
    def _deltanet(self) -> DeltaNetCosts:
        return DeltaNetCosts(self.run.model, self._tokens)

    @cached_property
    def _attention(self) -> Attention:
        return attention_in(self.run.engine, self.run.model, on_gpu=self.on_gpu)[0]

    @property
    def _is_plain(self) -> bool:
        return self._attention is Attention.PLAIN


def _ema_bytes(run: RunConfig) -> int:
    return EMA_BYTES if run.optim.ema_decay else 0


def _width(run: RunConfig) -> int:
    return 4 if run.engine.number_format == "fp32" else 2


# Elements of a bucket at least: smaller sums take as long as this one on most networks.
SMALLEST_BUCKET = 1 << 22
COPIED = 500_000_000  # elements at most that stages 0 and 1 copy at a time, to sum them


@dataclass(frozen=True)
class Buffers:
    """Bytes of a rank during the backward pass, and of what is offloaded in its host memory."""

    gradients: float
    buckets: float
    offloaded: float


def stage_of(run: RunConfig) -> int:
    """Return the ZeRO stage; plain torch has none."""
    return run.engine.zero_stage if run.engine.kind == "deepspeed" else 0


# DeepSpeed's classes around our optimizer; empty: none.
ZeroOptimizer = Literal[
    "",
    "FP16_UnfusedOptimizer",
    "BF16_Optimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
]


def optimizer_of(run: RunConfig) -> ZeroOptimizer:
    """Return the class that DeepSpeed wraps around our optimizer; empty if it does not."""
    stage, precision = stage_of(run), run.engine.number_format
    if stage == 3:
        return "DeepSpeedZeroOptimizer_Stage3"
    if stage == 0:
        is_wrapped = run.engine.kind == "deepspeed" and precision != "fp32"
        return "FP16_UnfusedOptimizer" if is_wrapped else ""
    if stage == 1 and not run.engine.offload_optimizer and precision == "bf16":
        return "BF16_Optimizer"
    return "DeepSpeedZeroOptimizer"


def overlaps_reduction(run: RunConfig, on_gpu: bool) -> bool:
    """Whether gradients are summed over the ranks while the backward pass goes on."""
    return on_gpu and (
        stage_of(run) == 3 or (stage_of(run) == 2 and not run.engine.offload_optimizer)
    )


def bucket_elements(run: RunConfig) -> int:
    """Return the size of a bucket: the largest parameter's.

    ZeRO-2 sums a larger parameter's gradient in place and lets go of it: on a GPU its memory could
    get into use again while it is read. DeepSpeed's 500,000,000 would be 2 GB for each of up to
    four buffers.
    """
    zero = run.engine.deepspeed_extra.get("zero_optimization")
    given = zero.get("reduce_bucket_size") if isinstance(zero, Mapping) else None
    # DeepSpeed takes 5e8, too, and rejects values that are not numbers.
    return int(given) if isinstance(given, (int, float)) else smallest_bucket(run.model)


def smallest_bucket(model: ModelConfig) -> int:
    """Return the elements of a bucket into which every parameter fits."""
    return min(parameters_of(model).total, max(SMALLEST_BUCKET, largest_parameter(model)))


def largest_parameter(model: ModelConfig) -> int:
    """Return the elements of the largest parameter."""
    attention = model.head_width * max(model.num_heads, 2 * model.key_heads)
    learns = model.compressed_length and model.compression == "conv"
    compressed = model.compression_rate * model.d_model if learns else 0
    values = model.num_heads * model.deltanet_value_width if model.num_deltanet_layers else 0
    rows = max(attention, values, model.inner_width, compressed, model.memory_tokens)
    bins = (size * width for size, width in bins_of(model))
    return max(rows * model.d_model, *bins)


def buffers_of(run: RunConfig, world_size: int, on_gpu: bool) -> Buffers:
    """Return what a rank keeps of gradients and buckets at the peak of its backward pass."""
    P, R, stage = parameters_of(run.model).total, world_size, stage_of(run)
    w, c = _width(run), (4 if run.engine.reduction_precision == "fp32" else 2)
    bucket = bucket_elements(run)
    # A bucket is put together in the weights' type; one more copy, or two, are on their way.
    staged = 2 if overlaps_reduction(run, on_gpu) else 1
    offloads = run.engine.offload_optimizer
    kind = optimizer_of(run)
    moments = moment_bytes(run.model, run.optim, P)
    match kind:
        case "" | "FP16_UnfusedOptimizer":
            own = w if run.engine.kind == "deepspeed" else 4
            copied = own * min(P, COPIED) if run.engine.kind == "deepspeed" else 0
            return Buffers(own * P, copied, 0)
        case "BF16_Optimizer":
            return Buffers(6 * P, (4 + (c if c != 4 else 0)) * min(P, COPIED), 0)
        case "DeepSpeedZeroOptimizer":
            kept = (8 + w) * P + moments
            offloaded = kept / R + w * largest_parameter(run.model) if offloads else 0
            if stage == 1:  # when they are summed
                return Buffers(4 * P + 4 * P / R, 4 * bucket, offloaded)
            several = w == 4 and accumulation_steps(run, R) > 1  # the sum so far, and the next
            copies = w + (c if c != w else 0)
            buckets = staged * w * bucket + copies * min(bucket, P / R)
            return Buffers((8 if several else 4) * P / R, buckets, offloaded)
        case "DeepSpeedZeroOptimizer_Stage3":
            offloaded = (12 * P + moments) / R if offloads else 0
            return Buffers(0 if offloads else 4 * P / R, 2 * c * bucket, offloaded)
        case _:
            assert_never(kind)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a run in the phase that needs the most memory."""

    run: RunConfig  # in that phase
    parts: dict[str, float]  # of a rank's device; on a CPU, of host memory
    offloaded: float  # host memory of a rank, for what its GPU offloads
    drawn: float  # host memory of a rank, for the weights as it draws them
    checkpoint: float
    copy: float  # host memory of a rank while it saves

    @property
    def device(self) -> float:
        """Bytes of a rank's device."""
        return sum(self.parts.values())

    @property
    def host(self) -> float:
        """Bytes of a rank's host memory at its peak, besides the process itself; for a GPU."""
        return max(self.drawn, self.offloaded + self.copy)

    @property
    def disk(self) -> float:
        """Bytes of the checkpoints that are kept, and of the one being written."""
        return (self.run.checkpoint.keep_last + 1) * self.checkpoint


def footprint_of(run: RunConfig, world_size: int, on_gpu: bool) -> Footprint:
    """Return what the run occupies on so many ranks."""
    largest = largest_phase(run, world_size, on_gpu)
    saved = checkpoint_bytes(largest)
    is_drawn_on_device = on_gpu and stage_of(largest) == 3
    return Footprint(
        run=largest,
        parts=memory_parts(largest, world_size, on_gpu),
        offloaded=offloaded_bytes(largest, world_size) if on_gpu else 0.0,
        drawn=0.0 if is_drawn_on_device else MASTER_BYTES * parameters_of(largest.model).total,
        checkpoint=saved,
        copy=saved / world_size if largest.checkpoint.asynchronous else 0.0,
    )
