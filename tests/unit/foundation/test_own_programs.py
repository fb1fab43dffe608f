"""How this project starts its own programs."""

import subprocess
import sys
from pathlib import Path

from pretrain.processes.local_ranks import train_command


def run_in(directory: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


def test_a_module_in_the_working_directory_is_not_executed(tmp_path):
    for name in ("argparse", "yaml", "pretrain", "runpy"):
        (tmp_path / f"{name}.py").write_text("print('EXECUTED')\n")
    missing = tmp_path / "missing.yaml"
    done = run_in(tmp_path, train_command(missing, tmp_path / "run"))
    assert done.returncode == 2
    assert "EXECUTED" not in done.stdout
    assert "missing.yaml" in done.stderr


def test_the_processes_of_a_build_do_not_import_from_the_working_directory(tmp_path):
    for name in ("multiprocessing", "signal", "socket", "data_pipeline", "hostile"):
        (tmp_path / f"{name}.py").write_text(f"open('EXECUTED-{name}', 'w')\n")
    code = (
        "import sys; sys.path.remove('')\n"
        "import multiprocessing, os\n"
        "from data_pipeline.builder import parallel_build as parts\n"
        "context = multiprocessing.get_context('forkserver')\n"
        "context.set_forkserver_preload(['hostile'])\n"
        "parts._start_server()\n"
        "child = context.Process(target=print, args=('alive',))\n"
        "child.start(); child.join(); print(os.getcwd())\n"
    )
    done = run_in(tmp_path, [sys.executable, "-c", code])
    assert done.stdout == f"alive\n{tmp_path}\n", done.stderr
    assert not list(tmp_path.glob("EXECUTED*"))
