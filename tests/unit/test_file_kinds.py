"""A file of one kind given as another: one line says what it is and which command takes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from data_pipeline.cli import main as data_pipeline
from data_pipeline.config import CorpusConfig
from foundation.files import write_text
from foundation.yaml_files import KINDS
from launcher.cli import main as launcher
from pretrain.cli import main as pretrain
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import ClusterConfig
from pretrain.scaling.sweep_file import Sweep
from pretrain.scaling.variants import Comparison

CONFIGS = Path(__file__).parents[2] / "configs"
SCHEMAS = {
    "a corpus configuration": CorpusConfig,
    "an experiment": RunConfig,
    "a cluster file": ClusterConfig,
    "a sweep": Sweep,
    "a comparison of variants": Comparison,
}
SHIPPED = {
    "a corpus configuration": "data",
    "an experiment": "experiments",
    "a cluster file": "clusters",
    "a sweep": "sweeps",
    "a comparison of variants": "comparisons",
}
EXPERIMENT = str(CONFIGS / "experiments" / "demo.yaml")
CALLS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "a corpus configuration": (data_pipeline, ("build", "FILE")),
    "an experiment": (pretrain, ("describe", "FILE")),
    "a cluster file": (launcher, ("submit", EXPERIMENT, "--cluster", "FILE")),
    "a sweep": (launcher, ("sweep", "status", "FILE")),
    "a comparison of variants": (pretrain, ("scale", "plan", "FILE")),
}


def test_a_kind_is_told_by_settings_that_no_other_kind_has():
    names = {kind: {each.name for each in fields(schema)} for kind, schema in SCHEMAS.items()}
    names["a sweep"].add("grid")
    assert {kind.name for kind in KINDS} == set(SCHEMAS)
    for kind in KINDS:
        others = set().union(*(names[other] for other in names if other != kind.name))
        assert kind.marks <= names[kind.name] - others, kind.name


@pytest.mark.parametrize("given", SHIPPED)
@pytest.mark.parametrize("wanted", CALLS)
def test_every_shipped_file_is_recognized_where_another_kind_is_wanted(given, wanted, capsys):
    main, words = CALLS[wanted]
    for file in sorted((CONFIGS / SHIPPED[given]).glob("*.yaml")):
        if given == wanted or (given, wanted) == ("an experiment", "a comparison of variants"):
            continue  # a plan takes either
        assert main([word.replace("FILE", str(file)) for word in words]) == 2
        error = capsys.readouterr().err
        assert f"{file}: found {given}, expected {wanted}; use it as in '" in error
        assert error.count("\n") == 1


def test_an_override_or_a_misspelt_setting_does_not_make_a_file_another_kind(tmp_path, capsys):
    write_text(tmp_path / "x.yaml", "model: {vocab_size: 300}\ngpu: H100\n")
    assert pretrain(["describe", str(tmp_path / "x.yaml")]) == 2
    assert re.search("gpu: unknown setting", capsys.readouterr().err)
    cpu = str(CONFIGS / "clusters" / "cpu.yaml")
    assert pretrain(["describe", cpu, "model.vocab_size=300"]) == 2
    assert "found a cluster file" in capsys.readouterr().err


def test_describe_takes_only_a_cluster_file_as_its_cluster(capsys):
    assert pretrain(["describe", EXPERIMENT, "--cluster", EXPERIMENT]) == 2
    assert "found an experiment, expected a cluster file" in capsys.readouterr().err
