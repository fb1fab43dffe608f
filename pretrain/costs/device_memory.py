"""Device memory of a rank by part, in bytes, and the size of a checkpoint. Torch-free.

P parameters, R ranks, L layers, A of them with attention, B lanes of one forward pass, T segment
with its memory tokens, G gradient segments, M memory with its compressed rows (the mean of the
layers), K = T + M keys, d d_model, h heads times head width, k key heads times head width, f inner
width, V vocabulary, b bytes of an activation.

What a run occupies: memory of a rank's device and of its host, and disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from foundation.errors import ConfigError
from pretrain.config.choices import (
    LayerKind,
    attends,
    feed_forward_traits,
    norm_traits,
    norms_inputs,
    position_traits,
    precision_traits,
    recomputation_traits,
    scales_with_length,
    shards,
)
from pretrain.config.engine import Attention, attention_in
from pretrain.config.lane_parts import lane_parts
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.costs.devices import GIB
from pretrain.costs.flops import (
    MOMENT_BYTES,
    DeltaNetCosts,
    bins_of,
    lanes_of_pass,
    moment_bytes,
    parameters_of,
    tokens_of_pass,
)
from pretrain.costs.zero_buffers import Buffers, buffers_of, largest_parameter, stage_of
from pretrain.kernels.triton.tiling import built_in_tiles
from pretrain.kernels.triton.workspace import workspace_of

MASTER_BYTES = 4
EMA_BYTES = 4
LOGIT_COPIES = 3  # logits, their float32 softmax, its gradient
TILE_CAPABILITY = (9, 0)  # whose tiles round the workspace's rows; those of other GPUs are as wide
TILE_ROWS = 128  # queries of a tile on a CPU; keys after them are skipped


@dataclass(frozen=True)
class Part:
    name: str
    bytes: float
    formula: str


def memory_parts(run: RunConfig, world_size: int, on_gpu: bool = False) -> list[Part]:
    """Return the parts of one rank's memory at its peak under the run's settings."""
    pass_rows = tokens_of_pass(run, world_size)
    rows = min(run.engine.logits_chunk_tokens or pass_rows, pass_rows)
    bins = bins_of(run.model)
    logits = LOGIT_COPIES * MASTER_BYTES * rows * (bins[0][0] + len(bins) - 1)
    if rows < pass_rows and _width(run) == 2:  # gradients are summed over chunks in float32
        logits += MASTER_BYTES * sum(size * (width + 1) for size, width in bins)
    buffers = buffers_of(run, world_size, on_gpu)
    return [
        *_weights_and_optimizer(run, world_size),
        _gradients(run, buffers),
        Part("gradient buckets", buffers.buckets, buffers.buckets_formula),
        _recurrent_memory(run, world_size, on_gpu),
        _activations(run, world_size, on_gpu, logits, buffers.gradients),
        Part(
            "logits",
            logits,
            f"{LOGIT_COPIES} * 4 G T B V; in chunks, less of G T B, and in bf16 4 d V",
        ),
    ]


def largest_phase(run: RunConfig, world_size: int, on_gpu: bool = False) -> RunConfig:
    """Return the run in the phase in which a rank needs the most memory."""
    phases = runs_of_phases(run)
    if len(phases) == 1:
        return phases[0]
    return max(phases, key=lambda phase: total_bytes(memory_parts(phase, world_size, on_gpu)))


def total_bytes(parts: list[Part]) -> float:
    """Return the sum of all parts."""
    return sum(part.bytes for part in parts)


def largest_micro_batch(
    run: RunConfig, world_size: int, capacity: float, on_gpu: bool = False
) -> int:
    """Return the most lanes of one forward pass that fit into `capacity` bytes, or 0."""
    own = len(lanes_of_rank(run, 0, world_size))
    for lanes in range(own, 0, -1):
        if own % lanes == 0:
            tried = replace(run, engine=replace(run.engine, micro_batch_lanes=lanes))
            if total_bytes(memory_parts(tried, world_size, on_gpu)) <= capacity:
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
        needed += _recurrent_memory(kept, world_size, on_gpu=True).bytes
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


def _gradients(run: RunConfig, buffers: Buffers) -> Part:
    """Return what a rank keeps of gradients, under ZeRO-3 also before all segments have theirs."""
    waiting, formula = 0, buffers.gradients_formula
    if _has_segments(run) and stage_of(run) == 3:
        # A gradient is complete, and can be reduced, when the first segment's is there.
        waiting = _width(run) * parameters_of(run.model).total
        formula += f"; {_width(run)} P of all segments, before they are reduced"
    return Part("gradients", buffers.gradients + waiting, formula)


def _has_segments(run: RunConfig) -> bool:
    return run.optim.gradient_segments > 1


def _checkpoints_all(run: RunConfig) -> bool:
    repeated = recomputation_traits(run.engine.activation_checkpointing)
    return repeated.layers and run.engine.checkpoint_every_n_layers == 1


def _weights_and_optimizer(run: RunConfig, world_size: int) -> list[Part]:
    parameters, stage, width = parameters_of(run.model), stage_of(run), _width(run)
    # float32 weights that ZeRO does not shard are their own masters.
    master = 0 if width == 4 and stage == 0 else MASTER_BYTES
    offloaded = run.engine.offload_optimizer
    moments = moment_bytes(run.model, run.optim, parameters.total) / parameters.total
    each = master + moments + _ema_bytes(run)
    held = f"master weights, {moments / MOMENT_BYTES:.3g} moments"
    held += " and an EMA" if run.optim.ema_decay else ""
    formula = f"{each:.4g} P" + (" / R" if stage else "") + f": {held} in float32"
    weights = Part("weights", parameters.total * width, f"{width} P")
    if stage == 3:  # it gathers a layer for its use, and prefetches the next one
        gathered = 2 * parameters.body / run.model.num_layers + largest_parameter(run.model)
        sharers = run.engine.secondary_shard_ranks
        shares = 1 / world_size + (1 / sharers if sharers > 1 else 0)
        formula = f"{width} P / R, two gathered layers and the largest matrix"
        formula += f", and {width} P / {sharers} once more" if sharers > 1 else ""
        if _has_segments(run) and not _checkpoints_all(run):
            # DeepSpeed frees what it gathered for the last segment, and not for those before.
            gathered, formula = parameters.total, f"{width} P / R and {width} P, all gathered"
        weights = Part("weights", width * (parameters.total * shares + gathered), formula)
    return [
        weights,
        Part(
            "optimizer",
            0.0 if offloaded else parameters.total * each / (world_size if stage else 1),
            "on the CPU" if offloaded else formula,
        ),
    ]


def _recurrent_memory(run: RunConfig, world_size: int, on_gpu: bool) -> Part:
    of_one_lane = lane_parts(run.model).num_bytes(_width(run))
    each = "(A M d b + states)"
    # Between the segments of a step; kept for the backward pass.
    between = (run.optim.gradient_segments - 1) * of_one_lane * lanes_of_pass(run, world_size)
    further = ", and G - 1 more in a forward pass" if between else ""
    if run.engine.offload_memories and on_gpu:  # on a CPU, host memory is what is counted
        lanes = lanes_of_pass(run, world_size)
        formula = f"3 {each} for each lane of a forward pass: old, new, on its way to the host"
        return Part("recurrent memory", 3 * of_one_lane * lanes + between, formula + further)
    lanes = len(lanes_of_rank(run, 0, world_size))
    formula = f"2 {each} for each of the rank's lanes, old and new"
    return Part("recurrent memory", 2 * of_one_lane * lanes + between, formula + further)


def _activations(
    run: RunConfig, world_size: int, on_gpu: bool, logits: float, gradients: float
) -> Part:
    """Return what is kept for the backward pass, plus what that pass of one layer needs."""
    segments = run.optim.gradient_segments
    width, every = _width(run), run.engine.checkpoint_every_n_layers
    lanes, compressed = lanes_of_pass(run, world_size), run.model.compressed_length
    numbered = enumerate(run.model.memory_lengths())
    made = cache(partial(LayerActivations, run, lanes, width, on_gpu))
    layers = [made(run.model.layer_kind(index), each + compressed) for index, each in numbered]
    formula = "what a layer keeps (rows of T B d, T B h, K B k and T B f, attention's weights)"
    workspace = max(layer.workspace for layer in layers)
    scores = f", {workspace / 2**20:,.0f} MiB of score gradients" if workspace else ""
    checkpointed = layers[::every]
    freed = kept = segments * sum(layer.kept for layer in layers)
    working = max(layer.working for layer in layers)
    repeated = recomputation_traits(run.engine.activation_checkpointing)
    if repeated.layers:
        tokens = segments * lanes * run.model.read_tokens(run.data.segment_length)
        inputs = len(checkpointed) * tokens * run.model.d_model * width
        kept -= segments * sum(layer.kept for layer in checkpointed)
        freed = kept = inputs + kept
        # A layer runs again when the logits are already freed, so only what exceeds them adds to
        # the peak.
        working = max(0.0, max(layer.kept + layer.working for layer in checkpointed) - logits)
        other = "" if every == 1 else ", all of it in the layers that are not checkpointed"
        formula = f"G L T B d b + beyond the logits {formula}, twice{other}"
    else:
        if repeated.scores:
            weights = [layer.weights for layer in checkpointed]
            kept -= segments * sum(weights) - max(weights)
            some = "all" if every == 1 else "some"
            formula += f", the weights of {some} layers but one left out"
        freed, formula = kept - layers[-1].kept, f"G L + 1 times {formula}"
    is_unsharded = not shards(run.engine.kind)
    if is_unsharded and width == 4 and accumulation_steps(run, world_size) == 1:
        # The backward pass allocates gradients while it frees activations, so the two do not peak
        # together.
        kept -= min(gradients, freed)
        formula += ", less what is freed when the gradients exist"
    return Part("activations", kept + working, formula + scores)


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
        if not attends(self.kind):
            return self.lanes * self._deltanet.kept_by_rule(self.width)
        return self._pairs * (1 + self._drops_weights * self._is_plain)

    @cached_property
    def working(self) -> float:
        """During its backward pass only: about the gradients of what was kept."""
        if not attends(self.kind):  # the delta rule's tensors are freed as its gradients come
            return self._rows - self.width * self.lanes * self._deltanet.kept_elements
        return self._rows + self._pairs * self._is_plain + self.workspace

    @cached_property
    def workspace(self) -> float:
        """Gradients of the scores of some heads, which the fused kernels pass to each other."""
        if self._attention is not Attention.FUSED or not attends(self.kind):
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
        normed = keys if norms_inputs(model.norm_position) and attends(self.kind) else tokens
        elements = (3 * tokens + normed) * d
        elements += norm_traits(model.norm).kept * (tokens + normed) * d
        inner_tensors = feed_forward_traits(model.feed_forward).inner_tensors + bool(model.dropout)
        elements += tokens * model.inner_width * inner_tensors
        if not attends(self.kind):
            elements += self.lanes * self._deltanet.kept_elements + self._deltanet.joined_elements
            return float(self.width * elements)
        elements += 2 * tokens * h + 2 * keys * k  # queries and what they read; keys and values
        if model.query_key_norm:
            elements += 2 * tokens * h + 3 * keys * k
        if scales_with_length(model.softmax_scaling):
            elements += tokens * h
        if position_traits(model.positions).projects_encodings:
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
        drops = self._drops_weights and attends(self.kind)
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
    return precision_traits(run.engine.number_format).bytes


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a run in the phase that needs the most memory."""

    run: RunConfig  # in that phase
    parts: tuple[Part, ...]  # of a rank's device; on a CPU, of host memory
    offloaded: float  # host memory of a rank, for what its GPU offloads
    drawn: float  # host memory of a rank, for the weights as it draws them
    checkpoint: float
    copy: float  # host memory of a rank while it saves

    @property
    def device(self) -> float:
        """Bytes of a rank's device."""
        return total_bytes(list(self.parts))

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
        parts=tuple(memory_parts(largest, world_size, on_gpu)),
        offloaded=offloaded_bytes(largest, world_size) if on_gpu else 0.0,
        drawn=0.0 if is_drawn_on_device else MASTER_BYTES * parameters_of(largest.model).total,
        checkpoint=saved,
        copy=saved / world_size if largest.checkpoint.asynchronous else 0.0,
    )
