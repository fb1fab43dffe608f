"""The host waits for the device once per step, for the norm, apart from what DeepSpeed reads."""

from __future__ import annotations

import json

import pytest

from tests.helpers.engine_cells import run_helper
from tests.helpers.host_reads import CELLS


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    output = tmp_path_factory.mktemp("reads")
    run_helper("host_reads", output, str(output))
    return json.loads((output / "reads.json").read_text())


@pytest.mark.parametrize("name", CELLS)
def test_a_step_reads_at_most_one_value_of_the_device(reads, name):
    assert reads[name]["pretrain"] <= 1  # 0 where DeepSpeed has read the norm
