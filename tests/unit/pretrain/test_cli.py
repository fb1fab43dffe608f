from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.cli import main as data_main
from foundation.errors import ConfigError
from launcher.cli import main as launcher
from pretrain.cli import COMMANDS, main
from pretrain.commands import generate

ROOT = Path(__file__).parents[3]
# Prints, of each command line, its exit status, its error, and whether torch was imported by then.
COMMAND_LINES = """
import contextlib, io, json, sys
from pretrain.cli import main
found = []
for line in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        found.append([main(line), error.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""
ACTIONS = {
    "checkpoint": ("list", "verify", "prune"),
    "scale": ("plan", "collect", "fit", "predict", "tasks", "report", "memory", "measure"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys, command):
    try:
        status = main([command, "--help"])
    except SystemExit as exited:  # argparse's way
        status = exited.code
    assert status == 0
    assert f"usage: pretrain {command}" in capsys.readouterr().out


def test_a_command_with_actions_takes_its_arguments(capsys):
    assert main(["scale", "fit", "nowhere.csv"]) == 2
    assert "nowhere.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "line", "expected"),
    [
        ("pretrain", "eval x", "use 'pretrain evaluate RUN'"),
        ("pretrain", "sample x", "use 'pretrain generate RUN'"),
        ("pretrain", "scale fit sweep.yaml", "'pretrain scale collect sweep.yaml' writes"),
        ("launcher", "train x.yaml", "use 'launcher local EXPERIMENT, or launcher submit'"),
        ("launcher", "stop x", "use 'launcher cancel RUN'"),
        ("launcher", "ps", "use 'launcher status'"),
        ("launcher", "sweep run x.yaml", "use 'launcher sweep submit SWEEP --local'"),
        ("pretrain", "settings gpus", "use --ranks of launcher local"),
        ("pretrain", "checkpoint runs/x", "one of fetch, list, prune, verify comes before runs/x"),
        ("data-pipeline", "tokenize x", "use 'data-pipeline build CONFIG --input PATH"),
    ],
)
def test_first_guesses_are_answered_with_the_right_word(capsys, program, line, expected):
    mains = {"pretrain": main, "launcher": launcher, "data-pipeline": data_main}
    assert mains[program](line.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert expected in said


def test_settings_may_stand_before_between_and_after_options(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("model: {vocab_size: 100}\n")
    arguments = [
        str(tmp_path / "x.yaml"),
        "--mfu",
        "0.5",
        "model.num_layers=2",
        "--gpu",
        "H100",
        "model.d_model=64",
    ]
    assert main(["describe", *arguments]) == 0
    assert "at an MFU of 50%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--promt=x", "unrecognized arguments: --promt=x; did you mean '--prompt'?"),
        ("--prom=x", "did you mean '--prompt'?"),
        ("--temp=1", "did you mean '--temperature'?"),
        ("--prompt-file=/", "--prompt-file / cannot be read (Is a directory)"),
        ("optim.steps=9", "unrecognized arguments: optim.steps=9; a trained model keeps its sett"),
        ("Once upon", "unrecognized arguments: Once upon; give the text to continue with --prompt"),
        ("--top-k", "--top-k: expected one argument; see pretrain generate --help"),
        ("--temperature=hot", "invalid float value: 'hot'; see pretrain generate --help"),
    ],
)
def test_a_misspelt_flag_is_answered_in_one_line_with_the_nearest(capsys, flag, answer):
    assert main(["generate", "run", flag]) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("after", "has_hint"), [("-hot", True), ("--seed=1", False)])
def test_only_a_value_that_begins_with_a_dash_is_told_to_follow_an_equals_sign(
    capsys, after, has_hint
):
    assert main(["generate", "run", "--prompt", after]) == 2
    error = capsys.readouterr().err
    assert "--prompt: expected one argument; " in error
    assert ("a value that starts with a dash follows an equals sign" in error) is has_hint


def test_a_wrong_flag_is_answered_before_torch_is_imported():
    names = [f"{name} {x}".split() for name in COMMANDS for x in ACTIONS.get(name, ("",))]
    lines = [[*name, "x.yaml", "--wrong"] for name in names]
    child = subprocess.run(
        [sys.executable, "-c", COMMAND_LINES], input=json.dumps(lines), text=True, cwd=ROOT,
        capture_output=True, check=True,
    )  # fmt: skip
    for line, (status, error, has_torch) in zip(lines, json.loads(child.stdout), strict=True):
        assert status == 2, line
        assert "--wrong" in error, line
        assert not has_torch, line


def test_characters_that_an_output_cannot_encode_are_shown_as_escapes(corpus, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert data_main(["inspect", str(corpus.directory)]) == 0
    output.flush()
    assert rb"na\xefve \u2192" in output.buffer.getvalue()


def test_overrides_may_stand_before_the_experiment_too(tmp_path, capsys):
    experiment = tmp_path / "x.yaml"
    experiment.write_text("name: mine\nmodel: {vocab_size: 100}\n")
    assert main(["describe", "model.num_layers=2", str(experiment), "name=other"]) == 0
    before = capsys.readouterr().out
    assert main(["describe", str(experiment), "model.num_layers=2", "name=other"]) == 0
    assert capsys.readouterr().out == before
    assert before.startswith("other: ")
    for wrong in (["name=x"], ["name=x", str(experiment), str(experiment)]):
        assert main(["describe", *wrong]) == 2
        assert capsys.readouterr().err == (
            f"error: found {' '.join(wrong)}, expected one experiment and overrides of its "
            "settings\n"
        )


def test_a_file_may_follow_a_flag_of_several_numbers_and_another_argument_is_told_the_order(
    tmp_path, capsys
):
    experiment, sweep = tmp_path / "x.yaml", tmp_path / "sweep.yaml"
    experiment.write_text("name: mine\nmodel: {vocab_size: 100}\n")
    plan = ["scale", "plan", "--output", str(sweep), "--rates", "1e-3", "2e-3", "4e-3"]
    assert main([*plan, str(experiment), "data.lanes=8"]) == 0
    assert "data.lanes=8" in sweep.read_text()
    capsys.readouterr()
    order = "takes all words up to the next flag, so write other arguments first\n"
    assert main([*plan, "runs/mine"]) == 2
    assert capsys.readouterr().err.endswith(f"'runs/mine'; --rates {order}")
    assert main([*plan[:2], "--rates", "1e-3", "--seeds"]) == 2
    assert "--seeds: expected at least one argument; see" in capsys.readouterr().err
    assert main(["scale", "plan", "--budgets", "1e15", "--ladder", str(experiment)]) == 2
    assert capsys.readouterr().err.endswith(f"are required: EXPERIMENT; --ladder {order}")


def test_a_misspelt_flag_is_named_also_where_it_should_have_been_a_required_one(capsys):
    assert main(["train", "x.yaml", "--rundir", "runs/x"]) == 2
    expected = "error: unrecognized arguments: --rundir; did you mean '--run-dir'?\n"
    assert capsys.readouterr().err == expected
    assert main(["train", "x.yaml"]) == 2
    assert "the following arguments are required: --run-dir" in capsys.readouterr().err


def test_a_misspelt_command_is_answered_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--name", "name=VALUE"),
        ("--learning-rate", "optim.learning_rate=VALUE"),
        ("--lr", "optim.learning_rate=VALUE"),
        ("--optim.steps", "optim.steps=VALUE"),
        ("--run-name", "name=VALUE"),
        ("--lanes", "data.lanes=VALUE or evaluation.lanes=VALUE"),
    ],
)
def test_a_setting_with_dashes_is_told_to_have_none(capsys, flag, setting):
    assert main(["train", "x.yaml", "--run-dir", "runs/x", flag, "9"]) == 2
    expected = f"error: unrecognized arguments: {flag}; a setting has no dashes: {setting}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("flag", ["--dry-run", "--colors=2", "--data"])
def test_a_flag_that_is_no_setting_is_answered_with_the_flags_that_there_are(capsys, flag):
    assert launcher(["local", "x.yaml", flag]) == 2
    error = capsys.readouterr().err
    assert f"error: unrecognized arguments: {flag}; expected one of: " in error
    assert "--run-dir" in error
    assert "no dashes" not in error


def test_settings_for_a_run_that_resumes_belong_to_the_command_that_started_it(tmp_path, capsys):
    assert launcher(["resume", str(tmp_path), "optim.steps=9"]) == 2
    assert "a run resumes with its own settings; to change some" in capsys.readouterr().err


def test_a_prompt_may_come_from_a_file(tmp_path):
    (tmp_path / "prompt.txt").write_text("Grüße\n")
    (tmp_path / "latin").write_bytes("Grüße".encode("latin-1"))
    arguments = argparse.Namespace(prompt="", prompt_file=tmp_path / "prompt.txt")
    generate._take_prompt_file(arguments)
    assert arguments.prompt == "Grüße\n"
    arguments.prompt_file = tmp_path / "latin"
    with pytest.raises(ConfigError, match="not UTF-8"):
        generate._take_prompt_file(arguments)
