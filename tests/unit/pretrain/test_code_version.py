from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from pretrain.rundir.code_version import PACKAGES, code_version

ROOT = Path(__file__).parents[3]


def version_of(copy: Path) -> str:
    code = "from pretrain.rundir.code_version import code_version; print(code_version())"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env={"PYTHONPATH": str(copy)}, stdout=subprocess.PIPE, check=True  # noqa: E501
    ).stdout.decode().strip()  # fmt: skip


def test_a_copy_of_the_code_has_its_version_and_an_edit_another(tmp_path):
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    assert re.fullmatch(r"[\w.]+\+[0-9a-f]{12}", code_version())
    assert version_of(tmp_path) == code_version()
    with open(tmp_path / "pretrain" / "schedule.py", "a") as file:
        file.write("# a change\n")
    assert version_of(tmp_path) != code_version()
