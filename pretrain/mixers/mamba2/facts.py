"""The facts of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060). Torch-free.

n heads, d d_model, h the width of a state, v of all heads' values, w of all groups' B.
"""

from dataclasses import dataclass

from foundation.errors import ConfigError
from foundation.settings import Range, setting
from pretrain.config.mixer import Kept, LanePart, Mixer, MixerFlops, SegmentSize, Weight, chunks_of
from pretrain.config.model import LARGEST_WIDTH, MOST_HEADS, ModelConfig
from pretrain.mixers.deltanet.facts import CHUNK, TAPS, Widths

EXPANSION = 2  # heads of Mamba-2 per head of attention


@dataclass(frozen=True, kw_only=True)
class Mamba2Settings:
    """The settings of Mamba-2 layers, `model.mixers.mamba2`."""

    state_width: int = setting(0, Range(0, LARGEST_WIDTH), unit="channels")
    """Width of B and C, and of each channel's state; 0: twice a head of attention."""
    groups: int = setting(1, Range(1, MOST_HEADS), unit="groups")
    """Groups of heads, each with a B and C of its own."""


class Mamba2Facts(Mixer):
    """Every head has a state, which maps what B has written to values."""

    title = "Mamba-2"
    module = "Mamba2"
    settings = Mamba2Settings

    def check(self, model: ModelConfig) -> None:
        heads, groups = EXPANSION * model.num_heads, widths_of_states(model).heads
        if heads % groups:
            raise ConfigError(
                f"model.mixers.{self.kind}.groups={groups} does not divide {heads} heads, "
                f"{EXPANSION} for each of num_heads; use a divisor"
            )

    def states(self, model: ModelConfig) -> tuple[LanePart, ...]:
        widths = widths_of_states(model)
        shape = (EXPANSION * model.num_heads, widths.key, widths.value)
        return (
            LanePart(name="state", kind="state", shape=shape, in_float32=True),
            # Inputs of the last tokens, which the short convolution still reads.
            LanePart(name="tail", kind="state", shape=(TAPS - 1, widths.values + 2 * widths.keys)),
        )

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        d, n, widths = model.d_model, EXPANSION * model.num_heads, widths_of_states(model)
        v, w = widths.values, widths.keys
        return {
            "value_weight": Weight((v, d)),
            "key_weight": Weight((w, d)),
            "query_weight": Weight((w, d)),
            "step_weight": Weight((n, d)),
            "gate_weight": Weight((v, d)),
            "output_weight": Weight((d, v)),
            "convolution_weight": Weight((TAPS, 1, v + 2 * w), "vector"),
            "convolution_bias": Weight((v + 2 * w,), "vector"),
            "decay_rate": Weight((n,), "vector"),
            "step_bias": Weight((n,), "vector"),
            "skip": Weight((n, 1), "vector"),
            "output_norm.gain": Weight((v,), "vector"),
        }

    def flops(self, model: ModelConfig, segment: SegmentSize) -> MixerFlops:
        """Count products of a chunk's tokens, and those that write and read the states."""
        n, widths = EXPANSION * model.num_heads, widths_of_states(model)
        v, w, (number, size) = widths.values, widths.keys, chunks_of(segment.tokens, CHUNK)
        decay = 2.0 * number * size**2 * n  # sums of logarithms, a product with a mask
        states = 2.0 * number * size * widths.key * v  # written, or read
        rule = decay + 2.0 * number * size**2 * (w + v) + 2 * states
        # A mask has no gradient, nor has the state that a backward pass's first segment reads. The
        # loss does not depend on the state that its last segment writes if that has one chunk.
        unread = states / number + (2 * states if number == 1 else 0)
        saved = decay + unread / segment.gradient_segments
        projections = 2.0 * model.d_model * (3 * v + 2 * w + n) * segment.tokens
        return MixerFlops({self.kind: projections + rule}, saved, rule)

    def kept(self, model: ModelConfig, tokens: int) -> Kept:
        """Count, outside the rule, the convolution's input, its taps where documents hide some, and
        its result; what the heads read, the gate before and after its activation, their product and
        its norm. Shared are the joined weights. In the rule: B, C and values as they are, weighted
        by decays, and between the tokens of a chunk; the state before each chunk.
        """
        n, widths = EXPANSION * model.num_heads, widths_of_states(model)
        taps, pairs = (TAPS, 1) if model.isolate_documents else (1, 0)
        v, w, (number, size) = widths.values, widths.keys, chunks_of(tokens, CHUNK)
        mixed, pairs = v + 2 * w, pairs + 2 * n + widths.heads
        rows = mixed + 2 * n * widths.key + 2 * w + v
        return Kept(
            activations=tokens * ((1 + taps) * mixed + 6 * v),
            exact=tokens * rows + number * (pairs * size**2 + v * widths.key),
            shared=model.d_model * (mixed + n),
        )


def widths_of_states(model: ModelConfig) -> Widths:
    """Return the widths of B and C (as keys) and of values; `heads` is the number of groups."""
    settings: Mamba2Settings = model.mixer_settings("mamba2")
    value, groups = model.head_width, settings.groups
    key = settings.state_width or 2 * value
    return Widths(key, value, groups * key, EXPANSION * model.num_heads * value, groups)
