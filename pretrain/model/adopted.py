"""A causal language model of transformers as a model of ours: lanes carry what its cache holds.

The model's cache is filled with what a lane carries. The model reads a segment, and what the cache
then holds is carried on. Nothing here knows a family. Letters of shapes as in `pretrain.model`; R
rows of the cache, P rotated channels.

Attention keeps keys that are already rotated. Lanes are as long as a corpus, and angles of such
positions are wrong in float32. So a segment's positions start after the carried rows, and carried
keys are rotated back by the number of rows that have left: attention sees distances alone.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from foundation.errors import ConfigError
from pretrain.config.mixer import LanePart, Role
from pretrain.config.model import ModelConfig
from pretrain.model.dropout import DropoutStream
from pretrain.model.memory import (
    Carried,
    Memory,
    MemoryLayout,
    detached,
    last_rows,
    segment_documents,
)
from pretrain.model.transformer_xl import TransformerXL
from pretrain.model.transformers_modules import empty_inner, fill_parameters, new_cache

CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")  # its names in various families
STATES, ROWS = ("conv_states", "recurrent_states"), ("keys", "values")


class AdoptedModel(nn.Module):
    """A module of transformers with its cache; called like `TransformerXL`."""

    def __init__(self, config: ModelConfig, inner: Any) -> None:
        super().__init__()
        self.config, self.inner = config, inner
        self.roles = parameter_roles(inner)
        self._cache_class = type(new_cache(inner))
        names = inspect.signature(inner.forward).parameters
        self._cache_argument = cache_argument(inner)
        self._takes_positions = "position_ids" in names
        self._frequencies = rotary_frequencies(inner)
        self.trained_keys: tuple[int, ...] = ()  # an adopted model has no rope_extension

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
        """Return the NLL [B, L] in float32 and the next memory, as `TransformerXL` does.

        `starts_BL` only counts documents: state carries over their borders.
        """
        assert dropout is None, "an adopted model has no dropout of ours"
        logits_BLV, memory = self.read(tokens_BL, memory, starts_BL, memory_length, num_segments)
        nll = cross_entropy(
            _exact(logits_BLV).flatten(0, 1), targets_BL.flatten(), reduction="none"
        )
        return nll.view_as(targets_BL), memory

    def logits_BLV(
        self,
        tokens_BL: Tensor,
        memory: Memory | None = None,
        starts_BL: Tensor | None = None,
        memory_length: int | None = None,
        num_last: int | None = None,
    ) -> tuple[Tensor, Memory]:
        """Return log-probabilities after the last `num_last` tokens (default: all), and memory."""
        logits_BLV, memory = self.read(tokens_BL, memory, starts_BL, memory_length)
        return _exact(logits_BLV[:, -(num_last or 0) :]).log_softmax(-1), memory

    def read(
        self,
        tokens_BL: Tensor,
        memory: Memory | None = None,
        starts_BL: Tensor | None = None,
        memory_length: int | None = None,
        num_segments: int = 1,
        first_position: int = 0,
    ) -> tuple[Tensor, Memory]:
        """Return the logits [B, L, V] of the module of transformers, and the next memory.

        `first_position` is the position of the first carried row; results do not depend on it.
        """
        layout, logits = MemoryLayout(self.config, memory_length), []
        memory = None if memory is None else detached(memory)
        if starts_BL is None:
            starts_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
        segments = (whole.chunk(num_segments, dim=1) for whole in (tokens_BL, starts_BL))
        for tokens, starts in zip(*segments, strict=True):
            logits_BLV, memory = self._read_segment(tokens, starts, memory, layout, first_position)
            logits.append(logits_BLV)
        assert memory is not None
        return logits[0] if num_segments == 1 else torch.cat(logits, dim=1), detached(memory)

    def expect_keys(self, longest_memory: int, segment_length: int) -> None:
        """Do nothing: the model rotates by its own settings."""

    @property
    def layers(self) -> nn.ModuleList:
        return next(module for module in self.modules() if isinstance(module, nn.ModuleList))

    def train(self, mode: bool = True) -> AdoptedModel:
        """Set the mode of this module alone: dropout of transformers differs at a resume."""
        super().train(mode)
        self.inner.eval()
        return self

    def _read_segment(
        self,
        tokens_BL: Tensor,
        starts_BL: Tensor,
        memory: Memory | None,
        layout: MemoryLayout,
        first: int,
    ) -> tuple[Tensor, Memory]:
        carried = layout.usable(memory, len(tokens_BL), next(self.inner.parameters()))
        rows, tokens = carried.documents_BM.shape[1], tokens_BL.shape[1]
        cache = self._cache_class(config=self.inner.config)
        layers = [*zip(layout.parts.layers, cache.layers, strict=True)]
        for (parts, layer), tensors in zip(layers, carried.layers, strict=True):
            for part, tensor in zip(parts, tensors, strict=True):
                held = self._rotated(tensor, first) if _own_name(part) == "keys" else tensor
                fill_layer(layer, _own_name(part), held, rows)
        options: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if self._takes_positions:
            positions_L = torch.arange(tokens, device=tokens_BL.device) + rows + first
            options["position_ids"] = positions_L.expand(len(tokens_BL), -1)
        logits_BLV = self.inner(input_ids=tokens_BL, **options).logits
        documents_BL = segment_documents(carried.documents_BM, tokens, starts_BL)
        documents_BM = last_rows(carried.documents_BM, documents_BL, layout.parts.memory_length)
        steps_back = first + rows + tokens - documents_BM.shape[1]
        kept = tuple(
            tuple(self._carried(part, layer, steps_back) for part in parts)
            for parts, layer in layers
        )
        return logits_BLV, layout.joined(Carried(kept, documents_BM - documents_BL[:, -1:]))

    def _carried(self, part: LanePart, layer: Any, steps_back: int) -> Tensor:
        """Return what a part carries on; keys are rotated to positions that count from 0 again."""
        tensor = held_by(layer)[_own_name(part)]
        if part.kind == "state":
            return tensor
        # A copy, because a view would keep the rows of the whole segment.
        tensor = tensor[:, max(0, tensor.shape[1] - part.length) :].contiguous()
        return self._rotated(tensor, -steps_back) if _own_name(part) == "keys" else tensor

    def _rotated(self, keys_BRNH: Tensor, steps: int) -> Tensor:
        """Return the keys rotated to positions that are higher by `steps`."""
        if self._frequencies is None or not steps:
            return keys_BRNH
        angles_P = (steps * self._frequencies).repeat(2)
        exact_1 = _exact(keys_BRNH[:, :0])
        cos_P, sin_P = angles_P.cos().to(exact_1), angles_P.sin().to(exact_1)
        rotated_BRNP, rest = keys_BRNH.tensor_split([len(angles_P)], dim=-1)
        first, second = rotated_BRNP.chunk(2, dim=-1)
        turned = rotated_BRNP * cos_P + torch.cat([-second, first], dim=-1) * sin_P
        return torch.cat([turned.to(keys_BRNH.dtype), rest], dim=-1)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the module; buffers keep their type, because angles in half precision are wrong."""
        kept = {id(buffer): buffer for buffer in self.buffers()}

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(fn(tensor).device) if id(tensor) in kept else fn(tensor)

        return super()._apply(moved, recurse)


