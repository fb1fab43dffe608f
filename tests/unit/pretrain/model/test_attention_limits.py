"""torch's attention computes what plain operations do, for exactly the models that it is said to.

The table of limits, from both sides: every setting of a model is tried, also against the page.
"""

import logging
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from foundation.errors import ConfigError
from pretrain.config.engine import LIMITS, Attention, chosen_attention
from pretrain.config.model import (
    ActivationCheckpointing,
    AttentionKernel,
    FeedForwardKind,
    NormKind,
    Positions,
)
from pretrain.config.run import EngineConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.kernels import flash_linear_attention
from pretrain.kernels.triton.tiling import built_in_tiles
from pretrain.mixers.deltanet import facts
from pretrain.model.attention_backends import (
    ScoreTerms,
    WeightDropout,
    backend_for,
    log_once,
    sdpa_attention,
)
from pretrain.model.dropout import DropoutStream
from pretrain.model.transformer_xl import TransformerXL
from pretrain.model.visibility import Visibility
from pretrain.weights.export import with_model_settings
from tests.helpers.models import TINY, random_starts, random_tokens

GPU = torch.device("cuda", 0)
ROPE = replace(TINY, positions="rope", d_head=8, num_heads=4, d_model=16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

# One or more other values of every setting of a model, with what they need.
OTHERS: dict[str, list[dict[str, Any]]] = {
    **{name: [{name: value}] for name, value in {
        "vocab_size": 41, "num_layers": 3, "d_model": 24, "num_heads": 2, "num_key_heads": 1,
        "d_inner": 10, "d_embed": 6, "memory_tokens": 2, "query_key_norm": True,
        "softmax_scaling": "log_length", "attention_sinks": True, "norm_position": "pre",
        "same_length": True, "isolate_documents": True, "dropout": 0.2, "attention_dropout": 0.2,
        "tie_embeddings": False, "cutoffs": (9, 20), "z_loss": 0.1, "init_std": 0.3,
        "base_width": 8,
    }.items()},
    "layer_kinds": [{"layer_kinds": ("deltanet", "attention")}],
    "mixers": [{
        "layer_kinds": ("deltanet", "attention"), "mixers": {"deltanet": {"largest_write": 2.0}}
    }],
    "d_head": [{"d_head": width} for width in (6, 80, 96, 128, 136, 256, 264)],
    "memory_length": [{"memory_length": length} for length in (0, 3, 25, (3, 8))],
    "compressed_length": [{"compressed_length": 4}],
    "compression_rate": [{"compressed_length": 4, "compression_rate": 2}],
    "positions": [{"positions": each} for each in get_args(Positions)],
    "rope_extension": [{"rope_extension": "yarn"}],
    "feed_forward": [{"feed_forward": each} for each in get_args(FeedForwardKind)],
    "norm": [{"norm": each} for each in get_args(NormKind)],
    "untie_biases": [{"positions": "relative", "untie_biases": True}],
    "clamp_length": [{"positions": "relative", "clamp_length": 5}],
    "div_val": [{"cutoffs": (9, 20), "div_val": 2}],
    "tie_projections": [{"cutoffs": (9, 20), "tie_projections": (True, False, True)}],
}  # fmt: skip
CASES = [options for each in OTHERS.values() for options in each]


def trained(
    config: ModelConfig,
    kernel: AttentionKernel,
    dtype: torch.dtype = torch.float64,
    checkpointing: ActivationCheckpointing = "none",
) -> list[Tensor]:
    """Return the losses of three segments whose memory carries gradients, and all gradients."""
    torch.manual_seed(1)
    model = TransformerXL(replace(config, init_std=0.3), checkpointing, kernel).to(dtype)
    stream_BT, starts_BT = random_tokens(3, 31), random_starts(3, 30)
    dropout = DropoutStream(seed=1, step=2, lanes=[4, 5, 6])
    nll_BT, _ = model(stream_BT[:, :-1], stream_BT[:, 1:], None, starts_BT, dropout, num_segments=3)
    nll_BT.mean().backward()
    return [nll_BT.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_segments_that_are_read_again_have_the_same_gradients(options):
    config = replace(ROPE, **options)
    found, expected = trained(config, "plain", checkpointing="segments"), trained(config, "plain")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def excluded(config: ModelConfig) -> list[str]:
    return [limit.option for limit in LIMITS if limit.sdpa and limit.applies(config, True)]


def test_every_setting_of_a_model_is_tried():
    # An adopted model has attention of its own.
    assert {*OTHERS, "adopted"} == {each.name for each in fields(ModelConfig)}


@pytest.mark.parametrize("options", CASES, ids=str)
def test_torchs_attention_equals_plain_operations_or_the_table_has_the_option(options):
    config = replace(ROPE, **options)
    optim = OptimConfig(gradient_segments=2)
    engine = EngineConfig(attention_kernel="sdpa")
    if named := excluded(config):
        assert all(name.split()[0].removeprefix("model.") in options for name in named)
        with pytest.raises(ConfigError, match=", ".join(named)):
            RunConfig(model=config, engine=engine, optim=optim)
        with pytest.raises(AssertionError):
            trained(config, "sdpa")
    else:
        RunConfig(model=config, engine=engine, optim=optim)
        found, expected = trained(config, "sdpa"), trained(config, "plain")
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.float64])


