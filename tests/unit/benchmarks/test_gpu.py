"""The parts of the prepared half hour: comparisons, sizes, processes, results and candidates."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import cost, kernels, processes, speed, tiles
from benchmarks.gpu.attention import AttentionInputs, FusedMasks, Shape, errors
from benchmarks.gpu.bundle import BUILT, DOWNLOADED, ROOT, locked_versions
from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report, Result, append_result, findings_in, results_in, status_of
from benchmarks.gpu.steps import LONGEST_STEP, STEPS, Step, selected
from benchmarks.gpu.training import large_run
from foundation.errors import UserError
from pretrain.costs.flops import cost_of
from pretrain.kernels.triton.settings import DROPOUT_LEVELS
from pretrain.kernels.triton.tiling import FORMAT, KERNELS, kernels_version
from pretrain.model.attention_paths import plain_attention
from pretrain.model.dropout import Site
from tests.helpers.exact_attention import kept_weights

CPU = torch.device("cpu")
SMALL = Shape(B=2, L=12, M=7, N=2, H=16)


def test_both_sides_attend_to_the_same_keys() -> None:
    """Without a relative term the paper's attention is what flash attention computes."""
    inputs = AttentionInputs(SMALL, CPU, torch.float64)
    with torch.no_grad():
        for leaf in (inputs.position_CNH, *inputs.biases_NH):
            leaf.zero_()
    torch.testing.assert_close(inputs.without_positions(), inputs.relative(plain_attention))


