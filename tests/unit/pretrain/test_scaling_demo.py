"""`make scaling-demo`, as far as seconds allow: its text, its plan, and that every command is one."""  # noqa: E501

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from data_pipeline.config_loader import load_config
from launcher.commands import sweep as launcher_sweep
from pretrain.cli import main
from pretrain.commands import scale
from pretrain.config.run import RunConfig
from pretrain.demo import texts
from pretrain.scaling.sweep_file import config_of, read_sweep

REPOSITORY = Path(__file__).parents[3]
SMALLEST_TEXT = 5.5e6  # bytes; what this Python and its neighbors ship is more


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """What the recipe runs, as words."""
    recipe = ["make", "--dry-run", "--old-file=.venv/.installed", "scaling-demo"]
    done = subprocess.run(recipe, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.replace("\\\n", " ").splitlines()]


def test_the_demos_plan_is_three_budgets_of_five_sizes_and_a_hold_out(commands, tmp_path, capsys):
    plan = next(words for words in commands if words[:3] == ["pretrain", "scale", "plan"])
    plan[3] = str(REPOSITORY / plan[3])
    plan[plan.index("--output") + 1] = str(tmp_path / "sweep.yaml")
    overrides = ["--set", "model.vocab_size=257", f"data.path={tmp_path}/absent"]
    assert main([*plan[1:], *overrides]) == 0
    cells = read_sweep(tmp_path / "sweep.yaml").cells
    fitted = [cell for cell in cells if not cell.holdout]
    budgets = [cell.facts["budget"] for cell in fitted]
    assert [budgets.count(budget) for budget in sorted(set(budgets))] == [5, 5, 5]
    assert [cell.facts["budget"] > max(budgets) for cell in cells if cell.holdout] == [True]
    assert max(cell.facts["tokens"] for cell in cells) < SMALLEST_TEXT
    shapes = [config_of(cell, tmp_path / "sweep.yaml").model for cell in cells]
    assert all(8 <= model.d_model <= 64 and model.num_layers == 2 for model in shapes)


def test_every_command_of_the_demo_is_understood_and_it_says_what_it_is(commands):
    scaling = [words[2:] for words in commands if words[:2] == ["pretrain", "scale"]]
    for action, *flags in scaling:
        target, _ = scale.PROGRAM.commands[action]
        module, _, name = target.partition(":")
        parser = argparse.ArgumentParser()
        prefix = f"add_{name}_arguments" if name else "add_arguments"
        getattr(importlib.import_module(module), prefix)(parser)
        parser.parse_args(flags)
    actions = [action for action, *_ in scaling]
    assert actions == ["plan", "collect", "fit", "predict", "report", "predict"]
    sweeping = next(words for words in commands if words[0] == "launcher")
    parser = argparse.ArgumentParser()
    launcher_sweep.add_submit_arguments(parser)
    parsed = parser.parse_args(sweeping[3:])
    assert sweeping[1:3] == ["sweep", "submit"]
    assert (parsed.local, parsed.jobs) == (True, 2)
    assert any("demonstrates the workflow" in " ".join(words) for words in commands)
    assert (
        load_config(RunConfig, REPOSITORY / "configs/experiments/scaling-demo.yaml").name
        == "scaling-demo"
    )


def test_the_standard_librarys_text_is_written_as_jsonl(tmp_path, capsys):
    path = tmp_path / "text.jsonl"
    assert texts.main([str(path)]) == 0
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(len(document["text"].encode()) for document in documents) > SMALLEST_TEXT
    assert f"{len(documents):,} documents" in capsys.readouterr().out


def test_a_missing_file_name_takes_one_line(capsys):
    assert texts.main([]) == 2
    error = capsys.readouterr().err
    assert "expected one, the file to write" in error
    assert error.count("\n") == 1
