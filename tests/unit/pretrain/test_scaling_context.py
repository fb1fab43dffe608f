"""`pretrain scale context`: the plan's arithmetic, and plan, training, collection and report for
real.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from data_pipeline.files import write_text
from pretrain.cli import main
from pretrain.commands.scale_context import _evaluator
from pretrain.config.data import DataConfig, PhaseConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig, ScheduleConfig
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import checkpoint_bytes
from pretrain.reporting.charts import PAGE
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.context import ContextRow, plan_contexts
from pretrain.scaling.context_cells import differences_of, recipe_id
from pretrain.scaling.context_report import loss_by_memory, refuse_repeats
from pretrain.scaling.sweep_file import config_of, read_sweep
from tests.helpers.corpora import make_tiny_corpus

BASE = RunConfig(
    model=ModelConfig(vocab_size=300, num_layers=2, d_model=32, num_heads=2, memory_length=32),
    data=DataConfig(segment_length=32, lanes=16),
    optim=OptimConfig(steps=1000),
)
NOT_TRAINED = "t8-m0-same-flops"


def test_contexts_differ_in_nothing_but_segment_and_memory_at_equal_tokens_and_equal_flops():
    runs = plan_contexts(BASE, [16, 32, 64], [0, 32, 128])
    contexts = {(item.run.data.segment_length, item.run.model.memory_length) for item in runs}
    assert len(contexts) == 9
    base = next(item for item in runs if item.name == "t32-m32")
    assert base.facts["same_tokens"]
    assert base.facts["same_flops"]
    for item in runs:
        assert item.cost.parameters == base.cost.parameters
        assert item.run.tokens_per_step == BASE.tokens_per_step
        assert item.run.optim.learning_rate == BASE.optim.learning_rate
        if item.facts["same_tokens"]:
            assert item.cost.tokens == base.cost.tokens
        if item.facts["same_flops"]:
            assert item.cost.flops == pytest.approx(base.cost.flops, rel=0.01)
    assert (
        sum(item.facts["same_tokens"] for item in runs)
        == sum(item.facts["same_flops"] for item in runs)
        == 9
    )
    assert len(runs) == len({item.name for item in runs}) == 17


@pytest.mark.parametrize(
    ("base", "segments", "memories", "said"),
    [
        (BASE, [24], [0, 32], "segments of 24 do not divide the 512 tokens of a step"),
        (BASE, [32, 32], [8], "leaves nothing to compare"),
        (BASE, [0], [8, 16], "--segments must be positive"),
        (
            replace(BASE, optim=OptimConfig(schedule=ScheduleConfig(shape="constant"))),
            [32],
            [8, 16],
            "does not decay",
        ),
        (
            replace(BASE, data=replace(BASE.data, phases=(PhaseConfig(from_step=9, lanes=8),))),
            [32],
            [8],
            "has 1 phases",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(base, segments, memories, said):
    with pytest.raises(ConfigError, match=said):
        plan_contexts(base, segments, memories)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A context sweep whose cells were trained for a few steps, but for one."""
    directory = tmp_path_factory.mktemp("context")
    corpus = make_tiny_corpus(directory / "corpus")
    write_text(
        directory / "tiny.yaml",
        f"""name: tiny
model: {{num_layers: 2, d_model: 16, num_heads: 2, memory_length: 8}}
data: {{path: {corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: 30}}
engine: {{kind: torch, threads: 1}}
evaluation: {{interval: 0, max_tokens: 200}}
metrics: {{tensorboard: false}}
""",
    )
    sweep = directory / "sweep.yaml"
    plan = [
        "scale",
        "context",
        "plan",
        str(directory / "tiny.yaml"),
        "--segments",
        "8",
        "--memories",
        "0",
        "8",
    ]
    with redirect_stdout(io.StringIO()) as said:
        assert main([*plan, "--out", str(sweep)]) == 0
    assert "every run: optim.schedule.warmup_steps is 5% of its steps (the exp" in said.getvalue()
    cells = read_sweep(sweep).cells
    assert [cell.name for cell in cells] == ["t8-m0-same-tokens", NOT_TRAINED, "t8-m8"]
    for cell in cells:
        if cell.name != NOT_TRAINED:
            run_dir = directory / "runs" / cell.name
            assert (
                main(
                    [
                        "train",
                        str(directory / "tiny.yaml"),
                        "--run-dir",
                        str(run_dir),
                        *cell.overrides,
                    ]
                )
                == 0
            )
    torch.set_flush_denormal(False)  # training sets it for its process
    return directory


def collect(directory: Path, *options: object) -> int:
    sweep, runs, out = directory / "sweep.yaml", directory / "runs", directory / "context.csv"
    arguments = ["scale", "context", "collect", sweep, "--runs-dir", runs, "--out", out, *options]
    return main([str(item) for item in arguments])


