"""What runs first on a GPU: the yardstick, comparisons, processes, findings and the schedule."""

import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.__main__ import main
from benchmarks.gpu import bundle, command, processes, speed, steps
from benchmarks.gpu.attention import AttentionInputs, Shape
from benchmarks.gpu.findings import CPU, END, Context, Finding, findings_in
from benchmarks.gpu.gpt import GPT, yardstick
from benchmarks.gpu.steps import ROOT, STEPS, Step, known_steps
from benchmarks.gpu.training import measured_run
from data_pipeline.corpora.manifest import MANIFEST_NAME
from pretrain.costs.device_memory import Footprint
from pretrain.costs.flops import run_cost
from pretrain.model.attention_backends import plain_attention
from tests.helpers.corpora import make_tiny_corpus

DEVICE = torch.device("cpu")
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """On a CPU, and of full size."""
    out = tmp_path_factory.mktemp("out")
    corpus = make_tiny_corpus(tmp_path_factory.mktemp("corpus"))
    return FullSize(out=out, results=out / "results.jsonl", corpus=corpus, step="s")


class FullSize(Context):
    is_dry = False
    device = DEVICE


def test_every_way_attends_to_the_same_keys_with_and_without_positions() -> None:
    inputs = AttentionInputs(Shape(B=2, L=12, M=7, N=4, H=16, G=2), DEVICE, torch.float64)
    for leaf in inputs.leaves:  # FlexAttention has no backward pass on a CPU
        leaf.requires_grad_(False)
    with torch.no_grad():
        expected = inputs.relative(plain_attention)
        torch.testing.assert_close(inputs.flex(flex_attention, is_relative=True), expected)
        for leaf in (inputs.position_CNH, *inputs.biases_NH):
            leaf.zero_()
        expected = inputs.relative(plain_attention)
        torch.testing.assert_close(inputs.without_positions(), expected)
        torch.testing.assert_close(inputs.flex(flex_attention, is_relative=False), expected)


def test_the_gpt_has_the_models_size_its_tokens_and_its_keys_per_query(context: Context) -> None:
    run = measured_run("xl_modern_1b", context)
    gpt = yardstick(run)
    assert gpt.tokens_per_step == run.tokens_per_step == 16_384
    memory, length = run.model.longest_memory, run.data.segment_length
    assert (gpt.data.segment_length + 1) / 2 == memory + (length + 1) / 2
    with torch.device("meta"):
        module = GPT(gpt.model, compiles=False)
    parameters = sum(each.numel() for each in module.parameters())
    assert parameters == pytest.approx(run_cost(run).parameters, rel=1e-3)
    # The memory's keys and values are the only other products.
    flops, expected = (speed.visible_flops_per_token(each) for each in (gpt, run))
    assert flops == pytest.approx(expected, rel=0.05)


def test_no_token_of_the_gpt_sees_a_later_one(context: Context) -> None:
    run = measured_run("xl_modern_1b", context)
    small = {"num_layers": 2, "d_model": 32, "num_heads": 2, "num_key_heads": 1}
    module = GPT(replace(run.model, vocab_size=16, **small), compiles=False)
    tokens_BL = torch.arange(12)[None] % 7
    changed_BL = tokens_BL.clone()
    changed_BL[0, 8] = 15
    nll_BL, other_BL = (module(each, tokens_BL) for each in (tokens_BL, changed_BL))
    torch.testing.assert_close(nll_BL[:, :8], other_BL[:, :8])
    assert (nll_BL[:, 8:] != other_BL[:, 8:]).all()  # all of these see it


@pytest.mark.parametrize("step", [step for step in STEPS if step.case], ids=lambda step: step.name)
def test_every_model_that_is_measured_fits_into_80_gigabytes(context: Context, step: Step) -> None:
    run = measured_run(step.case, context)
    run = replace(run, engine=replace(run.engine, precision="bf16"))
    assert Footprint(run, 1, on_gpu=True).device < 72 * 2**30


def test_pairs_that_no_query_sees_do_not_count(context: Context) -> None:
    run = measured_run("relative_1b", context)
    assert 1.25e9 < run_cost(run).parameters < 1.4e9
    every, visible = run_cost(run).flops_per_token, speed.visible_flops_per_token(run)
    # Counted pair by pair, for products of content, positions and values, forward and backward.
    length, memory = run.data.segment_length, run.model.memory_length
    pairs = sum(memory + query + 1 for query in range(length)) / length
    hidden = 3 * run.model.num_layers * 6 * run.model.d_model * (length + memory - pairs)
    assert visible == pytest.approx(every - hidden)