def test_an_evaluation_with_a_setting_that_sdpa_cannot_express_attends_otherwise():
    run = RunConfig(model=ROPE, engine=EngineConfig(attention_kernel="sdpa"))
    assert with_model_settings(run, {"same_length": True}).engine.attention_kernel == "auto"
    assert with_model_settings(run, None) == run


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("memory", [0, 3, 10, 25])
def test_memories_and_groups_of_any_size_in_both_precisions(dtype, memory):
    kinds = {1: ("none",), 2: get_args(ActivationCheckpointing), 4: ("none",)}
    for groups, kinds_of_checkpointing in kinds.items():
        config = replace(ROPE, memory_length=memory, num_key_heads=groups, query_key_norm=True)
        expected = trained(config, "plain", dtype)
        for kind in kinds_of_checkpointing:
            found = trained(config, "sdpa", dtype, kind)
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("options", "is_half", "kind", "reason"),
    [
        ({}, True, Attention.SDPA, ""),
        ({"d_head": 80}, True, Attention.SDPA, ""),
        ({"d_head": 96, "positions": "relative"}, True, Attention.FUSED, "rope"),
        ({"d_head": 256}, True, Attention.SDPA, ""),
        ({"d_head": 256, "positions": "alibi"}, True, Attention.PLAIN, "128"),
        ({"d_head": 42}, True, Attention.SDPA, ""),
        ({"d_head": 264}, True, Attention.PLAIN, "256"),
        ({}, False, Attention.PLAIN, "float32"),
    ],
)
def test_a_gpu_takes_the_fastest_attention_or_says_why_not(options, is_half, kind, reason):
    config = replace(ROPE, **options)
    found = chosen_attention("auto", config, on_gpu=True, is_half=is_half)
    assert found[0] is kind
    assert reason in found[1]
    assert bool(reason) == bool(found[1])
    if kind is Attention.FUSED:
        built_in_tiles(config.head_width, (9, 0))


@pytest.mark.parametrize(
    ("kernel", "options", "is_half", "reason"),
    [
        ("atomic", {}, True, ""),
        ("auto", {}, True, ""),
        ("plain", {}, True, "engine.attention_kernel=plain"),
        ("atomic", {"d_head": 264}, True, "256"),
        ("atomic", {"d_head": 7}, True, "odd"),
        ("atomic", {}, False, "float32"),
    ],
)
def test_a_gpu_takes_fla_or_names_what_excludes_it(monkeypatch, kernel, options, is_half, reason):
    config = replace(TINY, layer_kinds=("deltanet",), **options)
    monkeypatch.setattr(facts, "missing_package", lambda: "")
    found = facts.fla_here(kernel, config, "deltanet", on_gpu=True, is_half=is_half)
    assert found[0] == (not reason)
    assert reason in found[1]
    on_cpu = facts.fla_here(kernel, config, "deltanet", on_gpu=False, is_half=True)
    assert on_cpu == (False, "")


