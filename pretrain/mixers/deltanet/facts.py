"""The facts of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464). Torch-free.

n heads, d d_model, w the width of all keys, v of all values.
"""

from dataclasses import dataclass
from typing import ClassVar

from foundation.errors import ConfigError
from foundation.settings import Range, setting
from pretrain.config.engine import EngineConfig
from pretrain.config.mixer import (
    Kept,
    LanePart,
    LayerBytes,
    Mixer,
    MixerFlops,
    SegmentSize,
    Weight,
    activation_bytes,
    chunks_of,
)
from pretrain.config.model import LARGEST_WIDTH, MOST_HEADS, AttentionKernel, ModelConfig
from pretrain.kernels.flash_linear_attention import CHUNK_TOKENS, fingerprint, missing_package

TAPS = 4  # tokens that the short convolution sees
CHUNK = 64  # most tokens that are computed together
CHANNEL_CHUNK = 16  # the same, where each pair of tokens has a decay per channel
WIDEST_FLA_HEAD = 256


@dataclass(frozen=True, kw_only=True)
class DeltaNetSettings:
    """The settings of Gated DeltaNet layers, `model.mixers.deltanet`."""

    key_width: int = setting(0, Range(0, LARGEST_WIDTH), unit="channels")
    """Width of a head's keys; 0: as in attention."""
    value_width: int = setting(0, Range(0, LARGEST_WIDTH), unit="channels")
    """Width of a head's values; 0: twice as wide as keys."""
    expansion: ClassVar[int] = 2
    key_heads: int = setting(0, Range(0, MOST_HEADS), unit="heads")
    """Heads of queries and keys, each shared by several states; 0: `num_heads`."""
    largest_write: float = setting(1.0, Range(0, 2, above=True))
    """Upper limit of beta; above 1, a token may reverse what is stored under its key."""


@dataclass(frozen=True)
class Widths:
    """Widths of keys and values, of one head and of all."""

    key: int
    value: int
    keys: int
    values: int
    heads: int  # of queries and keys


