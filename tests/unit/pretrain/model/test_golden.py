"""The model against recorded vectors, an independent reimplementation and its own losses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.__main__ import main
from tests.golden.compare import compare
from tests.golden.record_losses import CASES, LOSSES, losses_of
from tests.golden.record_vectors import CASES as RECORDED_CASES
from tests.golden.record_vectors import DIRECTORY, case_arrays, write

# Options that the recorded files leave out, alone and together.
REFERENCE_CASES: dict[str, dict[str, Any]] = {
    "untied_embedding": {"tie_weight": False},
    "narrow_embedding": {"d_embed": 10, "d_head": 5},
    "narrow_embedding_tied_projection": {"d_embed": 10, "tie_projs": [True]},
    "adaptive_div1": {"cutoffs": [9, 20], "tie_projs": [False, True, True]},
    "adaptive_div1_narrow": {"cutoffs": [9, 20], "d_embed": 10, "tie_projs": [False, True, True]},
    "adaptive_div2_untied": {
        "cutoffs": [9, 20],
        "div_val": 2,
        "tie_projs": [False] * 3,
        "tie_weight": False,
    },
    "adaptive_four_bins_untied_biases": {
        "cutoffs": [5, 9, 20],
        "div_val": 2,
        "tie_projs": [True] * 4,
        "untie_r": True,
    },
    "pre_norm_same_length_clamp": {
        "pre_lnorm": True,
        "same_length": True,
        "clamp_len": 4,
        "mem_len": 7,
    },
    "extended_context": {"ext_len": 2, "mem_len": 9},
    "extended_context_same_length": {"ext_len": 3, "mem_len": 5, "same_length": True},
}


def write_case(path: Path, options: dict[str, Any]) -> Path:
    """A file in the golden format, computed by the independent reimplementation."""
    return write(path, case_arrays(options))


def test_every_recorded_case_agrees_to_1e_10(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(DIRECTORY.glob("*.npz"))
    assert len(files) == len(RECORDED_CASES) + 2  # masks and shifts
    assert main(list(map(str, files))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1 : len(files) + 1]] == ["ok"] * len(files)


@pytest.mark.parametrize("case", REFERENCE_CASES)
def test_an_independent_reimplementation_agrees(case: str, tmp_path: Path) -> None:
    result = compare(write_case(tmp_path / "case.npz", REFERENCE_CASES[case]))
    assert result.verdict == "ok", result.errors
    assert result.errors.keys() == {"NLL", "hidden", "memories", "gradients"}


@pytest.mark.parametrize(
    ("file", "entry"),
    [
        *(("", each) for each in ("nll/1", "mem/2/1", "grad/r_r_bias")),
        ("", "param/layers.1.dec_attn.r_net.weight"),
        ("masks.npz", "q8_mlen3_memlen3_same1"),
        ("relative_shift.npz", "out_5x6"),
    ],
)
def test_one_wrong_number_fails_a_file(file, entry, tmp_path, capsys):
    path = DIRECTORY / file if file else write_case(tmp_path / "case.npz", {})
    with np.load(path) as recorded:
        arrays = dict(recorded)
    values = arrays[entry]
    values.flat[3] = ~values.flat[3] if values.dtype == bool else values.flat[3] + 1e-8
    write(tmp_path / path.name, arrays)
    assert main([str(tmp_path / path.name)]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("case", CASES)
def test_the_losses_kept_in_the_tree_have_not_moved(case: str) -> None:
    assert losses_of(case) == pytest.approx(json.loads(LOSSES.read_text())[case], abs=1e-12, rel=0)
