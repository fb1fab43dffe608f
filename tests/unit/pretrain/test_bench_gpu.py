"""The GPU's bench on small shapes of the CPU: both sides compute the same, and errors are seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from benchmarks.__main__ import main
from benchmarks.compare import measure
from benchmarks.gpu_report import correctness, promised_flops
from pretrain.costs.flops import cost_of
from pretrain.model.attention_paths import plain_attention

CPU = torch.device("cpu")
SMALL = gpu.Shape(B=2, L=12, M=7, N=2, H=16)


def test_both_sides_attend_to_the_same_keys() -> None:
    """Without a relative term the paper's attention is what flash attention computes."""
    inputs = gpu.AttentionInputs(SMALL, CPU, torch.float64)
    with torch.no_grad():
        for leaf in (inputs.position_CNH, *inputs.biases_NH):
            leaf.zero_()
    torch.testing.assert_close(inputs.without_positions(), inputs.relative(plain_attention))


def test_comparisons_run_and_leave_no_gradients() -> None:
    comparisons = list(gpu.attention_comparisons(SMALL, CPU, torch.float32))
    assert [comparison.goal for comparison in comparisons] == [1 / 2.2, 5.0]
    for comparison in comparisons:
        assert measure(replace(comparison, rounds=1)).ratio > 0.0


def test_errors_are_those_of_the_precision() -> None:
    text, passes = correctness(SMALL, CPU, torch.float32)
    assert passes, text
    errors = gpu.errors_against_float64(SMALL, CPU, torch.float32)
    assert list(errors) == ["output", "query", "keys and values", "positions", "u", "v"]
    assert all(0.0 < error < 1e-5 for pair in errors.values() for error in pair)


def test_the_large_model_has_its_size_and_a_step_of_it_trains() -> None:
    run = gpu.large_run()
    assert 1.25e9 < cost_of(run).parameters < 1.4e9
    model = replace(
        run.model, vocab_size=50, num_layers=2, d_model=32, num_heads=2, memory_length=8
    )
    work = gpu.training_step(
        replace(run, model=model, data=replace(run.data, lanes=2, segment_length=8)),
        CPU,
        torch.float32,
    )
    work()
    work()  # with memory


def test_names_of_gpus_are_found_in_what_the_driver_says() -> None:
    assert promised_flops("NVIDIA H200") == 989e12
    assert promised_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert promised_flops("NVIDIA GeForce") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the bench would run")
def test_without_a_gpu_it_says_so(capsys) -> None:
    assert main(["model", "--gpu"]) == 2
    assert "found no CUDA device" in capsys.readouterr().err
