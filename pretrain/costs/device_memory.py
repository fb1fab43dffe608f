"""What a run occupies: memory of a rank's device by part and of its host, and disk. Torch-free.

P parameters, R ranks, w bytes of a weight; gradients are summed over the ranks in float32.
DeepSpeed 0.19.8 decides by stage, precision and offloading. Tests compare these functions with the
optimizer that results and with the bytes of real steps:

    optimizer                      gradients in the backward pass      they are summed
    (none), FP16_UnfusedOptimizer  w P come while activations go       after it
    BF16_Optimizer                 4 P; 2 P come, until the update     after it
    DeepSpeedZeroOptimizer         stage 1: 4 P come                   after it, with 4 P / R
    DeepSpeedZeroOptimizer         stage 2: 4 P / R                    bucket by bucket in it
    DeepSpeedZeroOptimizer_Stage3  4 P / R                             bucket by bucket in it

On a GPU stages 2 and 3 sum a bucket on a stream of its own while the pass goes on (overlap_comm).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from foundation.errors import ConfigError
from pretrain.config.engine import Attention, DeltaRule, attention_in
from pretrain.config.lane_parts import lane_parts
from pretrain.config.model import (
    CONVOLUTION_WIDTH,
    FEED_FORWARDS,
    POSITIONS,
    LayerKind,
    ModelConfig,
)
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.costs.flops import (
    Parameters,
    delta_rule_chunks,
    moment_bytes,
    parameter_counts,
    pass_lanes,
    pass_tokens,
    vocabulary_bins,
    weight_shapes,
)
from pretrain.costs.hardware import GIB
from pretrain.kernels.flash_linear_attention import CHUNK_TOKENS, delta_rule_here
from pretrain.kernels.triton.tiling import backward_workspace, built_in_tiles

MASTER_BYTES = 4
EXACT_BYTES = 4  # the delta rule computes in float32
# Logits, their float32 softmax, its gradient; of z-loss another softmax and the sum of gradients.
LOGIT_COPIES, LOGIT_COPIES_OF_Z_LOSS = 3, 5
TILE_CAPABILITY = (9, 0)  # its tiles round the workspace's rows; other GPUs' tiles are as wide
TILE_ROWS = 128  # queries of a tile on a CPU; keys after them are skipped
# Elements of a bucket at least: smaller sums take as long as this one on most networks.
SMALLEST_BUCKET = 1 << 22
COPIED = 500_000_000  # elements at most that stages 0 and 1 copy at a time, to sum them


@dataclass(frozen=True)
class Buffers:
    """Bytes of a rank's gradients before and after a backward pass, and of what sums them."""

    before: float = 0.0
    after: float = 0.0
    summing: float = 0.0  # after the pass only
    buckets: float = 0.0
    offloaded: float = 0.0  # on the host, with the state that is


