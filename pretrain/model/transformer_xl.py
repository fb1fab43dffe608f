"""Transformer-XL (Dai et al. 2019), with segment recurrence over a memory of hidden states.

Letters of shapes as in `pretrain.model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import ConfigError
from pretrain.config.model import POSITIONS, ActivationCheckpointing, AttentionKernel, ModelConfig
from pretrain.model.compiled import recomputed_if
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.embedding_and_softmax import AdaptiveSoftmax, Embedding
from pretrain.model.layer import new_layer
from pretrain.model.memory import (
    Carried,
    LayerParts,
    Memory,
    MemoryLayout,
    detached,
    grouped_documents,
    last_rows,
    leaving_rows,
    num_leaving_rows,
    segment_documents,
)
from pretrain.model.memory_modules import Compression, MemoryTokens, documents_with_tokens
from pretrain.model.parameters import normal
from pretrain.model.positions import DistanceBias, RelativePositions, Stretch
from pretrain.model.token_losses import with_gradient_of
from pretrain.model.visibility import SegmentKeys


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment:
    """What all layers need to know of a segment."""

    state: MemoryLayout
    keys: SegmentKeys
    documents_BL: Tensor
    leaving_BX: Tensor  # documents of the rows that leave the memory to be compressed
    compresses: bool
    dropout: DropoutStream | None
    carries_gradient: bool  # to a next segment, which is part of the same backward pass
    memory_tokens: int

    def own(self, hidden_BLD: Tensor) -> Tensor:
        """Return the rows of the segment's tokens, without its memory tokens."""
        count = self.memory_tokens
        return hidden_BLD[:, count:-count] if count else hidden_BLD

    def kept(self, old_BMX: Tensor, new_BLX: Tensor, length: int) -> Tensor:
        """Return the rows of a memory that stay; with compression, rows leave in groups."""
        if self.compresses and length:
            length = old_BMX.shape[1] + new_BLX.shape[1] - self.leaving_BX.shape[1]
        return last_rows(old_BMX, new_BLX, length)


