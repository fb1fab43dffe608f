"""The bench: fair turns, honest yardsticks, verdicts that can fail."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.command import add_arguments, all_comparisons, machine, run
from benchmarks.compare import Comparison, Measurement, measure, table
from benchmarks.saving import bench_run
from benchmarks.scaling import points
from data_pipeline.errors import UserError
from pretrain.costs.flops import parameters_of
from pretrain.model.original import original_to_ours
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import TINY, random_tokens
from tests.helpers.reference_training import ReferenceTransformerXL, original_state


def measured(goal: float, baseline: list[float], candidate: list[float]) -> Measurement:
    return Measurement("case", goal, baseline, candidate, flops=3e9)


def test_both_sides_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    now = [0.0]

    def work(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds if len(calls) > 2 else 100.0

    comparison = Comparison("case", 2.0, lambda: work("a", 6.0), lambda: work("b", 2.0), rounds=2)
    measurement = measure(comparison, clock=lambda: now[0])
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert measurement.baseline_seconds == [6.0, 6.0]
    assert measurement.ratio == 3.0


def test_a_ratio_passes_down_to_fifteen_percent_below_its_goal() -> None:
    assert measured(2.0, [1.71], [1.0]).passes
    assert not measured(2.0, [1.69], [1.0]).passes


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    assert measured(2.0, [1.0, 100.0, 9.0], [1.0, 1.0, 3.0]).ratio == 3.0


def test_the_table_shows_ratio_range_floor_and_verdict() -> None:
    rows = table(
        [measured(2.0, [3.0, 5.0], [1.0, 1.0]), measured(9.0, [3.0], [1.0])], 1e9
    ).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[2] == [
        "case",
        "2.0x",
        "4.00x",
        "3.00x",
        "5.00x",
        "4,000.0",
        "1,000.0",
        "3,000.0",
        "reached",
    ]
    assert cells[3][-1] == "MISSED"
    assert {len(row) for row in rows} == {len(rows[0])}


def test_the_reference_step_computes_the_models_loss() -> None:
    """A yardstick that did less work, or other work, would flatter or slander the model."""
    torch.manual_seed(0)
    reference = ReferenceTransformerXL(
        TINY.vocab_size,
        TINY.num_layers,
        TINY.num_heads,
        TINY.d_model,
        TINY.inner_width,
        dropout=0.0,
    ).double()
    model = TransformerXL(TINY).double()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(15.0)  # far from the linear regime of fresh weights
    load_parameters(model, original_to_ours(original_state(reference), TINY))
    memory, reference_memory = None, []
    stream_BT = random_tokens(3, 19)
    for first in (0, 6, 12):
        tokens_BL, targets_BL = stream_BT[:, first : first + 6], stream_BT[:, first + 1 : first + 7]
        nll_BL, memory = model(tokens_BL, targets_BL, memory)
        loss, reference_memory = reference(
            tokens_BL.t(), targets_BL.t(), reference_memory, TINY.memory_length
        )
        # The reference masks in float32.
        torch.testing.assert_close(loss, nll_BL.mean(), rtol=1e-5, atol=0)
        torch.testing.assert_close(
            reference_memory[1].transpose(0, 1), memory[1], rtol=1e-5, atol=1e-6
        )


def test_every_promised_comparison_is_there() -> None:
    assert [(each.name, each.goal) for each in all_comparisons()] == [
        ("attention module, segment = memory = 128", 1.8),
        ("attention module, segment = memory = 512", 4.5),
        ("cached evaluation, segment 128, memory 1600, against the original's", 3.0),
        ("cached evaluation, segment 128, memory 1600, against our hidden states", 1.7),
        ("cached layer, attention length 3800, against the original's sliding window", 3000.0),
        ("cached layer, attention length 3800, against our own sliding window", 2000.0),
        ("12-layer training step, segment = memory = 128", 1.5),
        ("12-layer training step, segment = memory = 512", 3.0),
        ("stall of a save beside training, 100M parameters, against a blocking one", 20.0),
    ]


def test_the_saved_model_has_a_hundred_million_parameters() -> None:
    assert parameters_of(bench_run().model).total == pytest.approx(100e6, rel=0.02)


def test_a_comparison_may_say_itself_which_seconds_count() -> None:
    comparison = Comparison("case", 2.0, lambda: 8.0, lambda: 2.0, rounds=2, own_clock=True)
    assert measure(comparison).ratios == [4.0, 4.0]


def test_an_unknown_comparison_is_refused_with_the_names_there_are() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    num_threads = torch.get_num_threads()
    try:
        with pytest.raises(
            UserError, match=r"--only nothing.*attention module, segment = memory = 128"
        ):
            run(parser.parse_args(["--only", "nothing", "--threads", str(num_threads)]))
    finally:
        torch.set_num_threads(num_threads)


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    assert platform.node() not in machine()
    assert "torch" in machine()


def test_what_grows_a_token_s_cost_is_varied_one_at_a_time() -> None:
    base, *others = points()
    for other in others:
        changed = [
            name for name, value in vars(other.model).items() if value != getattr(base.model, name)
        ]
        assert len(changed) + (other.segment_length != base.segment_length) == 1, other.name
        assert other.flops_per_token != base.flops_per_token
