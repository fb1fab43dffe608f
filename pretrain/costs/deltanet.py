"""What a Gated DeltaNet takes: parameters, FLOPs, and what it keeps for its backward pass.

T tokens of a segment, in Z chunks of Y; d d_model; n heads; w and v the widths of all their keys
and of all their values. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.model import CONVOLUTION_WIDTH, DELTANET_CHUNK, ModelConfig

EXACT_BYTES = 4  # the delta rule computes in float32


@dataclass(frozen=True)
class DeltaNetCosts:
    """One deltanet in place of a layer's attention, for one lane; feed-forward and norms aside."""

    model: ModelConfig
    tokens: int  # of a segment

    @property
    def parameters(self) -> int:
        w, v, n, d = self._w, self._v, self.model.num_heads, self.model.d_model
        convolution = CONVOLUTION_WIDTH * (2 * w + v)
        return d * (2 * w + 3 * v + 2 * n) + convolution + 2 * n + self.model.deltanet_value_width

    @property
    def projection_flops(self) -> float:
        """Per token: queries, keys, values, gates and output. The convolution is not counted."""
        w, v, n, d = self._w, self._v, self.model.num_heads, self.model.d_model
        return 2.0 * d * (2 * w + 3 * v + 2 * n)

    @property
    def rule_flops(self) -> float:
        """Per token: products of a chunk's tokens, the solve (as a product), and of the state."""
        w, v, size = self._w, self._v, self._chunk_tokens
        products = size * (6 * w + 4 * v) + 6 * v * self.model.head_width
        return self._padding * products + self._decay_flops

    def flops_without_gradient(self, gradient_segments: int) -> float:
        """Per token: the state that a backward pass's first segment reads has no gradient, and
        nothing of the loss reads the one that its last segment leaves."""
        return 4 * self._last_state_flops / gradient_segments + self._decay_flops

    @property
    def recomputed_flops(self) -> float:
        """Per token: what selective checkpointing repeats, all but the final state."""
        return self.rule_flops - self._last_state_flops

    @property
    def kept_elements(self) -> int:
        """What is kept for the backward pass, outside the delta rule, in activations.

        The convolution's input, its taps where documents hide some, and its result; what the heads
        read, normed; the gate before and after its activation; the product.
        """
        taps = CONVOLUTION_WIDTH - 1 if self.model.isolate_documents else 0
        return self.tokens * ((2 + taps) * (2 * self._w + self._v) + 4 * self._v)

    @property
    def joined_elements(self) -> int:
        """The copy of the weights of queries, keys, values and gates, for one product of all.

        It is kept for the backward pass, once for all lanes.
        """
        return self.model.d_model * (2 * self._w + self._v + 2 * self.model.num_heads)

    def kept_by_rule(self, width: int) -> float:
        """Return the bytes kept of the delta rule, in float32 or with `width` if that is wider.

        Tensors of rows, five matrices [Y, Y] per chunk and head, and the state before each chunk.
        """
        rows = self.tokens * (9 * self._w + 5 * self._v)
        pairs = 5 * self.model.num_heads * self._padding * self.tokens * self._chunk_tokens
        states = self._num_chunks * self._v * self.model.head_width
        return max(width, EXACT_BYTES) * (rows + pairs + states)

    @property
    def _last_state_flops(self) -> float:
        return 2.0 * self._v * self.model.head_width * self._chunk_tokens / self.tokens

    @property
    def _decay_flops(self) -> float:
        """Of the sums of logarithms, a product with a mask, which has no gradient."""
        return 2.0 * self._padding * self._chunk_tokens * self.model.num_heads

    @property
    def _w(self) -> int:
        return self.model.num_heads * self.model.head_width

    @property
    def _v(self) -> int:
        return self.model.num_heads * self.model.deltanet_value_width

    @property
    def _num_chunks(self) -> int:
        return -(-self.tokens // DELTANET_CHUNK)

    @property
    def _chunk_tokens(self) -> int:
        return -(-self.tokens // self._num_chunks)

    @property
    def _padding(self) -> float:
        """Tokens of all chunks over those of the segment."""
        return self._num_chunks * self._chunk_tokens / self.tokens
