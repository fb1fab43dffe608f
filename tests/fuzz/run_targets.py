"""Files of runs and of exports."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from foundation.files import content_of, sha256_of
from foundation.typed_values import to_tree
from launcher import cli as launcher
from pretrain import cli as pretrain
from pretrain.checkpoint.object_store import MIRROR_INDEX, RUN_FILES, MirrorIndex, StoredCheckpoint
from pretrain.rundir.heartbeat import HeartbeatRecord
from pretrain.rundir.restore import restore_run
from pretrain.rundir.run_dir import RunDir
from pretrain.weights.export import load_export
from tests.fuzz.mutations import json_text
from tests.fuzz.target import Refused, Target, command, parse_lines, write_lines
from tests.helpers.stores import QUICK, FileServer


def run_targets(run: Path, experiment: Path) -> dict[str, Target]:
    step = sorted((run / "checkpoints").iterdir())[-1].relative_to(run)
    attempt, heartbeat = "attempt", "heartbeats/ranks-from-00000.jsonl"
    place = {"rank": 0, "hostname": "n1", "pid": 1}
    record = HeartbeatRecord(**place, time=1.0, written=2.0, step=1, phase="train")
    (run / heartbeat).write_text(json.dumps(vars(record)))

    def resume(copy: Path) -> object:
        """Return the loss of one more step."""
        more = ("optim.steps=4", "optim.schedule.shape=constant")
        command(pretrain.main, "train", experiment, *more, "--run-dir", copy)
        last = json.loads((copy / "metrics.jsonl").read_bytes().splitlines()[-1])
        return last["kind"], last["step"], last["loss"]

    def seal_index(copy: Path) -> None:
        (copy / step / "COMPLETE").write_text(sha256_of(copy / step / "index.json") + "\n")

    def seal_file(name: str) -> Callable[[Path], None]:
        def seal(copy: Path) -> None:
            path = copy / step / name
            index = json.loads((copy / step / "index.json").read_bytes())
            size = path.stat().st_size
            index["ranks"][0].update(bytes=size, sha256=sha256_of(path))
            (copy / step / "index.json").write_bytes(json_text(index))
            seal_index(copy)

        return seal

    def resumed(name: str, parse: Any = None, seal: Any = None) -> Target:
        return Target(run, name, resume, parse, seal=seal, seconds=0.1)

    def resumed_with(name: str, *form: Any) -> Target:
        return Target(run, name, resume, *form, is_protected=False, seconds=0.1)

    def seen(name: str, parse: Any = json.loads, write: Any = json_text) -> Target:
        return Target(run, name, _look_at_run, parse, write, is_protected=False)

    def reported(name: str, parse: Any, write: Any) -> Target:
        report = partial(command, pretrain.main, "report")
        return Target(run, name, report, parse, write, is_protected=False, seconds=1.0)

    lines, file = (parse_lines, write_lines), "rank-00000.safetensors"
    return {
        "checkpoint index": resumed(f"{step}/index.json", json.loads, seal_index),
        "marker": resumed(f"{step}/COMPLETE"),
        "rank's file": resumed(f"{step}/{file}", None, seal_file(file)),
        "ledger of a resume": resumed_with("ledger.jsonl", *lines),
        "metrics of a resume": resumed_with("metrics.jsonl", *lines),
        "run.json of a resume": resumed_with("run.json", json.loads),
        "config.yaml of a resume": resumed_with("config.yaml", yaml.safe_load),
        "token of an attempt": resumed_with(attempt, None),
        "ledger": seen("ledger.jsonl", *lines),
        "metrics": seen("metrics.jsonl", *lines),
        "run.json": seen("run.json"),
        "config.yaml": seen("config.yaml", yaml.safe_load),
        "heartbeat": seen(heartbeat, *lines),
        "lock": seen("train.lock"),
        "index in a list": seen(f"{step}/index.json"),
        "ledger in a report": reported("ledger.jsonl", *lines),
        "metrics in a report": reported("metrics.jsonl", *lines),
        "config.yaml in a report": reported("config.yaml", yaml.safe_load, json_text),
    }


def _look_at_run(copy: Path) -> None:
    refusals = 0
    for main, *arguments in (
        (launcher.main, "status", copy),
        (launcher.main, "status", copy, "--json"),
        (launcher.main, "logs", copy, "--errors"),
        (pretrain.main, "checkpoint", "list", copy),
        (pretrain.main, "checkpoint", "verify", copy),
        (pretrain.main, "describe", copy),
    ):
        try:
            command(main, *arguments)
        except Refused:
            refusals += 1
    if refusals:
        raise Refused


def mirror_targets(home: Path, run: Path) -> dict[str, Target]:
    """What a run's mirror has in a store, as files; the run has one checkpoint in it."""
    step = sorted((run / "checkpoints").iterdir())[-1]
    stored = StoredCheckpoint.of(step)
    shutil.copytree(step, home / stored.folder)
    for name in RUN_FILES:
        shutil.copy(run / name, home / stored.folder)
    run_files = {name: content_of(run / name) for name in RUN_FILES}
    index = MirrorIndex(RunDir(run).identity.id, (replace(stored, run_files=run_files),))
    (home / MIRROR_INDEX).write_bytes(index.to_bytes())

    def restore(copy: Path) -> object:
        """Return what arrives from a server of these files."""
        target = copy.parent / "scratch" / "restored"
        with FileServer(copy) as server:
            step = restore_run(server.url, target, QUICK)
        run_dir = RunDir.open(target)
        return step, run_dir.identity, sha256_of(run_dir.metrics), len(run_dir.ledger.read())

    return {"index of a mirror": Target(home, MIRROR_INDEX, restore, seconds=0.1)}


def export_targets(export: Path) -> dict[str, Target]:
    weights = "model.safetensors"
    return {
        "export": Target(export, "config.json", _read_export, seal=_seal_export),
        "exported weights": Target(export, weights, _read_export, None, seal=_seal_export),
    }


def _read_export(copy: Path) -> object:
    module, config, step = load_export(copy)
    weights = hashlib.sha256()
    for parameter in module.parameters():
        weights.update(parameter.detach().numpy().tobytes())
    return to_tree(config), step, weights.hexdigest()


def _seal_export(copy: Path) -> None:
    """Repair the checksums of the weights and of the settings that list them."""
    path, weights = copy / "config.json", copy / "model.safetensors"
    tree = json.loads(path.read_bytes())
    entry = {"bytes": weights.stat().st_size, "sha256": sha256_of(weights)}
    tree["files"]["model.safetensors"] = entry
    content = {name: value for name, value in tree.items() if name != "hash"}
    text = json.dumps(content, sort_keys=True)
    path.write_bytes(json_text({**tree, "hash": hashlib.sha256(text.encode()).hexdigest()}))
