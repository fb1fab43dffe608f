"""What a run occupies: memory of a rank's device by part and of its host, and disk. Torch-free.

P parameters, R ranks, w bytes of a weight; gradients are summed over the ranks in float32.
DeepSpeed 0.19.8 chooses an optimizer by stage, precision and offloading. Tests compare these
functions with the optimizer that it chooses and with the bytes of real steps:

    optimizer                      bytes of gradients                  summed over the ranks
    (none), FP16_UnfusedOptimizer  w P, made in the backward pass      after the pass
    BF16_Optimizer                 4 P; 2 P from pass to update        after the pass
    DeepSpeedZeroOptimizer         stage 1: 4 P, made in the pass      after it, with 4 P / R more
    DeepSpeedZeroOptimizer         stage 2: 4 P / R                    in the pass, in buckets
    DeepSpeedZeroOptimizer_Stage3  4 P / R                             in the pass, in buckets

On a GPU stages 2 and 3 sum a bucket on a stream of its own while the pass goes on (overlap_comm).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from foundation.errors import ConfigError
from pretrain.config.engine import BLOCK_LOGITS, BLOCK_LOGITS_OF_GPU
from pretrain.config.lane_parts import lane_parts
from pretrain.config.mixer import LayerBytes, SegmentSize, activation_bytes, mixer_facts
from pretrain.config.model import FEED_FORWARDS, ModelConfig
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.costs.flops import (
    Parameters,
    kinds_and_rows,
    moment_bytes,
    parameter_counts,
    pass_lanes,
    pass_tokens,
    vocabulary_bins,
    weight_shapes,
)
from pretrain.costs.hardware import GIB

MASTER_BYTES = 4
# Fewest elements of a bucket: on most networks, summing fewer takes as long.
SMALLEST_BUCKET = 1 << 22
COPIED = 500_000_000  # most elements that stages 0 and 1 copy at a time, to sum them


@dataclass(frozen=True)
class Buffers:
    """Bytes of a rank's gradients before and after a backward pass, and of what sums them."""

    before: float = 0.0
    after: float = 0.0
    summing: float = 0.0  # only while gradients are summed after the pass
    buckets: float = 0.0
    offloaded: float = 0.0  # on the host, together with the optimizer state offloaded there


