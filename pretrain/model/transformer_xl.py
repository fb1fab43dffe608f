"""Transformer-XL (Dai et al. 2019): segment recurrence over a memory of hidden states; and its later variants.

B lanes, L tokens of the segment, M memory rows (K compressed ones first), C = M + L, D d_model, N heads, H head width,
V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.errors import ConfigError
from pretrain.config.run import ActivationCheckpointing, AttentionKernel, ModelConfig
from pretrain.model.adaptive_softmax import AdaptiveSoftmax, with_gradient_of
from pretrain.model.compression import (
    Compression,
    grouped_documents,
    leaving_rows,
    num_leaving_rows,
    with_compressed,
)
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.embedding import Embedding
from pretrain.model.layer import TransformerLayer
from pretrain.model.masks import Visibility
from pretrain.model.memory import (
    Memory,
    compressed_rows,
    empty_memory,
    extended,
    keep_last_rows,
    memory_num_lanes,
    memory_num_rows,
    recent_rows,
    segment_documents,
)
from pretrain.model.parameters import normal
from pretrain.model.positions import DistanceBias, RelativePositions


class TransformerXL(nn.Module):
    """The language model. Parameters come from torch's default generator; nothing else uses random-number state."""

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
            raise ConfigError(
                "model.vocab_size=0: set it to the tokenizer's number of tokens before building the model"
            )
        self.config = config
        self.activation_checkpointing: ActivationCheckpointing = activation_checkpointing
        self.checkpoint_every_n_layers = checkpoint_every_n_layers
        self.embedding = Embedding(config)
        layers = [
            TransformerLayer(config, layer, attention_kernel) for layer in range(config.num_layers)
        ]
        for layer in layers[::checkpoint_every_n_layers]:
            layer.attention.recomputes_scores = activation_checkpointing == "selective"
        self.layers = nn.ModuleList(layers)
        self.content_bias: nn.Parameter | None = None  # u, r_w_bias
        self.position_bias: nn.Parameter | None = None  # v, r_r_bias
        if config.positions == "relative" and not config.untie_biases:
            self.content_bias = normal(config.num_heads, config.head_width, std=config.init_std)
            self.position_bias = normal(config.num_heads, config.head_width, std=config.init_std)
        self.distance_bias = DistanceBias(config) if config.positions in ("alibi", "t5") else None
        self.head = AdaptiveSoftmax(config, self.embedding, logits_chunk_tokens)
        self.compressions: nn.ModuleList | None = None
        if config.compressed_length:
            self.compressions = nn.ModuleList(
                Compression(config, layer.attention) for layer in layers
            )
        width = config.head_width if config.positions == "rope" else config.d_model
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
        """NLL [B, L] per token in float32 (float64 for a float64 model) and the memory for the next segment.

        `starts_BL` marks first tokens of documents. Dropout acts in training mode only and only if a stream is given.
        `memory_length` replaces the configured one for this call; with `same_length` it is also the number of keys
        seen, except that 0 means the segment alone.
        """
        hidden_BLD, memory, error = self._run_layers(
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
        hidden_BLD, memory, _ = self._run_layers(
            tokens_BL, memory, starts_BL, dropout, memory_length
        )
        return hidden_BLD, memory

    def _run_layers(
        self,
        tokens_BL: Tensor,
        memory: Memory | None,
        starts_BL: Tensor | None,
        dropout: DropoutStream | None,
        memory_length: int | None,
    ) -> tuple[Tensor, Memory, Tensor | None]:
        """Hidden states, the next memory, and the compression's error if there is one."""
        dropout = dropout if self.training else None
        length = self.config.memory_length if memory_length is None else memory_length
        hidden_BLD = drop(self.embedding(tokens_BL), self.config.dropout, dropout, Site.EMBEDDING)
        recent, compressed = self._usable_memory(memory, hidden_BLD, length)
        documents_BL = segment_documents(recent[-1], tokens_BL.shape[1], starts_BL)
        documents_BC = torch.cat(
            [*(part[-1] for part in (compressed, recent) if part), documents_BL], dim=1
        )
        positions_CX = self.positions_CX(documents_BC.shape[1], hidden_BLD, dropout)
        visibility = self._visibility(documents_BC, hidden_BLD, length)
        inputs_BLD = []
        for index, layer in enumerate(self.layers):
            inputs_BLD.append(hidden_BLD)
            memory_BMD = (
                torch.cat([compressed[index], recent[index]], dim=1)
                if compressed
                else recent[index]
            )
            inputs = (hidden_BLD, memory_BMD, positions_CX, self.content_bias, self.position_bias)
            hidden_BLD = self._run(index, layer, *inputs, visibility=visibility, dropout=dropout)
        hidden_BLD = drop(hidden_BLD, self.config.dropout, dropout, Site.FINAL)
        if self.compressions is None:
            return hidden_BLD, extended(recent, inputs_BLD, documents_BL, length), None
        return hidden_BLD, *self._extended_and_compressed(
            recent, compressed, inputs_BLD, documents_BL, length
        )

    def _run(self, index: int, module: nn.Module, *inputs: Tensor | None, **options: Any) -> Any:
        """A layer's module on its inputs, with or without keeping what its backward pass needs."""
        # The options go by name: DeepSpeed's hooks look into positional inputs only and know no such objects.
        if (
            self.activation_checkpointing != "full"
            or index % self.checkpoint_every_n_layers
            or not torch.is_grad_enabled()
        ):
            return module(*inputs, **options)
        return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False, **options)

    def _usable_memory(
        self, memory: Memory | None, hidden_BLD: Tensor, length: int
    ) -> tuple[Memory, Memory]:
        """Recent and compressed rows, the latter () where nothing is compressed."""
        num_lanes, _, d_model = hidden_BLD.shape
        num_layers, compresses = len(self.layers), self.compressions is not None
        if memory is None:
            dtype, device = hidden_BLD.dtype, hidden_BLD.device
            memory = empty_memory(
                num_layers, num_lanes, d_model, dtype, device, compressed=compresses
            )
        assert len(memory) == (num_layers + 1) * (1 + compresses), (len(memory), num_layers)
        assert memory_num_lanes(memory) == num_lanes, (memory_num_lanes(memory), num_lanes)
        memory = tuple(part.detach() for part in memory)
        recent, compressed = recent_rows(memory, num_layers), compressed_rows(memory, num_layers)
        if not compresses:
            return keep_last_rows(recent, length), ()
        if not length:
            return keep_last_rows(recent, 0), keep_last_rows(compressed, 0)
        waiting = self.config.compression_rate - 1
        return keep_last_rows(recent, length + waiting), keep_last_rows(
            compressed, self.config.compressed_length
        )

    def _extended_and_compressed(
        self,
        recent: Memory,
        compressed: Memory,
        inputs_BLD: list[Tensor],
        documents_BL: Tensor,
        length: int,
    ) -> tuple[Memory, Tensor]:
        """The next memory, and the summed error of the layers' compressions."""
        assert self.compressions is not None
        rate, total = self.config.compression_rate, memory_num_rows(recent) + documents_BL.shape[1]
        count = (
            num_leaving_rows(memory_num_rows(recent), documents_BL.shape[1], length, rate)
            if length
            else 0
        )
        documents_BK, own_BKc = grouped_documents(
            leaving_rows(recent[-1], documents_BL, count), rate
        )
        rows_BKD, errors = [], []
        for index, (compression, segment_BLD) in enumerate(
            zip(self.compressions, inputs_BLD, strict=True)
        ):
            layer = self.layers[index]
            assert isinstance(layer, TransformerLayer)
            leaving_BED = leaving_rows(recent[index], segment_BLD, count)
            own = own_BKc if self.config.isolate_documents else None
            new_BKD, error = self._run(
                index, compression, leaving_BED, own, segment_BLD.detach(), layer=layer
            )
            rows_BKD.append(new_BKD)
            errors.append(error)
        new = (*rows_BKD, documents_BK)
        kept = with_compressed(compressed, new, self.config.compressed_length, documents_BL[:, -1:])
        levels = extended(recent, inputs_BLD, documents_BL, total - count if length else 0)
        return (*levels[:-1], *kept, levels[-1]), torch.stack(errors).sum()

    def positions_CX(
        self, num_keys: int, hidden_BLD: Tensor, dropout: DropoutStream | None = None
    ) -> Tensor:
        """Encodings [C, D or H], or biases [C, N], farthest first; the paper drops parts of its encodings too."""
        if self.distance_bias is not None:
            return self.distance_bias(num_keys, hidden_BLD.dtype, hidden_BLD.device)
        positions_CX = self._encodings.encodings_CD(num_keys, hidden_BLD.dtype, hidden_BLD.device)
        if dropout is None or self.config.dropout == 0.0 or self.config.positions != "relative":
            return positions_CX
        return dropout.drop_shared(positions_CX, self.config.dropout, Site.POSITIONS)

    def _visibility(self, documents_BC: Tensor, hidden_BLD: Tensor, length: int) -> Visibility:
        return Visibility(
            num_queries=hidden_BLD.shape[1],
            num_keys=documents_BC.shape[1],
            window=length if self.config.same_length else 0,
            documents_BC=documents_BC if self.config.isolate_documents else None,
            dtype=hidden_BLD.dtype,
            device=hidden_BLD.device,
        )
