"""Dropout masks: a pure function of (seed, step, layer, site, lane), with the right probability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.model.dropout import LEVELS, DropoutStream, Site, drop, realized_rate
from tests.helpers.dropout_cases import CASES, differences_of
from tests.helpers.triton_interpreter import interpreted

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


def test_a_lanes_mask_does_not_depend_on_the_other_lanes_or_their_order() -> None:
    together = mask([7, 3, 4096, 0])
    assert torch.equal(together[[1, 0]], mask([3, 7]))
    for row, lane in enumerate([7, 3, 4096, 0]):
        assert torch.equal(together[row], mask([lane])[0])


@pytest.mark.parametrize(
    "other",
    [{"seed": 9}, {"step": 9}, {"layer": 9}, {"site": Site.FINAL}, {"lanes": [6]},
     {"seed": 2, "step": 1}],
    ids=str,
)  # fmt: skip
def test_every_part_of_the_key_changes_the_mask(other) -> None:
    base, changed = mask([5]), mask(**{"lanes": [5], **other})
    # Independent masks agree by chance: 0.7^2 + 0.3^2 = 0.58 of the time; independent bits
    # hardly ever.
    assert (base == changed).float().mean() < 0.65


def test_cpu_bits_are_philox_with_the_documented_key_and_counter() -> None:
    counter = np.array([0, 6, 3, int(Site.ATTENTION)], dtype=np.uint64)
    words = np.random.Philox(key=np.array([1, 2], dtype=np.uint64), counter=counter).random_raw(25)
    expected = torch.from_numpy(words.view(np.int16)) >= round(0.3 * LEVELS) - LEVELS // 2
    assert torch.equal(mask([6], count=100)[0], expected)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_elements_are_dropped_at_the_given_rate(rate: float) -> None:
    dropped = 1 - mask([1, 2, 3, 4], MANY // 4, rate=rate).float().mean().item()
    assert abs(dropped - rate) < 4 * (rate * (1 - rate) / MANY) ** 0.5


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


@pytest.mark.parametrize("part", ["seed", "step", "lane", "layer", "site"])
def test_every_part_changes_the_keys_of_the_fused_attentions_masks(part: str) -> None:
    def keys(seed: int, step: int, lane: int, layer: int, site: Site) -> Tensor:
        return DropoutStream(seed, step, [lane, 7]).lane_keys(site, layer, torch.device("cpu"))

    base = {"seed": 1, "step": 2, "lane": 5, "layer": 3, "site": Site.ATTENTION}
    changed = keys(**base | {part: Site.FINAL if part == "site" else 9})  # type: ignore[arg-type]
    assert keys(**base)[0] != changed[0]  # type: ignore[arg-type]
    assert (keys(**base)[1] != changed[1]) == (part != "lane")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, int]]:
    """Bits that differ between the kernel and the CPU."""
    return interpreted("tests.helpers.dropout_cases")


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_drops_what_the_cpu_drops_to_the_last_bit(differences, name: str) -> None:
    assert differences[name] == {"output": 0, "gradient": 0}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_drops_what_the_cpu_drops_to_the_last_bit(name: str) -> None:
    assert differences_of(CASES[name], torch.device("cuda")) == {"output": 0, "gradient": 0}


@pytest.mark.gpu
def test_a_gpu_keeps_no_mask_for_the_backward_pass() -> None:
    values = torch.ones(4, 1 << 20, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    dropped = DropoutStream(1, 2, range(4)).drop(values, 0.3, Site.FINAL)
    assert torch.cuda.memory_allocated() - before < 1.1 * dropped.nbytes