class TransformerXL(nn.Module):
    """The language model. Only its initialization uses random-number state: torch's generator."""

    def __init__(
        self,
        config: ModelConfig,
        activation_checkpointing: ActivationCheckpointing = "none",
        attention_kernel: AttentionKernel = "auto",
        logits_chunk_tokens: int = 0,
        compiles: bool = False,
    ) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ConfigError("model.vocab_size=0; set it to the tokenizer's number of tokens")
        self.config = config
        self.activation_checkpointing: ActivationCheckpointing = activation_checkpointing
        recomputes_scores = activation_checkpointing == "selective"
        self.embedding = Embedding(config)
        layers = [new_layer(config, layer, attention_kernel) for layer in range(config.num_layers)]
        for layer in layers:
            layer.compiles = compiles
            layer.mixer.compiles = compiles
            layer.mixer.recomputes_scores = recomputes_scores
        self.layers = nn.ModuleList(layers)
        self.content_bias: nn.Parameter | None = None  # u, r_w_bias
        self.position_bias: nn.Parameter | None = None  # v, r_r_bias
        positions = POSITIONS[config.positions]
        has_rows = config.num_layers_with_rows > 0
        if positions.projects_encodings and not config.untie_biases and has_rows:
            self.content_bias = normal(config.num_heads, config.head_width, std=config.init_std)
            self.position_bias = normal(config.num_heads, config.head_width, std=config.init_std)
        self.distance_bias = None
        if positions.adds_bias and has_rows:
            self.distance_bias = DistanceBias(config)
        self.head = AdaptiveSoftmax(config, self.embedding, logits_chunk_tokens)
        self.head.compiles = compiles
        self.compressions: nn.ModuleList | None = None
        if config.compressed_length:
            self.compressions = nn.ModuleList(
                Compression(config, layer.mixer)
                if config.mixer(index).has_rows
                else nn.Identity()  # a layer without rows; the others keep their numbers
                for index, layer in enumerate(layers)
            )
        self.memory_tokens = MemoryTokens(config) if config.memory_tokens else None
        self._stretches: tuple[Stretch | None, ...] = (None,) * config.num_layers
        self._encodings: dict[Stretch | None, RelativePositions] = {None: self._encodings_of(None)}
        # The most keys of each layer in training; while it is empty, `rope_extension` does not act.
        self.trained_keys: tuple[int, ...] = ()

    def forward(
        self,
        tokens_BL: Tensor,
        targets_BL: Tensor,
        memory: Memory | None = None,
        starts_BL: Tensor | None = None,
        dropout: DropoutStream | None = None,
        memory_length: int | None = None,
        num_segments: int = 1,
    ) -> tuple[Tensor, Memory]:
        """Return the NLL [B, L] in float32 (float64 in a float64 model) and the next memory.

        `starts_BL` marks the first tokens of documents. Dropout acts only in training mode and if a
        stream is given. `memory_length` replaces the configured one for this call; with
        `same_length` it is also the number of keys seen, except that 0 means the segment alone.
        `num_segments`: see `hidden_states`.
        """
        hidden_BLD, memory, error = self.hidden_states(
            tokens_BL, memory, starts_BL, dropout, memory_length, num_segments
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
        """Return log-probabilities after the last `num_last` tokens (default: all), and the memory.

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
        num_segments: int = 1,
    ) -> tuple[Tensor, Memory, Tensor | None]:
        """Return the output layer's input [B, L, D], the next memory, the compression's error.

        The tokens are `num_segments` segments, read one after the other. Gradients of a later one
        reach earlier ones through memory, but not the given memory. The error is the mean over the
        segments.
        """
        assert tokens_BL.shape[1] % num_segments == 0, (tokens_BL.shape, num_segments)
        state = MemoryLayout(self.config, memory_length)
        memory = None if memory is None else detached(memory)
        starts: Sequence[Tensor | None] = [None] * num_segments
        if starts_BL is not None:
            starts = starts_BL.chunk(num_segments, dim=1)
        hidden, errors = [], []
        # Keeps the memory between segments; the backward pass reads them again, last first.
        read = recomputed_if(self.activation_checkpointing == "segments", self._read_segment)
        for number, part_BL in enumerate(tokens_BL.chunk(num_segments, dim=1)):
            masks = dropout.of_segment(number) if dropout and self.training else None
            is_last = number == num_segments - 1
            hidden_BLD, memory, of_segment = read(
                part_BL, memory, starts[number], masks, state, carries_gradient=not is_last
            )
            hidden.append(hidden_BLD)
            errors += of_segment
        assert memory is not None
        hidden_BLD = hidden[0] if num_segments == 1 else torch.cat(hidden, dim=1)
        error = torch.stack(errors).sum() / num_segments if errors else None
        return hidden_BLD, detached(memory), error

    def _read_segment(
        self,
        tokens_BL: Tensor,
        memory: Memory | None,
        starts_BL: Tensor | None,
        dropout: DropoutStream | None,
        state: MemoryLayout,
        *,
        carries_gradient: bool,
    ) -> tuple[Tensor, Memory, list[Tensor]]:
        """Return the output layer's input [B, L, D], the next memory, the compressions' errors."""
        hidden_BLD = drop(self.embedding(tokens_BL), self.config.dropout, dropout, Site.EMBEDDING)
        carried = state.usable(memory, len(hidden_BLD), hidden_BLD)
        documents_BL = segment_documents(carried.documents_BM, tokens_BL.shape[1], starts_BL)
        if self.memory_tokens is not None:
            is_new_B = documents_BL[:, -1] > 0 if self.config.isolate_documents else None
            hidden_BLD = self.memory_tokens(hidden_BLD, carried.tokens_BXD, is_new_B)
        segment = self._segment(state, carried, hidden_BLD, documents_BL, dropout, carries_gradient)
        layers, errors = [], []
        for index in range(len(self.layers)):
            hidden_BLD, parts, error = self._read(index, hidden_BLD, carried.layers[index], segment)
            layers.append(parts)
            errors += [] if error is None else [error]
        remembered = self._remembered(carried, layers, segment)
        if self.memory_tokens is not None:
            hidden_BLD, written_BXD = self.memory_tokens.split(hidden_BLD)
            remembered = replace(remembered, tokens_BXD=written_BXD)
        hidden_BLD = drop(hidden_BLD, self.config.dropout, dropout, Site.FINAL)
        return hidden_BLD, state.joined(remembered), errors

    def _run(self, module: nn.Module, *inputs: Tensor | None, **options: Any) -> Any:
        """Run a layer's module, with full activation checkpointing if set."""
        # Options are keyword arguments: DeepSpeed's hooks inspect the positional ones and support
        # tensors only.
        return recomputed_if(self.activation_checkpointing == "full", module)(*inputs, **options)

    def _segment(
        self,
        state: MemoryLayout,
        carried: Carried,
        hidden_BLD: Tensor,
        documents_BL: Tensor,
        dropout: DropoutStream | None,
        carries_gradient: bool,
    ) -> Segment:
        """Return what all layers need to know of the segment."""
        num_rows, num_tokens = carried.documents_BM.shape[1], documents_BL.shape[1]
        compressed_BK = carried.compressed_documents_BK
        read_BL = documents_with_tokens(documents_BL, self.config.memory_tokens)
        documents = (compressed_BK, carried.documents_BM, read_BL)
        documents_BC = torch.cat([part for part in documents if part is not None], dim=1)
        positions = self.positions(documents_BC.shape[1], hidden_BLD, dropout)
        length, num_leaving = state.parts.memory_length, 0
        if compressed_BK is not None and length:
            rate = self.config.compression_rate
            num_leaving = num_leaving_rows(num_rows, num_tokens, length, rate)
        return Segment(
            state=state,
            keys=SegmentKeys(
                self.config, hidden_BLD.dtype, positions, documents_BC, read_BL.shape[1]
            ),
            documents_BL=documents_BL,
            leaving_BX=leaving_rows(carried.documents_BM, documents_BL, num_leaving),
            compresses=compressed_BK is not None,
            dropout=dropout,
            carries_gradient=carries_gradient,
            memory_tokens=self.config.memory_tokens,
        )

    def _read(
        self, index: int, hidden_BLD: Tensor, parts: LayerParts, segment: Segment
    ) -> tuple[Tensor, LayerParts, Tensor | None]:
        """Return a layer's output, what it carries on, and the error of its compression."""
        layer = self.layers[index]
        if not self.config.mixer(index).has_rows:
            inputs = (hidden_BLD, *parts, segment.keys.isolated_documents_BL)
            options = {"dropout": segment.dropout, "carries_gradient": segment.carries_gradient}
            output_BLD, *carried = self._run(layer, *inputs, **options)
            return output_BLD, tuple(carried), None
        num_keys = sum(part.shape[1] for part in parts) + hidden_BLD.shape[1]
        # Compressed rows are older.
        memory_BMD = parts[0] if len(parts) == 1 else torch.cat(parts[::-1], dim=1)
        length = segment.state.parts.layers[index][0].length
        output_BLD = self._run(
            layer,
            hidden_BLD,
            memory_BMD,
            segment.keys.positions_CX(index, num_keys),
            self.content_bias,
            self.position_bias,
            visibility=segment.keys.visibility(num_keys, length),
            dropout=segment.dropout,
        )
        hidden_BLD = segment.own(hidden_BLD)
        recent_BMD = segment.kept(parts[0], hidden_BLD, length)
        if self.compressions is None:
            return output_BLD, (recent_BMD,), None
        compressed_BKD, error = self._compressed(index, hidden_BLD, parts, segment)
        return output_BLD, (recent_BMD, compressed_BKD), error

    def _compressed(
        self, index: int, hidden_BLD: Tensor, parts: LayerParts, segment: Segment
    ) -> tuple[Tensor, Tensor]:
        """Return the compressed rows that a layer carries on, and the error."""
        assert self.compressions is not None
        recent_BMD, compressed_BKD = parts
        isolated = (segment.leaving_BX, segment.documents_BL)
        new_BKD, error = self._run(
            self.compressions[index],
            leaving_rows(recent_BMD, hidden_BLD, segment.leaving_BX.shape[1]),
            hidden_BLD.detach(),
            *(isolated if self.config.isolate_documents else (None, None)),
            layer=self.layers[index],
        )
        length = segment.state.parts.layers[index][1].length
        return last_rows(compressed_BKD, new_BKD.detach(), length), error

    def _remembered(self, carried: Carried, layers: list[LayerParts], segment: Segment) -> Carried:
        """Return what is carried on, with documents counted back from the segment's last token."""
        parts, documents_BL = segment.state.parts, segment.documents_BL
        last_B1, compressed_BK = documents_BL[:, -1:], carried.compressed_documents_BK
        documents_BM = segment.kept(carried.documents_BM, documents_BL, parts.memory_length)
        if compressed_BK is not None:
            new_BK, _ = grouped_documents(segment.leaving_BX, self.config.compression_rate)
            compressed_BK = last_rows(compressed_BK, new_BK, parts.shared[-2].length) - last_B1
        return Carried(tuple(layers), documents_BM - last_B1, compressed_BK)

    def positions(
        self, num_keys: int, hidden_BLD: Tensor, dropout: DropoutStream | None = None
    ) -> list[Tensor]:
        """Return each layer's encodings [C, D or H] or biases [C, N], farthest first."""
        made = {
            stretch: self._positions_CX(encodings, num_keys, hidden_BLD, dropout)
            for stretch, encodings in self._encodings.items()
        }
        return [made[stretch] for stretch in self._stretches]

    def _positions_CX(
        self,
        encodings: RelativePositions,
        num_keys: int,
        hidden_BLD: Tensor,
        dropout: DropoutStream | None,
    ) -> Tensor:
        if self.distance_bias is not None:
            return self.distance_bias(num_keys, hidden_BLD.dtype, hidden_BLD.device)
        positions_CX = encodings.encodings_CD(num_keys, hidden_BLD.dtype, hidden_BLD.device)
        drops = POSITIONS[self.config.positions].projects_encodings
        if dropout is None or self.config.dropout == 0.0 or not drops:
            return positions_CX
        return dropout.drop_shared(positions_CX, self.config.dropout, Site.POSITIONS)

    def expect_keys(self, longest_memory: int, segment_length: int) -> None:
        """Prepare for memories and segments of up to these lengths.

        Where a layer then sees more keys than in training, `rope_extension` acts.
        """
        if not POSITIONS[self.config.positions].rotates:
            return
        trained = self.trained_keys or (0,) * self.config.num_layers
        lengths = self.config.memory_lengths(longest_memory)
        expected = (self.config.most_keys(length, segment_length) for length in lengths)
        kind = self.config.rope_extension
        self._stretches = tuple(
            Stretch(kind, keys / before, before) if 0 < before < keys else None
            for keys, before in zip(expected, trained, strict=True)
        )
        self._encodings = {
            stretch: self._encodings.get(stretch) or self._encodings_of(stretch)
            for stretch in self._stretches
        }

    def _encodings_of(self, stretch: Stretch | None) -> RelativePositions:
        rotates = POSITIONS[self.config.positions].rotates
        width = self.config.head_width if rotates else self.config.d_model
        return RelativePositions(width, self.config.clamp_length, stretch)
