"""Every setting of a model, and which combinations are errors. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from data_pipeline.errors import ConfigError
from pretrain.config.fields import require_at_least

Positions = Literal["relative", "rope", "alibi", "t5"]
FeedForwardKind = Literal["relu", "gelu", "swiglu"]
Compression = Literal["conv", "mean", "max"]

SWIGLU_MULTIPLE = 64  # the derived width of a SwiGLU layer is rounded up to this


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The Transformer-XL of Dai et al. 2019; comments give the names in the paper or its code.

    The defaults are the paper's. `docs/model.md` gives the formula and source of every variant.
    """

    vocab_size: int = 0  # n_token; 0: taken from the corpus' tokenizer
    num_layers: int = 4  # n_layer
    d_model: int = 128
    num_heads: int = 4  # n_head
    num_key_heads: int = 0  # grouped-query attention: heads of keys and values; 0: num_heads
    d_head: int = 0  # 0: d_model / num_heads
    # Width of the feed-forward layer; 0: 4 * d_model, or 8/3 for swiglu, which has a third matrix.
    d_inner: int = 0
    d_embed: int = 0  # 0: d_model; else a projection maps one to the other
    memory_length: int = 128  # mem_len in training
    compressed_length: int = 0  # rows of compressed memory, older than the memory; 0: none
    compression_rate: int = 3  # c: this many rows that leave the memory become one
    compression: Compression = "conv"  # conv is learned, by attention reconstruction
    positions: Positions = "relative"  # how attention encodes distances
    t5_buckets: int = 32  # num_buckets
    t5_max_distance: int = 128  # longer distances share the last bucket
    query_key_norm: bool = False  # normalize queries and keys within each head
    feed_forward: FeedForwardKind = "relu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_position: Literal["post", "pre"] = "post"  # pre_lnorm
    untie_biases: bool = False  # untie_r: u and v per layer, not shared
    same_length: bool = False  # every query attends to exactly memory_length keys
    clamp_length: int = 0  # clamp_len: longer distances share one encoding; 0: none
    # No attention across a document boundary, in the segment or in memory.
    isolate_documents: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0  # dropatt
    tie_embeddings: bool = True  # tie_weight
    cutoffs: tuple[int, ...] = ()  # adaptive softmax: first token of each tail cluster; (): full
    div_val: int = 1  # adaptive embedding: each cluster is narrower by this factor
    tie_projections: tuple[bool, ...] = ()  # tie_projs: one per bin, shortlist first; (): none
    # Weight of log(sum of exp(logits)) squared in the gradient; reported losses are without it.
    z_loss: float = 0.0
    init_std: float = 0.02
    projection_init_std: float = 0.01  # proj_init_std: projections of embedding and softmax

    def __post_init__(self) -> None:
        positive = ("num_layers", "num_heads", "compression_rate", "div_val")
        require_at_least(1, "model", self, *positive)
        require_at_least(2, "model", self, "d_model")
        lengths = ("memory_length", "compressed_length", "clamp_length")
        require_at_least(0, "model", self, *lengths, "num_key_heads", "vocab_size", "z_loss")
        if self.positions == "relative" and self.d_model % 2:
            raise ConfigError(
                f"model.d_model={self.d_model} is odd; sine and cosine halves need an even number"
            )
        if not self.d_head and self.d_model % self.num_heads:
            raise ConfigError(
                f"model.d_model={self.d_model} does not divide into num_heads={self.num_heads}; "
                "set model.d_head or change one of them"
            )
        if self.same_length and not self.memory_length:
            raise ConfigError(
                "model.same_length needs model.memory_length > 0, the number of keys of each query"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(
                    f"model.{name}={getattr(self, name)} must be at least 0 and below 1"
                )
        self._check_heads()
        self._check_positions()
        self._check_compression()
        self._check_adaptive()

    def _check_heads(self) -> None:
        if self.num_heads % self.key_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} does not divide into "
                f"num_key_heads={self.num_key_heads} groups; use a divisor, or 0 for a key head "
                "per head"
            )

    def _check_positions(self) -> None:
        if self.positions == "rope" and self.head_width % 2:
            raise ConfigError(
                "model.positions=rope rotates pairs of a head's channels, but a head has "
                f"{self.head_width}; set an even model.d_head"
            )
        if self.positions == "t5" and not 2 <= self.t5_buckets < 2 * self.t5_max_distance:
            raise ConfigError(
                f"model.t5_buckets={self.t5_buckets} must be at least 2 and below twice "
                f"t5_max_distance={self.t5_max_distance}: half of them are single distances"
            )
        if self.positions != "relative":
            for name in ("clamp_length", "untie_biases"):
                if getattr(self, name):
                    raise ConfigError(
                        f"model.{name} belongs to positions=relative and has no effect with "
                        f"positions={self.positions}; remove one of them"
                    )

    def _check_compression(self) -> None:
        if not self.compressed_length:
            return
        if not self.memory_length:
            raise ConfigError(
                "model.compressed_length needs model.memory_length > 0: it compresses what leaves "
                "the memory"
            )
        if self.same_length:
            raise ConfigError(
                "model.same_length shows each query memory_length keys and so never the older "
                "compressed rows; remove it or model.compressed_length"
            )

    def _check_adaptive(self) -> None:
        bounds = (0, *self.cutoffs, *((self.vocab_size,) if self.vocab_size else ()))
        if any(first >= last for first, last in pairwise(bounds)):
            raise ConfigError(
                f"model.cutoffs={list(self.cutoffs)} must increase from above 0 to below the "
                f"vocabulary's {self.vocab_size or 'number of'} tokens; remove or lower some"
            )
        narrowest = self.embedding_width // self.div_val ** len(self.cutoffs)
        if narrowest < 1:
            raise ConfigError(
                f"model.div_val={self.div_val} with {len(self.cutoffs)} cutoffs divides the "
                f"embedding width {self.embedding_width} to below 1; use a smaller div_val or "
                "fewer cutoffs"
            )
        if self.tie_projections and len(self.tie_projections) != len(self.cutoffs) + 1:
            raise ConfigError(
                f"model.tie_projections has {len(self.tie_projections)} entries; expected "
                f"{len(self.cutoffs) + 1}, one for the shortlist and one per cutoff"
            )

    def ties_projection(self, index: int) -> bool:
        """Whether bin `index` of the output layer uses the embedding's projection."""
        return bool(self.tie_projections) and self.tie_projections[index]

    @property
    def head_width(self) -> int:
        return self.d_head or self.d_model // self.num_heads

    @property
    def key_heads(self) -> int:
        return self.num_key_heads or self.num_heads

    @property
    def inner_width(self) -> int:
        if self.d_inner or self.feed_forward != "swiglu":
            return self.d_inner or 4 * self.d_model
        return -(-8 * self.d_model // (3 * SWIGLU_MULTIPLE)) * SWIGLU_MULTIPLE

    @property
    def embedding_width(self) -> int:
        return self.d_embed or self.d_model
