"""Layers with memories of their own lengths, against the longest in all layers with masks."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.errors import ConfigError
from foundation.settings import parse_config, to_tree
from pretrain.config.data import DataConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.memory import Footprint, checkpoint_bytes
from pretrain.model.attention_paths import Visibility
from pretrain.model.lane_state import LaneState
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import TINY, random_starts, random_tokens, stream_nll, tiny_model

LAYERS = 6
SEGMENTS = [5, 9, 1, 7, 9]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "isolated_pre_norm": {"isolate_documents": True, "norm_position": "pre"},
    "rope": {"positions": "rope", "norm_position": "pre"},
    "alibi": {"positions": "alibi"},
    "t5": {"positions": "t5", "isolate_documents": True},
    "clamp": {"clamp_length": 6, "untie_biases": True},
}


class Masked(Visibility):
    """What a layer sees of the longest memory: no more rows than `own`, and with a window keys."""

    own: int
    is_window: bool

    @cached_property
    def mask(self) -> Tensor:
        first_query, keys = self.num_keys - self.num_queries, torch.arange(self.num_keys)
        distances_LC = torch.arange(first_query, self.num_keys)[:, None] - keys
        hidden = (distances_LC < 0) | (keys < first_query - self.own)
        if self.is_window:
            hidden = hidden | (distances_LC >= self.own)
        if self.documents_BC is not None:
            queries_BL1 = self.documents_BC[:, first_query:, None]
            hidden = hidden | (queries_BL1 != self.documents_BC[:, None])
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill(hidden, float("-inf"))


def masked(model: TransformerXL, lengths: tuple[int, ...], is_window: bool) -> TransformerXL:
    """The model, with plain operations and a mask for every layer's own length of memory."""

    def hook_of(own: int) -> Any:
        def hook(module: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            seen = options["visibility"]
            changed = Masked(**{each.name: getattr(seen, each.name) for each in fields(seen)})
            object.__setattr__(changed, "own", own)
            object.__setattr__(changed, "is_window", is_window)
            return inputs, {**options, "visibility": changed}

        return hook

    for layer, own in zip(model.layers, lengths, strict=True):
        layer.register_forward_pre_hook(hook_of(own), with_kwargs=True)
        layer.attention._kernel = "plain"  # type: ignore[union-attr]
    return model


def losses_and_gradients(model: TransformerXL) -> tuple[Tensor, dict[str, Tensor], Any]:
    length = sum(SEGMENTS)
    stream_BT, starts_BT = random_tokens(3, length + 1), random_starts(3, length + 1)
    nll_BT, memory = stream_nll(model, stream_BT, SEGMENTS, starts_BT)
    nll_BT.sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return nll_BT.detach(), found, LaneState(model.config).named(memory or ())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("same_length", [False, True])
def test_losses_gradients_and_memory_are_those_of_the_longest_memory_with_masks(
    case: str, same_length: bool
) -> None:
    pattern = (3, 20, 5) if same_length else (3, 20, 0)
    options = {"num_layers": LAYERS, **CASES[case]}
    lengths = pattern * (LAYERS // len(pattern))
    reference = masked(tiny_model(**options, memory_length=20), lengths, same_length)
    model = tiny_model(**options, memory_length=pattern, same_length=same_length)
    expected, expected_gradients, expected_memory = losses_and_gradients(reference)
    found, gradients, memory = losses_and_gradients(model)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-7, atol=1e-9)
    for layer, length in enumerate(lengths):
        rows_BMD, longest_BMD = (
            each[f"layers.{layer}.hidden"] for each in (memory, expected_memory)
        )
        assert rows_BMD.shape[1] == length
        torch.testing.assert_close(rows_BMD, longest_BMD[:, 20 - length :], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(None, (3, 8) * 2), (0, (0, 0) * 2), (2, (2, 2) * 2), (5, (3, 5) * 2), (64, (3, 64) * 2)],
)
def test_another_length_in_evaluation_is_that_of_the_longest_layers(longest, lengths) -> None:
    model = replace(TINY, num_layers=4, memory_length=(3, 8))
    assert model.memory_lengths(longest) == lengths
    rows = {part.name: part.length for part in LaneState(model, longest).parts}
    expected = {f"layers.{layer}.hidden": length for layer, length in enumerate(lengths)}
    assert rows == {**expected, "documents": max(lengths)}
    if longest is not None:
        assert model.with_memory(longest).memory_lengths() == lengths


@pytest.mark.parametrize("width", ["fp32", "bf16"])
def test_bytes_of_memory_and_checkpoint_are_those_of_the_tensors(width: str) -> None:
    model = replace(TINY, memory_length=(3, 8))
    run = RunConfig(
        model=model,
        data=DataConfig(lanes=6, segment_length=8),
        engine=EngineConfig(precision=width, zero_stage=0),  # type: ignore[arg-type]
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[width]
    module = TransformerXL(model).to(dtype)
    _, memory = module(random_tokens(6, 8), random_tokens(6, 8, 1))
    num_bytes = sum(part.nbytes for part in memory)
    parts = Footprint(run, 1).parts
    assert parts["recurrent memory"] == 2 * num_bytes
    uniform = replace(run, model=replace(model, memory_length=8))
    saved = checkpoint_bytes(uniform) - checkpoint_bytes(run)
    assert saved == 6 * (8 - 3) * model.d_model * dtype.itemsize


def test_a_pattern_that_does_not_repeat_over_the_layers_is_an_error() -> None:
    for pattern in ((), (1, 2, 3), (4,) * 8):
        with pytest.raises(ConfigError, match="num_layers=4"):
            ModelConfig(num_layers=4, memory_length=pattern)
    with pytest.raises(ConfigError, match="memory_length"):
        ModelConfig(num_layers=4, memory_length=(4, 8), compressed_length=2)
    with pytest.raises(ConfigError, match="same_length"):
        ModelConfig(num_layers=4, memory_length=(0, 8), same_length=True)


@pytest.mark.parametrize(
    ("given", "read"), [(8, 8), ("2k", 2000), ([8, 64], (8, 64)), (["1k", 0], (1000, 0))]
)
def test_a_file_gives_one_length_or_a_list(given: Any, read: Any) -> None:
    run = parse_config(RunConfig, {"model": {"memory_length": given}}, "file")
    assert run.model.memory_length == read
    assert to_tree(run)["model"]["memory_length"] == (
        list(read) if isinstance(read, tuple) else read
    )