def test_what_a_gpu_gets_is_logged_once(caplog):
    log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            backend_for("auto", ROPE, GPU, torch.bfloat16)
            backend_for("auto", ROPE, GPU, torch.float32)
    texts = [record.getMessage() for record in caplog.records]
    assert ["scaled_dot_product_attention" in text for text in texts] == [True, False]


@pytest.mark.parametrize("width", [6, 8])
def test_its_backward_pass_is_strict_where_operations_without_an_order_only_warn(width):
    # FlashAttention's, too, looks at the mode when its backward pass runs.
    query_BLNH = torch.randn(2, 3, 4, width, requires_grad=True)
    parts = [torch.randn(2, rows, 2, 2, width, requires_grad=True) for rows in (5, 3)]
    visibility = Visibility(num_queries=3, num_keys=8, dtype=torch.float32, device=parts[0].device)
    strict = []
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        dropout = WeightDropout(0.0, 0, None)
        read_BLNH = sdpa_attention(query_BLNH, parts, ScoreTerms(), visibility, dropout)
        assert read_BLNH.grad_fn is not None
        attention = read_BLNH.grad_fn
        while "Attention" not in attention.name():
            attention = attention.next_functions[0][0]
        attention.register_prehook(
            lambda _: strict.append(not torch.is_deterministic_algorithms_warn_only_enabled())
        )
        read_BLNH.sum().backward()
        assert strict == [True]
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("rows", [0, 3, 5, 6, 7])
def test_sums_in_any_order_are_of_the_same_keys(rows):
    # Up to as many rows as queries, memory gets queries of its own, whose results are dropped.
    query_BLNH = torch.randn(2, 6, 4, 16, dtype=torch.float64, requires_grad=True)
    parts = [torch.randn(2, rows + 6, 2, 2, 16, dtype=torch.float64, requires_grad=True)]
    sizes = {"num_queries": 6, "num_keys": rows + 6, "device": query_BLNH.device}
    inputs = (query_BLNH, parts, ScoreTerms(), Visibility(dtype=torch.float64, **sizes))
    expected, found = (
        sdpa_attention(*inputs, WeightDropout(0.0, 0, None), is_bitwise=is_bitwise)
        for is_bitwise in (True, False)
    )
    torch.testing.assert_close(found, expected)
    leaves, gradient = (query_BLNH, *parts), torch.randn_like(expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, leaves, gradient) for each in (found, expected))
    )


def test_the_page_has_the_table():
    page = (Path(__file__).parents[4] / "docs/model.md").read_text()
    section = page.split("## Attention kernels")[1].split("\n## ")[0]
    answer = r" (yes|no) \|"
    rows = re.findall(rf"^\| `?([^|`]+)`? \|{answer * 2}$", section, re.MULTILINE)
    limits = [(each.option, each.sdpa or each.flash, each.fused) for each in LIMITS]
    assert [(option, *(word == "no" for word in words)) for option, *words in rows] == limits


@pytest.mark.parametrize(
    ("major", "triton", "refused"),
    [
        (9, "3.6.0", True),
        (9, "3.4.0+git1", True),
        (9, "3.7.0", True),
        (9, "3.3.1", False),
        (9, "3.7.1", False),
        (9, "3.10.0", False),
        (8, "3.6.0", False),
        (10, "3.6.0", False),
    ],
)
def test_a_triton_that_fla_refuses_on_hopper_is_the_reason_for_plain_operations(
    monkeypatch, major, triton, refused
):
    versions = {"fla-core": flash_linear_attention.VERSION, "triton": triton}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    flash_linear_attention.missing_package.cache_clear()
    try:
        config = replace(TINY, layer_kinds=("deltanet",))
        uses, reason = facts.fla_here("auto", config, "deltanet", on_gpu=True, is_half=True)
    finally:
        flash_linear_attention.missing_package.cache_clear()
    assert uses != refused
    assert (f"found Triton {triton}" in reason) == refused
