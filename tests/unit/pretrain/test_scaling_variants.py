"""Sweeps of variants: equal FLOPs, best rates, and plan, training, probes and report for
real.
"""

from __future__ import annotations

import argparse
import importlib
import io
import math
import shlex
import subprocess
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foundation.files import write_text
from foundation.settings import load_config
from launcher.commands import sweep as launcher_sweep
from pretrain.cli import main
from pretrain.commands import evaluate
from pretrain.commands.scale import PROGRAM
from pretrain.config.run import RunConfig
from pretrain.costs.flops import computed_flops_of_step
from pretrain.costs.memory import checkpoint_bytes
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.collect import Row, read_rows
from pretrain.scaling.comparison_pages import variant_notes, variant_table
from pretrain.scaling.sweep_file import read_sweep
from pretrain.scaling.variants import (
    MemberResult,
    compared_rows,
    member_of,
    plan_members,
    read_comparison,
    results_of,
)
from tests.helpers.corpora import make_tiny_corpus

REPOSITORY = Path(__file__).parents[3]
COMPARISONS = sorted((REPOSITORY / "configs" / "comparisons").glob("*.yaml"))
TINY = """name: tiny
model: {num_layers: 2, d_model: 16, num_heads: 2, memory_length: 8}
data: {path: CORPUS, lanes: 2, segment_length: 8}
engine: {kind: torch}
evaluation: {interval: 0, lanes: 2}
metrics: {tensorboard: false}
"""
TWO = """name: two
experiment: tiny.yaml
flops: 1e8
rates: [1e-5, 4e-3]
seeds: [3, 4]
settings: [evaluation.max_tokens=200]
members:
  no-memory: [model.memory_length=0]
  long: ["model.memory_length=[8, 32]"]
"""


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_members_of_the_shipped_comparisons_differ_and_train_for_as_many_flops(path):
    comparison = read_comparison(path, ["model.vocab_size=257"])
    planned = plan_members(comparison, path.parent / comparison.experiment)
    members = list(comparison.members)
    assert len(planned) == len(members) * len(comparison.rates) * len(comparison.seeds)
    assert [member_of(item.name) for item in planned[: len(members)]] == members, "they take turns"
    runs = {member_of(item.name): item.run for item in planned[: len(members)]}
    assert len({item.name for item in planned}) == len(planned)
    for member, run in runs.items():
        flops = computed_flops_of_step(run, 1) * run.optim.steps
        assert flops == pytest.approx(comparison.flops, rel=0.01), member
        assert run.tokens_per_step == runs["transformer-xl"].tokens_per_step
    assert len({str(replace(run, name="x")) for run in runs.values()}) == len(runs)


