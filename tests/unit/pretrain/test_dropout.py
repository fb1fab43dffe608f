"""Dropout masks: a pure function of (seed, step, layer, site, lane), with the right probability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.model.dropout import LEVELS, DropoutStream, Site, drop, hashed_bits, realized_rate

MANY = 100_000


def mask(
    lanes: list[int],
    count: int = 1000,
    *,
    seed: int = 1,
    step: int = 2,
    layer: int = 3,
    site: Site = Site.ATTENTION,
    rate: float = 0.3,
) -> Tensor:
    values = DropoutStream(seed, step, lanes).drop(torch.ones(len(lanes), count), rate, site, layer)
    return values != 0


def hash_of(
    lanes: list[int],
    count: int = 1000,
    *,
    seed: int = 1,
    step: int = 2,
    layer: int = 3,
    site: Site = Site.ATTENTION,
) -> Tensor:
    """The bits that devices other than the CPU compute; the same operations run here."""
    return hashed_bits(torch.tensor(lanes), count, seed=seed, step=step, site=site, layer=layer)


BITS = pytest.mark.parametrize("bits", [mask, hash_of], ids=["philox", "hash"])


@BITS
def test_a_lanes_mask_does_not_depend_on_the_other_lanes_or_their_order(bits) -> None:
    together = bits([7, 3, 4096, 0])
    assert torch.equal(together[[1, 0]], bits([3, 7]))
    for row, lane in enumerate([7, 3, 4096, 0]):
        assert torch.equal(together[row], bits([lane])[0])


@BITS
def test_every_part_of_the_key_changes_the_mask(bits) -> None:
    base = bits([5])
    others = {
        "seed": bits([5], seed=9),
        "step": bits([5], step=9),
        "layer": bits([5], layer=9),
        "site": bits([5], site=Site.FINAL),
        "lane": bits([6]),
        "seed and step swapped": bits([5], seed=2, step=1),
    }
    for part, other in others.items():
        assert not torch.equal(base, other), part
        agreeing = (base.float() == other.float()).float().mean().item()
        # Independent masks agree by chance: 0.7^2 + 0.3^2 = 0.58 of the time; independent bits
        # hardly ever.
        assert agreeing < 0.65, (part, agreeing)


def test_the_same_key_gives_the_same_mask_again_in_any_order_of_use() -> None:
    stream = DropoutStream(1, 2, [0, 1])
    values = torch.ones(2, 500)
    first = stream.drop(values, 0.5, Site.ATTENTION, layer=0)
    stream.drop(values, 0.5, Site.FINAL, layer=4)
    assert torch.equal(stream.drop(values, 0.5, Site.ATTENTION, layer=0), first)


def test_cpu_bits_are_philox_with_the_documented_key_and_counter() -> None:
    counter = np.array([0, 6, 3, int(Site.ATTENTION)], dtype=np.uint64)
    words = np.random.Philox(key=np.array([1, 2], dtype=np.uint64), counter=counter).random_raw(25)
    expected = torch.from_numpy(words.view(np.int16)) >= round(0.3 * LEVELS) - LEVELS // 2
    assert torch.equal(mask([6], count=100)[0], expected)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_elements_are_dropped_at_the_given_rate(rate: float) -> None:
    dropped = 1 - mask([1, 2, 3, 4], MANY // 4, rate=rate).float().mean().item()
    assert abs(dropped - rate) < 4 * (rate * (1 - rate) / MANY) ** 0.5
    threshold = round(rate * LEVELS) - LEVELS // 2
    hashed = (hash_of([1, 2, 3, 4], MANY // 4) < threshold).float().mean().item()
    assert abs(hashed - rate) < 4 * (rate * (1 - rate) / MANY) ** 0.5


def test_every_bit_of_the_hash_is_fair_and_neighbors_are_independent() -> None:
    bits = hash_of([1, 2, 3, 4], MANY // 4).flatten().to(torch.int32)
    tolerance = 4 * 0.5 / MANY**0.5
    for position in range(16):
        ones = ((bits >> position) & 1).float()
        assert abs(ones.mean().item() - 0.5) < tolerance
        for distance in (1, 2, 4, 64):
            same = (ones[distance:] == ones[:-distance]).float().mean().item()
            assert abs(same - 0.5) < tolerance


def test_what_is_kept_is_rescaled_by_the_realized_probability() -> None:
    rate = 0.1
    assert abs(realized_rate(rate) - rate) <= 0.5 / LEVELS
    values = torch.full((1, 100), 3.0, dtype=torch.float64)
    kept = DropoutStream(1, 2, [0]).drop(values, rate, Site.FINAL)
    assert set(kept.flatten().tolist()) == {0.0, 3.0 * (1 / (1 - realized_rate(rate)))}


def test_the_gradient_passes_through_the_same_mask() -> None:
    values = torch.randn(2, 300, dtype=torch.float64, requires_grad=True)
    dropped = DropoutStream(1, 2, [8, 9]).drop(values, 0.4, Site.FINAL)
    dropped.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad * values.detach(), dropped.detach(), rtol=1e-14, atol=0)


def test_lanes_may_lie_on_another_axis() -> None:
    values = torch.randn(3, 2, 5, 7)  # lanes second
    stream = DropoutStream(1, 2, [8, 9])
    across = stream.drop(values, 0.4, Site.ATTENTION, layer=1, lane_axis=1)
    assert torch.equal(
        across, stream.drop(values.movedim(1, 0), 0.4, Site.ATTENTION, layer=1).movedim(0, 1)
    )


def test_the_shared_mask_depends_on_no_lane() -> None:
    values = torch.ones(40, 6)
    masks = [
        DropoutStream(1, 2, lanes).drop_shared(values, 0.5, Site.POSITIONS)
        for lanes in ([0], [5, 6])
    ]
    assert torch.equal(*masks)
    assert not torch.equal(
        masks[0], DropoutStream(1, 3, [0]).drop_shared(values, 0.5, Site.POSITIONS)
    )


def test_without_a_stream_or_a_rate_values_pass_untouched() -> None:
    values = torch.ones(2, 3)
    assert drop(values, 0.5, None, Site.FINAL) is values
    assert drop(values, 0.0, DropoutStream(1, 2, [0, 1]), Site.FINAL) is values


def test_lanes_may_come_as_a_tensor_and_large_seeds_are_accepted() -> None:
    values = torch.ones(2, 64)
    seed = (1 << 64) + 5  # taken modulo 2^64
    as_list = DropoutStream(seed, 2, [3, 4]).drop(values, 0.5, Site.FINAL)
    assert torch.equal(
        as_list, DropoutStream(5, 2, torch.tensor([3, 4])).drop(values, 0.5, Site.FINAL)
    )


@pytest.mark.gpu
def test_cuda_masks_equal_the_hash_computed_on_the_cpu() -> None:
    stream = DropoutStream(1, 2, [3, 1 << 40])
    values = torch.ones(2, 1001, device="cuda")
    kept = stream.drop(values, 0.3, Site.FINAL, layer=2).cpu() != 0
    bits = hash_of([3, 1 << 40], 1001, layer=2, site=Site.FINAL)
    assert torch.equal(kept, bits[:, :1001] >= round(0.3 * LEVELS) - LEVELS // 2)
    shared = [
        DropoutStream(1, 2, lanes).drop_shared(values, 0.3, Site.POSITIONS)
        for lanes in ([0], [5, 6])
    ]
    assert torch.equal(*shared)
