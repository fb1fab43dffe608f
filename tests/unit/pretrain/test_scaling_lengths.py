"""Sweeps of segment and memory lengths: the plan's arithmetic, their table and their page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foundation.files import write_text
from pretrain.costs.flops import cost_of
from pretrain.scaling.collect import read_rows
from pretrain.scaling.comparison_pages import loss_by_memory
from pretrain.scaling.sweep_file import config_of, read_sweep
from tests.helpers.scaling_runs import EXPERIMENT, command, train_by_the_law

BASE = """name: base
model: {vocab_size: 300, num_layers: 2, d_model: 32, num_heads: 2, memory_length: 32}
data: {path: absent, segment_length: 32, lanes: 16}
optim: {steps: 1000}
"""


def test_contexts_differ_in_nothing_but_segment_and_memory_at_equal_tokens_and_equal_flops(
    tmp_path: Path,
):
    write_text(tmp_path / "base.yaml", BASE)
    sweep = tmp_path / "sweep.yaml"
    lengths = ("--segments", 16, 32, 64, "--memories", 0, 32, 128, "--output", sweep)
    assert command("plan", tmp_path / "base.yaml", *lengths) == 0
    runs = [config_of(cell, sweep) for cell in read_sweep(sweep).cells]
    contexts = {(run.data.segment_length, run.model.memory_length) for run in runs}
    assert len(contexts) == 9
    base = cost_of(next(run for run in runs if run.name == "t32-m32"))
    for run in runs:
        cost = cost_of(run)
        assert cost.parameters == base.parameters
        assert run.tokens_per_step == 512
        assert run.optim.learning_rate == runs[0].optim.learning_rate
        if not run.name.endswith("same-flops"):
            assert cost.tokens == base.tokens
        if not run.name.endswith("same-tokens"):
            assert cost.flops == pytest.approx(base.flops, rel=0.01)
    assert len(runs) == len({run.name for run in runs}) == 17


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--segments", 24, "--memories", 0, 32], "segments of 24 do not divide the 512 tokens"),
        (["--segments", 32, 32, "--memories", 8], "leaves nothing to compare"),
        (
            ["optim.schedule.shape=constant", "--segments", 32, "--memories", 8, 16],
            "does not decay",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys, flags, said):
    write_text(tmp_path / "base.yaml", BASE)
    assert command("plan", tmp_path / "base.yaml", *flags, "--output", tmp_path / "s.yaml") == 2
    assert said in capsys.readouterr().err


def test_a_sweep_of_lengths_becomes_a_table_and_a_page_with_both_comparisons(
    tmp_path: Path, capsys
):
    write_text(tmp_path / "books.yaml", EXPERIMENT + "optim: {steps: 300}\n")
    sweep, runs = tmp_path / "sweep.yaml", tmp_path / "runs"
    lengths = ("--segments", 32, 64, "--memories", 0, 64, "--output", sweep)
    assert command("plan", tmp_path / "books.yaml", *lengths) == 0
    assert "every run: optim.schedule.warmup_steps is 5% of its steps" in capsys.readouterr().out
    cells = read_sweep(sweep).cells
    for cell in cells[1:]:
        train_by_the_law(runs / cell.name, config_of(cell, sweep))
    assert command("collect", sweep, "--runs-dir", runs) == 0
    rows = read_rows(runs / "runs.csv")
    assert {(row.segment_length, row.memory_length) for row in rows[1:]} == {
        (32, 0), (32, 64), (64, 0), (64, 64)
    }  # fmt: skip
    assert {row.varies for row in rows} == {"lengths"}
    capsys.readouterr()
    assert command("report", runs / "runs.csv") == 0
    said = capsys.readouterr().out
    assert f"left out: {cells[0].name}: not started" in said
    page = (runs / "scaling-report" / "report.html").read_text()
    assert all(f"Equal {name}" in page for name in ("tokens", "FLOPs"))
    assert all(f"{row.loss:.4f}" in page for row in rows[1:])
    figures = {path.name for path in (runs / "scaling-report").glob("*.png")}
    forms = {path.suffix for path in (runs / "scaling-report").glob("equal-flops.*")}
    assert forms == {".png", ".svg", ".pdf", ".csv"}
    assert re.search(r"\d{4}-\d\d-\d\d, code ", page)
    assert figures == {"equal-tokens.png", "equal-flops.png"}
    at_tokens = [row for row in rows[1:] if not row.name.endswith("same-flops")]
    lines = loss_by_memory(at_tokens).axes[0].get_lines()
    assert [str(line.get_label()) for line in lines] == ["32", "64"]
