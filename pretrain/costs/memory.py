"""What one rank must hold, in bytes, by part, before anything is started. Torch-free.

P parameters, R ranks, L layers, B lanes of one forward pass, T segment, M memory, K = T + M keys, d d_model, h heads
times head width, k key heads times head width, f inner width, V vocabulary, b bytes of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.costs.activations import LayerActivations
from pretrain.costs.flops import bins_of, parameters_of

MASTER_BYTES = 4
MOMENT_BYTES = 8  # two of float32
LOGIT_COPIES = 3  # logits, their float32 softmax, its gradient


@dataclass(frozen=True)
class Part:
    name: str
    bytes: float
    formula: str


def memory_parts(run: RunConfig, world_size: int, on_gpu: bool = False) -> list[Part]:
    """The parts of one rank's memory at its peak under the configured engine, precision and checkpointing."""
    logits = (
        LOGIT_COPIES
        * MASTER_BYTES
        * _logit_rows(run, _lanes_of_pass(run, world_size))
        * _logit_columns(run)
    )
    gradients = _gradients(run, world_size)
    return [
        *_state(run, world_size),
        gradients,
        _recurrent_memory(run, world_size, on_gpu),
        _activations(run, world_size, on_gpu, logits, gradients.bytes),
        Part("logits", logits, f"{LOGIT_COPIES} * 4 T B V, or of a chunk of T B"),
    ]


def largest_phase(run: RunConfig, world_size: int, on_gpu: bool = False) -> RunConfig:
    """The run in the phase whose ranks hold the most."""
    return max(
        runs_of_phases(run), key=lambda phase: total_bytes(memory_parts(phase, world_size, on_gpu))
    )


def total_bytes(parts: list[Part]) -> float:
    """The sum of all parts."""
    return sum(part.bytes for part in parts)


def largest_micro_batch(run: RunConfig, world_size: int, room: float, on_gpu: bool = False) -> int:
    """The most lanes of one forward pass whose rank fits into `room` bytes; 0 when not even one does."""
    own = len(lanes_of_rank(run, 0, world_size))
    for lanes in range(own, 0, -1):
        if own % lanes == 0:
            tried = replace(run, engine=replace(run.engine, micro_batch_lanes=lanes))
            if total_bytes(memory_parts(tried, world_size, on_gpu)) <= room:
                return lanes
    return 0


def checkpoint_bytes(run: RunConfig) -> float:
    """Weights, both moments and their average, if there is one, in float32, and every lane's memory.

    File headers and the random-number state of each rank (5 kB) come on top.
    """
    model = run.model
    rows = run.data.lanes * (model.memory_length + model.compressed_length)
    elements = MASTER_BYTES + MOMENT_BYTES + _average_bytes(run)
    return float(elements) * parameters_of(model).total + rows * (
        model.num_layers * model.d_model * _width(run) + 4
    )


def _state(run: RunConfig, world_size: int) -> list[Part]:
    """Weights and optimizer: what is there all the time."""
    parameters, stage, width = parameters_of(run.model), _stage(run), _width(run)
    # float32 weights that ZeRO does not partition are their own masters.
    master = 0 if width == 4 and stage == 0 else MASTER_BYTES
    offloaded = run.engine.offload_optimizer
    each = master + MOMENT_BYTES + _average_bytes(run)
    held = (
        "master weights, two moments and an average"
        if run.optim.ema_decay
        else "master weights and two moments"
    )
    formula = f"{each} P" + (" / R" if stage else "") + f": {held} in float32"
    gathered = 2 * parameters.body / run.model.num_layers * width if stage == 3 else 0
    return [
        Part(
            "weights",
            parameters.total * width / (world_size if stage == 3 else 1) + gathered,
            f"{width} P" + (" / R and two gathered layers" if stage == 3 else ""),
        ),
        Part(
            "optimizer",
            0.0 if offloaded else parameters.total * each / (world_size if stage else 1),
            "on the CPU" if offloaded else formula,
        ),
    ]


