from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.cli import main


def test_starting_the_launcher_imports_no_torch():
    code = (
        "import sys, launcher.cli, launcher.commands.local\n"
        "found = {'torch', 'deepspeed', 'streaming', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_misspelt_command_is_answered_with_the_nearest(capsys):
    assert main(["locla"]) == 2
    assert "did you mean 'local'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        (["{experiment}", "--ranks", "3"], "data.lanes=8 does not divide over 3 ranks"),
        (["{experiment}", "--ranks", "0"], "--ranks=0 must be 1 or more"),
        (["{experiment}", "optim.stps=3"], "did you mean 'steps'"),
        (["{experiment}", "--run-dir=x.yaml"], "x.yaml is a file, expected a directory"),
        (["{experiment}", "--run-dir=."], "holds other files and no run (x.yaml)"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("data: {lanes: 8}\n")
    assert main(["local", *(text.format(experiment="x.yaml") for text in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.yaml"]
