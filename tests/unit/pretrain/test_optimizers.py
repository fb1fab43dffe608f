"""Muon against torch.optim.Muon bit for bit, and LAMB against its algorithm as printed.

Under ZeRO both are compared with plain torch in tests/integration/test_optimizers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.engine import EngineConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.run import RunConfig
from pretrain.costs.flops import moment_bytes, orthogonalizing_flops
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.engines.engine import TorchEngine
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.optimizers import orthogonalized, owners
from pretrain.optim.parameter_groups import role_of, stacked_matrices
from pretrain.run import build_engine
from tests.helpers.models import TINY
from tests.helpers.tiny_runs import ALONE, tiny_run, training_stream

STEPS, RATE, DECAY = 10, 0.02, 0.1
VARIED = replace(  # tall, wide and stacked matrices; projections and tables that Muon leaves alone
    TINY, num_key_heads=1, feed_forward="swiglu", d_inner=40, cutoffs=(20,), div_val=2
)


def gradients_of(module: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(each.shape, generator=generator) / (1 + step)
        for name, each in module.named_parameters()
    }


def is_decayed(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and not name.endswith(("content_bias", "position_bias"))


def torch_optimizers(
    module: TransformerXL, optim: OptimConfig
) -> tuple[dict[str, list[nn.Parameter]], list[torch.optim.Optimizer]]:
    """torch's Muon with a parameter for each single matrix, and its AdamW for everything else."""
    parts = {
        name: [
            nn.Parameter(part.clone())
            for part in each.detach().chunk(
                stacked_matrices(name) if role_of(name) == "matrix" else 1
            )
        ]
        for name, each in module.named_parameters()
    }
    matrices = [part for name in parts if role_of(name) == "matrix" for part in parts[name]]
    others = [
        {"params": parts[name], "weight_decay": DECAY if is_decayed(name, parts[name][0]) else 0.0}
        for name in parts
        if role_of(name) != "matrix"
    ]
    rate = {"lr": optim.learning_rate, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, weight_decay=DECAY, **rate)
    adamw = torch.optim.AdamW(others, lr=optim.learning_rate, betas=optim.betas, fused=True)
    return parts, [muon, adamw]


def test_ten_steps_in_bf16_are_bit_for_bit_those_of_torch() -> None:
    torch.manual_seed(3)
    optim = OptimConfig(name="muon", learning_rate=RATE, weight_decay=DECAY, clip_norm=0.0)
    module = TransformerXL(VARIED)
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    parts, references = torch_optimizers(module, optim)
    run = RunConfig(model=VARIED, optim=optim, engine=EngineConfig(kind="torch", precision="bf16"))
    engine = TorchEngine(run, module, ALONE, accumulation_steps=1)
    for step in range(STEPS):
        for name, gradient in gradients_of(module, step).items():
            module.get_parameter(name).grad = gradient.clone()
            for part, of_part in zip(parts[name], gradient.chunk(len(parts[name])), strict=True):
                part.grad = of_part.clone()
        engine.step(RATE)
        for reference in references:
            reference.step()
    for name, after in module.named_parameters():
        assert torch.equal(after.detach(), torch.cat([each.detach() for each in parts[name]])), name
        assert not torch.equal(after, before[name])


def textbook_lamb(
    weight: Tensor, gradients: list[Tensor], optim: OptimConfig, is_matrix: bool
) -> Tensor:
    """Algorithm 2 of the paper with phi(z) = z, in float64; vectors by Adam alone."""
    weight, average, square = weight.double(), torch.zeros(()).double(), torch.zeros(()).double()
    (first, second), decay = optim.betas, DECAY * is_matrix
    for number, gradient in enumerate(gradients, start=1):
        average = first * average + (1 - first) * gradient.double()
        square = second * square + (1 - second) * gradient.double() ** 2
        root = (square / (1 - second**number)).sqrt() + optim.epsilon
        update = average / (1 - first**number) / root + decay * weight
        trust = weight.norm() / update.norm() if is_matrix and weight.any() else 1.0
        weight = weight - RATE * trust * update
    return weight