class GatedDeltaNetFacts(Mixer):
    """Every head has a state, which maps keys to values."""

    title = "Gated DeltaNet"
    module = "GatedDeltaNet"
    settings = DeltaNetSettings
    by_channel = False  # whether each channel of keys decays at its own rate

    def check(self, model: ModelConfig) -> None:
        if model.num_heads % (heads := widths_of(model, self.kind).heads):
            raise ConfigError(
                f"model.mixers.{self.kind}.key_heads={heads} does not divide num_heads="
                f"{model.num_heads}; use a divisor"
            )

    def states(self, model: ModelConfig) -> tuple[LanePart, ...]:
        widths = widths_of(model, self.kind)
        shape = (model.num_heads, widths.key, widths.value)
        return (
            LanePart(name="state", kind="state", shape=shape, in_float32=True),
            # Inputs of the last tokens, which the short convolution still reads.
            LanePart(name="tail", kind="state", shape=(TAPS - 1, 2 * widths.keys + widths.values)),
        )

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        d, n, widths = model.d_model, model.num_heads, widths_of(model, self.kind)
        w, v, decays = widths.keys, widths.values, self._decays(model)
        return {
            "query_weight": Weight((w, d)),
            "key_weight": Weight((w, d)),
            "value_weight": Weight((v, d)),
            "decay_weight": Weight((decays, d)),
            "write_weight": Weight((n, d)),
            "gate_weight": Weight((v, d)),
            "output_weight": Weight((d, v)),
            "convolution_weight": Weight((TAPS, 1, 2 * w + v), "vector"),
            "decay_rate": Weight((n,), "vector"),
            "decay_bias": Weight((decays,), "vector"),
            "output_norm.gain": Weight((widths.value,), "vector"),
        }

    def flops(self, model: ModelConfig, segment: SegmentSize) -> MixerFlops:
        """Count products of a chunk's tokens and of the state, and the solve (as a product)."""
        d, n, tokens, decays = model.d_model, model.num_heads, segment.tokens, self._decays(model)
        widths = widths_of(model, self.kind)
        w, v, of_states = widths.keys, widths.values, n * widths.key
        number, size = self._chunks(tokens)
        padded = number * size
        decay = 2.0 * padded * size * decays  # sums of logarithms, a product with a mask
        # With a decay per channel, products of keys are not products of matrices.
        of_keys = 2.0 if self.by_channel else 6.0
        rule = padded * (size * (of_keys * of_states + 4 * v) + 6 * v * widths.key) + decay
        last_state = 2.0 * v * widths.key * size
        # A mask has no gradient, nor has the state that a backward pass's first segment reads. The
        # loss does not depend on the state that the last segment leaves.
        saved = decay + 4 * last_state / segment.gradient_segments
        projections = 2.0 * d * (2 * w + 3 * v + n + decays) * tokens
        return MixerFlops({self.kind: projections + rule}, saved, rule - last_state)

    def kept(self, model: ModelConfig, tokens: int) -> Kept:
        """Count, outside the rule, the convolution's input, its taps where documents hide some, and
        its result; what the heads read, normed; the gate before and after its activation; their
        product. Shared are the weights of queries, keys, values and gates, joined for one product.
        In the rule: tensors of rows, five matrices per chunk and head, and the state before each
        chunk.
        """
        n, widths, decays = model.num_heads, widths_of(model, self.kind), self._decays(model)
        w, v, of_states = widths.keys, widths.values, n * widths.key
        taps = TAPS - 1 if model.isolate_documents else 0
        number, size = self._chunks(tokens)
        rows, pairs = 9 * of_states + 5 * v, 5 * n
        if self.by_channel:  # gates; pairs with their channels
            rows += (4 + model.isolate_documents) * of_states
            pairs = 2 * (n + of_states)
        return Kept(
            activations=tokens * ((2 + taps) * (2 * w + v) + 4 * v),
            exact=tokens * rows + number * (pairs * size * size + v * widths.key),
            shared=model.d_model * (2 * w + v + n + decays),
        )

    def kept_bytes(
        self, model: ModelConfig, engine: EngineConfig, segment: SegmentSize, on_gpu: bool
    ) -> LayerBytes:
        """Kernels keep queries and keys, normed, values, the inverse of each chunk, and both gates
        in float32. From these the backward pass computes w and u, gradients, and the states before
        chunks.
        """
        is_half, tokens = engine.number_format != "fp32", segment.tokens
        kernel = engine.attention_kernel
        if not fla_here(kernel, model, self.kind, on_gpu=on_gpu, is_half=is_half)[0]:
            return super().kept_bytes(model, engine, segment, on_gpu)
        n, widths, kept = model.num_heads, widths_of(model, self.kind), self.kept(model, tokens)
        w, v, of_element = widths.keys, widths.values, activation_bytes(engine) * segment.lanes
        in_rule = of_element * tokens * (2 * w + v + n * CHUNK_TOKENS + 4 * n)
        states = -(-tokens // CHUNK_TOKENS) * v * widths.key
        passed = of_element * (tokens * (6 * w + 4 * v) + 2 * states)
        shared = activation_bytes(engine) * kept.shared
        rows = of_element * kept.activations + shared
        return LayerBytes(rows + in_rule, in_rule, shared + passed)

    def paths(self, model: ModelConfig, engine: EngineConfig) -> list[str]:
        is_half = engine.number_format != "fp32"
        kernel = engine.attention_kernel
        return [rule_text(*fla_here(kernel, model, self.kind, on_gpu=True, is_half=is_half))]

    def environment(self, model: ModelConfig, engine: EngineConfig, on_gpu: bool) -> dict[str, str]:
        is_half, kernel = engine.number_format != "fp32", engine.attention_kernel
        uses_fla, _ = fla_here(kernel, model, self.kind, on_gpu=on_gpu, is_half=is_half)
        return {"delta rule": fingerprint() if uses_fla else "none"}

    def _decays(self, model: ModelConfig) -> int:
        return model.num_heads * (widths_of(model, self.kind).key if self.by_channel else 1)

    def _chunks(self, tokens: int) -> tuple[int, int]:
        return chunks_of(tokens, CHANNEL_CHUNK if self.by_channel else CHUNK)


def widths_of(model: ModelConfig, kind: str) -> Widths:
    """Return the widths of keys and values."""
    settings: DeltaNetSettings = model.mixer_settings(kind)
    key, heads = settings.key_width or model.head_width, settings.key_heads or model.num_heads
    value = settings.value_width or settings.expansion * key
    return Widths(key, value, heads * key, model.num_heads * value, heads)


def fla_here(
    kernel: AttentionKernel, model: ModelConfig, kind: str, *, on_gpu: bool, is_half: bool
) -> tuple[bool, str]:
    """Return whether kernels of flash-linear-attention compute the rule, and on a GPU why not."""
    width = widths_of(model, kind).key
    limits = {
        f"engine.attention_kernel={kernel}": kernel in ("plain", "sdpa"),
        f"heads wider than {WIDEST_FLA_HEAD}": width > WIDEST_FLA_HEAD,
        "a decay by channel": kind != "deltanet",
        "heads of odd width": width % 2 > 0,
        "activations in float32": not is_half,
    }
    reasons = [limit for limit, applies in limits.items() if applies]
    if not on_gpu or reasons:
        return False, f"not flash-linear-attention: {', '.join(reasons)}" if on_gpu else ""
    missing = missing_package()
    return not missing, missing


def rule_text(uses_fla: bool, reason: str) -> str:
    """Return how a GPU computes the rule in one line, and why."""
    name = "flash-linear-attention" if uses_fla else "plain operations in chunks"
    return f"delta rule: {name}" + (f" ({reason})" if reason else "")