@pytest.mark.parametrize("member", ["xl", "a-lr-b", "k2-s1"])
def test_a_cells_name_tells_its_member(member):
    assert member_of(f"c4e11-{member}-lr0.002-s7") == member


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seeds: [3, 4]|seeds: [3, 3]", "different numbers, none negative"),
        ("rates: [1e-5, 4e-3]|rates: [0]", "different numbers, none negative"),
        ("flops: 1e8|flops: 0", "0 FLOPs pay for 0 steps of 16 tokens"),
        ("flops: 1e8|flops: 1e6", "c1e06-no-memory-lr1e-05-s3: 1e+06 FLOPs pay for 0.8"),
        ("  no-memory: [model.memory_length=0]\n|", "found 1 members, expected two"),
        ("model.memory_length=0|optim.steps=9", "optim.steps=9 follows from flops"),
        ("evaluation.max_tokens=200|seed=9", "seed=9 follows from flops"),
        ("model.memory_length=0|model.memory=0", "cell c1e08-no-memory-lr1e-05-s3 (over"),
        ("no-memory:|no/memory:", "members"),
        ("rates: [1e-5, 4e-3]|rates: []", "expected one or more different numbers, none negative"),
        ("rates: [1e-5, 4e-3]|rates:", "rates: found no value, expected a list"),
        (
            f"{TWO[TWO.index('members') :]}|members: [a]\n",
            "members: found ['a'], expected a section",
        ),
        ("experiment: tiny|experiment: absent", "does not exist (experiment is relative to the"),
        ("seeds: [3, 4]|seeds: []", "expected one or more different numbers, none negative"),
        ("flops: 1e8|flops: 5e25", "expected 50 to 1e+12; change the FLOPs"),
        ("[model.memory_length=0]|3", "members.no-memory is 3; write settings as on a command"),
    ],
)
def test_a_wrong_comparison_is_refused_in_a_line(tmp_path, capsys, text, said):
    before, after = text.split("|")
    assert before in TWO
    write_text(tmp_path / "tiny.yaml", TINY.replace("CORPUS", str(tmp_path / "absent")))
    write_text(tmp_path / "two.yaml", TWO.replace(before, after))
    out = tmp_path / "sweep.yaml"
    plan = ["scale", "plan", str(tmp_path / "two.yaml"), "--output", str(out)]
    assert main([*plan, "model.vocab_size=300"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_overrides_hold_for_all_members_and_those_that_the_plan_makes_are_refused(tmp_path, capsys):
    write_text(tmp_path / "tiny.yaml", TINY.replace("CORPUS", str(tmp_path / "absent")))
    write_text(tmp_path / "two.yaml", TWO)
    out = tmp_path / "sweep.yaml"
    plan = ["scale", "plan", str(tmp_path / "two.yaml"), "--output", str(out)]
    for refused in ("optim.steps=9", "checkpoint.interval=9"):
        assert main([*plan, "model.vocab_size=300", refused]) == 2
        assert f"{refused} follows from flops, rates and seeds" in capsys.readouterr().err
        assert not out.exists()
    assert main([*plan, "model.vocab_size=300", "model.d_model=8"]) == 0
    cells = read_sweep(out).cells
    assert len(cells) == 8
    assert all({"model.d_model=8", "model.vocab_size=300"} <= {*x.overrides} for x in cells)


def ended(member: str, rate: float, loss: float | str, seed: int = 1) -> Row:
    return Row(
        name=f"c1e09-{member}-lr{rate:g}-s{seed}",
        progress=1.0 if loss else 0.5,
        loss=loss,
        learning_rate=rate,
        seed=seed,
        excluded="diverged" if loss == math.inf else "",
    )


def test_a_members_best_rate_has_the_lowest_mean_of_its_seeds_once_all_runs_have_ended():
    seeds = [ended("a", 1e-3, 2.0), ended("a", 2e-3, 1.9), ended("a", 4e-3, math.inf)]
    seeds += [ended("a", 1e-3, 1.9, 2), ended("a", 2e-3, 2.1, 2), ended("a", 4e-3, 0.1, 2)]
    running = [ended("b", 1e-3, 1.0), ended("b", 2e-3, "")]
    diverged = [ended("c", 1e-3, math.inf)]
    found = compared_rows([*seeds, *running, *diverged])
    assert {member: [row.loss for row in rows] for member, rows in found.items()} == {
        "a": [2.0, 1.9]
    }


def result(member: str, losses: tuple[float, ...], is_edge: bool = False) -> MemberResult:
    return MemberResult(
        member=member,
        first=Row(name=member, N=1000, D=5000, C=1e9, learning_rate=1e-3, lane_bytes=2048),
        losses_S=losses,
        is_edge=is_edge,
        tokens_per_second=10.0,
        probes={
            "probes/far_loss": 1.75,
            "probes/needle/8": 0.5,
            "probes/needle/16": 0.25,
            "probes/chance": 0.1,
        },
    )


def test_the_table_has_means_over_seeds_the_far_tokens_and_the_edge_of_the_rates():
    results = [result("worse", (2.0, 2.25), is_edge=True), result("better", (1.0,))]
    heads, *rows = variant_table(results)
    better, worse = (dict(zip(heads, row, strict=True)) for row in rows)
    assert [better["member"], worse["member"]] == ["better", "worse"]
    assert [worse["loss"], worse["+-"], better["+-"]] == ["2.1250", "0.1250", "-"]
    assert better["loss from token 512"] == "1.7500"
    assert [better["needle"], better["rate"], worse["rate"]] == ["37.5%", "0.001", "0.001*"]
    assert any("lowest or highest rate" in line for line in variant_notes(results))
    assert not any("lowest or highest rate" in line for line in variant_notes(results[1:]))


def call(*words: object) -> str:
    with redirect_stdout(io.StringIO()) as said:
        assert main(["scale", *map(str, words)]) == 0
    return said.getvalue()


def train(directory: Path) -> list[str]:
    """Train the cells that are new; return their names."""
    trained = []
    for cell in read_sweep(directory / "sweep.yaml").cells:
        run_dir = directory / "cells" / cell.name
        if not run_dir.exists():
            command = ["train", str(directory / "tiny.yaml"), "--run-dir", str(run_dir)]
            assert main([*command, *cell.overrides]) == 0
            trained.append(cell.name)
    torch.set_flush_denormal(False)  # training sets it for its process
    return trained


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """A comparison whose cells were planned, trained and probed as `make` does it."""
    directory = tmp_path_factory.mktemp("variants")
    corpus = make_tiny_corpus(directory / "corpus")
    write_text(directory / "tiny.yaml", TINY.replace("CORPUS", str(corpus)))
    write_text(directory / "two.yaml", TWO)
    said = call("plan", directory / "two.yaml", "--output", directory / "sweep.yaml")
    assert "pretrain scale collect" in said
    assert len(train(directory)) == 8
    runs = sorted((directory / "cells").glob("c*-s*"))
    probe = ["--probe", "needle", "position", "--trials=4", "--longest-distance=32"]
    assert main(["evaluate", *map(str, runs), *probe, "--max-tokens=200"]) == 0
    return directory


def test_finished_members_are_in_the_table_with_all_of_their_seeds(compared):
    call("collect", compared / "sweep.yaml", "--runs-dir", compared / "cells")
    table, out = compared / "cells" / "runs.csv", compared / "report"
    said = call("report", table, "--output", out)
    assert "means of 2 seeds" in said
    found = {each.member: each for each in results_of(read_rows(table))}
    assert set(found) == {"no-memory", "long"}
    assert found["long"].first.lane_bytes == 4 * 16 * (8 + 32) + 4 * 32, "two layers, documents"
    assert found["no-memory"].first.lane_bytes == 0
    assert float(found["no-memory"].first.D) > float(found["long"].first.D), "as many FLOPs"
    for each in found.values():
        assert len(each.losses_S) == 2
        assert (each.first.learning_rate, each.is_edge) == (4e-3, True)
        assert set(each.probed("needle")) == {8, 16, 32}
        assert each.tokens_per_second > 0
    page = (out / "report.html").read_text()
    assert all(f"{each.loss:.4f}" in page for each in found.values())
    assert {path.name for path in out.glob("*.png")} == {"variants.png", "positions.png"}


def test_a_run_with_other_settings_than_its_cell_is_refused(compared, tmp_path, capsys):
    write_text(tmp_path / "tiny.yaml", (compared / "tiny.yaml").read_text())
    write_text(tmp_path / "two.yaml", TWO.replace("[8, 32]", "[32, 8]"))
    sweep = tmp_path / "sweep.yaml"
    call("plan", tmp_path / "two.yaml", "--output", sweep)
    assert main(["scale", "collect", str(sweep), "--runs-dir", str(compared / "cells")]) == 2
    assert "model.memory_length" in capsys.readouterr().err


def test_without_a_finished_member_there_is_no_page(compared, tmp_path, capsys):
    (tmp_path / "cells").mkdir()
    cells = [str(compared / "sweep.yaml"), "--runs-dir", str(tmp_path / "cells")]
    assert main(["scale", "collect", *cells]) == 0
    capsys.readouterr()
    assert main(["scale", "report", str(tmp_path / "cells" / "runs.csv")]) == 2
    assert "no member has ended at all of its rates" in capsys.readouterr().err


def test_a_real_checkpoint_has_the_bytes_that_describe_counts(compared):
    run_dir = RunDir(compared / "cells" / "c1e08-no-memory-lr0.004-s3")
    steps = run_dir.config.optim.steps
    files = run_dir.checkpoints.glob(f"step-{steps:08}/*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    random_state = tensors.pop("random.cpu")
    assert random_state.nbytes < 6000
    assert sum(tensor.nbytes for tensor in tensors.values()) == checkpoint_bytes(run_dir.config)


def test_a_run_on_a_cpu_records_fp32_where_its_experiment_says_auto(compared):
    assert load_config(RunConfig, compared / "tiny.yaml").engine.precision == "auto"
    run_dir = RunDir(compared / "cells" / "c1e08-no-memory-lr0.004-s3")
    assert run_dir.config.engine.precision == "fp32"


@pytest.mark.parametrize("options", [[], ["QUICK=1"], ["CORPUS=x/books/", "CLUSTER=c.yaml"]])
def test_every_command_of_make_compare_variants_is_understood(options):
    recipe = ["make", "--dry-run", "--old-file=.venv/.installed", "compare-variants", *options]
    done = subprocess.run(recipe, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    commands = [shlex.split(line) for line in done.stdout.replace("\\\n", " ").splitlines()]
    actions = []
    for words in commands:
        parser = argparse.ArgumentParser()
        if words[:2] == ["pretrain", "scale"]:
            module, _, name = PROGRAM.commands[words[2]][0].partition(":")
            add = f"add_{name}_arguments" if name else "add_arguments"
            getattr(importlib.import_module(module), add)(parser)
            parsed = parser.parse_intermixed_args(words[3:])
            actions.append(words[2])
            if words[2] == "plan":
                assert (REPOSITORY / parsed.experiment).is_file()
        elif words[:2] == ["pretrain", "evaluate"]:
            evaluate.add_arguments(parser)
            probed = parser.parse_args(words[2 : words.index(">")])
            assert probed.probe == ["needle", "position"]
            actions.append("probe")
        elif words[0] == "launcher":
            launcher_sweep.add_submit_arguments(parser)
            assert bool(parser.parse_args(words[3:]).cluster) == ("CLUSTER=c.yaml" in options)
            actions.append("submit")
    assert actions == ["plan", "submit", "probe", "collect", "report"]
    assert any("data-pipeline" in words for words in commands) == ("CORPUS=x/books/" not in options)
