"""Transformer-XL as xl-pretrain trains it, for Hugging Face transformers, in plain torch.

`XLPretrainForCausalLM`, at the end of this file, reads its input in segments of
`config.segment_length` tokens, each with the memory that the previous one left, as in training.
`model(input_ids).mems` is the memory; give it back as `mems` with the tokens that follow.
`generate` remembers keys and values instead, which gives the same result with less work.

Names of tensors end in the letters of their shape: B rows of a batch, L tokens of a segment, M rows
of memory, C keys (M + L), D d_model, N heads, G heads of keys and values, H head width, V
vocabulary, T tokens of an input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.generic import ModelOutput

from pretrain.config.model import AttentionKernel, ModelConfig
from pretrain.model.attention_backends import AttentionBackend, plain_attention, tiled_attention
from pretrain.model.cached import last_logits_BTV, new_stream
from pretrain.model.memory import document_starts
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.huggingface.configuration_xl_pretrain import XLPretrainConfig

ALIGNMENT = 64  # bytes, as of what torch allocates


# An export has this table, and the next definitions, instead of the project's own. The export's
# last lines enter its kinds of layers.
MIXERS: dict[str, Any] = {}


def mixer_class(kind: str) -> Any:
    """Return the module's class of a kind of layer."""
    return MIXERS[kind]


class DropoutStream:
    """A stand-in for the project's class of dropout masks; there is no dropout here."""


