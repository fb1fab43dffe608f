"""The GPU benchmarks on small shapes on the CPU: both sides compute the same, errors are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from benchmarks.__main__ import main
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
        [measurement] = replace(comparison, rounds=1).measure()
        assert measurement.median > 0.0


def test_errors_are_those_of_the_precision() -> None:
    errors = list(gpu.errors(SMALL, CPU, torch.float32))
    assert len(errors) == 6
    assert all(0.0 < error.median < 1e-5 for error in errors)
    assert all(error.passes for error in errors), errors


def test_the_large_model_has_its_size_and_a_step_of_it_trains() -> None:
    run = gpu.large_run()
    assert 1.25e9 < cost_of(run).parameters < 1.4e9
    model = replace(
        run.model, vocab_size=50, num_layers=2, d_model=32, num_heads=2, memory_length=8
    )
    work = gpu.large_step(
        replace(run, model=model, data=replace(run.data, lanes=2, segment_length=8)),
        CPU,
        torch.float32,
    )
    work()
    work()  # with memory


def test_data_sheets_are_found_by_the_name_that_the_driver_reports() -> None:
    assert gpu.promised_flops("NVIDIA H200") == 989e12
    assert gpu.promised_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert gpu.promised_flops("NVIDIA GeForce") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmarks would run on the GPU")
def test_a_missing_gpu_is_an_error(capsys) -> None:
    assert main(["gpu"]) == 2
    assert "found no CUDA device" in capsys.readouterr().err
