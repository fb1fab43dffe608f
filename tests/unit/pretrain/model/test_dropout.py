"""Dropout masks: a pure function of (seed, step, layer, site, lane), with the right probability."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.model.dropout import LEVELS, DropoutStream, Site, drop, realized_rate
from tests.helpers.dropout_cases import CASES, differences_of
from tests.helpers.triton_interpreter import interpreted


@pytest.mark.parametrize(("seed", "step", "layer"), [(1, 2, 3), (2, 1, 0), (9, 4096, 7)])
@pytest.mark.parametrize("site", [Site.ATTENTION, Site.FINAL])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_cpu_bits_are_philox_with_the_documented_key_and_counter(seed, step, layer, site, rate):
    """So every part of the key counts, and no lane's mask depends on the others."""
    lanes, key = [7, 3, 4096, 0], np.array([seed, step], dtype=np.uint64)
    found = DropoutStream(seed, step, lanes).drop(torch.ones(4, 100), rate, site, layer) != 0
    for row, lane in enumerate(lanes):
        counter = np.array([0, lane, layer, int(site)], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=counter).random_raw(25)
        expected = torch.from_numpy(words.view(np.int16)) >= round(rate * LEVELS) - LEVELS // 2
        assert torch.equal(found[row], expected)


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
