"""What ranks that share lanes (`engine.sequence_ranks`) exchange for attention. Torch-free."""

from __future__ import annotations

from pretrain.config.choices import precision_traits, recomputation_traits
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.costs.flops import lanes_of_pass


def exchanged_bytes(run: RunConfig, world_size: int) -> float:
    """Return the bytes that a rank sends to the others of its group in a step with full memories.

    Of each layer, segment and pass: (s - 1) / s of its rows of queries and of what they read, and
    of the keys and values of segment and memory, b B (2 L h + 2 (L + M) k) / s in all. The backward
    pass sends as much, full activation checkpointing the layer's forward pass again.
    """
    model, engine, ranks = run.model, run.engine, run.engine.sequence_ranks
    h, k = model.num_heads * model.head_width, model.key_heads * model.head_width
    length = run.data.segment_length
    repeats = recomputation_traits(engine.activation_checkpointing).layers
    elements = 0
    for layer, memory in enumerate(model.memory_lengths()):
        passes = 3 if repeats and layer % engine.checkpoint_every_n_layers == 0 else 2
        elements += passes * (2 * length * h + 2 * (length + memory) * k)
    width = precision_traits(engine.number_format).bytes
    rows = lanes_of_pass(run, world_size) * accumulation_steps(run, world_size)
    sent = (ranks - 1) / ranks**2  # the part of a rank, but what stays with it
    return width * rows * run.optim.gradient_segments * elements * sent
