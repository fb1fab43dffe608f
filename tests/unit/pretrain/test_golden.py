"""The model against the original: recorded files, an independent reimplementation, and this project's own losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.errors import DataError
from pretrain.cli import main
from pretrain.weights import golden
from tests.golden.record import CASES, LOSSES, losses_of
from tests.helpers.reference_model import DEFAULTS, random_state, reference_segment
from tests.helpers.shared import shared_path

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


@pytest.fixture(scope="module")
def golden_directory() -> Path:
    return shared_path("golden")


def write_case(path: Path, options: dict[str, Any]) -> Path:
    """A file in the golden format, computed by the independent reimplementation."""
    settings = {**DEFAULTS, **options}
    state, ties = random_state(settings)
    lanes, length, context = settings["bsz"], settings["tgt_len"], settings["ext_len"]
    generator = torch.Generator().manual_seed(1)
    stream = torch.randint(
        0, settings["n_token"], (settings["n_seg"] * length + 1, lanes), generator=generator
    )
    arrays: dict[str, np.ndarray] = {"config": np.array(json.dumps(settings))}
    losses, memories = [], []
    for s in range(settings["n_seg"]):
        first = s * length
        tokens, targets = (
            stream[max(0, first - context) : first + length],
            stream[first + 1 : first + length + 1],
        )
        result = reference_segment(state, ties, settings, tokens, targets, memories)
        memories = result.memories
        losses.append(result.nll.mean())
        arrays |= {f"inp/{s}": tokens.numpy(), f"tgt/{s}": targets.numpy()}
        arrays |= {
            f"nll/{s}": result.nll.detach().numpy(),
            f"hid/{s}": result.hidden.detach().numpy(),
        }
        arrays |= {f"mem/{s}/{level}": rows.numpy() for level, rows in enumerate(memories)}
    torch.stack(losses).sum().backward()
    for name, tensor in state.items():
        assert tensor.grad is not None
        arrays |= {f"param/{name}": tensor.detach().numpy(), f"grad/{name}": tensor.grad.numpy()}
    arrays |= {f"alias/{name}": np.array(origin) for name, origin in ties.items()}
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return path


def test_every_recorded_case_of_the_original_agrees_to_1e_10(
    golden_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(golden_directory.glob("*.npz"))
    assert len(files) >= 9
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


def test_a_wrong_mask_or_shift_fails(golden_directory: Path, tmp_path: Path) -> None:
    for name in ("masks.npz", "rel_shift.npz"):
        with np.load(golden_directory / name) as file:
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
