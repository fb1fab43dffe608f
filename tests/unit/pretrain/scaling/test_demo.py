"""`examples/scaling-demo.sh` as far as seconds allow: its text, every command but the training."""

import argparse
import re
import shlex
import subprocess
from math import log
from pathlib import Path

import pytest

from benchmarks import texts
from data_pipeline.cli import main as data_pipeline
from foundation.settings import load_config
from launcher.commands import sweep as launcher_sweep
from pretrain.cli import main
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import run_cost
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.law import Law
from pretrain.sweeps.cell_runs import config_of
from pretrain.sweeps.sweep_file import read_sweep
from tests.helpers.checkout import ROOT
from tests.helpers.scaling_runs import train_by_the_law
from tests.worked_example import BLOCK, blocks_of, filled

EXPERIMENT = "configs/experiments/scaling-demo.yaml"
LAW = Law(E=1.0, A=89.4, B=600.0, alpha=0.5, beta=0.5)  # 45 tokens per parameter are best
SMALLEST_TEXT = 5.5e6  # bytes; what this Python and its neighbors ship is more


# In place of the programs that the script runs: each prints its command line.
PROGRAMS = """
say() { printf '%q ' "$@"; echo; }
for program in python data-pipeline pretrain launcher; do
    eval "$program() { say $program \\"\\$@\\"; }"
done
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> list[list[str]]:
    """What the script runs, as words."""
    script = PROGRAMS + (ROOT / "examples" / "scaling-demo.sh").read_text()
    folder = tmp_path_factory.mktemp("empty")  # not where a demo has left its runs
    printed = subprocess.run(
        ["bash", "-ec", script], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    return list(map(shlex.split, printed.stdout.splitlines()))


def lowest_at(rate: float, run: RunConfig) -> float:
    """A last loss by the law, higher at other rates than this one."""
    cost, apart = run_cost(run), log(run.optim.learning_rate / rate)
    return float(LAW.loss(cost.parameters, cost.tokens)) + 0.1 * apart**2


def walk(words: list[str], here: Path) -> list[str]:
    """Run a command of the demo in `here`; runs are not trained, but leave what training leaves."""
    program, *rest = [
        word.replace("runs/scaling-demo", str(here)).replace(EXPERIMENT, str(here / "demo.yaml"))
        for word in words
    ]
    if program == "data-pipeline":
        rest[1] = str(ROOT / rest[1])
        assert data_pipeline(rest) == 0
        return []
    if program == "pretrain":
        assert main(rest) == 0
    elif (program, rest[0]) == ("launcher", "local"):
        experiment, _, directory, _, card = rest[1:]
        run = with_vocabulary(load_config(RunConfig, Path(experiment)))
        RunDir(Path(directory)).path.mkdir()
        RunDir(Path(directory)).sign_forecast(Path(card), run)
        train_by_the_law(Path(directory), run, loss=lowest_at(0.02, run), law=LAW)
    elif program == "launcher":
        parser = argparse.ArgumentParser()
        launcher_sweep.add_submit_arguments(parser)
        parsed = parser.parse_args(rest[2:])
        assert (rest[:2], parsed.local, parsed.jobs) == (["sweep", "submit"], True, 2)
        for cell in read_sweep(parsed.sweep).cells:
            run = with_vocabulary(config_of(cell, parsed.sweep))
            loss = lowest_at(0.02, run)
            train_by_the_law(parsed.runs_dir / cell.name, run, loss=loss, law=LAW)
    else:
        return []
    return rest


def test_the_demo_tunes_plans_fits_and_forecasts_a_run_that_comes_out_inside(
    commands, tmp_path, capsys
):
    assert texts.main([str(tmp_path / "text.jsonl")]) == 0
    text = (ROOT / EXPERIMENT).read_text()
    (tmp_path / "demo.yaml").write_text(text.replace("runs/scaling-demo", str(tmp_path)))
    walked = [walk(words, tmp_path) for words in commands]
    actions = [words[words[0] != "local"] for words in walked if words]
    tuned, swept = ["plan", "submit", "collect", "report"], ["plan", "submit", "collect", "fit"]
    assert actions == [*tuned, *swept, "forecast", "fit", "local", "grade", "report"]
    said = capsys.readouterr().out
    for each in (r"512 .* optim\.learning_rate=0\.02 ", r"rate: .* 2\.0e-02", r"rely on \d"):
        assert re.search(each, said), each
    assert re.search(r"^inside: measured .* \([+-]0\.\d\d%\)", said, re.M)
    assert "signed: before the run began" in said
    assert load_config(RunConfig, tmp_path / "best.yaml").optim.learning_rate == pytest.approx(0.02)

    cells = read_sweep(tmp_path / "sweep.yaml").cells
    budgets = [cell.facts["budget"] for cell in cells]
    assert [budgets.count(budget) for budget in sorted(set(budgets))] == [5, 5, 5, 5]
    assert max(cell.facts["tokens"] for cell in cells) < SMALLEST_TEXT
    shapes = [config_of(cell, tmp_path / "sweep.yaml").model for cell in cells]
    assert all(4 <= model.d_model <= 64 and model.num_layers == 2 for model in shapes)
    tuning = sum(cell.facts["flops"] for cell in read_sweep(tmp_path / "tune.yaml").cells)
    assert tuning < 0.2 * sum(cell.facts["flops"] for cell in cells)

    blocks = blocks_of(tmp_path)
    page = (ROOT / "docs" / "scaling-example.md").read_text()
    assert {found[2] for found in BLOCK.finditer(page)} == blocks.keys()
    assert all(block in filled(page, blocks) for block in blocks.values())
    assert re.search(r"^    2 IsoFLOP .* 0\.5\d+ \[", blocks["fit"], re.M)
