"""What one layer keeps from the forward for the backward pass, in bytes, counted tensor by tensor. Torch-free.

B lanes of one forward pass, T segment, M memory with its compressed rows, K = T + M keys, d d_model, h heads times head
width, k key heads times head width, f inner width, b bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.run import RunConfig

LARGEST_FUSED_HEAD = 128  # wider heads run in plain operations on a GPU
TILE_ROWS = 128  # queries of a tile on a CPU; keys after them are skipped
# Tensors of the inner width that are kept: what relu gave; gelu's input too; swiglu's two factors, both gates, product.
INNER_TENSORS = {"relu": 1, "gelu": 2, "swiglu": 4}


@dataclass(frozen=True)
class LayerActivations:
    """A layer of the run with `lanes` lanes in a forward pass."""

    run: RunConfig
    lanes: int
    width: int  # bytes of an element
    on_gpu: bool

    @property
    def kept(self) -> float:
        """From forward to backward."""
        return self._rows + self.weights + self._masks

    @property
    def weights(self) -> float:
        """Attention's weights among what is kept; selective checkpointing computes them again."""
        return self._pairs * (1 + self._drops_weights * self._is_plain)

    @property
    def working(self) -> float:
        """What its backward pass holds for a moment: about the gradients of what was kept."""
        return self._rows + self._pairs * self._is_plain

    @property
    def _rows(self) -> float:
        """Whatever is a row per token, per key or per distance."""
        model, T = self.run.model, self.run.data.segment_length
        d, h, k = (
            model.d_model,
            model.num_heads * model.head_width,
            model.key_heads * model.head_width,
        )
        tokens, keys = T * self.lanes, (T + self._memory) * self.lanes
        # Input, its sum with attention, both norms (pre: of memory too); queries and what they read; keys and values.
        normed = keys if model.norm_position == "pre" else tokens
        elements = (3 * tokens + normed) * d + 2 * tokens * h + 2 * keys * k
        if model.norm == "rmsnorm":
            elements += (tokens + normed) * d  # once more before the gain
        if model.query_key_norm:
            elements += 2 * tokens * h + 3 * keys * k
        elements += (
            tokens * model.inner_width * (INNER_TENSORS[model.feed_forward] + bool(model.dropout))
        )
        if model.positions == "relative":
            elements += (T + self._memory) * h
        return self.width * elements

    @property
    def _pairs(self) -> float:
        """Attention's weights."""
        T, heads = self.run.data.segment_length, self.run.model.num_heads
        if self.on_gpu and not self._is_plain:
            return 4.0 * T * heads * self.lanes  # the fused kernel keeps one number per query
        keys = T + self._memory if self._is_plain else self._memory + (T + min(T, TILE_ROWS)) / 2
        return float(self.width * T * keys * heads * self.lanes)

    @property
    def _masks(self) -> float:
        """Of dropout, a byte per element."""
        model, T = self.run.model, self.run.data.segment_length
        rows = 2 * model.d_model + model.inner_width if model.dropout else 0
        draws_pairs = self._drops_weights and (
            self._is_plain or not self.on_gpu
        )  # the fused kernel draws them again
        pairs = model.num_heads * (T + self._memory) if draws_pairs else 0
        return float(T * self.lanes * (rows + pairs))

    @property
    def _memory(self) -> int:
        return self.run.model.memory_length + self.run.model.compressed_length

    @property
    def _drops_weights(self) -> bool:
        return bool(self.run.model.attention_dropout)

    @property
    def _is_plain(self) -> bool:
        engine = self.run.engine
        cannot_fuse = engine.precision == "fp32" or self.run.model.head_width > LARGEST_FUSED_HEAD
        return engine.attention_kernel == "plain" or (self.on_gpu and cannot_fuse)
