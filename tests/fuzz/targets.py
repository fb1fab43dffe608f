"""What is fuzzed: a valid file, and what reads it.

A reader is a command as a user calls it, or the function that a rank calls. It returns what it
read, so that an accepted change can be compared with the valid file.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zstandard
from hypothesis import strategies as st

from data_pipeline import cli as data_pipeline
from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CacheConfig, CorpusConfig, TokenizerConfig
from data_pipeline.config_loader import load_config, to_tree
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.corpora.remote_corpus import CachedShards, local_corpus_directory
from data_pipeline.corpora.shard_cache import ShardCache
from data_pipeline.corpora.stores import RetryPolicy, store_at
from data_pipeline.files import sha256_of
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import Mixture, open_training_data
from data_pipeline.shards.shards import ShardFormat
from data_pipeline.tokenizer import Tokenizer, fingerprint_of
from launcher import cli as launcher
from launcher.slurm.cluster import ClusterConfig, load_cluster
from launcher.slurm.sbatch import Job, NodeRange, render
from launcher.status import slurm_queue
from pretrain import cli as pretrain
from pretrain.config.run import RunConfig
from pretrain.rundir.heartbeat import HeartbeatRecord
from pretrain.scaling.point_files import read_points
from pretrain.scaling.sweep_file import read_sweep
from pretrain.weights.export import load_export
from tests.fuzz.mutations import Change, changes, json_text
from tests.helpers.corpora import config_of, make_text, make_tiny_corpus, some_texts
from tests.helpers.stores import FileServer

ROOT = Path(__file__).parents[2]
LINES_OF_A_SCRIPT = 24  # at most, besides what a cluster file adds
SEGMENTS = 12  # that a reader of a corpus reads
IMPATIENT = RetryPolicy(attempts=2, timeout=1.0, pause=0.01, bytes_per_second=1e6)
TINY_MODEL = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_inner": 16, "memory_length": 8}


class Refused(Exception):
    """A command ended with a status other than 0, after it said why."""


@dataclass(frozen=True)
class Target:
    """A file below `home`, and `read`, which is given the path of a copy of `home`."""

    home: Path
    file: str
    read: Callable[[Path], object]
    parse: Callable[[bytes], Any] | None = json.loads  # None: only its bytes are changed
    write: Callable[[Any], bytes] = json_text
    seal: Callable[[Path], None] | None = None  # repair the checksums over the file
    # With checksums: whatever is accepted unrepaired must read as the valid file does.
    is_protected: bool = True
    seconds: float = 0.02  # about what an example takes


def changes_of(target: Target, targets: Mapping[str, Target]) -> st.SearchStrategy[Change]:
    """Changes of the target's file, which may be exchanged with those of the other targets."""
    others = {other.home / other.file for other in targets.values()} - {target.home / target.file}
    return changes(
        (target.home / target.file).read_bytes(),
        [other.read_bytes() for other in sorted(others)],
        target.parse,
        target.write,
    )


