"""muP (Yang et al. 2022): wider models learn at the base's rate, with activations of equal size.

The coordinate check of the paper's appendix D: after some steps, the mean absolute value of what
each part returns is about the same at every width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from pretrain.config.run import EngineConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.engines.torch_engine import TorchEngine
from pretrain.model.layer import RowsLayer, StateLayer
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim import parameter_groups
from pretrain.optim.parameter_groups import GroupTraits
from tests.helpers.tiny_runs import ALONE

BASE = ModelConfig(vocab_size=40, num_layers=2, d_model=32, num_heads=4, memory_length=16)
WIDTHS = (32, 256)
STEPS = 4
SEEDS = 2
ADAMW = OptimConfig(learning_rate=8e-3)
LAMB = OptimConfig(name="lamb", learning_rate=0.05)
MUON = OptimConfig(name="muon", learning_rate=8e-3)
GROWTH = 1.6  # that counts as none
SHRINKAGE = 4.0  # likewise; sums of random signs, and so small parts, cancel better in wide models

Sizes = dict[str, float]

PRE = {"norm_position": "pre"}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {"cutoffs": (10, 24), "div_val": 2, "tie_projections": (False, True, True)},
    "fixed_embedding": {
        "d_embed": 24,
        "feed_forward": "gelu",
        "positions": "t5",
        "query_key_norm": True,
        "attention_sinks": True,
    },
    "compressive": {"compressed_length": 8, "compression_rate": 2, "untie_biases": True, **PRE},
    "deltanet": {"layer_kinds": ("deltanet", "attention"), **PRE},
    "memory_tokens": {"memory_tokens": 2, **PRE},
    "modern": {
        **PRE,
        "positions": "rope",
        "norm": "rmsnorm",
        "feed_forward": "swiglu",
        "num_key_heads": 2,
        "tie_embeddings": False,
        "softmax_scaling": "log_length",
    },
    "relative": {"clamp_length": 20},
}


def widened(options: Mapping[str, Any], width: int, *, mup: bool = True) -> ModelConfig:
    """The base with these options at another width."""
    config = replace(BASE, **options, d_model=width, base_width=BASE.d_model if mup else 0)
    key_heads = config.num_key_heads * width // BASE.d_model
    return replace(config, num_heads=width // BASE.head_width, num_key_heads=key_heads)


def sizes(config: ModelConfig, optim: OptimConfig, seed: int) -> Sizes:
    """The mean absolute value of what each part returns, before the first step and after some."""
    torch.manual_seed(seed)
    module = TransformerXL(config)
    segments = 2 if config.memory_tokens else 1
    optim = replace(optim, gradient_segments=segments)
    run = RunConfig(model=config, optim=optim, engine=EngineConfig(kind="torch"))
    engine = TorchEngine(run, module, ALONE, 1)
    parts: dict[str, nn.Module] = {"embedding": module.embedding}
    for index, layer in enumerate(module.layers):
        assert isinstance(layer, StateLayer | RowsLayer)
        parts |= {f"layer {index}": layer, f"mixer {index}": layer.mixer}
        parts |= {f"feed-forward {index}": layer.feed_forward}
    parts |= {f"logits {index}": part for index, part in enumerate(module.head.bins)}
    if module.compressions is not None:
        parts["compression"] = module.compressions[0]
    if module.memory_tokens is not None and module.memory_tokens.norm is not None:
        parts["written"] = module.memory_tokens.norm
    found: Sizes = {}
    for name, part in parts.items():
        part.register_forward_hook(keeping(name, found))
    module.layers[1].register_forward_hook(keeping_scores(found), with_kwargs=True)
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(config.vocab_size, (4, 17), generator=generator)
    memory, start = None, None
    for _ in range(STEPS + 1):
        inputs = (tokens_BT[:, :-1], tokens_BT[:, 1:], memory)
        nll_BL, memory = module(*inputs, num_segments=segments)
        start = start or dict(found)
        nll_BL.mean().backward()
        engine.step(optim.learning_rate)
    # Output and scores may be smaller at first: they shrink as random sums over the width do.
    start = {name: size for name, size in start.items() if size == size}
    return found | {f"{name} at the start": size for name, size in start.items()}


def keeping(name: str, found: Sizes) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        value = output[0] if isinstance(output, tuple) else output
        found[name] = value.detach().abs().mean().item()

    return hook


def keeping_scores(found: Sizes) -> Callable[..., None]:
    """The scores by content, of the segment's tokens."""

    def hook(
        layer: RowsLayer, inputs: tuple[Tensor, ...], options: dict[str, Any], _: Tensor
    ) -> None:
        hidden_BLD, _, positions_CX = inputs[:3]
        if layer.input_norm is not None:
            hidden_BLD = layer.input_norm(hidden_BLD)
        projected_BLNH = layer.mixer.projected_queries(hidden_BLD)
        query_BLNH = layer.mixer.queries(projected_BLNH, positions_CX, options["visibility"])
        keys = layer.mixer.keys_and_values(hidden_BLD)
        key_BLGH = layer.mixer.placed(keys, positions_CX[-hidden_BLD.shape[1] :])[:, :, 0]
        key_BLNH = key_BLGH.repeat_interleave(query_BLNH.shape[2] // key_BLGH.shape[2], 2)
        scores = torch.einsum("blnh,bcnh->bnlc", query_BLNH, key_BLNH)
        found["scores"] = (scores / query_BLNH.shape[3] ** 0.5).abs().mean().item()

    return hook


def mean_sizes(config: ModelConfig, optim: OptimConfig) -> Sizes:
    """Those of a few seeds, as geometric means."""
    found = [sizes(config, optim, seed) for seed in range(SEEDS)]
    return {name: math.exp(fmean(math.log(each[name]) for each in found)) for name in found[0]}


def out_of_size(options: Mapping[str, Any], optim: OptimConfig = ADAMW, mup: bool = True) -> Sizes:
    """How much larger each part of a wider model is than the base's, if that is not about 1."""
    base, wide = (mean_sizes(widened(options, width, mup=mup), optim) for width in WIDTHS)
    ratios = {name: wide[name] / base[name] for name in base}
    return {name: ratio for name, ratio in ratios.items() if not 1 / SHRINKAGE <= ratio <= GROWTH}


@pytest.mark.parametrize("name", VARIANTS)
def test_activations_are_of_equal_size_at_every_width(name: str) -> None:
    assert not out_of_size(VARIANTS[name])


def test_without_mup_activations_grow_with_the_width() -> None:
    assert max(out_of_size(VARIANTS["relative"], mup=False).values()) > 8


@pytest.mark.parametrize(("name", "optim"), [("paper", LAMB), ("modern", MUON), ("deltanet", MUON)])
def test_activations_are_of_equal_size_with_other_optimizers(name: str, optim: OptimConfig) -> None:
    assert not out_of_size(VARIANTS[name], optim)


def test_at_the_base_s_width_everything_is_what_it_is_without() -> None:
    options = {**VARIANTS["paper"], "z_loss": 0.01}
    found = []
    for mup in (True, False):
        torch.manual_seed(0)
        config = widened(options, BASE.d_model, mup=mup)
        module = TransformerXL(config)
        groups = parameter_groups.parameter_groups(module, OptimConfig(weight_decay=0.1))
        tokens_BL = torch.arange(32).view(2, 16)
        nll_BL, memory = module(tokens_BL, tokens_BL)
        nll_BL.mean().backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        found.append((groups, [nll_BL, *memory, *module.parameters(), *gradients]))
        assert config.function_settings()["base_width"] == BASE.d_model
    (groups, tensors), (plain_groups, plain_tensors) = found
    assert all(map(torch.equal, tensors, plain_tensors))
    for group, plain in zip(groups, plain_groups, strict=True):
        assert len(group.pop("params")) == len(plain.pop("params"))
        assert group == plain


def test_rate_decay_and_epsilon_of_each_role_follow_the_width() -> None:
    model = widened({}, 4 * BASE.d_model)
    optim = OptimConfig(weight_decay=0.1, epsilon=1e-8)
    roles = get_args(parameter_groups.Role)
    found = {role: parameter_groups.group_traits(role, optim, model) for role in roles}
    hidden = GroupTraits(decays=True, weight_decay=0.4, eps=0.25e-8, rate_factor=0.25)
    vector = GroupTraits(decays=False, weight_decay=0.0, eps=0.25e-8)
    assert found == {
        "matrix": hidden,
        "projection": hidden,
        "table": GroupTraits(decays=True, weight_decay=0.1, eps=0.25e-8),
        "vector": vector,
        "output_bias": replace(vector, eps=1e-8),
    }
    fixed = replace(model, d_embed=24)
    assert parameter_groups.group_traits("projection", optim, fixed) == found["table"]