def test_classes_and_idle_time_add_up_to_the_step() -> None:
    rows = {"a_gemm": (4000.0, 2), "memset": (1000.0, 1), "another_gemm": (2000.0, 1)}
    found = speed.classes(rows, wall_seconds=0.010)
    assert {name: ms for name, ms in found.items() if ms} == {"GEMM": 3, "copies": 0.5, "idle": 1.5}


def test_a_step_is_known_while_its_sources_stay_as_they_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.py").write_text("a = 1\n")
    (tmp_path / "other.py").write_text("b = 1\n")
    step = Step("s", "", 1, 1, "", ("folder", "other.py"))
    first = step.fingerprint
    monkeypatch.setattr(steps, "STEPS", (step,))

    def known(now: str | None, part: str = END, device: str = H100) -> set[str]:
        values = {"step": "s", "part": part, "fingerprint": first, "device": device}
        return known_steps([Finding(date="", values={}, **values)], now)

    assert known(H100) == known(None) == {"s"}
    assert known("NVIDIA H200") == known(H100, part="step") == known(None, device=CPU) == set()
    (tmp_path / "folder" / "notes.txt").write_text("not code\n")
    assert known(H100) == {"s"}
    (tmp_path / "folder" / "a.py").write_text("a = 2\n")
    assert known(H100) == set()


@pytest.mark.parametrize("is_dry", [True, False], ids=["forked", "new interpreter"])
def test_a_step_ends_at_its_limit_and_leaves_its_exit_status(tmp_path: Path, is_dry: bool) -> None:
    log = tmp_path / "log"
    run = partial(processes.run_process, log=log, is_dry=is_dry)
    assert run(partial(int, 3), limit=300) == 3
    assert run(partial(int, "no number"), limit=300) == 1
    assert processes.last_line(log).startswith("ValueError: ")
    start = time.monotonic()
    assert run(partial(time.sleep, 600), limit=0.5) is None
    assert time.monotonic() - start < 300


def report_and_wait(context: Context) -> None:
    context.add("before", ratio=float("nan"))
    time.sleep(600)


def report_a_difference(context: Context) -> None:
    context.add("bits", passed=False)


def test_findings_of_a_step_that_fails_or_hangs_are_kept(tmp_path, monkeypatch, capsys):
    targets = ["builtins:int", f"{__name__}:report_and_wait", f"{__name__}:report_a_difference"]
    listed = tuple(
        Step(f"s{number}", target, expected=0, limit=limit, purpose="", sources=())
        for number, (target, limit) in enumerate(zip(targets, (300, 5.0, 300), strict=True))
    )
    monkeypatch.setattr(steps, "STEPS", listed)
    monkeypatch.setattr(command, "prepare", lambda _: None)
    arguments = ["gpu", "--dry-run", "--out", str(tmp_path), "--corpus", str(tmp_path)]
    assert main(arguments) == 1
    found = findings_in(tmp_path / "results.jsonl")
    ends = {each.step: each.values for each in found if each.part == END}
    assert [each["status"] for each in ends.values()] == ["failed", "timed out", "missed"]
    assert ends["s0"]["error"].startswith("TypeError: int()")
    assert [each.values for each in found if each.part == "before"] == [{"ratio": "nan"}]
    assert "| s2   | missed    |" in capsys.readouterr().out
    assert main(arguments) == 1
    assert findings_in(tmp_path / "results.jsonl") == found  # all are known


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out=OUT", "--minutes=-1"], "--minutes=-1"),
        (["--out=OUT", "--steps=fast"], "'fast'"),
        (["--out=OUT/results.jsonl"], "OUT/results.jsonl "),
        (["--out=OUT"], "OUT/results.jsonl: line 1 "),
    ],
)
def test_wrong_options_and_damaged_results_are_told_in_a_line(tmp_path, capsys, arguments, said):
    (tmp_path / "results.jsonl").write_text('{"step": "b", "par')
    words = [each.replace("OUT", str(tmp_path)) for each in arguments]
    assert main(["gpu", "--dry-run", *words]) == 2
    error = capsys.readouterr().err
    assert said.replace("OUT", str(tmp_path)) in error
    assert error.count("\n") == 1


def test_the_bundle_carries_the_corpus_that_is_given(context: Context, monkeypatch) -> None:
    monkeypatch.setattr(bundle, "fetch_wheels", lambda *_: None)  # from a network
    out = context.out / "bundle"
    assert main(["gpu-bundle", "--out", str(out), "--corpus", str(context.corpus)]) == 0
    manifest = Path("train", MANIFEST_NAME)
    assert (out / "corpus" / manifest).read_bytes() == (context.corpus / manifest).read_bytes()


def test_the_command_starts_without_writers_of_shards_and_what_the_bundle_carries() -> None:
    absent = (*processes.ABSENT, "deepspeed", "hjson", "pydantic")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import benchmarks.gpu.command"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
