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
    "scale": ("plan", "collect", "fit", "predict", "tasks", "report", "memory"),
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
        ("--promt=x", "unrecognized arguments: --promt; did you mean '--prompt'?"),
        ("--prom=x", "did you mean '--prompt'?"),
        ("--temp=1", "did you mean '--temperature'?"),
        ("--prompt-file=/", "--prompt-file / cannot be read (Is a directory)"),
        ("optim.steps=9", "unrecognized arguments: optim.steps=9; see pretrain generate --help"),
        ("--top-k", "--top-k: expected one argument; see pretrain generate --help"),
        ("--temperature=hot", "invalid float value: 'hot'; see pretrain generate --help"),
    ],
)
def test_a_misspelt_flag_is_answered_in_one_line_with_the_nearest(capsys, flag, answer):
    assert main(["generate", "run", flag]) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert error.count("\n") == 1


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


def test_a_misspelt_flag_is_named_also_where_it_should_have_been_a_required_one(capsys):
    assert main(["train", "x.yaml", "--rundir", "runs/x"]) == 2
    expected = "error: unrecognized arguments: --rundir; did you mean '--run-dir'?\n"
    assert capsys.readouterr().err == expected
    assert main(["train", "x.yaml"]) == 2
    assert "the following arguments are required: --run-dir" in capsys.readouterr().err


def test_a_misspelt_command_is_answered_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--dry-run", "--lr=2"])
def test_a_flag_that_is_no_setting_is_answered_with_the_flags_that_there_are(capsys, flag):
    assert launcher(["local", "x.yaml", flag]) == 2
    error = capsys.readouterr().err
    assert f"unrecognized arguments: {flag.partition('=')[0]}; expected one of: --attempts" in error
    assert "--run-dir" in error


def test_a_prompt_may_come_from_a_file(tmp_path):
    (tmp_path / "prompt.txt").write_text("Grüße\n")
    (tmp_path / "latin").write_bytes("Grüße".encode("latin-1"))
    arguments = argparse.Namespace(prompt="", prompt_file=tmp_path / "prompt.txt")
    generate._take_prompt_file(arguments)
    assert arguments.prompt == "Grüße\n"
    arguments.prompt_file = tmp_path / "latin"
    with pytest.raises(ConfigError, match="not UTF-8"):
        generate._take_prompt_file(arguments)
