"""Transformer-XL (Dai et al. 2019), with segment recurrence over a memory of hidden states.

Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.errors import ConfigError
from pretrain.config.choices import (
    ActivationCheckpointing,
    AttentionKernel,
    position_traits,
    recomputation_traits,
)
from pretrain.config.model import ModelConfig
from pretrain.model.attention_paths import Visibility
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.embedding_and_softmax import AdaptiveSoftmax, Embedding, with_gradient_of
from pretrain.model.layer import TransformerLayer
from pretrain.model.memory import (
    Compression,
    Memory,
    compressed_rows,
    empty_memory,
    extended,
    grouped_documents,
    keep_last_rows,
    leaving_rows,
    memory_num_lanes,
    memory_num_rows,
    num_leaving_rows,
    recent_rows,
    segment_documents,
    with_compressed,
)
from pretrain.model.parameters import normal
from pretrain.model.positions import DistanceBias, RelativePositions


class TransformerXL(nn.Module):
    """The language model. Only its initialization uses random-number state: torch's generator."""

    def __init__(
        self,
        config: ModelConfig,
        activation_checkpointing: ActivationCheckpointing = "none",
        attention_kernel: AttentionKernel = "auto",
        logits_chunk_tokens: int = 0,
        checkpoint_every_n_layers: int = 1,
    ) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ConfigError("model.vocab_size=0; set it to the tokenizer's number of tokens")
        self.config = config
        self.activation_checkpointing: ActivationCheckpointing = activation_checkpointing
        recomputes_scores = recomputation_traits(activation_checkpointing).scores
        self.checkpoint_every_n_layers = checkpoint_every_n_layers
        self.embedding = Embedding(config)
        layers = [
            TransformerLayer(config, layer, attention_kernel) for layer in range(config.num_layers)
        ]
        for layer in layers[::checkpoint_every_n_layers]:
            layer.attention.recomputes_scores = recomputes_scores
        self.layers = nn.ModuleList(layers)
        self.content_bias: nn.Parameter | None = None  # u, r_w_bias
        self.position_bias: nn.Parameter | None = None  # v, r_r_bias
        positions = position_traits(config.positions)
        if positions.projects_encodings and not config.untie_biases:
            self.content_bias = normal(config.num_heads, config.head_width, std=config.init_std)
            self.position_bias = normal(config.num_heads, config.head_width, std=config.init_std)
        self.distance_bias = DistanceBias(config) if positions.adds_bias else None
        self.head = AdaptiveSoftmax(config, self.embedding, logits_chunk_tokens)
        self.compressions: nn.ModuleList | None = None
        if config.compressed_length:
            self.compressions = nn.ModuleList(
                Compression(config, layer.attention) for layer in layers
            )
        width = config.head_width if positions.rotates else config.d_model
        self._encodings = RelativePositions(width, config.clamp_length)

    def forward(
        self,
        tokens_BL: Tensor,
        targets_BL: Tensor,
        memory: Memory | None = None,
        starts_BL: Tensor | None = None,
        dropout: DropoutStream | None = None,
        memory_length: int | None = None,
    ) -> tuple[Tensor, Memory]:
        """Return the NLL [B, L] in float32 (float64 in a float64 model) and the next memory.

        `starts_BL` marks the first tokens of documents. Dropout acts only in training mode and if a
        stream is given. `memory_length` replaces the configured one for this call; with
        `same_length` it is also the number of keys seen, except that 0 means the segment alone.
        """
        hidden_BLD, memory, error = self.hidden_states(
            tokens_BL, memory, starts_BL, dropout, memory_length
        )
        nll_BL = self.head(hidden_BLD, targets_BL)
        return (nll_BL if error is None else with_gradient_of(nll_BL, error)), memory

    def logits_BLV(
        self,
        tokens_BL: Tensor,
        memory: Memory | None = None,
        starts_BL: Tensor | None = None,
        memory_length: int | None = None,
        num_last: int | None = None,
    ) -> tuple[Tensor, Memory]:
        """Return log-probabilities after each of the last `num_last` tokens (all), and the memory.

        Their shape is [B, `num_last`, V]. Not for ZeRO-3, whose hooks act in `forward`.
        """
        hidden_BLD, memory, _ = self.hidden_states(
            tokens_BL, memory, starts_BL, None, memory_length
        )
        return self.head(hidden_BLD[:, -(num_last or 0) :], None), memory

    def hidden_states(
        self,
        tokens_BL: Tensor,
        memory: Memory | None = None,
        starts_BL: Tensor | None = None,
        dropout: DropoutStream | None = None,
        memory_length: int | None = None,
    ) -> tuple[Tensor, Memory, Tensor | None]:
        """Return the output layer's input [B, L, D], the next memory, the compression's error."""
        dropout = dropout if self.training else None
        length = self.config.memory_length if memory_length is None else memory_length
        hidden_BLD = drop(self.embedding(tokens_BL), self.config.dropout, dropout, Site.EMBEDDING)
        recent, compressed = self._usable_memory(memory, hidden_BLD, length)
        documents_BL = segment_documents(recent[-1], tokens_BL.shape[1], starts_BL)
        documents_BC = torch.cat(
            [*(part[-1] for part in (compressed, recent) if part), documents_BL], dim=1
        )
        positions_CX = self.positions_CX(documents_BC.shape[1], hidden_BLD, dropout)
        visibility = self.visibility(documents_BC, hidden_BLD, length)
        inputs_BLD = []
        for index, layer in enumerate(self.layers):
            inputs_BLD.append(hidden_BLD)
            memory_BMD = recent[index]
            if compressed:
                memory_BMD = torch.cat([compressed[index], memory_BMD], dim=1)
            inputs = (hidden_BLD, memory_BMD, positions_CX, self.content_bias, self.position_bias)
            hidden_BLD = self._run(index, layer, *inputs, visibility=visibility, dropout=dropout)
        hidden_BLD = drop(hidden_BLD, self.config.dropout, dropout, Site.FINAL)
        if self.compressions is None:
            return hidden_BLD, extended(recent, inputs_BLD, documents_BL, length), None
        return hidden_BLD, *self._extended_and_compressed(
            recent, compressed, inputs_BLD, documents_BL, length
        )

    def _run(self, index: int, module: nn.Module, *inputs: Tensor | None, **options: Any) -> Any:
        """Run a layer's module, with full activation checkpointing for every n-th layer if set."""
        # Options are keyword arguments: DeepSpeed's hooks inspect the positional ones and support
        # tensors only.
        if (
            not recomputation_traits(self.activation_checkpointing).layers
            or index % self.checkpoint_every_n_layers
            or not torch.is_grad_enabled()
        ):
            return module(*inputs, **options)
        return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False, **options)

    def _usable_memory(
        self, memory: Memory | None, hidden_BLD: Tensor, length: int
    ) -> tuple[Memory, Memory]:
        """Return recent and compressed rows, the latter () if nothing is compressed."""
        num_lanes, num_layers = len(hidden_BLD), len(self.layers)
        compresses = self.compressions is not None
        if memory is None:
            memory = empty_memory(self.config, num_lanes, hidden_BLD)
        assert len(memory) == (num_layers + 1) * (1 + compresses), (len(memory), num_layers)
        assert memory_num_lanes(memory) == num_lanes, (memory_num_lanes(memory), num_lanes)
        memory = tuple(part.detach() for part in memory)
        recent, compressed = recent_rows(memory, num_layers), compressed_rows(memory, num_layers)
        if not compresses:
            return keep_last_rows(recent, length), ()
        if not length:
            return keep_last_rows(recent, 0), keep_last_rows(compressed, 0)
        recent = keep_last_rows(recent, length + self.config.compression_rate - 1)
        return recent, keep_last_rows(compressed, self.config.compressed_length)

    def _extended_and_compressed(
        self,
        recent: Memory,
        compressed: Memory,
        inputs_BLD: list[Tensor],
        documents_BL: Tensor,
        length: int,
    ) -> tuple[Memory, Tensor]:
        """Return the next memory and the summed error of the layers' compressions."""
        assert self.compressions is not None
        rate, num_recent = self.config.compression_rate, memory_num_rows(recent)
        num_tokens, count = documents_BL.shape[1], 0
        if length:
            count = num_leaving_rows(num_recent, num_tokens, length, rate)
        leaving_BX = leaving_rows(recent[-1], documents_BL, count)
        isolated = (leaving_BX, documents_BL) if self.config.isolate_documents else (None, None)
        rows_BKD, errors = [], []
        for index, (compression, segment_BLD) in enumerate(
            zip(self.compressions, inputs_BLD, strict=True)
        ):
            layer = self.layers[index]
            assert isinstance(layer, TransformerLayer)
            leaving_BXD = leaving_rows(recent[index], segment_BLD, count)
            inputs = (leaving_BXD, segment_BLD.detach(), *isolated)
            new_BKD, error = self._run(index, compression, *inputs, layer=layer)
            rows_BKD.append(new_BKD)
            errors.append(error)
        new = (*rows_BKD, grouped_documents(leaving_BX, rate)[0])
        kept = with_compressed(compressed, new, self.config.compressed_length, documents_BL[:, -1:])
        kept_rows = num_recent + num_tokens - count if length else 0
        levels = extended(recent, inputs_BLD, documents_BL, kept_rows)
        return (*levels[:-1], *kept, levels[-1]), torch.stack(errors).sum()

    def positions_CX(
        self, num_keys: int, hidden_BLD: Tensor, dropout: DropoutStream | None = None
    ) -> Tensor:
        """Return encodings [C, D or H] or biases [C, N], farthest first, with dropout."""
        if self.distance_bias is not None:
            return self.distance_bias(num_keys, hidden_BLD.dtype, hidden_BLD.device)
        positions_CX = self._encodings.encodings_CD(num_keys, hidden_BLD.dtype, hidden_BLD.device)
        drops = position_traits(self.config.positions).projects_encodings
        if dropout is None or self.config.dropout == 0.0 or not drops:
            return positions_CX
        return dropout.drop_shared(positions_CX, self.config.dropout, Site.POSITIONS)

    def visibility(self, documents_BC: Tensor, hidden_BLD: Tensor, length: int) -> Visibility:
        """Return which of the C keys the segment's queries see."""
        return Visibility(
            num_queries=hidden_BLD.shape[1],
            num_keys=documents_BC.shape[1],
            window=length if self.config.same_length else 0,
            documents_BC=documents_BC if self.config.isolate_documents else None,
            dtype=hidden_BLD.dtype,
            device=hidden_BLD.device,
        )
