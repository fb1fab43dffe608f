"""LAMB against its algorithm as printed, written out here for one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pretrain.config.optim import OptimConfig
from pretrain.config.run import RunConfig
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.optim.fragments import FragmentIndex, create_state, fragment_of
from pretrain.optim.optimizers import Lamb
from pretrain.run import build_engine
from tests.helpers.tiny_runs import ALONE, tiny_run, training_stream

STEPS, RATE, DECAY, BETAS, EPSILON = 20, 0.02, 0.1, (0.9, 0.98), 1e-6
SHAPES = {"matrix": (6, 4), "other": (3, 5), "bias": (7,)}


def textbook_lamb(weight: Tensor, gradients: list[Tensor], decay: float, is_matrix: bool) -> Tensor:
    """Algorithm 2 of the paper with phi(z) = z, in float64; vectors by Adam alone."""
    weight, average, square = weight.double(), torch.zeros(()).double(), torch.zeros(()).double()
    for number, gradient in enumerate(gradients, start=1):
        average = BETAS[0] * average + (1 - BETAS[0]) * gradient.double()
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient.double() ** 2
        direction = (
            average
            / (1 - BETAS[0] ** number)
            / ((square / (1 - BETAS[1] ** number)).sqrt() + EPSILON)
        )
        update = direction + decay * weight
        trust = (
            math.sqrt((weight**2).sum()) / math.sqrt((update**2).sum())
            if is_matrix and weight.any()
            else 1.0
        )
        weight = weight - RATE * trust * update
    return weight


def gradients_of(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


@pytest.mark.parametrize(
    "is_flat", [False, True], ids=["a tensor each", "one flat tensor with padding"]
)
def test_twenty_steps_agree_with_the_algorithm_as_printed(is_flat: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    weights["zeros"] = torch.zeros(2, 3)  # a norm of 0 leaves the ratio at 1
    gradients = {
        name: gradients_of(tuple(weight.shape), seed)
        for seed, (name, weight) in enumerate(weights.items())
    }
    optimizer, masters = (flat if is_flat else separate)(weights)
    for step in range(STEPS):
        for master, names in masters:
            parts = [gradients[name][step].reshape(-1) for name in names]
            whole = torch.cat([*parts, torch.zeros(master.numel() - sum(map(len, parts)))])
            master.grad = whole.view_as(master)
        optimizer.step()
    assert optimizer.index is not None
    for fragment in optimizer.index.fragments_in([master for master, _ in masters]):
        is_matrix = fragment.name != "bias"
        before = weights[fragment.name]
        expected = textbook_lamb(
            before, gradients[fragment.name], DECAY if is_matrix else 0.0, is_matrix
        )
        torch.testing.assert_close(
            fragment.values["weight"].double(), expected.view(-1), rtol=0, atol=2e-6
        )
        assert (expected - before).abs().max() > 0.01


def separate(weights: dict[str, Tensor]) -> tuple[Lamb, list[tuple[Tensor, list[str]]]]:
    """Each weight is a parameter of its own, as without ZeRO."""
    masters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    return optimizer_of({name: (masters[name], [name]) for name in masters}, weights)


def flat(weights: dict[str, Tensor]) -> tuple[Lamb, list[tuple[Tensor, list[str]]]]:
    """All of a group lie in one vector with padding behind them, as under ZeRO."""
    masters = {}
    for key, names in {
        "decayed": [name for name in weights if name != "bias"],
        "bias": ["bias"],
    }.items():
        padded = torch.cat([*(weights[name].view(-1) for name in names), torch.zeros(5)])
        masters[key] = (torch.nn.Parameter(padded), names)
    return optimizer_of(masters, weights)


def optimizer_of(
    masters: dict[str, tuple[torch.nn.Parameter, list[str]]], weights: dict[str, Tensor]
) -> tuple[Lamb, list[tuple[Tensor, list[str]]]]:
    decayed = [master for key, (master, _) in masters.items() if key != "bias"]
    groups = [
        {"params": decayed, "decays": True, "weight_decay": DECAY, "lr": RATE},
        {"params": [masters["bias"][0]], "decays": False, "weight_decay": 0.0, "lr": RATE},
    ]
    optimizer = Lamb(groups, BETAS, EPSILON)
    fragments = []
    for master, names in masters.values():
        offset = 0
        create_state(optimizer.state[master], master)
        for name in names:
            fragments.append(
                fragment_of(name, 0, master, optimizer.state[master], offset, weights[name].numel())
            )
            offset += weights[name].numel()
    optimizer.index = FragmentIndex(
        fragments, dict(masters.values()), is_sharded=False, world=ALONE
    )
    return optimizer, list(masters.values())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunConfig]:
    yield tiny_run(tmp_path, OptimConfig(name="lamb", clip_norm=0.05))
    destroy_process_group()


def test_gradients_are_clipped_before_the_moments_see_them(run: RunConfig) -> None:
    engine = build_engine(run, init_world())
    batch = next(training_stream(run))
    engine.forward_backward(batch, None, 0)
    grad_norm = engine.step(RATE).grad_norm
    assert grad_norm is not None
    assert float(grad_norm) > 2 * run.optim.clip_norm
    exp_avgs = torch.cat([fragment.values["exp_avg"] for fragment in engine.fragments()])
    torch.testing.assert_close(exp_avgs.norm().item(), 0.1 * run.optim.clip_norm, rtol=1e-4, atol=0)
