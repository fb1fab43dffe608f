"""The index of a checkpoint, index.json: what it says is checked once, before anything acts on it.

format, run, step, world_size, config     which checkpoint it is
files      name -> bytes and sha256       of every file but index and marker, as a list of the parts
                                          that one rank each has written, one after the other
pieces     parameter -> kinds and runs    which rank's file has which elements (`pieces.py`)
ranks      first_lane, num_lanes, cursor  of every rank, in their order; `past`, an earlier cursor;
                                          `state`, the file with its memories (`state_of_rank`)
rebuild    steps, forgotten               null, or what memories that are not here are rebuilt from
tokens_seen, optimizer_steps, loss_scale, validation_loss
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import NoneType
from typing import Any

from data_pipeline.checked_fields import Fields, InvalidField, shown
from data_pipeline.errors import CheckpointError
from data_pipeline.files import parse_json
from pretrain.checkpoint import pieces
from pretrain.checkpoint.directory import KINDS, rank_file
from pretrain.terminal.text import counted

FORMAT = 6  # of a checkpoint: file names, keys of tensors and of the index


def parse_index(path: Path, content: bytes) -> dict[str, Any]:
    """Return the contents of the index; CheckpointError unless all its fields are right."""
    try:
        index = parse_json(content)
        fields = Fields(index)
        if index.get("format") == 5:
            _make_format_6(index)
        if (found := fields.integer("format")) != FORMAT:
            raise CheckpointError(
                f"{path}: found format {found}, expected format {FORMAT}; "
                "resume with the version that wrote it, or use a new run directory"
            )
        _check(fields, index)
    except (ValueError, InvalidField) as error:
        raise CheckpointError(
            f"{path}: found no index of a checkpoint of format {FORMAT} ({error})"
        ) from None
    return index


def _check(fields: Fields, index: dict[str, Any]) -> None:
    """Raise InvalidField unless the fields are of their types, and the ranks' lanes add up."""
    fields.text("run")
    for name in ("step", "tokens_seen", "optimizer_steps"):
        fields.integer(name)
    fields.object("config")
    if type(index.get("validation_loss", ...)) not in (int, float, NoneType):  # it may be NaN
        raise InvalidField("validation_loss is not a number")
    if "loss_scale" not in index:
        raise InvalidField("loss_scale is missing")
    if index["loss_scale"] is not None:
        scale = fields.object("loss_scale")
        scale.number("scale")
        scale.integer("updates")
    for name in fields.tree("files"):
        for part in fields.object("files").items(name):
            part.only(("bytes", "sha256")).integer("bytes")
            part.sha256("sha256")
    reports, next_lane = fields.items("ranks"), 0
    if fields.integer("world_size", least=1) != len(reports):
        raise InvalidField(f"world_size is {index['world_size']}, ranks has {len(reports)}")
    pieces.parsed(fields, len(reports))
    # Of a cursor, its reader checks what is in it; None before the first batch.
    for name in ("cursor", "past"):
        if not all(isinstance(each.get(name, ...), (dict, NoneType)) for each in index["ranks"]):
            raise InvalidField(f"a rank has no {name}")
    _check_rebuild(fields, index)
    for report in reports:
        report.integer("first_lane", next_lane, next_lane)
        next_lane += report.integer("num_lanes")
    if not next_lane:
        raise InvalidField("ranks have no lanes")
    _check_files(index["files"], [report.text("state") for report in reports])


def _check_files(files: dict[str, Any], states: list[str]) -> None:
    """Raise InvalidField unless each rank has its part in two of the files: its engine's, and the
    one of `states`.

    Whatever is listed is opened, so nothing but these names may be.
    """
    engines, possible = ([rank_file(kind, n) for n in range(len(states))] for kind in KINDS)
    parts = Counter([*engines, *states])
    for name, count in parts.items():
        if (found := len(files.get(name, ()))) != count:
            raise InvalidField(f"{shown(name)} has {counted(found, 'part')}, expected {count}")
    unknown = (files.keys() - parts.keys()) | (set(states) - set(possible))
    if unknown:
        raise InvalidField(f"found the file {shown(min(unknown))}, expected those of ranks only")


def _make_format_6(index: dict[str, Any]) -> None:
    """Format 5 had one file per rank and kind."""
    index["format"] = FORMAT
    if isinstance(files := index.get("files"), dict):
        index["files"] = {name: [entry] for name, entry in files.items()}
    if isinstance(reports := index.get("ranks"), list):
        for rank, report in enumerate(reports):
            if isinstance(report, dict):
                report["state"] = rank_file("state", rank)


def _check_rebuild(fields: Fields, index: dict[str, Any]) -> None:
    if "rebuild" not in index:
        raise InvalidField("rebuild is missing")
    if index["rebuild"] is not None:
        rebuild = fields.object("rebuild").only(("steps", "forgotten"))
        steps = rebuild.integer("steps", 1, index["step"])
        rebuild.integers("forgotten", steps - 1)