@dataclass(frozen=True)
class Footprint:
    """Bytes of a run in the phase that `run` describes, at its peak.

    A rank's device on a CPU is its part of host memory.
    """

    run: RunConfig
    world_size: int
    on_gpu: bool = False

    @cached_property
    def parts(self) -> dict[str, float]:
        """Of a rank's device, by what occupies it."""
        segments = self.run.optim.gradient_segments
        return {
            "weights": self._weights,
            "optimizer": self._optimizer,
            # With segments a gradient is complete, and can be reduced, at the first segment's end.
            "gradients": self._gradients
            + self._weight_bytes * self._parameters.total * (segments > 1 and self._stage == 3),
            "gradient buckets": self._buffers.buckets,
            "recurrent memory": self._recurrent_memory(self.run.engine.offload_memories),
            "activations": self._activations,
            "logits": self._logits,
        }

    @property
    def device(self) -> float:
        """Of a rank's device."""
        return sum(self.parts.values())

    @property
    def offloaded(self) -> float:
        """Of a rank's host memory, for what its GPU offloads."""
        if not self.on_gpu:
            return 0.0
        has_memories = self.run.engine.offload_memories
        return self._buffers.offloaded + self._recurrent_memory(False) * has_memories

    @property
    def host(self) -> float:
        """Of a rank's host memory at its peak, besides the process itself; for a GPU."""
        is_drawn_on_device = self.on_gpu and self._stage == 3
        drawn = 0.0 if is_drawn_on_device else float(MASTER_BYTES * self._parameters.total)
        if self._weight_bytes == 2 and self.on_gpu:  # the masters get their weights from these
            drawn += self._buffers.offloaded
        return max(drawn, self.offloaded + self.copy)

    @property
    def checkpoint(self) -> float:
        """Of one checkpoint."""
        return checkpoint_bytes(self.run)

    @property
    def copy(self) -> float:
        """Of a rank's host memory while it saves in the background."""
        return self.checkpoint / self.world_size if self.run.checkpoint.asynchronous else 0.0

    @property
    def disk(self) -> float:
        """Of the checkpoints that are kept, and the one being written."""
        return (self.run.checkpoint.keep_last + 1) * self.checkpoint

    @cached_property
    def _parameters(self) -> Parameters:
        return parameter_counts(self.run.model)

    @cached_property
    def _stage(self) -> int:
        return sharding_stage(self.run)

    @property
    def _weight_bytes(self) -> int:
        return activation_bytes(self.run)

    @property
    def _gradients(self) -> float:
        """Gradients at the peak; the backward pass lets go of activations while gradients come."""
        buffers = self._buffers
        several = accumulation_steps(self.run, self.world_size) > 1
        before = buffers.after if several else buffers.before
        after = buffers.after + max(buffers.summing, self._working)
        return max(before, after - self._activations - self._logits)

    @cached_property
    def _buffers(self) -> Buffers:
        run, P, R, w = self.run, self._parameters.total, self.world_size, self._weight_bytes
        if run.engine.kind != "deepspeed":
            return Buffers(before=0.0 if w == 4 else 4 * P, after=4 * P)
        if self._stage == 0:
            return Buffers(after=w * P, summing=w * min(P, COPIED))
        if deepspeed_optimizer(run) == "BF16_Optimizer":
            return Buffers(before=4 * P, after=6 * P, summing=4 * min(P, COPIED))
        bucket, offloads = bucket_elements(run), run.engine.offload_optimizer
        moments = moment_bytes(run.model, run.optim) if offloads else 0.0
        if self._stage == 3:
            own = 0.0 if offloads else 4 * P / R
            offloaded = (12 * P + moments) / R if offloads else 0.0
            return Buffers(own, own, buckets=8 * bucket, offloaded=offloaded)
        largest = largest_parameter(run.model)
        offloaded = ((8 + w) * P + moments) / R + w * largest if offloads else 0.0
        if self._stage == 1:
            summing = 4 * P / R + 4 * min(bucket, P / R)  # this rank's sums, a copy on its way
            return Buffers(after=4 * P, summing=summing, buckets=4 * bucket, offloaded=offloaded)
        # A bucket is put together in the weights' type. One more copy, or two, are on their way: of
        # all of it where it is summed to all ranks, else of one rank's part.
        overlaps = overlaps_reduction(run, self.on_gpu)
        several = w == 4 and accumulation_steps(run, R) > 1  # the sum so far, and the next
        copies = w + (4 if w != 4 else 0)
        copied = bucket if overlaps else min(bucket, P / R)
        buckets = (1 + overlaps) * w * bucket + copies * copied
        own = (8 if several else 4) * P / R
        return Buffers(own, own, buckets=buckets, offloaded=offloaded)

    @property
    def _weights(self) -> float:
        engine, P, w = self.run.engine, self._parameters.total, self._weight_bytes
        if self._stage < 3:
            return float(w * P)
        # A layer is gathered for its use, and the next one is prefetched.
        gathered = 2 * self._parameters.body / self.run.model.num_layers
        gathered += largest_parameter(self.run.model)
        if self.run.optim.gradient_segments > 1 and engine.activation_checkpointing != "full":
            # DeepSpeed frees what it gathered for the last segment, and not for those before.
            gathered = P
        # A second copy of the weights, sharded within a node.
        within = _given(self.run, "zero_hpz_partition_size")
        copied = P / within if within > 1 else 0
        return w * (P / self.world_size + copied + gathered)

    @property
    def _optimizer(self) -> float:
        run, P = self.run, self._parameters.total
        if run.engine.offload_optimizer:
            return 0.0
        # float32 weights that ZeRO does not shard are their own masters.
        masters = 0 if self._weight_bytes == 4 and self._stage == 0 else MASTER_BYTES
        per_weight = masters + MASTER_BYTES * bool(run.optim.ema_decay)
        total = per_weight * P + moment_bytes(run.model, run.optim)
        return total / (self.world_size if self._stage else 1)

    @property
    def _logits(self) -> float:
        pass_rows = pass_tokens(self.run, self.world_size)
        rows = min(self.run.engine.logits_chunk_tokens or pass_rows, pass_rows)
        bins = vocabulary_bins(self.run.model)
        copies = LOGIT_COPIES_OF_Z_LOSS if self.run.model.z_loss else LOGIT_COPIES
        logits = copies * MASTER_BYTES * rows * (bins[0][0] + len(bins) - 1)
        if rows < pass_rows and self._weight_bytes == 2:  # gradients are summed in float32
            logits += MASTER_BYTES * sum(size * (width + 1) for size, width in bins)
        return logits

    def _recurrent_memory(self, is_offloaded: bool) -> float:
        of_one_lane, at_once = lane_bytes(self.run), pass_lanes(self.run, self.world_size)
        # Between the segments of a step; kept for the backward pass.
        between = (self.run.optim.gradient_segments - 1) * of_one_lane * at_once
        if is_offloaded and self.on_gpu:  # on a CPU, host memory is what is counted
            return 3 * of_one_lane * at_once + between  # old, new, on its way to the host
        own = len(lanes_of_rank(self.run, 0, self.world_size))
        return 2 * of_one_lane * own + between  # old and new

    @property
    def _activations(self) -> float:
        """What is kept for the backward pass, and what a layer of it needs beyond the logits.

        The logits' gradients are there first, and freed when the first layer begins.
        """
        return self._kept + max(0.0, self._working - self._logits)

    @cached_property
    def _layers(self) -> list[LayerBytes]:
        model, lanes = self.run.model, pass_lanes(self.run, self.world_size)
        kinds: list[tuple[LayerKind, int]] = [
            (model.layer_kind(index), length + model.compressed_length)
            for index, length in enumerate(model.memory_lengths())
        ]
        # Each kind once, because plans ask for thousands of settings.
        by_kind = {kind: layer_bytes(self.run, lanes, self.on_gpu, *kind) for kind in set(kinds)}
        return [by_kind[kind] for kind in kinds]

    @property
    def _kept(self) -> float:
        """Activations at the end of the forward pass."""
        run, layers = self.run, self._layers
        segments = run.optim.gradient_segments
        if run.engine.activation_checkpointing == "full":  # their inputs
            tokens = segments * pass_lanes(run, self.world_size)
            tokens *= run.model.read_tokens(run.data.segment_length)
            return float(len(layers) * tokens * run.model.d_model * self._weight_bytes)
        kept = segments * sum(layer.kept for layer in layers)
        if run.engine.activation_checkpointing == "selective":
            repeated = [layer.repeated for layer in layers]
            kept -= segments * sum(repeated) - max(repeated)
        return kept

    @property
    def _working(self) -> float:
        """What the backward pass of one layer needs besides, at most."""
        runs_again = self.run.engine.activation_checkpointing == "full"
        return max(layer.kept * runs_again + layer.working for layer in self._layers)


