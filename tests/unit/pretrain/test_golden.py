"""The model against recorded vectors, an independent reimplementation and its own losses."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.errors import DataError
from pretrain.cli import main
from pretrain.weights import golden
from tests.golden.record_losses import CASES, LOSSES, losses_of
from tests.golden.record_vectors import CASES as RECORDED_CASES
from tests.golden.record_vectors import DIRECTORY, case_arrays, write
from tests.helpers.reference_model import DEFAULTS

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
    assert main(["golden", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1 : len(files) + 1]] == ["ok"] * len(files)


@pytest.mark.parametrize("case", REFERENCE_CASES)
def test_an_independent_reimplementation_agrees(case: str, tmp_path: Path) -> None:
    result = golden.compare(write_case(tmp_path / "case.npz", REFERENCE_CASES[case]))
    assert result.verdict == "ok", result.errors
    assert result.errors.keys() == {"NLL", "hidden", "memories", "gradients"}


@pytest.mark.parametrize(
    "entry", ["nll/1", "mem/2/1", "grad/r_r_bias", "param/layers.1.dec_attn.r_net.weight"]
)
def test_one_wrong_number_in_a_case_fails_it(
    entry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_case(tmp_path / "case.npz", {})
    with np.load(path) as file:
        arrays = dict(file)
    arrays[entry].flat[3] += 1e-8
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    assert main(["golden", str(path)]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_wrong_mask_or_shift_fails(tmp_path: Path) -> None:
    for name in ("masks.npz", "relative_shift.npz"):
        with np.load(DIRECTORY / name) as file:
            arrays = dict(file)
        last = sorted(key for key in arrays if not key.startswith("in_"))[-1]
        arrays[last].flat[0] = not arrays[last].flat[0]
        np.savez(tmp_path / name, **arrays)  # pyright: ignore[reportArgumentType]
        assert golden.compare(tmp_path / name).verdict == "FAILED"


def test_another_attention_is_reported_as_unsupported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_case(tmp_path / "case.npz", {})
    with np.load(path) as file:
        arrays = dict(file)
    arrays["config"] = np.array(json.dumps({**DEFAULTS, "attn_type": 1}))
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    assert main(["golden", str(path)]) == 1
    assert "not supported: attn_type 1" in capsys.readouterr().out


def npz_of_header(path: Path, shape: tuple[int, ...]) -> None:
    """A file whose only array has a header, and none of the numbers that it promises."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": shape}
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.npy", header.getvalue())


FORGED: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "shape": lambda path, arrays: npz_of_header(path, (10**12,)),
    "huge shape": lambda path, arrays: npz_of_header(path, (10**30, 3)),
    "layers": lambda path, arrays: with_settings(path, arrays, n_layer=4000, d_model=4096),
    "many layers": lambda path, arrays: with_settings(path, arrays, n_layer=10**7),
    "text": lambda path, arrays: with_settings(path, arrays, n_layer="x"),
    "a list": lambda path, arrays: np.savez(path, **{**arrays, "config": np.array("[1]")}),
    "deep": lambda path, arrays: np.savez(path, **{**arrays, "config": np.array("[" * 200_000)}),
    "tokens": lambda path, arrays: np.savez(path, **{**arrays, "inp/0": arrays["inp/0"] + 10**6}),
    "words": lambda path, arrays: np.savez(path, **{**arrays, "inp/0": np.array(["a", "b"])}),
    "mask": lambda path, arrays: np.savez(
        path, q999999999_mlen999999999_memlen9_same0=np.zeros((1, 2))
    ),
    "object": lambda path, arrays: np.savez(path, config=np.array([{}], dtype=object)),
}


def with_settings(path: Path, arrays: dict[str, Any], **settings: Any) -> None:
    changed = {**json.loads(str(arrays["config"])), **settings}
    np.savez(path, **{**arrays, "config": np.array(json.dumps(changed))})


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_golden_case_is_one_line_and_costs_no_memory(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_case(tmp_path / "case.npz", {"n_seg": 1})
    with np.load(path) as file:
        arrays = dict(file)
    path.unlink()
    FORGED[how](path, arrays)
    assert main(["golden", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}")
    assert error.count("\n") == 1


def test_an_archive_that_grows_when_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "LARGEST_ARRAYS_BYTES", 1 << 20)
    np.savez_compressed(tmp_path / "case.npz", config=np.zeros(1 << 18))
    with pytest.raises(DataError, match=r"cannot be read as a \.npz file"):
        golden.compare(tmp_path / "case.npz")


@pytest.mark.parametrize(
    "content", ["text", "truncated", "single", "foreign", "incomplete", "config"]
)
def test_a_file_that_is_no_golden_case_gets_one_clear_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_case(tmp_path / "case.npz", {"n_seg": 1})
    if content == "text":
        path.write_text("no archive")
    elif content == "truncated":
        path.write_bytes(path.read_bytes()[:2000])
    elif content == "single":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    elif content == "foreign":
        np.savez(path, weights=np.zeros(3))
    else:
        with np.load(path) as file:
            arrays = dict(file)
        del arrays["inp/0"], arrays["param/r_w_bias"]
        arrays["config"] = np.array("{") if content == "config" else arrays["config"]
        np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    assert main(["golden", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}")
    assert error.count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.npz is not a file"):
        golden.compare(tmp_path / "absent.npz")


@pytest.mark.parametrize("case", CASES)
def test_the_losses_kept_in_the_tree_have_not_moved(case: str) -> None:
    assert losses_of(case) == pytest.approx(json.loads(LOSSES.read_text())[case], abs=1e-12, rel=0)