LanguageModel = TransformerXL | AdoptedModel


def build_adopted(model: ModelConfig) -> AdoptedModel:
    """Return the model with parameters of 0, for weights to replace."""
    assert model.facts is not None
    module = AdoptedModel(model, empty_inner(model.facts.config))
    fill_parameters(module.inner, lambda _, shape: torch.zeros(shape))
    return module


def cache_argument(inner: nn.Module) -> str:
    """Return the argument of `forward` that takes the cache; ConfigError without one."""
    names = inspect.signature(inner.forward).parameters
    if name := next((name for name in CACHE_ARGUMENTS if name in names), ""):
        return name
    raise ConfigError(
        f"{type(inner).__name__} takes no cache of transformers; expected one of "
        f"{', '.join(CACHE_ARGUMENTS)} as an argument of forward"
    )


def _own_name(part: LanePart) -> str:
    return part.name.split(".", 2)[2]  # layers.NUMBER.NAME


def _exact(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rotary_frequencies(inner: nn.Module) -> Tensor | None:
    """Return the angles of a step, by pair of channels; None without rotations.

    ConfigError if layers rotate by different angles, or by others in a longer text.
    """
    name = type(inner).__name__
    kinds = " ".join(str(getattr(module, "rope_type", "")) for module in inner.modules())
    if "dynamic" in kinds or "longrope" in kinds:
        raise ConfigError(f"{name} rotates by angles that depend on the length of the text")
    buffers = [buffer for own, buffer in inner.named_buffers() if own.endswith("inv_freq")]
    if any(not torch.equal(buffer, buffers[0]) for buffer in buffers):
        raise ConfigError(f"{name} has layers that rotate by different angles")
    return buffers[0].double() if buffers else None


def held_by(layer: Any) -> dict[str, Tensor]:
    """Return what a layer of the cache holds by name: states [B, ...], rows [B, R, N, H]."""
    held = {
        f"{name}.{number}": state
        for name in STATES
        for number, state in getattr(layer, name, {}).items()
        if state is not None
    }
    for name in ROWS:
        if isinstance(rows := getattr(layer, name, None), Tensor) and rows.dim() == 4:
            held[name] = rows.transpose(1, 2)
    return held


def fill_layer(layer: Any, name: str, tensor: Tensor, num_tokens: int) -> None:
    """Let a new layer of the cache hold a tensor of this name, after `num_tokens`.

    The layer then assigns new states. Its own methods would copy them in place, and a backward pass
    could not go through the next segment.
    """
    layer.device, layer.dtype = tensor.device, tensor.dtype
    if name in ROWS:
        setattr(layer, name, tensor.transpose(1, 2))
        layer.is_initialized = True
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = num_tokens
        return
    kind, number = name.split(".")
    getattr(layer, kind)[int(number)] = tensor
    getattr(layer, f"is_{kind}_initialized")[int(number)] = True
    layer.has_previous_state[int(number)] = True
    layer.update_conv_state = partial(_next_conv_state, layer)
    layer.update_recurrent_state = partial(_next_recurrent_state, layer)


def _next_conv_state(layer: Any, new: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
    """Remember the last inputs of a convolution, and return all that the next one reads."""
    old = layer.conv_states[state_idx]
    read = torch.cat([old, new], dim=-1)
    layer.conv_states[state_idx] = read[..., read.shape[-1] - old.shape[-1] :].contiguous()
    return read


def _next_recurrent_state(layer: Any, new: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
    layer.recurrent_states[state_idx] = new
    return new


def parameter_roles(inner: Any) -> dict[str, Role]:
    """Return the role of each parameter, by its name in `AdoptedModel`.

    Weights of linear layers are matrices; other weights of two or more dimensions, such as stacked
    experts, decay, but no optimizer takes them for one matrix.
    """
    roles: dict[str, Role] = {}
    head = inner.get_output_embeddings()
    for name, parameter in inner.named_parameters():
        module = inner.get_submodule(name.rpartition(".")[0])
        role: Role = "projection" if parameter.dim() > 1 else "vector"
        if parameter.dim() > 1 and (isinstance(module, nn.Embedding) or module is head):
            role = "table"
        elif isinstance(module, nn.Linear) and name.endswith(".weight"):
            role = "matrix"
        roles[f"inner.{name}"] = role
    return roles
