"""The facts of attention (Dai et al. 2019, section 3.3), with all positions. Torch-free.

K keys of a segment: its T tokens and M rows of memory; B lanes of a forward pass, d d_model, w and
k the widths of all queries and of all keys, c compression rate.
"""

from pretrain.config.engine import Attention, EngineConfig, attention_in
from pretrain.config.mixer import (
    LayerBytes,
    Mixer,
    MixerFlops,
    SegmentSize,
    Weight,
    activation_bytes,
)
from pretrain.config.model import POSITIONS, ModelConfig
from pretrain.kernels.triton.tiling import backward_workspace, built_in_tiles

# The workspace is rounded to tiles of this compute capability; tiles of other GPUs are as wide.
TILE_CAPABILITY = (9, 0)
TILE_ROWS = 128  # queries of a tile on a CPU; keys after them are skipped


class AttentionFacts(Mixer):
    """Attention reads what the layer remembers: rows of its inputs, and compressed ones."""

    title = "attention"
    module = "RelativeAttention"
    has_rows = True

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        d, n, h, (w, k) = model.d_model, model.num_heads, model.head_width, _widths(model)
        weights = {
            "query_weight": Weight((w, d)),
            "key_value_weight": Weight((2 * k, d), stacked=2),
            "output_weight": Weight((d, w)),
        }
        if POSITIONS[model.positions].projects_encodings:
            weights["position_weight"] = Weight((w, d))
        of_heads: dict[str, tuple[bool, tuple[int, ...], str]] = {
            "content_bias": (model.untie_biases, (n, h), "biases"),  # u
            "position_bias": (model.untie_biases, (n, h), "biases"),  # v
            "query_norm.gain": (model.query_key_norm, (h,), "norms"),
            "key_norm.gain": (model.query_key_norm, (h,), "norms"),
            "length_scale": (model.softmax_scaling == "log_length", (n,), "biases"),
            "sinks": (model.attention_sinks, (n,), "biases"),
        }
        for name, (is_there, shape, part) in of_heads.items():
            if is_there:
                weights[name] = Weight(shape, "vector", part=part)
        return weights

    def flops(self, model: ModelConfig, segment: SegmentSize) -> MixerFlops:
        d, (w, k), tokens = model.d_model, _widths(model), segment.tokens
        projects = POSITIONS[model.positions].projects_encodings
        keys = tokens + segment.memory
        # W_R R is computed once for all lanes of a forward pass.
        positions = 2.0 * d * w * keys / segment.lanes if projects else 0.0
        scores = (6 if projects else 4) * w * keys * tokens
        own = tokens - 2 * model.memory_tokens
        compression, still = _compression_flops(model, own)
        forward = {
            # Memory's keys and values are computed again in every segment.
            "projections": 4.0 * d * ((w + k) * tokens + k * segment.memory),
            "positions": positions,
            "attention": float(scores),  # content scores, position scores, weighted values
            # Of the rows that leave the memory, and of what attention would have read from them.
            "compression": compression * own,
        }
        # The memory that a backward pass's first segment reads has no gradient.
        first = 4 * d * k * segment.memory / segment.gradient_segments
        # Checkpointing computes scores again, but not the sums of values that they weight.
        repeated = scores - 2.0 * w * keys * tokens
        return MixerFlops(forward, positions + first + still * own, repeated)

    def kept_bytes(
        self, model: ModelConfig, engine: EngineConfig, segment: SegmentSize, on_gpu: bool
    ) -> LayerBytes:
        width, n = activation_bytes(engine), model.num_heads
        queries, memory = segment.tokens, segment.memory
        tokens, keys = queries * segment.lanes, (queries + memory) * segment.lanes
        attention = attention_in(engine, model, on_gpu=on_gpu)[0]
        is_plain, drops_weights = attention is Attention.PLAIN, bool(model.attention_dropout)
        w, k = _widths(model)
        elements = 2 * tokens * w + 2 * keys * k  # queries and what they read; keys and values
        if model.query_key_norm:
            # A GPU computes rms_norm from its input again.
            elements += tokens * w + keys * k + (tokens * w + 2 * keys * k) * (not on_gpu)
        if model.softmax_scaling == "log_length":
            elements += tokens * w
        if POSITIONS[model.positions].projects_encodings:
            elements += (queries + memory) * w + tokens * w * is_plain  # plain: with u, with v
        if attention in (Attention.SDPA, Attention.FUSED):
            weights = 4.0 * tokens * n  # one float32 number per query and head
        elif is_plain:
            weights = float(width * keys * queries * n)
        else:
            weights = width * tokens * n * (memory + (queries + min(queries, TILE_ROWS)) / 2)
        masks = keys * queries * n if drops_weights and not on_gpu else 0
        is_fused = attention is Attention.FUSED
        workspace = _workspace(model, segment, width) if is_fused else 0.0
        rows, repeated = width * elements, weights * (1 + (drops_weights and is_plain))
        working = rows + weights * is_plain + workspace
        return LayerBytes(rows + repeated + masks, repeated, working, workspace)

    def memory_text(self, model: ModelConfig) -> str:
        up_to = "" if isinstance(model.memory_length, int) else "up to "
        rows = f"{up_to}{model.longest_memory:,} tokens of hidden states per layer"
        return f"attention remembers {rows}"


def _widths(model: ModelConfig) -> tuple[int, int]:
    return model.num_heads * model.head_width, model.key_heads * model.head_width


def _compression_flops(model: ModelConfig, tokens: int) -> tuple[float, float]:
    """Return the forward FLOPs per token, and those that need no gradient."""
    if not model.compressed_length:
        return 0.0, 0.0
    d, c, (w, k) = model.d_model, model.compression_rate, _widths(model)
    convolution, queries, leaving, compressed = 2 * d * d, 2 * d * w, 4 * d * k, 4 * d * k / c
    expected, actual = 4 * w * tokens, 4 * w * tokens / c
    forward = convolution + queries + leaving + compressed + expected + actual
    return forward, convolution + 2 * (queries + leaving + expected) + compressed + actual / 2


def _workspace(model: ModelConfig, segment: SegmentSize, width: int) -> float:
    """Return the bytes of scores' gradients that the fused kernels pass to each other."""
    needed = backward_workspace(
        lanes=segment.lanes,
        queries=segment.tokens,
        keys=segment.tokens + segment.memory,
        heads=model.num_heads,
        groups=model.key_heads,
        head_width=model.head_width,
        tiles=built_in_tiles(model.head_width, TILE_CAPABILITY),
        element_bytes=width,
    )
    return float(needed.num_bytes(width))