class Workplace:
    """The valid files, made once in a directory: corpora, a run, an export, settings."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self) -> dict[str, Target]:
        """Build everything, and say what to do with the files."""
        slurm_queue.SECOND_LOOK_SECONDS = 0.1  # a wait that is meant, before a run is called dead
        corpus = make_tiny_corpus(self.directory / "corpus", documents=12)
        experiment = self.directory / "experiment" / "experiment.yaml"
        experiment.parent.mkdir()
        experiment.write_text(yaml.safe_dump(_settings(corpus)))
        run, export = self.directory / "run", self.directory / "export"
        _command(pretrain.main, "train", experiment, "--run-dir", run)
        _command(pretrain.main, "export", run, "--output", export)
        return {
            **_corpus_targets(corpus),
            **_shard_targets(self.directory, corpus),
            "SentencePiece model": _sentencepiece_target(self.directory),
            **_run_targets(run, experiment),
            **_settings_targets(self.directory, experiment, corpus),
            **_result_targets(self.directory),
            **_text_targets(self.directory),
            "export": Target(export, "config.json", _read_export, seal=_seal_export),
            "exported weights": Target(
                export, "model.safetensors", _read_export, None, seal=_seal_export
            ),
        }


def _command(main: Callable[[list[str]], int], *arguments: object) -> None:
    """Run a command; Refused unless its status is 0."""
    status = main([str(argument) for argument in arguments])
    if status:
        assert status in (1, 2), f"exit status {status}"
        raise Refused


def _settings(corpus: Path) -> dict[str, Any]:
    return {
        "name": "fuzz",
        "model": TINY_MODEL,
        "data": {"path": str(corpus), "lanes": 2, "segment_length": 8},
        # constant, so that the steps to repeat do not depend on how many there will be
        "optim": {"steps": 3, "learning_rate": 1e-3, "schedule": {"shape": "constant"}},
        "engine": {
            "kind": "torch", "zero_stage": 0, "threads": 1, "watchdog_timeout_seconds": 0,
        },
        "checkpoint": {"interval": 2, "storage_patience_seconds": 0},
        "evaluation": {"interval": 2, "lanes": 1, "max_tokens": 20},
        "metrics": {"interval": 1, "tensorboard": False},
    }  # fmt: skip


# ----------------------------------------------------------------------------------------- corpora


def _corpus_targets(corpus: Path) -> dict[str, Target]:
    manifest = "train/manifest.json"
    return {
        "manifest": Target(corpus, manifest, _read_corpus, seal=_seal_manifest),
        "manifest over HTTP": Target(
            corpus, manifest, _read_remote_corpus, seal=_seal_manifest, seconds=0.1
        ),
        "tokenizer": Target(corpus, "tokenizer/tokenizer.json", _read_corpus),
        "tokenizer over HTTP": Target(
            corpus, "tokenizer/tokenizer.json", _read_remote_corpus, seconds=0.1
        ),
        "corpus as JSON": Target(
            corpus, "build.json", lambda copy: _command(data_pipeline.main, "inspect", copy)
        ),
    }


def _shard_targets(directory: Path, corpus: Path) -> dict[str, Target]:
    tars = _built(directory / "tars", shard_format="webdataset")
    shard = "train/shard.00000"
    return {
        "MDS shard": Target(
            corpus, f"{shard}.mds", _read_corpus, None, seal=_seal_shard(f"{shard}.mds")
        ),
        "tar shard": Target(
            tars, f"{shard}.tar", _read_corpus, None, seal=_seal_shard(f"{shard}.tar")
        ),
    }


def _built(directory: Path, shard_format: ShardFormat = "mds") -> Path:
    config = config_of(directory, some_texts(12), shard_format=shard_format)
    build_corpus(config)
    return config.output


def _read_corpus(copy: Path) -> str:
    _command(data_pipeline.main, "verify", copy)
    _command(data_pipeline.main, "inspect", copy)
    return _read_lanes(copy)


def _read_remote_corpus(copy: Path) -> str:
    """Fetch and read the corpus as training does, but give up earlier on a server."""
    config = CacheConfig(directory=copy.with_name("cache"), gib=1e-4)
    with FileServer(copy) as server:
        split = local_corpus_directory(Path(server.url), config, IMPATIENT) / "train"
        store = store_at(f"{server.url}/train", IMPATIENT)
        shards = CachedShards(store, ShardCache(config))
        return _tokens_of_lanes(Corpus(split, read_manifest(split), shards))


def _read_lanes(path: Path) -> str:
    return _tokens_of_lanes(open_training_data(path, (), CacheConfig()))


def _tokens_of_lanes(corpus: Corpus | Mixture) -> str:
    """Return the hash of the first tokens of two lanes."""
    stream = LaneStream(corpus, 2, 1, 16, range(2))
    digest = hashlib.sha256()
    for _ in range(SEGMENTS):
        digest.update(next(stream).tokens_BL.tobytes())
    return digest.hexdigest()


def _seal_manifest(copy: Path) -> None:
    path = copy / "train" / "manifest.json"
    tree = json.loads(path.read_bytes())
    content = {key: tree[key] for key in tree if key not in ("hash", "totals")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_bytes(json_text({**tree, "hash": hashlib.sha256(text.encode()).hexdigest()}))


def _seal_shard(name: str) -> Callable[[Path], None]:
    def seal(copy: Path) -> None:
        path, shard = copy / "train" / "manifest.json", copy / name
        tree = json.loads(path.read_bytes())
        entry = next(each for each in tree["shards"] if each["path"] == shard.name)
        entry |= {"size": shard.stat().st_size, "sha256": sha256_of(shard)}
        path.write_bytes(json_text(tree))
        _seal_manifest(copy)

    return seal


def _sentencepiece_target(directory: Path) -> Target:
    corpus = make_tiny_corpus(directory / "unigram", documents=12, vocabulary="unigram")

    def read(copy: Path) -> object:
        tokenizer = Tokenizer.load(copy)
        tokens = tokenizer.encode("The river carried a silver key.")
        return tokens.tolist(), tokenizer.decode(tokens), str(tokenizer.text_sizes())

    def seal(copy: Path) -> None:
        path = copy / "tokenizer.json"
        found = fingerprint_of("unigram", (copy / "tokenizer.model").read_bytes())
        path.write_bytes(json_text({**json.loads(path.read_bytes()), "fingerprint": found}))

    return Target(corpus / "tokenizer", "tokenizer.model", read, None, seal=seal)


# -------------------------------------------------------------------------------------------- runs


def _run_targets(run: Path, experiment: Path) -> dict[str, Target]:
    step = sorted((run / "checkpoints").iterdir())[-1].relative_to(run)
    attempt, heartbeat = "attempt", "heartbeats/rank-00000.json"
    record = HeartbeatRecord(time=1.0, written=2.0, step=1, phase="train", hostname="n1", pid=1)
    (run / heartbeat).write_text(json.dumps(vars(record)))

    def resume(copy: Path) -> object:
        """Return the loss of one more step."""
        _command(pretrain.main, "train", experiment, "optim.steps=4", "--run-dir", copy)
        last = json.loads((copy / "metrics.jsonl").read_bytes().splitlines()[-1])
        return last["kind"], last["step"], last["loss"]

    def seal_index(copy: Path) -> None:
        (copy / step / "COMPLETE").write_text(sha256_of(copy / step / "index.json") + "\n")

    def seal_file(name: str) -> Callable[[Path], None]:
        def seal(copy: Path) -> None:
            path = copy / step / name
            index = json.loads((copy / step / "index.json").read_bytes())
            index["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            (copy / step / "index.json").write_bytes(json_text(index))
            seal_index(copy)

        return seal

    def resumed(name: str, parse: Any = None, seal: Any = None, **more: Any) -> Target:
        return Target(run, name, resume, parse, seal=seal, seconds=0.1, **more)

    def seen(name: str, parse: Any = json.loads, write: Any = json_text) -> Target:
        return Target(run, name, _look_at_run, parse, write, is_protected=False)

    def reported(name: str, parse: Any, write: Any) -> Target:
        return Target(run, name, _report, parse, write, is_protected=False, seconds=1.0)

    lines = (_parse_lines, _write_lines)
    return {
        "checkpoint index": resumed(f"{step}/index.json", json.loads, seal_index),
        "marker": resumed(f"{step}/COMPLETE"),
        "report of a rank": resumed(
            f"{step}/rank-00000.json", json.loads, seal_file("rank-00000.json")
        ),
        "fragments": resumed(
            f"{step}/engine-00000.safetensors", None, seal_file("engine-00000.safetensors")
        ),
        "memories": resumed(
            f"{step}/state-00000.safetensors", None, seal_file("state-00000.safetensors")
        ),
        "ledger of a resume": Target(
            run, "ledger.jsonl", resume, *lines, is_protected=False, seconds=0.1
        ),
        "metrics of a resume": Target(
            run, "metrics.jsonl", resume, *lines, is_protected=False, seconds=0.1
        ),
        "run.json of a resume": resumed("run.json", json.loads, is_protected=False),
        "config.yaml of a resume": Target(
            run, "config.yaml", resume, yaml.safe_load, is_protected=False, seconds=0.1
        ),
        "token of an attempt": resumed(attempt, is_protected=False),
        "ledger": seen("ledger.jsonl", *lines),
        "metrics": seen("metrics.jsonl", *lines),
        "run.json": seen("run.json"),
        "config.yaml": seen("config.yaml", yaml.safe_load),
        "heartbeat": seen(heartbeat),
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
            _command(main, *arguments)
        except Refused:
            refusals += 1
    if refusals:
        raise Refused


def _report(copy: Path) -> None:
    _command(pretrain.main, "report", copy)


def _parse_lines(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


def _write_lines(tree: Any) -> bytes:
    lines = tree if isinstance(tree, list) else [tree]
    return b"".join(json_text(line) + b"\n" for line in lines)


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


# ---------------------------------------------------------------------------------------- settings


def _settings_targets(directory: Path, experiment: Path, corpus: Path) -> dict[str, Target]:
    """Settings are read as YAML, of which JSON is a part."""
    (directory / "settings").mkdir()

    def target(name: str, tree: Mapping[str, Any], read: Callable[[Path], object]) -> Target:
        path = directory / "settings" / f"{name}.yaml"
        path.write_text(yaml.safe_dump(dict(tree)))
        return Target(
            path.parent,
            path.name,
            lambda copy: read(copy / path.name),
            yaml.safe_load,
            is_protected=False,
        )

    sweep = {
        "format": 1,
        "name": "fuzz",
        "experiment": str(experiment),
        "grid": {"optim.learning_rate": [1e-3, 2e-3], "seed": [1, 2]},
    }
    cells = {
        "format": 1,
        "name": "fuzz",
        "notes": ["a"],
        "cells": [{"name": "x", "experiment": str(experiment), "overrides": ["seed=1"]}],
    }
    text = {"input": ["x"], "output": "y", "threads": 1, "tokenizer": {"kind": "bytes"}}
    full = ClusterConfig(
        gpus_per_node="8",
        options={"mem": "0", "exclusive": None},
        modules=("cuda",),
        setup=("true",),
        environment={"NCCL_DEBUG": "INFO", "TOKEN": "env:HOME"},
    )
    return {
        "experiment": target("experiment", _settings(corpus), _read_experiment),
        "parent of an experiment": Target(
            experiment.parent,
            experiment.name,
            _read_extended,
            yaml.safe_load,
            is_protected=False,
        ),
        "every setting": target(
            "every", to_tree(load_config(RunConfig, experiment)), _read_experiment
        ),
        "cluster": target("cluster", to_tree(full), _read_cluster),
        "grid of a sweep": target("grid", sweep, _read_sweep),
        "cells of a sweep": target("cells", cells, _read_sweep),
        "settings of a corpus": target("corpus", text, _plan_corpus),
    }


def _read_experiment(path: Path) -> None:
    load_config(RunConfig, path)
    _command(pretrain.main, "describe", path)


def _read_extended(copy: Path) -> None:
    (copy / "child.yaml").write_text("extends: experiment.yaml\nseed: 2\n")
    load_config(RunConfig, copy / "child.yaml")


def _read_cluster(path: Path) -> None:
    """Render a script: every line has to be one that the launcher or `setup` wanted."""
    cluster = load_cluster(path)
    place = Path("/runs/x")
    job = Job(
        name="x", run_dir=place, code=place, python="python3", nodes=NodeRange(1, 2),
        cluster=cluster, attempts_without_progress=3,
    )  # fmt: skip
    expected = len(cluster.options) + len(cluster.environment) + len(cluster.modules)
    lines = [line for line in render(job).splitlines() if line not in cluster.setup]
    assert len(lines) <= expected + LINES_OF_A_SCRIPT, lines


def _read_sweep(path: Path) -> None:
    read_sweep(path)
    _command(launcher.main, "sweep", "plan", path, "--runs-dir", path.parent / "runs")


def _plan_corpus(path: Path) -> None:
    load_config(CorpusConfig, path)


# ----------------------------------------------------------------------------------- results, text


def _result_targets(directory: Path) -> dict[str, Target]:
    home = directory / "results"
    home.mkdir()
    rows = [{"name": f"r{n}", "N": 1e6 * n, "D": 2e7, "loss": 3.0 / n} for n in range(1, 5)]
    (home / "runs.json").write_text(json.dumps(rows))
    columns = list(rows[0])
    lines = [",".join(columns), *(",".join(map(str, row.values())) for row in rows)]
    (home / "runs.csv").write_text("\n".join(lines) + "\n")
    golden = "no_memory.npz"
    shutil.copy(ROOT / "tests/golden" / golden, home / golden)
    return {
        "results as CSV": Target(
            home, "runs.csv", lambda copy: read_points(copy / "runs.csv"), None, is_protected=False
        ),
        "results as JSON": Target(
            home, "runs.json", lambda copy: read_points(copy / "runs.json"), is_protected=False
        ),
        "golden vectors": Target(
            home,
            golden,
            lambda copy: _command(pretrain.main, "golden", copy / golden),
            *_golden_case(home / golden),
            is_protected=False,
        ),
    }


def _golden_case(path: Path) -> tuple[Callable[[bytes], Any], Callable[[Any], bytes]]:
    """Its settings as a tree, and a case of the same arrays with other settings."""
    arrays = dict(np.load(path))

    def write(tree: Any) -> bytes:
        file = io.BytesIO()
        np.savez(file, **{**arrays, "config": np.array(json_text(tree).decode(errors="replace"))})
        return file.getvalue()

    return lambda content: json.loads(str(arrays["config"])), write


def _text_targets(directory: Path) -> dict[str, Target]:
    """Documents that a corpus is built of."""
    home = directory / "text"
    home.mkdir()
    generator = random.Random(0)
    records = [{"id": f"d{n}", "text": make_text(generator, 3)} for n in range(4)]
    text = _write_lines(records)
    (home / "text.jsonl").write_bytes(text)
    (home / "text.jsonl.zst").write_bytes(zstandard.compress(text))
    (home / "text.txt").write_text(records[0]["text"])

    def target(name: str, *form: Any) -> Target:
        return Target(home, name, _builder_of(name), *(form or (None,)), is_protected=False)

    return {
        "documents": target("text.jsonl", _parse_lines, _write_lines),
        "compressed documents": target(
            "text.jsonl.zst",
            lambda content: records,
            lambda tree: zstandard.compress(_write_lines(tree)),
        ),
        "text": target("text.txt"),
    }


def _builder_of(name: str) -> Callable[[Path], object]:
    def build(copy: Path) -> None:
        config = CorpusConfig(
            input=(copy / name,),
            output=copy / "out",
            validation_fraction=0.0,
            max_document_bytes=1 << 16,
            threads=1,
            tokenizer=TokenizerConfig(kind="bytes"),
        )
        build_corpus(config)

    return build
