"""The fused kernels compiled for three kinds of GPU: nothing is repeated, and all of it fits."""

from dataclasses import replace

import pytest

from benchmarks.static import TABLE, all_kernel_names, code_of_kernels, compiled_kernels
from foundation.files import read_json
from pretrain.kernels.triton.tiling import Tile, built_in_tiles
from tests.helpers.compiled_kernels import DROPOUT
from tests.helpers.kernel_work import (
    DEVICES,
    LARGEST_WARPS,
    Resources,
    executed_work,
    missed_limits,
)

WARPS = 4  # of a program of the kernel of dropout


@pytest.fixture(scope="module")
def resources() -> dict[str, Resources]:
    """What every kernel takes, from the static table while their code is as it was."""
    table = read_json(TABLE)
    found = table["kernels"] if table["code"] == code_of_kernels() else compiled_kernels()
    return {name: Resources(**found[name]) for name in all_kernel_names()}


@pytest.mark.slow
@pytest.mark.parametrize("name", all_kernel_names())
def test_no_work_is_repeated_and_the_kernel_fits(resources, name):
    assert (resources[name].needed > 0) != name.startswith(DROPOUT)
    assert missed_limits(name, resources[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", DEVICES)
def test_dropout_fills_a_multiprocessor_with_threads_and_spills_nothing(resources, target):
    found = resources[f"{DROPOUT}{target}"]
    assert found.spilled == 0
    assert found.programs * WARPS == LARGEST_WARPS


def test_work_that_two_groups_of_warps_repeat_is_counted_twice():
    product = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r1}, %rd1, %rd2;"
    assert executed_work(product, warps=4) == 64 * 32 * 16
    assert executed_work(product, warps=8) == 2 * 64 * 32 * 16


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("forward", Tile(64, 64, 8)),
        ("query_gradient", Tile(32, 64, 4)),
        ("key_gradient", Tile(32, 64, 8)),  # its products have a row per key
        ("position_gradient", Tile(64, 32, 4)),
    ],
)
def test_tiles_with_fewer_rows_than_their_warps_take_are_refused(kernel, tile):
    fitting = built_in_tiles(64, (9, 0))
    with pytest.raises(ValueError):
        replace(fitting, **{kernel: tile})
