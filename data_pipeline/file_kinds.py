"""Kinds of YAML files, told apart by settings that only one kind has at its top level."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError


@dataclass(frozen=True)
class FileKind:
    """A kind of file, and a command that takes one."""

    name: str
    command: str  # FILE stands for the file
    marks: frozenset[str]  # settings by which it is recognized


def _kind(name: str, command: str, marks: str) -> FileKind:
    return FileKind(name, command, frozenset(marks.split()))


KINDS = (
    _kind("a sweep", "launcher sweep plan FILE", "grid cells"),
    _kind("a comparison of variants", "pretrain scale plan FILE", "flops members"),
    _kind(
        "a cluster file",
        "launcher submit EXPERIMENT --cluster FILE",
        "partition gpus_per_node ranks_per_node gpu cpus_per_rank time_limit environment",
    ),
    _kind(
        "an experiment",
        "pretrain describe FILE",
        "model data optim engine evaluation checkpoint metrics recovery",
    ),
    _kind(
        "a corpus configuration",
        "data-pipeline build FILE",
        "tokenizer input validation_fraction validation_bytes text_field",
    ),
)


def names_of(schema: Any) -> list[str]:
    """Return the settings at the top level of a schema."""
    return [each.name for each in fields(schema)]


def refuse_other_kind(tree: Mapping[str, Any], path: Path, known: Collection[str]) -> None:
    """Raise ConfigError if the file is of another kind than one with the settings `known`.

    A file with settings of several kinds is a misspelt one of the right kind.
    """
    expected = next((kind for kind in KINDS if not kind.marks.isdisjoint(known)), None)
    found = [kind for kind in KINDS if not kind.marks.isdisjoint(tree)]
    if expected and found and expected not in found:
        command = found[0].command.replace("FILE", str(path))
        raise ConfigError(
            f"{path}: found {found[0].name}, expected {expected.name}; use it as in '{command}'"
        )