def test_every_run_is_evaluated_with_0_to_8_times_its_memory(swept, capsys):
    assert collect(swept) == 0
    said = capsys.readouterr().out
    rows = list(csv.DictReader((swept / "context.csv").read_text().splitlines()))
    cells = read_sweep(swept / "sweep.yaml").cells
    assert "9 evaluations to make, 3 made already: about " in said, "3 by the runs themselves"
    assert "2 of 3 cells evaluated" in said
    assert f"left out: {NOT_TRAINED}: not started: there is no run directory" in said
    for cell in cells:
        mine = [row for row in rows if row["name"] == cell.name and not row["excluded"]]
        if cell.name == NOT_TRAINED:
            assert not mine
            continue
        config = config_of(cell, swept / "sweep.yaml")
        unit = config.model.memory_length or config.data.segment_length
        assert [int(row["evaluated_memory"]) for row in mine] == [
            round(unit * x) for x in (0, 0.5, 1, 2, 4, 8)
        ]
        measured = [
            line
            for line in RunDir(swept / "runs" / cell.name).read_metrics()
            if line["kind"] == "evaluation"
        ]
        own = (swept / "runs" / cell.name, [config.model.memory_length])
        assert _evaluator(0)(*own) == pytest.approx([measured[-1]["loss"]], abs=1e-4)
    before = (swept / "context.csv").read_text()
    assert collect(swept) == 0
    assert "0 evaluations to make, 12 made already\n" in capsys.readouterr().out
    assert (swept / "context.csv").read_text() == before


def test_own_memory_measures_nothing_that_the_runs_have_and_drops_nothing_that_was_measured(
    swept, tmp_path, capsys
):
    shutil.copytree(swept / "runs", tmp_path / "runs")
    shutil.copy(swept / "sweep.yaml", tmp_path)
    shutil.copy(swept / "tiny.yaml", tmp_path)
    assert collect(tmp_path, "--own-memory") == 0
    assert "0 evaluations to make, 3 made already\n" in capsys.readouterr().out
    table = tmp_path / "context.csv"
    rows = [row for row in csv.DictReader(table.read_text().splitlines()) if row["recipe"]]
    found = {(row["name"], row["evaluated_memory"], row["seed"]) for row in rows}
    assert found == {
        ("t8-m0-same-tokens", "0", "1"), ("t8-m8", "0", "1"), ("t8-m8", "8", "1")
    }  # fmt: skip
    assert main(["scale", "context", "report", str(table)]) == 0
    assert collect(tmp_path) == 0
    assert collect(tmp_path, "--own-memory") == 0
    assert "0 evaluations to make, 12 made already\n" in capsys.readouterr().out


def test_runs_of_two_seeds_get_a_line_each_and_are_one_recipe():
    assert recipe_id(BASE) == recipe_id(replace(BASE, seed=7))
    rows = [
        ContextRow(
            name=f"m{memory}", same_tokens="yes", segment_length=32, N=100, D=100, C=1e9,
            times=1.0, memory_length=memory, evaluated_memory=memory, loss=2.0, recipe="r",
            seed=seed,
        )
        for seed in (1, 2) for memory in (0, 64)
    ]  # fmt: skip
    refuse_repeats(rows)
    lines = loss_by_memory(rows, PAGE).axes[0].get_lines()
    assert [str(line.get_label()) for line in lines] == ["32, N=100 seed=1", "32, N=100 seed=2"]


def test_runs_of_other_models_get_a_line_each_and_are_named():
    modern = replace(BASE, model=replace(BASE.model, norm="rmsnorm", norm_position="pre"))
    runs = {
        f"{name}-m{memory}": replace(
            run, name=name, model=replace(run.model, memory_length=memory), engine=EngineConfig()
        )
        for name, run in (("paper", BASE), ("modern", modern))
        for memory in (0, 64, 256)
    }
    differs = differences_of(runs)
    assert differs["paper-m0"] == "model.norm=layernorm model.norm_position=post"
    assert differs["modern-m64"] == "model.norm=rmsnorm model.norm_position=pre"
    rows = [
        ContextRow(
            name=name, same_tokens="yes", segment_length=32, N=100, D=100, C=1e9, times=1.0,
            memory_length=run.model.memory_length, evaluated_memory=run.model.memory_length,
            loss=2.0 + number / 10, recipe=recipe_id(run), differs=differs[name],
        )
        for number, (name, run) in enumerate(runs.items())
    ]  # fmt: skip
    lines = loss_by_memory(rows, PAGE).axes[0].get_lines()
    assert [len(line.get_xdata()) for line in lines] == [3, 3]  # before: one line through all six
    labels = {str(line.get_label()) for line in lines}
    assert labels == {f"32, {differs['paper-m0']}", f"32, {differs['modern-m0']}"}
    assert differences_of({name: runs[name] for name in ("paper-m0", "paper-m64")}) == {
        "paper-m0": "",
        "paper-m64": "",
    }