@dataclass(frozen=True)
class Footprint:
    """Bytes of a run in the phase that `run` describes, at its peak.

    On a CPU, a rank's device is its part of host memory.
    """

    run: RunConfig
    world_size: int
    on_gpu: bool = False

    @cached_property
    def parts(self) -> dict[str, float]:
        """Bytes of a rank's device, by what occupies them."""
        segments = self.run.optim.gradient_segments
        # Gradients at the peak: the backward pass frees activations while gradients come.
        buffers = self._buffers
        several = accumulation_steps(self.run, self.world_size) > 1
        before = buffers.after if several else buffers.before
        after = buffers.after + max(buffers.summing, self._working)
        return {
            "weights": self._weights,
            "optimizer": self._optimizer,
            # With several segments, stage 3 keeps all gradients until the first segment's backward
            # pass, which comes last, has completed them.
            "gradients": max(before, after - self._activations - self._logits)
            + self._weight_bytes * self._parameters.total * (segments > 1 and self._stage == 3),
            "gradient buckets": self._buffers.buckets,
            "recurrent memory": self._recurrent_memory(self.run.engine.offload_memories),
            "activations": self._activations,
            "logits": self._logits,
        }

    @property
    def device(self) -> float:
        """Bytes of a rank's device."""
        return sum(self.parts.values())

    @property
    def offloaded(self) -> float:
        """Bytes of a rank's host memory for what its GPU offloads."""
        if not self.on_gpu:
            return 0.0
        has_memories = self.run.engine.offload_memories
        return self._buffers.offloaded + self._recurrent_memory(False) * has_memories

    @property
    def host(self) -> float:
        """Most bytes of a GPU rank's host memory at a time, besides the process itself."""
        is_drawn_on_device = self.on_gpu and self._stage == 3
        drawn = 0.0 if is_drawn_on_device else float(MASTER_BYTES * self._parameters.total)
        if self._weight_bytes == 2 and self.on_gpu:  # masters are copied from them: both exist
            drawn += self._buffers.offloaded
        return max(drawn, self.offloaded + self.copy)

    @property
    def checkpoint(self) -> float:
        """Bytes of one checkpoint."""
        return checkpoint_bytes(self.run)

    @property
    def copy(self) -> float:
        """Bytes of a rank's host memory while it saves in the background."""
        return self.checkpoint / self.world_size if self.run.checkpoint.asynchronous else 0.0

    @property
    def disk(self) -> float:
        """Bytes of the checkpoints that are kept, and of the one being written."""
        return (self.num_kept + 1) * self.checkpoint

    @property
    def num_kept(self) -> int:
        """The checkpoints that are kept at the run's end."""
        return self.run.checkpoint.num_kept(self.run.optim.steps)

    @cached_property
    def _parameters(self) -> Parameters:
        return parameter_counts(self.run.model)

    @cached_property
    def _stage(self) -> int:
        return sharding_stage(self.run)

    @property
    def _weight_bytes(self) -> int:
        return activation_bytes(self.run.engine)

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
        # A bucket is filled in the weights' type. While it is summed it is copied, 16-bit ones also
        # to float32: all of it where sums overlap the pass, else one rank's part.
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
            # DeepSpeed frees weights gathered for the last segment, but not for earlier ones.
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
        count = rows * (bins[0][0] + len(bins) - 1)
        copies, block = 1, BLOCK_LOGITS_OF_GPU if self.on_gpu else BLOCK_LOGITS
        if self.run.engine.compiles and self.on_gpu and len(bins) == 1:
            copies, block = 2, 0  # one loop makes the gradient
        logits = copies * self._weight_bytes * count + 2 * MASTER_BYTES * min(block, count)
        if rows < pass_rows:  # gradients are summed apart, in float32
            logits += MASTER_BYTES * sum(size * (width + 1) for size, width in bins)
        return logits

    def _recurrent_memory(self, is_offloaded: bool) -> float:
        of_one_lane, at_once = lane_bytes(self.run), pass_lanes(self.run, self.world_size)
        # Memories between the segments of a step, kept for the backward pass.
        between = (self.run.optim.gradient_segments - 1) * of_one_lane * at_once
        if is_offloaded and self.on_gpu:  # a CPU's device memory is host memory
            return 3 * of_one_lane * at_once + between  # old, new, on its way to the host
        own = len(lanes_of_rank(self.run, 0, self.world_size))
        return 2 * of_one_lane * own + between  # old and new

    @property
    def _activations(self) -> float:
        """Bytes kept for the backward pass, and what a layer needs beyond the logits' bytes.

        The backward pass starts with the logits and frees their bytes before the first layer.
        """
        return self._kept + max(0.0, self._working - self._logits)

    @cached_property
    def _layers(self) -> list[LayerBytes]:
        model, lanes = self.run.model, pass_lanes(self.run, self.world_size)
        kinds = list(kinds_and_rows(model))
        # Compute each kind once, because plans ask for thousands of settings.
        by_kind = {kind: layer_bytes(self.run, lanes, self.on_gpu, *kind) for kind in set(kinds)}
        return [by_kind[kind] for kind in kinds]

    @property
    def _kept(self) -> float:
        """Activations at the end of the forward pass."""
        run, layers = self.run, self._layers
        segments = run.optim.gradient_segments
        if run.engine.activation_checkpointing == "full":  # keeps only the layers' inputs
            tokens = segments * pass_lanes(run, self.world_size)
            tokens *= run.model.read_tokens(run.data.segment_length)
            return float(len(layers) * tokens * run.model.d_model * self._weight_bytes)
        if run.engine.activation_checkpointing == "segments":  # what the output layer reads
            tokens = segments * pass_lanes(run, self.world_size) * run.data.segment_length
            return float(tokens * run.model.d_model * self._weight_bytes)
        kept = segments * sum(layer.kept for layer in layers)
        if run.engine.activation_checkpointing == "selective":
            repeated = [layer.repeated for layer in layers]
            kept -= segments * sum(repeated) - max(repeated)
        return kept

    @property
    def _working(self) -> float:
        """The most bytes that the backward pass of a layer needs besides what is kept."""
        kind = self.run.engine.activation_checkpointing
        of_segment = sum(layer.kept for layer in self._layers) if kind == "segments" else 0.0
        if kind != "full":
            return of_segment + max(layer.working for layer in self._layers)
        # All of a layer comes again. Its feed-forward part is done and gone before its mixer's.
        return max(
            layer.kept + max(layer.inner, layer.working - 2 * layer.inner) for layer in self._layers
        )


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
    return lane_parts(run.model).num_bytes(activation_bytes(run.engine))


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


