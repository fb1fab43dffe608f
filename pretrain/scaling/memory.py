"""What one rank must hold, in bytes, by part, before anything is started. Torch-free.

P parameters, R ranks, L layers, B lanes of one forward pass, T segment, K = T + M keys, d d_model, h heads times head
width, H heads, f inner width, V vocabulary, b bytes of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pretrain.config import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.scaling.costs import bins_of, parameters_of

MASTER_BYTES = 4
MOMENT_BYTES = 8  # two of float32
LOGIT_COPIES = 3  # logits, their float32 softmax, its gradient


@dataclass(frozen=True)
class Part:
    name: str
    bytes: float
    formula: str


def memory_parts(run: RunConfig, world_size: int) -> list[Part]:
    """The parts of one rank's memory under the configured ZeRO stage, precision and activation checkpointing."""
    model, stage = run.model, run.engine.zero_stage
    parameters, ranks = parameters_of(model).total, world_size
    width = 4 if run.engine.precision == "fp32" else 2
    lanes_of_one = len(lanes_of_rank(run, 0, world_size))
    lanes = lanes_of_one // accumulation_steps(run, world_size)
    gradient = 4 if width == 4 or stage > 0 else 2
    # float32 weights that ZeRO does not partition are their own masters.
    master = 0 if width == 4 and stage == 0 else MASTER_BYTES
    layers = parameters_of(model).body / model.num_layers
    rows = model.num_layers * model.memory_length * model.d_model * width
    return [
        Part(
            "weights",
            parameters * width / (ranks if stage == 3 else 1) + (2 * layers * width if stage == 3 else 0),
            f"{width} P" + (" / R and two gathered layers" if stage == 3 else ""),
        ),
        Part(
            "gradients",
            parameters * gradient / (ranks if stage >= 2 else 1),
            f"{gradient} P" + (" / R" if stage >= 2 else ""),
        ),
        Part(
            "optimizer",
            parameters * (master + MOMENT_BYTES) / (ranks if stage else 1),
            f"{master + MOMENT_BYTES} P" + (" / R" if stage else "") + ": master weights and two moments in float32",
        ),
        Part("recurrent memory", 2 * rows * lanes_of_one, "2 L M d b for each of the rank's lanes, old and new"),
        Part("activations", _activations(run, lanes, width), _activation_formula(run)),
        Part(
            "logits",
            LOGIT_COPIES * MASTER_BYTES * _logit_rows(run, lanes) * _logit_columns(run),
            f"{LOGIT_COPIES} * 4 T B V, or of a chunk of T B",
        ),
    ]


def total_bytes(parts: list[Part]) -> float:
    """The sum of all parts."""
    return sum(part.bytes for part in parts)


def largest_micro_batch(run: RunConfig, world_size: int, room: float) -> int:
    """The most lanes of one forward pass whose rank fits into `room` bytes; 0 when not even one does."""
    own = len(lanes_of_rank(run, 0, world_size))
    for lanes in range(own, 0, -1):
        if own % lanes == 0:
            tried = replace(run, engine=replace(run.engine, micro_batch_lanes=lanes))
            if total_bytes(memory_parts(tried, world_size)) <= room:
                return lanes
    return 0


def checkpoint_bytes(run: RunConfig) -> float:
    """Weights and both moments in float32, and every lane's memory; headers come on top."""
    model = run.model
    width = 4 if run.engine.precision == "fp32" else 2
    rows = run.data.lanes * (model.memory_length + model.compressed_length)
    return 12.0 * parameters_of(model).total + rows * (model.num_layers * model.d_model * width + 4)


def _activations(run: RunConfig, lanes: int, width: int) -> float:
    model, T = run.model, run.data.segment_length
    kept = model.num_layers * T * lanes * model.d_model * width  # each layer's input, which its memory is made of
    one_layer = _layer_activations(run, lanes, width)
    if run.engine.activation_checkpointing == "full":
        return kept + one_layer
    return model.num_layers * one_layer


def _layer_activations(run: RunConfig, lanes: int, width: int) -> float:
    model, T = run.model, run.data.segment_length
    K = T + model.memory_length + model.compressed_length
    d, h, k = model.d_model, model.num_heads * model.head_width, model.key_heads * model.head_width
    inner = model.inner_width * (3 if model.feed_forward == "swiglu" else 1)  # gate, its activation, the other factor
    elements = (
        K * lanes * d  # what keys and values are projected from
        + 2 * K * lanes * k  # keys and values
        + 3 * T * lanes * h  # queries, attended values, their heads in order
        + 3 * T * lanes * d  # residuals
        + T * lanes * inner
        + _attended_pairs(run) * model.num_heads * lanes
        + (K * h if model.positions == "relative" else 0)
    )
    dropped = (2 * T * lanes * d + T * lanes * model.inner_width) if model.dropout else 0
    return width * elements + dropped + 16 * T * lanes


def _attended_pairs(run: RunConfig) -> float:
    """Pairs of query and key whose weights are kept for the backward pass."""
    T, M = run.data.segment_length, run.model.memory_length + run.model.compressed_length
    if run.engine.attention_kernel == "plain":
        return 2.0 * T * (T + M)
    return T * (M + (T + 1) / 2)  # tiles keep what is in sight


def _activation_formula(run: RunConfig) -> str:
    one = "b [K B d + 2 K B k + 3 T B h + 3 T B d + T B f + H B pairs + K h] + 16 T B"
    return f"L T B d b + {one}" if run.engine.activation_checkpointing == "full" else f"L times {one}"


def _logit_rows(run: RunConfig, lanes: int) -> int:
    tokens = lanes * run.data.segment_length
    return min(run.engine.head_chunk_tokens or tokens, tokens)


def _logit_columns(run: RunConfig) -> int:
    bins = bins_of(run.model)
    return bins[0][0] + len(bins) - 1
