"""The comparison with other code, without that code: arguments, processes, arithmetic, patches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.peer_sides import Case, OurSide, Worker
from benchmarks.peers import LOSS_MODEL, LOSS_VARIANTS, OURS, SideProcess, speed_measurements
from foundation.errors import UserError
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.original_settings import config_of_original
from tests.helpers.reference_training import ReferenceTransformerXL, original_state

CASE = Case("case", {**LOSS_MODEL, "n_layer": 2}, segment_length=8, lanes=2, learning_rate=1e-2)
TEXT = b"to be or not to be, " * 20


@pytest.mark.parametrize("option", ["--original", "--nvidia"])
def test_a_directory_that_is_not_a_checkout_is_an_error_in_one_line(option, tmp_path, capsys):
    assert main(["peers", option, str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{option} {tmp_path} " in line


def test_code_that_cannot_be_imported_is_an_error_that_names_its_side(tmp_path: Path) -> None:
    (tmp_path / "pytorch").mkdir()
    (tmp_path / "pytorch" / "mem_transformer.py").touch()
    with pytest.raises(UserError, match=r"'original' .*AttributeError"):
        SideProcess("original", tmp_path, threads=1)


def test_speeds_are_ratios_of_cpu_seconds_with_the_rates_of_both_sides() -> None:
    seconds = {"original": [6.0, 8.0, 20.0], "NVIDIA": [3.0, 4.0, 4.0], OURS: [2.0, 2.0, 4.0]}
    over_original, over_nvidia = speed_measurements("training", 1000, seconds)
    assert over_original.values == [3.0, 4.0, 5.0]
    assert over_original.detail.startswith("125 -> 500 tokens per ")
    assert over_nvidia.values == [1.5, 2.0, 1.0]


@pytest.mark.parametrize("name", LOSS_VARIANTS)
def test_every_variant_is_a_model_of_ours(name: str) -> None:
    TransformerXL(config_of_original({**LOSS_MODEL, **LOSS_VARIANTS[name]}))


def test_our_side_trains_and_evaluates_the_imported_weights_on_the_same_text() -> None:
    torch.manual_seed(0)
    sizes = (CASE.model[name] for name in ("n_token", "n_layer", "n_head", "d_model", "d_inner"))
    reference = ReferenceTransformerXL(*sizes, dropout=0.0)
    weights = {name: values.numpy() for name, values in original_state(reference).items()}
    worker = Worker(OurSide(), [])
    worker.load(CASE, TEXT, weights)
    seconds, evaluated = worker.evaluate(2)
    assert seconds > 0
    worker.load(replace(CASE, dtype="float64"), TEXT, weights)
    _, trained = worker.train(6)
    assert evaluated[0] == pytest.approx(trained[0], abs=1e-5)
    assert trained[-1] < trained[0]