def layer_bytes(run: RunConfig, lanes: int, on_gpu: bool, kind: str, memory: int) -> LayerBytes:
    """Return what a layer that remembers `memory` rows occupies, compressed ones included."""
    model, width, mixer = run.model, activation_bytes(run.engine), mixer_facts(kind)
    queries = model.read_tokens(run.data.segment_length)
    if facts := model.facts:
        kept = facts.kept_per_token * width / MASTER_BYTES * queries * lanes / model.num_layers
        return LayerBytes(kept)
    tokens, d, has_dropout = queries * lanes, model.d_model, bool(model.dropout)
    segment = SegmentSize(lanes=lanes, tokens=queries, memory=memory)
    # Input, its sum with the mixer's output, results of both norms (pre: also of memory).
    normed = tokens + lanes * memory * (model.norm_position == "pre" and mixer.has_rows)
    elements = (3 * tokens + normed) * d
    # A GPU computes rms_norm again from its input; elsewhere torch also keeps the result before the
    # gain. For memory, the projection applies the gain.
    if model.norm == "rmsnorm":
        elements += 2 * tokens * d * (not on_gpu)
    traits = FEED_FORWARDS[model.feed_forward]
    is_kept_twice = has_dropout and not traits.drops_first
    inner = width * tokens * model.inner_width * (traits.inner_tensors + is_kept_twice)
    # Dropout's masks, a byte per element; a GPU draws them again in the backward pass.
    masks = 0 if on_gpu else tokens * (2 * d + model.inner_width) * has_dropout
    mixed, rows = mixer.kept_bytes(model, run.engine, segment, on_gpu), width * elements + inner
    kept, working = rows + mixed.kept + masks, rows + mixed.working
    return LayerBytes(kept, mixed.repeated, working, mixed.workspace, inner)


def sharding_stage(run: RunConfig) -> int:
    """Return the ZeRO stage; plain torch has none."""
    return run.engine.zero_stage if run.engine.kind == "deepspeed" else 0


def deepspeed_optimizer(run: RunConfig) -> str:
    """Return the class that DeepSpeed wraps around our optimizer; empty without a wrapper."""
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

    ZeRO-2 sums a larger parameter's gradient without a bucket and releases it early: a GPU could
    reuse its memory while it is read. DeepSpeed's default of 500,000,000 would be 2 GB for each of
    up to four buffers.
    """
    if given := _given(run, "reduce_bucket_size"):
        return int(given)
    return min(
        parameter_counts(run.model).total, max(SMALLEST_BUCKET, largest_parameter(run.model))
    )


def _given(run: RunConfig, name: str) -> float:
    """Return a number in `zero_optimization` of the run; 0 if it is missing or not a number."""
    zero = run.engine.deepspeed_extra.get("zero_optimization")
    given = zero.get(name) if isinstance(zero, Mapping) else None
    return given if isinstance(given, (int, float)) else 0  # DeepSpeed accepts floats such as 5e8


def largest_parameter(model: ModelConfig) -> int:
    """Return the elements of the largest parameter."""
    return max(weight.elements for weight in weight_shapes(model) if weight.copies)