def _recurrent_memory(run: RunConfig, world_size: int, on_gpu: bool) -> Part:
    of_one_lane = _memory_rows(run) * run.model.d_model * _width(run)
    if run.engine.offload_memories and on_gpu:  # without a GPU it is host memory that is counted
        lanes = _lanes_of_pass(run, world_size)
        formula = "3 L M d b for each lane of a forward pass: old, new, and on its way to the host"
        return Part("recurrent memory", 3 * of_one_lane * lanes, formula)
    lanes = len(lanes_of_rank(run, 0, world_size))
    return Part(
        "recurrent memory",
        2 * of_one_lane * lanes,
        "2 L M d b for each of the rank's lanes, old and new",
    )


def _gradients(run: RunConfig, world_size: int) -> Part:
    stage, width = _stage(run), _width(run)
    one = 4 if width == 4 or stage > 0 or run.engine.kind == "torch" else 2
    size = parameters_of(run.model).total * one / (world_size if stage >= 2 else 1)
    return Part("gradients", size, f"{one} P" + (" / R" if stage >= 2 else ""))


def _activations(
    run: RunConfig, world_size: int, on_gpu: bool, logits: float, gradients: float
) -> Part:
    """What is kept from forward to backward, and what the backward pass of one layer holds besides."""
    layers, width = run.model.num_layers, _width(run)
    lanes = _lanes_of_pass(run, world_size)
    layer = LayerActivations(run, lanes, width, on_gpu)
    formula = "what a layer keeps (rows of T B d, T B h, K B k and T B f, attention's weights)"
    checkpointed = -(-layers // run.engine.checkpoint_every_n_layers)
    freed = kept = layers * layer.kept
    working = layer.working
    if run.engine.activation_checkpointing == "full":
        inputs = checkpointed * run.data.segment_length * lanes * run.model.d_model * width
        freed = kept = inputs + (layers - checkpointed) * layer.kept
        working = max(
            0.0, layer.kept + layer.working - logits
        )  # computed again when the logits are gone
        other = (
            ""
            if run.engine.checkpoint_every_n_layers == 1
            else ", all of it in the layers that are not checkpointed"
        )
        formula = f"L T B d b + beyond the logits {formula}, twice{other}"
    else:
        if run.engine.activation_checkpointing == "selective":
            kept -= (checkpointed - 1) * layer.weights
            some = "all" if run.engine.checkpoint_every_n_layers == 1 else "some"
            formula += f", the weights of {some} layers but one left out"
        freed, formula = kept - layer.kept, f"L + 1 times {formula}"
    if run.engine.kind == "torch" and width == 4 and accumulation_steps(run, world_size) == 1:
        # Gradients come into being while the backward pass frees activations: the two peaks are not at one time.
        kept -= min(gradients, freed)
        formula += ", less what has gone when the gradients are there"
    return Part("activations", kept + working, formula)


def _average_bytes(run: RunConfig) -> int:
    """Of a running average of the weights, per parameter."""
    return 4 if run.optim.ema_decay else 0


def _stage(run: RunConfig) -> int:
    """The ZeRO stage; plain torch has none."""
    return run.engine.zero_stage if run.engine.kind == "deepspeed" else 0


def _width(run: RunConfig) -> int:
    return 4 if run.engine.precision == "fp32" else 2


def _lanes_of_pass(run: RunConfig, world_size: int) -> int:
    return len(lanes_of_rank(run, 0, world_size)) // accumulation_steps(run, world_size)


def _memory_rows(run: RunConfig) -> int:
    return run.model.num_layers * (run.model.memory_length + run.model.compressed_length)


def _logit_rows(run: RunConfig, lanes: int) -> int:
    tokens = lanes * run.data.segment_length
    return min(run.engine.logits_chunk_tokens or tokens, tokens)


def _logit_columns(run: RunConfig) -> int:
    bins = bins_of(run.model)
    return bins[0][0] + len(bins) - 1