def test_a_run_without_a_good_checkpoint_is_left_out_with_the_reason(swept, tmp_path, capsys):
    shutil.copytree(swept / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "t8-m8" / "checkpoints")
    runs, out = str(tmp_path / "runs"), str(tmp_path / "context.csv")
    command = [
        "scale",
        "context",
        "collect",
        str(swept / "sweep.yaml"),
        "--runs-dir",
        runs,
        "--out",
        out,
    ]
    assert main([*command, "--max-tokens", "50"]) == 0
    said = capsys.readouterr().out
    assert "1 of 3 cells evaluated" in said
    assert "left out: t8-m8: cannot be evaluated: " in said
    assert "has no checkpoint yet" in said


def test_runs_of_other_settings_than_the_sweeps_are_not_evaluated(swept, tmp_path, capsys):
    shutil.copy(swept / "sweep.yaml", tmp_path)
    write_text(tmp_path / "tiny.yaml", (swept / "tiny.yaml").read_text() + "seed: 2\n")
    sweep, output = tmp_path / "sweep.yaml", tmp_path / "context.csv"
    words = ["collect", sweep, "--runs-dir", swept / "runs", "--output", output]
    assert main(["scale", "context", *map(str, words)]) == 2
    assert "has other settings: seed 1 -> 2" in capsys.readouterr().err
    assert not output.exists()


def test_the_report_shows_both_comparisons_and_other_memories(swept, capsys):
    assert collect(swept, "--max-tokens", 100) == 0
    said = capsys.readouterr().out
    assert f"next: pretrain scale context report {swept / 'context.csv'}\n" in said
    out = swept / "context-report"
    assert (
        main(
            [
                "scale",
                "context",
                "report",
                str(swept / "context.csv"),
                "--title",
                "Tiny",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert re.search(r"^Equal tokens\n\nrun +segment +memory .*\nt8-m", said, re.M)
    assert re.search(r"^Other memory than in training\n\nrun +0x +0\.5x .*\nt8-m", said, re.M)
    assert said.endswith(f"report: {out / 'report.html'}\n")
    page = (out / "report.html").read_text()
    for words in (
        "<h1>Tiny</h1>",
        "Equal tokens",
        "Equal FLOPs",
        "Other memory than in training",
        "8x",
    ):
        assert words in page
    assert {path.stem for path in out.glob("*.png")} == {"same_tokens", "same_flops", "evaluated"}
    assert page.count("<svg") == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "'pretrain scale context collect' writes it"),
        ("name,loss\na,1\n", "no column 'same_tokens'"),
        (
            "HEAD\nr,,a,yes,,8,8,100,100,1e9,8,1.0,2.5,\nr,,b,yes,,8,8,100,100,1e9,8,1.0,2.6,\n",
            "a and b have the same settings, segment and memory",
        ),
        ("HEAD\nr,,a,yes,,8,8,100,100,1e9,8,1.0,nan,\n", "row 2: loss='nan', expected a number"),
        (
            "HEAD\nr,,a,maybe,,8,8,100,100,1e9,8,1.0,2.5,\n",
            "row 2: same_tokens='maybe', expected yes or nothing",
        ),
        (
            "HEAD\nr,,a,yes,,8,8,,,,,,,stopped at step 3 of 9: mid-schedule\n",
            "contains no evaluated run",
        ),
    ],
)
def test_bad_tables_take_one_line(tmp_path, capsys, text, said):
    head = "recipe,differs,name,same_tokens,same_flops,segment_length,memory_length,N,D,C,evaluated_memory,times,loss,excluded"  # noqa: E501
    if text is not None:
        write_text(tmp_path / "context.csv", text.replace("HEAD", head))
    assert (
        main(
            [
                "scale",
                "context",
                "report",
                str(tmp_path / "context.csv"),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_sweep_of_another_kind_and_a_wrong_directory_take_one_line(swept, tmp_path, capsys):
    shutil.copy(swept / "tiny.yaml", tmp_path / "tiny.yaml")
    write_text(
        tmp_path / "sweep.yaml", "format: 1\nname: x\ncells: [{name: a, experiment: tiny.yaml}]\n"
    )
    for sweep, runs, said in (
        (
            tmp_path,
            tmp_path,
            "sweep.yaml was planned to fit scaling laws: use 'pretrain scale",
        ),
        (swept, tmp_path / "nowhere", "is not a directory"),
    ):
        words = ["collect", str(sweep / "sweep.yaml"), "--runs-dir", str(runs)]
        assert main(["scale", "context", *words]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_a_real_checkpoint_has_the_bytes_that_describe_counts(swept):
    run_dir = RunDir(swept / "runs" / "t8-m8")
    files = run_dir.checkpoints.glob("step-00000030/*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    random_state = tensors.pop("random.cpu")
    assert random_state.nbytes < 6000
    assert sum(tensor.nbytes for tensor in tensors.values()) == checkpoint_bytes(run_dir.config)


def test_a_run_on_a_cpu_records_fp32_where_its_experiment_says_auto(swept):
    assert load_config(RunConfig, swept / "tiny.yaml").engine.precision == "auto"
    assert RunDir(swept / "runs" / "t8-m8").config.engine.precision == "fp32"
