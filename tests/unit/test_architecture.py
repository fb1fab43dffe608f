"""The packages' direction and the homes of heavy dependencies, read from the imports of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.config_loader import load_config
from pretrain.config.run import RunConfig

ROOT = Path(__file__).parents[2]
PACKAGES = ("data_pipeline", "pretrain", "launcher")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAY_IMPORT = {
    "data_pipeline": {"data_pipeline"},
    "pretrain": {"data_pipeline", "pretrain"},
    "launcher": {"data_pipeline", "pretrain", "launcher"},
}
# Where a heavy dependency may be imported; a folder stands for all modules in it.
HOMES = {
    "deepspeed": ("pretrain/engines/deepspeed_engine.py",),
    "triton": ("pretrain/kernels/",),
    "streaming": ("data_pipeline/",),
    "webdataset": ("data_pipeline/",),
    "sentencepiece": ("data_pipeline/tokenizer.py", "data_pipeline/builder/train_tokenizer.py"),
    "torch.utils.tensorboard": ("pretrain/metrics/writers.py",),
    "torch": ("pretrain/",),
}
EXPERIMENTS = sorted((ROOT / "configs" / "experiments").glob("*.yaml")) + sorted(
    (ROOT / "configs" / "models").glob("*.yaml")
)


def imports_of(path: Path) -> Iterator[str]:
    """Every module named in an import statement, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_in_one_direction_and_to_their_homes(path):
    name = str(path.relative_to(ROOT))
    package = name.split("/")[0]
    for imported in imports_of(path):
        first = imported.split(".")[0]
        if first in PACKAGES:
            assert first in MAY_IMPORT[package], f"{name} imports {imported}"
        for dependency, homes in HOMES.items():
            if imported == dependency or imported.startswith(dependency + "."):
                assert name.startswith(homes), f"{name} imports {imported}, whose home is {homes}"


def test_the_rule_sees_imports_inside_functions(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def f():\n    import torch.nn\n    from deepspeed import x\n")
    assert list(imports_of(path)) == ["torch.nn", "deepspeed"]


@pytest.mark.parametrize("package", ["data_pipeline", "launcher"])
def test_a_torch_free_package_imports_no_torch_by_detours_either(package):
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in MODULES
        if path.parts[len(ROOT.parts)] == package
        and path.name not in ("__init__.py", "__main__.py")
    ]
    code = (
        f"import importlib as i, sys\nfor name in {modules!r}: i.import_module(name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_every_experiment_and_model_file_is_valid(path):
    config = load_config(RunConfig, path)
    assert config.model.num_layers > 1


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_outgrows_what_one_reads_in_a_sitting(path):
    assert len(path.read_text().splitlines()) <= 400