def largest_footprint(run: RunConfig, world_size: int, on_gpu: bool = False) -> Footprint:
    """Return what the run occupies in the phase that needs the most memory."""
    phases = [Footprint(phase, world_size, on_gpu) for phase in runs_of_phases(run)]
    return max(phases, key=lambda phase: phase.device) if phases[1:] else phases[0]


def largest_micro_batch(
    run: RunConfig, world_size: int, capacity: float, on_gpu: bool = False
) -> int:
    """Return the most lanes of one forward pass that fit into `capacity` bytes, or 0."""
    own = len(lanes_of_rank(run, 0, world_size))
    for lanes in range(own, 0, -1):
        if own % lanes == 0:
            tried = replace(run, engine=replace(run.engine, micro_batch_lanes=lanes))
            if Footprint(tried, world_size, on_gpu).device <= capacity:
                return lanes
    return 0


def checkpoint_bytes(run: RunConfig) -> float:
    """Return the bytes of weights, moments, the EMA if there is one, and every lane's memory.

    File headers and the random-number state of each rank (5 kB) come on top.
    """
    copies = 1 + bool(run.optim.ema_decay)
    weights = MASTER_BYTES * copies * parameter_counts(run.model).total
    return weights + moment_bytes(run.model, run.optim) + run.data.lanes * lane_bytes(run)


def lane_bytes(run: RunConfig) -> int:
    """Return the bytes that each lane carries from segment to segment when its memory is full."""
    return lane_parts(run.model).num_bytes(activation_bytes(run))


def activation_bytes(run: RunConfig) -> int:
    """Return the bytes of an element of an activation, and of a weight that computes it."""
    return 4 if run.engine.number_format == "fp32" else 2