def backend_for(
    kernel: AttentionKernel, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """Return how attention is computed: in tiles on a CPU, elsewhere in plain operations."""
    return tiled_attention if device.type == "cpu" else plain_attention


@dataclass
class XLPretrainOutput(ModelOutput):
    """`logits` [B, T, V] are normalized: log-probabilities of the next token."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    past_key_values: XLPretrainCache | None = None


def logits_BTV(
    read: Callable[[Tensor, Tensor, int], Tensor],
    tokens_BT: Tensor,
    last_B: Tensor | None,
    config: XLPretrainConfig,
    num_last: int,
) -> Tensor:
    """Return the logits of the last `num_last` tokens, or of all if it is 0, read in segments.

    `read` as in `last_logits_BTV`; `last_B` is the token before each row, if there are any.
    """
    starts_BT = document_starts(tokens_BT, config.document_end_id)
    if last_B is not None:
        starts_BT[:, 0] = last_B == config.document_end_id
    num_last = num_last or tokens_BT.shape[1]
    return last_logits_BTV(read, tokens_BT, starts_BT, config.segment_length, num_last)


class XLPretrainCache:
    """What `generate` remembers of the text so far: keys and values of the last tokens."""

    def __init__(self, transformer: TransformerXL, config: XLPretrainConfig) -> None:
        self._config = config
        longest = transformer.config.longest_memory
        self._stream = new_stream(transformer, longest, config.segment_length)
        self._num_tokens = 0
        self._last_B: Tensor | None = None

    def read(self, tokens_BT: Tensor, num_last: int) -> Tensor:
        """Read the tokens that follow, and return the logits of the last `num_last`."""
        read = self._stream.logits_BLV
        result_BTV = logits_BTV(read, tokens_BT, self._last_B, self._config, num_last)
        self._num_tokens += tokens_BT.shape[1]
        self._last_B = tokens_BT[:, -1]
        return result_BTV

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read so far."""
        return self._num_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the rows by the present rows `beam_idx`, as beam search does."""
        self._stream.select(beam_idx)
        if self._last_B is not None:
            self._last_B = self._last_B[beam_idx]


class XLPretrainForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model. Training with it has no dropout."""

    config: XLPretrainConfig
    config_class = XLPretrainConfig
    base_model_prefix = "transformer"
    _is_stateful = True  # a memory cannot be rolled back

    def __init__(self, config: XLPretrainConfig) -> None:
        super().__init__(config)
        self.transformer = TransformerXL(config.model_config())
        self.transformer.trained_keys = config.trained_keys
        # By storage: transformers replaces parameters as they are registered, so that one that is
        # shared is two objects.
        first: dict[int, str] = {}
        # The further names of shared parameters -> their first names.
        self._tied_weights_keys = {
            name: first[storage]
            for name, parameter in self.named_parameters(remove_duplicate=False)
            if first.setdefault(storage := parameter.untyped_storage()._cdata, name) != name
        }
        self._keys_to_ignore_on_save = list(self._tied_weights_keys) or None
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the embedding, a table for each cluster of tokens."""
        return self.transformer.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        mems: tuple[Tensor, ...] | None = None,
        past_key_values: XLPretrainCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **options: Any,
    ) -> XLPretrainOutput | tuple[Any, ...]:
        """Read tokens [B, T] after those that `mems` or `past_key_values` remember.

        `labels` are the tokens themselves, or -100 where no loss is wanted. Padding must be on the
        right of a text; logits and memory after it are meaningless.
        """
        require_no_padding_on_the_left(attention_mask)
        if past_key_values is not None:
            logits, next_mems = past_key_values.read(input_ids, logits_to_keep), None
        else:
            logits, next_mems = self._read(input_ids, mems, logits_to_keep)
        loss = None
        if labels is not None:
            vocab_size = self.config.vocab_size
            loss = self.loss_function(logits, labels, vocab_size=vocab_size, **options)
        output = XLPretrainOutput(
            loss=loss, logits=logits, mems=next_mems, past_key_values=past_key_values
        )
        return output.to_tuple() if return_dict is False else output

    def _read(
        self, tokens_BT: Tensor, mems: tuple[Tensor, ...] | None, num_last: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the logits, and `mems`: the memory, then the last token of each row."""
        memory, last_B = (None, None) if mems is None else (mems[:-1], mems[-1])
        config = self.transformer.config
        self.transformer.expect_keys(config.longest_memory, self.config.segment_length)

        def read(tokens_BL: Tensor, starts_BL: Tensor, num_last: int) -> Tensor:
            nonlocal memory
            part_BLV, memory = self.transformer.logits_BLV(
                tokens_BL, memory, starts_BL, num_last=num_last
            )
            return part_BLV

        result_BTV = logits_BTV(read, tokens_BT, last_B, self.config, num_last)
        assert memory is not None
        return result_BTV, (*memory, tokens_BT[:, -1])

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        past_key_values: XLPretrainCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = True,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the tokens that are not read yet, and what remembers the others."""
        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                "found padding in attention_mask, which would enter the memory; generate from "
                "prompts of equal length, or from one at a time"
            )
        if not use_cache:
            return {"input_ids": input_ids, "logits_to_keep": 1}
        if past_key_values is None:
            past_key_values = XLPretrainCache(self.transformer, self.config)
        unread = input_ids[:, past_key_values.get_seq_length() :]
        return {"input_ids": unread, "past_key_values": past_key_values, "logits_to_keep": 1}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: `prepare_inputs_for_generation` makes the cache."""
        return False

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Do nothing: each parameter is drawn where it is declared."""

    def tie_weights(self, *arguments: Any, **options: Any) -> None:
        """Make each shared parameter one object again after transformers has replaced it."""
        super().tie_weights(*arguments, **options)
        for tied, name in self._tied_weights_keys.items():
            module_name, _, own_name = tied.rpartition(".")
            setattr(self.get_submodule(module_name), own_name, self.get_parameter(name))
        for parameter in self.parameters():
            # A matrix product may round differently for tensors that are not aligned, as tensors of
            # a mapped file may be.
            if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
                parameter.data = parameter.data.clone()


def require_no_padding_on_the_left(mask_BT: Tensor | None) -> None:
    """Raise ValueError if text follows padding, which would enter the memory."""
    if mask_BT is not None and bool((mask_BT[:, 1:] > mask_BT[:, :-1]).any()):
        raise ValueError(
            "found padding before a text in attention_mask, which would enter the memory; pad on "
            "the right, or read one text at a time"
        )
