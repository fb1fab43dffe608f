"""Transformer-XL (Dai et al. 2019): segment recurrence over a memory of hidden states, relative attention.

B lanes, L tokens of the segment, M memory rows, C = M + L, D d_model, N heads, H head width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.errors import ConfigError
from pretrain.config import ActivationCheckpointing, AttentionKernel, ModelConfig
from pretrain.model.adaptive_softmax import AdaptiveSoftmax
from pretrain.model.attention import RelativeAttention
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.embedding import Embedding
from pretrain.model.feed_forward import FeedForward
from pretrain.model.masks import Visibility
from pretrain.model.memory import (
    Memory,
    document_numbers,
    empty_memory,
    extended,
    keep_last_rows,
    memory_num_lanes,
)
from pretrain.model.parameters import LayerNorm, normal
from pretrain.model.positions import RelativePositions


class TransformerLayer(nn.Module):
    """Attention and feed-forward with residuals; the norm follows each (post, as in the paper) or precedes it (pre)."""

    def __init__(self, config: ModelConfig, layer: int, attention_kernel: AttentionKernel) -> None:
        super().__init__()
        self._pre_norm = config.norm_position == "pre"
        self.attention = RelativeAttention(config, layer, attention_kernel)
        self.attention_norm = LayerNorm(config.d_model, config.init_std)
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = LayerNorm(config.d_model, config.init_std)

    def forward(
        self,
        hidden_BLD: Tensor,
        memory_BMD: Tensor,
        positions_CD: Tensor,
        content_bias_NH: Tensor | None,
        position_bias_NH: Tensor | None,
        *,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        segment_BLD = hidden_BLD
        if self._pre_norm:
            # What is remembered is the residual stream; it meets the norm's present parameters.
            segment_BLD, memory_BMD = self.attention_norm(hidden_BLD), self.attention_norm(memory_BMD)
        biases_NH = (content_bias_NH, position_bias_NH)
        attended_BLD = hidden_BLD + self.attention(
            segment_BLD, memory_BMD, positions_CD, *biases_NH, visibility=visibility, dropout=dropout
        )
        if self._pre_norm:
            return attended_BLD + self.feed_forward(self.feed_forward_norm(attended_BLD), dropout=dropout)
        attended_BLD = self.attention_norm(attended_BLD)
        return self.feed_forward_norm(attended_BLD + self.feed_forward(attended_BLD, dropout=dropout))


class TransformerXL(nn.Module):
    """The language model. Parameters come from torch's default generator; nothing else uses random-number state."""

    def __init__(
        self,
        config: ModelConfig,
        activation_checkpointing: ActivationCheckpointing = "none",
        attention_kernel: AttentionKernel = "auto",
    ) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ConfigError(
                "model.vocab_size=0: set it to the tokenizer's number of tokens before building the model"
            )
        self.config = config
        self.activation_checkpointing: ActivationCheckpointing = activation_checkpointing
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(
            TransformerLayer(config, layer, attention_kernel) for layer in range(config.num_layers)
        )
        self.content_bias: nn.Parameter | None = None  # u, r_w_bias
        self.position_bias: nn.Parameter | None = None  # v, r_r_bias
        if not config.untie_biases:
            self.content_bias = normal(config.num_heads, config.head_width, std=config.init_std)
            self.position_bias = normal(config.num_heads, config.head_width, std=config.init_std)
        self.head = AdaptiveSoftmax(config, self.embedding)
        self._positions = RelativePositions(config.d_model, config.clamp_length)

    def forward(
        self,
        tokens_BL: Tensor,
        targets_BL: Tensor,
        memory: Memory | None = None,
        starts_BL: Tensor | None = None,
        dropout: DropoutStream | None = None,
        memory_length: int | None = None,
    ) -> tuple[Tensor, Memory]:
        """NLL [B, L] per token in float32 (float64 for a float64 model) and the memory for the next segment.

        `starts_BL` marks first tokens of documents. Dropout acts in training mode only and only if a stream is given.
        `memory_length` replaces the configured one for this call; with `same_length` it is also the number of keys
        seen, except that 0 means the segment alone.
        """
        hidden_BLD, memory = self.hidden_states(tokens_BL, memory, starts_BL, dropout, memory_length)
        return self.head(hidden_BLD, targets_BL), memory

    def logits_BLV(
        self,
        tokens_BL: Tensor,
        memory: Memory | None = None,
        starts_BL: Tensor | None = None,
        memory_length: int | None = None,
        num_last: int | None = None,
    ) -> tuple[Tensor, Memory]:
        """Log-probabilities [B, L, V] of the token after each of the last `num_last` tokens (default: all), and memory.

        Not under ZeRO-3, whose hooks sit on `forward`.
        """
        hidden_BLD, memory = self.hidden_states(tokens_BL, memory, starts_BL, None, memory_length)
        return self.head(hidden_BLD[:, -(num_last or 0) :], None), memory

    def hidden_states(
        self,
        tokens_BL: Tensor,
        memory: Memory | None = None,
        starts_BL: Tensor | None = None,
        dropout: DropoutStream | None = None,
        memory_length: int | None = None,
    ) -> tuple[Tensor, Memory]:
        """What the output layer reads, [B, L, D], and the memory for the next segment."""
        dropout = dropout if self.training else None
        length = self.config.memory_length if memory_length is None else memory_length
        hidden_BLD = drop(self.embedding(tokens_BL), self.config.dropout, dropout, Site.EMBEDDING)
        memory = self._usable_memory(memory, hidden_BLD, length)
        documents_BC = document_numbers(memory, tokens_BL.shape[1], starts_BL)
        positions_CD = self._positions_CD(documents_BC.shape[1], hidden_BLD, dropout)
        visibility = self._visibility(documents_BC, hidden_BLD, length)
        inputs_BLD = []
        for layer, memory_BMD in zip(self.layers, memory[:-1], strict=True):
            inputs_BLD.append(hidden_BLD)
            hidden_BLD = self._run(layer, hidden_BLD, memory_BMD, positions_CD, visibility, dropout)
        hidden_BLD = drop(hidden_BLD, self.config.dropout, dropout, Site.FINAL)
        return hidden_BLD, extended(memory, inputs_BLD, documents_BC, length)

    def _run(
        self,
        layer: nn.Module,
        hidden_BLD: Tensor,
        memory_BMD: Tensor,
        positions_CD: Tensor,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        # The options go by name: DeepSpeed's hooks look into positional inputs only and know no such objects.
        inputs = (hidden_BLD, memory_BMD, positions_CD, self.content_bias, self.position_bias)
        options = {"visibility": visibility, "dropout": dropout}
        if self.activation_checkpointing == "none" or not torch.is_grad_enabled():
            return layer(*inputs, **options)
        result = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
        assert isinstance(result, Tensor)
        return result

    def _usable_memory(self, memory: Memory | None, hidden_BLD: Tensor, length: int) -> Memory:
        num_lanes, _, d_model = hidden_BLD.shape
        if memory is None:
            return empty_memory(len(self.layers), num_lanes, d_model, hidden_BLD.dtype, hidden_BLD.device)
        assert len(memory) == len(self.layers) + 1, (len(memory), len(self.layers))
        assert memory_num_lanes(memory) == num_lanes, (memory_num_lanes(memory), num_lanes)
        return tuple(part.detach() for part in keep_last_rows(memory, length))

    def _positions_CD(self, num_keys: int, hidden_BLD: Tensor, dropout: DropoutStream | None) -> Tensor:
        positions_CD = self._positions.encodings_CD(num_keys, hidden_BLD.dtype, hidden_BLD.device)
        if dropout is None or self.config.dropout == 0.0:
            return positions_CD
        return dropout.drop_shared(positions_CD, self.config.dropout, Site.POSITIONS)

    def _visibility(self, documents_BC: Tensor, hidden_BLD: Tensor, length: int) -> Visibility:
        return Visibility(
            num_queries=hidden_BLD.shape[1],
            num_keys=documents_BC.shape[1],
            window=length if self.config.same_length else 0,
            documents_BC=documents_BC if self.config.isolate_documents else None,
            dtype=hidden_BLD.dtype,
            device=hidden_BLD.device,
        )
