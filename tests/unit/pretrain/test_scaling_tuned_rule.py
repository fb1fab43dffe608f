"""Rates of sweeps in plans: a rule over the rungs, with its interval, and its limits."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from foundation.files import write_text
from pretrain.commands import scale
from pretrain.config.data import DataConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.intervals import Interval
from pretrain.scaling.rates import Rung, TunedRule
from pretrain.scaling.sweep_file import config_of, read_sweep
from tests.helpers.metrics import train_line

POWER, BEST_BATCH = -0.4, 2048
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)


def best_rate(body: float) -> float:
    return 2e-3 * (body / 1e5) ** POWER


def command(*words: object) -> int:
    return scale.PROGRAM.main([str(word) for word in words])


def experiment(width: int) -> str:
    return (
        f"name: books{width}\n"
        f"model: {{vocab_size: 512, num_layers: 2, d_model: {width}, num_heads: {width // 16}, "
        "memory_length: 64}\ndata: {segment_length: 64, lanes: 16, path: absent}\n"
        "optim: {steps: 200, schedule: {warmup_steps: 10}}\n"
    )


def tuned(directory, width: int, lanes=(16, 32)) -> str:
    """The table of a sweep of rates and batches whose runs ended in a valley around `best_rate`."""
    write_text(directory / f"{width}.yaml", experiment(width))
    sweep, runs = directory / f"tune{width}.yaml", directory / f"runs{width}"
    words = ("plan", directory / f"{width}.yaml", "--rates", *RATES, "--lanes", *lanes)
    assert command(*words, "--output", sweep) == 0
    rng = np.random.default_rng(width)
    for cell in read_sweep(sweep).cells:
        config = config_of(cell, sweep)
        apart = math.log(config.optim.learning_rate / best_rate(cost_of(config).body_parameters))
        of_batch = 0.05 * abs(math.log(config.tokens_per_step / BEST_BATCH))
        loss = 3 + 0.1 * apart**2 + of_batch + 1e-3 * rng.standard_normal()
        run_dir, last = RunDir.create(runs / cell.name, config), config.optim.steps
        lines = [train_line(last, loss, tokens=last, seconds=1.0)]
        lines.append({"kind": "evaluation", "step": last, "loss": loss})
        write_text(run_dir.metrics, "".join(json.dumps(line) + "\n" for line in lines))
        run_dir.ledger.append(TrainingBegan(step=0, world_size=1))
    assert command("collect", sweep, "--runs-dir", runs) == 0
    return str(runs / "runs.csv")


def test_rates_of_two_rungs_give_every_cell_of_a_plan_its_rate_and_batch(tmp_path, capsys):
    rungs = [tuned(tmp_path, 32), tuned(tmp_path, 128)]
    capsys.readouterr()
    words = (
        "plan",
        tmp_path / "128.yaml",
        "--budgets",
        "1e14",
        "1e15",
        "--no-checks",
        "--sizes",
        3,
    )
    output = ("--output", tmp_path / "plan.yaml")
    assert command(*words, "--tuned", *rungs, *output) == 0
    said = capsys.readouterr().out
    cells = read_sweep(tmp_path / "plan.yaml").cells
    for cell in cells:
        run = config_of(cell, tmp_path / "plan.yaml")
        wanted = best_rate(cell.facts["body_parameters"])
        assert run.optim.learning_rate == pytest.approx(wanted, rel=0.06)
        assert run.tokens_per_step == BEST_BATCH
    line = re.search(r"rate: tuned on .*; N\^(-[\d.]+) between", said)
    assert line
    assert float(line[1]) == pytest.approx(POWER, abs=0.05)
    assert "batch: the best of those tried; the same at every size" in said
    assert "Step Law" not in said
    assert any("tuned by" in note for note in read_sweep(tmp_path / "plan.yaml").notes)


def test_one_rungs_rate_is_used_at_all_sizes_and_doubted_far_from_it(tmp_path, capsys):
    rung = tuned(tmp_path, 32, lanes=(16,))
    capsys.readouterr()
    words = ("plan", tmp_path / "32.yaml", "--budgets", "1e15", "--no-checks", "--sizes", 2)
    assert command(*words, "--tuned", rung, "--output", tmp_path / "plan.yaml") == 0
    said = capsys.readouterr().out
    assert "the same at every size, as of one rung: add a second" in said
    assert re.search(
        r"warning: 2 of 2 cells, such as \S+, are over 4x from the rungs in size", said
    )
    runs = [config_of(c, tmp_path / "plan.yaml") for c in read_sweep(tmp_path / "plan.yaml").cells]
    assert len({run.optim.learning_rate for run in runs}) == 1
    assert {run.data.lanes for run in runs} == {16}, "no batches were compared"


@pytest.mark.parametrize("base_width", [0, 64])
def test_runs_far_longer_or_shorter_than_the_rungs_are_doubted_also_where_rates_transfer(
    base_width,
):
    model = ModelConfig(
        vocab_size=512, num_layers=4, d_model=128, num_heads=8, base_width=base_width
    )
    shaped = RunConfig(name="cell", model=model, data=DataConfig(path="absent"))
    body = cost_of(shaped).body_parameters
    rule = TunedRule(rungs=(rung(body, 1e-3, base_width),), base_width=base_width)
    per_step = cost_of(shaped).tokens_per_step

    def doubts(tokens: float) -> list[str]:
        steps = replace(shaped.optim, steps=round(tokens / per_step))
        lines = rule.describe([replace(shaped, optim=steps)])
        return [line for line in lines if line.startswith("warning")]

    assert doubts(8 * 20 * body) == doubts(20 * body / 8) == []
    for tokens in (12 * 20 * body, 20 * body / 12):
        (line,) = doubts(tokens)
        assert line.startswith("warning: 1 of 1 cell, such as cell, are over 4x from the rungs")


def test_a_sweep_without_a_best_rate_is_no_rung(tmp_path, capsys):
    tuned(tmp_path, 32, lanes=(16,))
    for cell in read_sweep(tmp_path / "tune32.yaml").cells:
        path = RunDir(tmp_path / "runs32" / cell.name).metrics
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[-1]["loss"] = 3 - math.log(cell.facts["learning_rate"])  # falls up to the last rate
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    assert command("collect", tmp_path / "tune32.yaml", "--runs-dir", tmp_path / "runs32") == 0
    capsys.readouterr()
    words = ("plan", tmp_path / "32.yaml", "--budgets", "1e15", "--output", tmp_path / "plan.yaml")
    assert command(*words, "--tuned", tmp_path / "runs32" / "runs.csv") == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: --tuned .*: has no best rate: 0.008 is the highest .*\n", said)


def rung(body: float, rate: float, base_width: int = 0, width: float = 1.2) -> Rung:
    return Rung(
        body_parameters=body,
        tokens=20 * body,
        rate=Interval(rate, rate / width, rate * width),
        tokens_per_step=4096,
        num_batches=1,
        base_width=base_width,
    )


def test_rates_that_transfer_are_those_of_the_rungs_at_any_width():
    rungs = (rung(1e6, 1e-3, base_width=256), rung(8e6, 1.2e-3, base_width=256))
    model = ModelConfig(vocab_size=512, d_model=1024, num_heads=16, num_layers=8)
    run = RunConfig(model=model, data=DataConfig(lanes=16))
    rate, batch = TunedRule(rungs=rungs, base_width=256)(run, 1e9)
    assert rate == pytest.approx(1.095e-3, rel=1e-3)
    assert batch == 0, "the run's own"
    assert TunedRule(rungs=rungs, base_width=128)(run, 1e9)[0] > 1.2e-3, "another base: a power"
    mixed = (rungs[0], replace(rungs[1], base_width=0))
    assert not TunedRule(rungs=mixed, base_width=256).transfers


def test_batches_follow_the_rungs_that_compared_some():
    batches = ((1e6, 4096, 3), (16e6, 16384, 3), (64e6, 1024, 1))
    rungs = tuple(
        replace(rung(body, 1e-3, base_width=256), tokens_per_step=batch, num_batches=number)
        for body, batch, number in batches
    )
    for base_width in (0, 256):  # rates transfer between widths, batches grow with D
        rule = TunedRule(rungs=rungs, base_width=base_width)
        run = RunConfig(model=ModelConfig(vocab_size=512), data=DataConfig(lanes=16))
        assert rule(run, 20e6)[1] == pytest.approx(4096)
        assert rule(run, 320e6)[1] == pytest.approx(16384)
        assert "D^0.500 between" in rule.describe([])[1]