def test_plain_operations_drop_what_the_fused_kernels_drop() -> None:
    stream, sizes = FusedMasks(seed=1, step=1, lanes=[3, 5]), (2, 9, 11)
    dropped_NBLC = stream.drop(torch.ones(2, *sizes), 0.5, Site.ATTENTION, layer=1, lane_axis=1)
    keys = stream.lane_keys(Site.ATTENTION, 1, CPU).tolist()
    kept_BNLC = kept_weights(keys, *sizes, DROPOUT_LEVELS // 2)
    assert torch.equal(dropped_NBLC, 2.0 * kept_BNLC.transpose(0, 1))


@pytest.mark.parametrize("name", kernels.DRY_CASES)
def test_errors_are_those_of_the_precision(name: str) -> None:
    found = errors(kernels.DRY_CASES[name], CPU, torch.float32)
    assert len(found) == (4 if name == "distance bias" else 6)
    assert all(0.0 < each["error"] < 1e-5 for each in found.values()), found
    assert all(each["passed"] for each in found.values()), found


def test_a_wrong_gradient_is_found(monkeypatch) -> None:
    def path_of(*_arguments: object):
        return lambda query, *rest: plain_attention(query * 1.001, *rest)

    monkeypatch.setattr("benchmarks.gpu.attention.path_of", path_of)
    assert not errors(SMALL, CPU, torch.float32)["query"]["passed"]


def test_the_large_model_has_its_size_and_pairs_that_no_query_sees_do_not_count() -> None:
    run = large_run()
    assert 1.25e9 < cost_of(run).parameters < 1.4e9
    assert run.engine.zero_stage == 2  # what trains by default
    every, visible = cost_of(run).flops_per_token, cost.visible_flops_per_token(run)
    # Counted pair by pair, for products of content, positions and values, forward and backward.
    length, memory = run.data.segment_length, run.model.memory_length
    pairs = sum(memory + query + 1 for query in range(length)) / length
    hidden = 3 * run.model.num_layers * 6 * run.model.d_model * (length + memory - pairs)
    assert visible == pytest.approx(every - hidden)
    assert visible < 0.95 * every


def test_data_sheets_are_found_by_the_name_that_the_driver_reports() -> None:
    assert cost.makers_peak("NVIDIA H200") == 989e12
    assert cost.makers_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert cost.makers_peak("NVIDIA GeForce") is None


def test_what_matters_most_fits_into_twenty_five_minutes() -> None:
    assert sum(step.expected for step in STEPS) <= 25 * 60
    assert all(step.expected <= step.limit <= LONGEST_STEP for step in STEPS)
    assert [step.name for step in selected("mfu, kernels")] == ["kernels", "mfu"]
    with pytest.raises(UserError, match="found no step 'speed', expected some of environment"):
        selected("speed")


@pytest.mark.parametrize("is_dry", [True, False], ids=["forked", "new interpreter"])
def test_a_step_ends_at_its_limit_and_leaves_its_exit_status(tmp_path: Path, is_dry: bool) -> None:
    log = tmp_path / "log"
    run = partial(processes.run_process, log=log, is_dry=is_dry, is_group=True)
    assert run(partial(int, 3), limit=300) == 3
    assert run(partial(int, "no number"), limit=300) == 1
    assert processes.last_line(log).startswith("ValueError: invalid literal")
    start = time.monotonic()
    assert run(partial(time.sleep, 600), limit=0.5) is None
    assert time.monotonic() - start < 300


def report_and_wait(context: Context) -> None:
    context.report.check("before", True)
    time.sleep(600)


def report_a_difference(context: Context) -> None:
    context.report.check("bits", False)


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ["builtins:int", f"{__name__}:report_and_wait", f"{__name__}:report_a_difference"]
    limits = (300, 5.0, 300)
    steps = [
        Step(f"s{number}", target, expected=0, limit=limit, purpose="")
        for number, (target, limit) in enumerate(zip(targets, limits, strict=True))
    ]
    monkeypatch.setattr("benchmarks.gpu.command.selected", lambda _: steps)
    monkeypatch.setattr("benchmarks.gpu.command.prepare", lambda _: None)
    arguments = ["gpu", "--dry-run", "--out", str(tmp_path), "--corpus", str(tmp_path)]
    assert main([*arguments, "--minutes", "0.1"]) == 1  # no time for a step
    assert results_in(tmp_path, is_dry=True).keys() == set()
    assert main(arguments) == 1
    results = results_in(tmp_path, is_dry=True)
    assert [each.status for each in results.values()] == ["failed", "timed out", "missed"]
    assert results["s0"].error.startswith("TypeError: int() argument must be")
    assert results["s1"].found == {"before": {"passed": True}}
    assert re.search(r"\| s2   \| missed    \| \d+ +\| bits", capsys.readouterr().out)


def test_what_a_step_found_before_it_was_killed_counts(tmp_path: Path) -> None:
    report = Report(tmp_path / "parts.jsonl")
    report.check("first", True, ratio=float("nan"))
    report.check("second", False)
    with (tmp_path / "parts.jsonl").open("a") as file:
        file.write('{"part": "cut sh')
    found = findings_in(tmp_path / "parts.jsonl")
    assert found == {"first": {"passed": True, "ratio": "nan"}, "second": {"passed": False}}
    assert status_of(0, found) == "missed"
    assert status_of(None, found) == "timed out"
    assert status_of(1, {}) == "failed"
    append_result(tmp_path, Result(step="a", status="failed", seconds=1.0, device="cpu"))
    append_result(tmp_path, Result(step="a", status="ok", seconds=2.0, device="cpu"))
    assert results_in(tmp_path, is_dry=True)["a"].status == "ok"  # the latest one
    assert not results_in(tmp_path)  # a dry run is no result of a GPU


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out=OUT", "--minutes=-1"], "--minutes=-1 must be 0 (no end) or more"),
        (["--out=OUT/results.jsonl"], "results.jsonl is a file; name a directory"),
        (["--out=OUT"], "results.jsonl: line 2 is damaged, expected the result of a step; remove"),
    ],
)
def test_wrong_options_and_damaged_results_are_told_in_a_line(tmp_path, capsys, arguments, said):
    append_result(tmp_path, Result(step="a", status="ok", seconds=1.0, device="cpu"))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"step": "b", "sta')
    words = [each.replace("OUT", str(tmp_path)) for each in arguments]
    assert main(["gpu", "--dry-run", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_no_warp_of_a_candidate_repeats_the_work_of_another() -> None:
    for shape in speed.SHAPES:
        found = list(tiles.candidates(shape))
        assert {each.kernel for each in found} == set(KERNELS)
        assert 60 < len(found) < 150  # compiled by 12 processes in two minutes
        for each in found:
            kept = each.tile.rows if each.kernel in KERNELS[:2] else each.tile.columns
            assert 16 * each.tile.warps <= kept


def test_the_table_has_the_fastest_tile_of_each_kernel(tmp_path: Path) -> None:
    row = {"capability": [9, 0], "head_width": 64, "kernel": "forward", "rows": 64, "columns": 32}
    version = kernels_version()
    rows = [{**row, "seconds": 2.0}, {**row, "warps": 4, "seconds": 1.0}, {**row, "refused": "no"}]
    tiles.write_table(tmp_path / "tiles.json", rows)
    table = json.loads((tmp_path / "tiles.json").read_text())
    assert table == {"format": FORMAT, "kernels": version, "tiles": [rows[1]], "tried": rows}


def test_the_lock_has_a_version_of_all_that_the_bundle_carries() -> None:
    pins = locked_versions(ROOT / "requirements.lock")
    assert {*BUILT, *DOWNLOADED} <= pins.keys()
    assert pins["deepspeed"] == "0.19.8"


def test_a_step_finds_its_sizes_and_its_folder(tmp_path: Path) -> None:
    dry = Context(tmp_path, tmp_path / "corpus", is_dry=True, step="mfu")
    assert (dry.size(8, 1), dry.device, dry.dtype) == (1, CPU, torch.float32)
    assert {dry.work, dry.log, dry.parts} == {
        tmp_path / "work" / "mfu",
        tmp_path / "mfu.log",
        tmp_path / "mfu.parts.jsonl",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="the steps would run on the GPU")
def test_a_missing_gpu_is_an_error(capsys, tmp_path: Path) -> None:
    assert main(["gpu", "--out", str(tmp_path)]) == 2
    assert "found no CUDA device" in capsys.readouterr().err