def test_ten_steps_of_lamb_agree_with_the_algorithm_as_printed() -> None:
    torch.manual_seed(3)
    optim = OptimConfig(name="lamb", learning_rate=RATE, weight_decay=DECAY, clip_norm=0.0)
    module = TransformerXL(VARIED)
    with torch.no_grad():  # a norm of 0 leaves the ratio at 1
        module.get_parameter("layers.0.attention.query_weight").zero_()
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    run = RunConfig(model=VARIED, optim=optim, engine=EngineConfig(kind="torch", precision="fp32"))
    engine = TorchEngine(run, module, ALONE, accumulation_steps=1)
    steps = [gradients_of(module, step) for step in range(STEPS)]
    for gradients in steps:
        for name, gradient in gradients.items():
            module.get_parameter(name).grad = gradient.clone()
        engine.step(RATE)
    for name, after in module.named_parameters():
        is_matrix = is_decayed(name, after)
        gradients = [each[name] for each in steps]
        expected = textbook_lamb(before[name], gradients, optim, is_matrix)
        torch.testing.assert_close(after.double(), expected, rtol=0, atol=1e-5)
        assert (expected - before[name]).abs().max() > 1e-3


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (1, 7)], ids=str)
def test_in_fp32_the_iteration_is_the_published_one(shape: tuple[int, int]) -> None:
    """Its polynomial applied to the singular values, in float64."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ values.diag() @ right
    torch.testing.assert_close(orthogonalized(matrix).double(), expected, rtol=0, atol=1e-5)
    assert not orthogonalized(torch.zeros(shape)).any()  # not NaN


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunConfig]:
    yield tiny_run(tmp_path, OptimConfig(name="muon"))
    destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compressed_length": 2},
        {"num_key_heads": 1},
        {"layer_kinds": ("deltanet", "attention")},
    ],
    ids=str,
)
def test_flops_and_state_are_those_of_an_update(run: RunConfig, options: dict[str, Any]) -> None:
    run = replace(run, model=replace(run.model, feed_forward="swiglu", **options))
    engine = build_engine(run, init_world())
    batch = next(training_stream(run))
    engine.forward_backward(batch, None, 0)
    with FlopCounterMode(display=False) as counter:
        engine.step(RATE)
    assert orthogonalizing_flops(run.model, run.optim) == counter.get_total_flops()
    values = [each.values for each in engine.fragments()]
    elements = sum(each[kind].numel() for each in values for kind in each.keys() - {"weight"})
    parameters = sum(each["weight"].numel() for each in values)
    assert moment_bytes(run.model, run.optim) == 4 * elements < 8 * parameters


def test_gradients_are_clipped_before_the_moments_see_them(run: RunConfig) -> None:
    run = replace(run, optim=OptimConfig(name="lamb", clip_norm=0.05))
    engine = build_engine(run, init_world())
    engine.forward_backward(next(training_stream(run)), None, 0)
    grad_norm = engine.step(RATE).grad_norm
    assert grad_norm is not None
    assert float(grad_norm) > 2 * run.optim.clip_norm
    exp_avgs = torch.cat([fragment.values["exp_avg"] for fragment in engine.fragments()])
    torch.testing.assert_close(exp_avgs.norm().item(), 0.1 * run.optim.clip_norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("costs", "ranks", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0], 2, [0, 1, 0, 1, 0]),
        ([1.0, 1.0, 4.0, 2.0], 2, [1, 1, 0, 1]),  # the large one alone
        ([3.0], 4, [0]),
    ],
)
def test_owners_have_about_the_same_work(
    costs: list[float], ranks: int, expected: list[int]
) -> None:
    assert owners(costs, ranks) == expected