def check_host_memory(run: RunConfig, world_size: int, ranks_on_node: int, on_gpu: bool) -> None:
    """Raise ConfigError if this node cannot hold the weights that its ranks draw, in float32."""
    if on_gpu and sharding_stage(run) == 3:
        return  # each parameter goes to the GPUs before the next one is drawn
    parameters = parameter_counts(run.model).total
    drawn = parameters * ranks_on_node / (world_size if sharding_stage(run) == 3 else 1)
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if MASTER_BYTES * drawn > room:
        raise ConfigError(
            f"a model of {parameters:,} parameters takes {MASTER_BYTES * drawn / GIB:,.1f} GiB of "
            f"this node's host memory, found {room / GIB:,.1f} GiB; use a smaller model, or "
            "engine.zero_stage=3 on more nodes"
        )


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for a segment of all lanes of a pass, counted tensor by tensor."""

    kept: float  # from forward to backward
    repeated: float  # of these, what selective checkpointing computes again
    working: float  # during its backward pass only: about the gradients of what was kept
    workspace: float = 0.0  # of these, what fused kernels pass to each other


def layer_bytes(
    run: RunConfig, lanes: int, on_gpu: bool, kind: LayerKind, memory: int
) -> LayerBytes:
    """Return what a layer that remembers `memory` rows occupies, compressed ones included."""
    model, width = run.model, activation_bytes(run)
    queries = model.read_tokens(run.data.segment_length)
    tokens, keys, d = queries * lanes, (queries + memory) * lanes, model.d_model
    is_attention, has_dropout = kind == "attention", bool(model.dropout)
    # Input, its sum with attention, both norms (pre: of memory too).
    normed = keys if model.norm_position == "pre" and is_attention else tokens
    elements = (3 * tokens + normed) * d
    # A GPU computes rms_norm from its input again, elsewhere torch keeps it before the gain (which
    # memory gets in the projection).
    is_kept_normed = not on_gpu
    if model.norm == "rmsnorm":
        elements += 2 * tokens * d * is_kept_normed
    traits = FEED_FORWARDS[model.feed_forward]
    is_kept_twice = has_dropout and not traits.drops_first
    elements += tokens * model.inner_width * (traits.inner_tensors + is_kept_twice)
    # Dropout's masks, a byte per element; a GPU draws them again in the backward pass.
    masks = 0 if on_gpu else tokens * (2 * d + model.inner_width) * has_dropout
    if not is_attention:
        is_half = run.engine.number_format != "fp32"
        kernel = run.engine.attention_kernel
        rule, _ = delta_rule_here(kernel, model, on_gpu=on_gpu, is_half=is_half)
        of_mixer, joined, of_rule = _deltanet_elements(run, queries)
        if rule is DeltaRule.FLA:
            kept, passed = (width * lanes * each for each in _elements_of_fla(run, queries))
            rows = width * (elements + lanes * of_mixer + joined)
            working = rows - width * lanes * of_mixer + passed
            return LayerBytes(rows + kept + masks, kept, working)
        rows = width * (elements + lanes * of_mixer + joined)
        repeated = max(width, EXACT_BYTES) * lanes * of_rule
        # The delta rule's tensors are freed as its gradients come.
        return LayerBytes(rows + repeated + masks, repeated, rows - width * lanes * of_mixer)

    attention = attention_in(run.engine, model, on_gpu=on_gpu)[0]
    is_plain, drops_weights = attention is Attention.PLAIN, bool(model.attention_dropout)
    n = model.num_heads
    h, k = n * model.head_width, model.key_heads * model.head_width
    elements += 2 * tokens * h + 2 * keys * k  # queries and what they read; keys and values
    if model.query_key_norm:
        elements += tokens * h + keys * k + (tokens * h + 2 * keys * k) * is_kept_normed
    if model.softmax_scaling == "log_length":
        elements += tokens * h
    if POSITIONS[model.positions].projects_encodings:
        elements += (queries + memory) * h
    if attention in (Attention.SDPA, Attention.FUSED):
        weights = 4.0 * tokens * n  # they keep one number per query
    elif is_plain:
        weights = float(width * keys * queries * n)
    else:
        weights = width * tokens * n * (memory + (queries + min(queries, TILE_ROWS)) / 2)
    if drops_weights and not on_gpu:
        masks += keys * queries * n
    workspace = _workspace(run, lanes, queries, memory) if attention is Attention.FUSED else 0.0
    rows, repeated = width * elements, weights * (1 + (drops_weights and is_plain))
    working = rows + weights * is_plain + workspace
    return LayerBytes(rows + repeated + masks, repeated, working, workspace)


def _deltanet_elements(run: RunConfig, tokens: int) -> tuple[int, int, float]:
    """Return what a deltanet keeps for its backward pass: outside the delta rule and in it per
    lane, and once for all lanes.

    Outside, in activations: the convolution's input, its taps where documents hide some, and its
    result; what the heads read, normed; the gate before and after its activation; the product.
    Once: the weights of queries, keys, values and gates, joined for one product of all. In the
    rule: tensors of rows, five matrices per chunk and head, and the state before each chunk.
    """
    model, n = run.model, run.model.num_heads
    w, v = n * model.head_width, n * model.deltanet_value_width
    taps = CONVOLUTION_WIDTH - 1 if model.isolate_documents else 0
    number, size = delta_rule_chunks(tokens)
    of_mixer = tokens * ((2 + taps) * (2 * w + v) + 4 * v)
    joined = model.d_model * (2 * w + v + 2 * n)
    of_rule = tokens * (9 * w + 5 * v) + number * (5 * n * size * size + v * model.head_width)
    return of_mixer, joined, of_rule


def _elements_of_fla(run: RunConfig, tokens: int) -> tuple[float, float]:
    """Return what the kernels of the delta rule keep per lane, and pass on in the backward pass.

    Queries and keys, normed, values, the inverse of each chunk, both gates in float32. Of these and
    what follows from them the backward pass makes w and u, gradients, and states before chunks.
    """
    n, w = run.model.num_heads, run.model.num_heads * run.model.head_width
    v = n * run.model.deltanet_value_width
    states = -(-tokens // CHUNK_TOKENS) * v * run.model.head_width
    return tokens * (2 * w + v + n * CHUNK_TOKENS + 4 * n), tokens * (6 * w + 4 * v) + 2 * states


def _workspace(run: RunConfig, lanes: int, queries: int, memory: int) -> float:
    """Return gradients of the scores of some heads, which the fused kernels pass to each other."""
    model, width = run.model, activation_bytes(run)
    needed = backward_workspace(
        lanes=lanes,
        queries=queries,
        keys=queries + memory,
        heads=model.num_heads,
        groups=model.key_heads,
        head_width=model.head_width,
        tiles=built_in_tiles(model.head_width, TILE_CAPABILITY),
        element_bytes=width,
    )
    return float(needed.num_bytes(width))


def sharding_stage(run: RunConfig) -> int:
    """Return the ZeRO stage; plain torch has none."""
    return run.engine.zero_stage if run.engine.kind == "deepspeed" else 0


def deepspeed_optimizer(run: RunConfig) -> str:
    """Return the class that DeepSpeed wraps around our optimizer; empty if it does not."""
    stage, precision = sharding_stage(run), run.engine.number_format
    if stage == 3:
        return "DeepSpeedZeroOptimizer_Stage3"
    if stage == 0:
        is_wrapped = run.engine.kind == "deepspeed" and precision != "fp32"
        return "FP16_UnfusedOptimizer" if is_wrapped else ""
    if stage == 1 and not run.engine.offload_optimizer and precision == "bf16":
        return "BF16_Optimizer"
    return "DeepSpeedZeroOptimizer"


def overlaps_reduction(run: RunConfig, on_gpu: bool) -> bool:
    """Return whether gradients are summed over the ranks while the backward pass goes on."""
    return on_gpu and (
        sharding_stage(run) == 3 or (sharding_stage(run) == 2 and not run.engine.offload_optimizer)
    )


def bucket_elements(run: RunConfig) -> int:
    """Return the size of a bucket: every parameter fits into it.

    ZeRO-2 sums a larger parameter's gradient in place and lets go of it: on a GPU its memory could
    get into use again while it is read. DeepSpeed's 500,000,000 would be 2 GB for each of up to
    four buffers.
    """
    if given := _given(run, "reduce_bucket_size"):
        return int(given)
    return min(
        parameter_counts(run.model).total, max(SMALLEST_BUCKET, largest_parameter(run.model))
    )


def _given(run: RunConfig, name: str) -> float:
    """Return a number of zero_optimization; 0 if it is not given, or not one."""
    zero = run.engine.deepspeed_extra.get("zero_optimization")
    given = zero.get(name) if isinstance(zero, Mapping) else None
    return given if isinstance(given, (int, float)) else 0  # DeepSpeed takes 5e8, too


def largest_parameter(model: ModelConfig) -> int:
    """Return the elements of the largest parameter."""
    return max(weight.elements for weight in weight_shapes(model) if weight.copies)
