"""The doors by which a run, a corpus and an export are written, and what a cut leaves of a file.

Whole crash states of runs and builds are in tests/crash_states.
"""

import fcntl
import logging
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.journal import BuildJournal
from foundation.files import append_whole, atomic_write, make_directory, move, sync_tree
from pretrain.rundir.events import Rewind, Spike, TrainingBegan
from pretrain.rundir.ledger import Ledger, event_line
from pretrain.weights.export import new_directory
from tests.helpers.corpora import config_of, contents


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced, in order."""
    paths: list[str] = []
    sync = os.fsync

    def recording(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    return paths


def test_each_door_syncs_contents_then_names(tmp_path, synced):
    made = make_directory(tmp_path / "a" / "b")
    assert sorted(synced) == [str(tmp_path), str(tmp_path / "a")]
    synced.clear()
    append_whole(made / "log", b"1\n", sync=True)
    assert synced == [str(made / "log"), str(made)]
    synced.clear()
    with atomic_write(made / "file"):
        pass
    assert synced[1:] == [str(made)]
    synced.clear()
    move(made / "file", tmp_path / "a" / "file")
    assert synced == [str(tmp_path / "a")]
    synced.clear()
    make_directory(made)
    assert synced == [str(tmp_path / "a")], "its maker may have been killed before the sync"
    synced.clear()
    sync_tree(tmp_path)
    assert set(synced) == {str(path) for path in (tmp_path, *tmp_path.rglob("*"))}


def test_an_export_is_synced_before_it_gets_its_name(tmp_path, synced, monkeypatch):
    rename = os.rename

    def move_synced(old: Path, new: Path) -> None:
        assert {str(path) for path in (old, *old.rglob("*"))} <= set(synced)
        rename(old, new)

    monkeypatch.setattr(os, "rename", move_synced)
    with new_directory(tmp_path / "export") as beside:
        (beside / "tokenizer").mkdir()
        (beside / "tokenizer" / "model").write_bytes(b"pieces")
    assert (tmp_path / "export" / "tokenizer" / "model").read_bytes() == b"pieces"
    assert synced[-1] == str(tmp_path)


EVENTS = [
    TrainingBegan(step=0, world_size=1),
    Rewind(spike=Spike(8, 9, 9.0, 3.0), to_step=6, segments=(7, 19)),
    TrainingBegan(step=6, world_size=1),
]
LAST = event_line(EVENTS[2])


@pytest.mark.parametrize(
    "left",
    [
        LAST[:-1],
        LAST[: len(LAST) // 2],
        bytes(len(LAST)),
        bytes(len(LAST) - 9) + LAST[-9:],
        LAST[:9] + bytes(len(LAST) - 10) + b"\n",
        bytes(200_000),
        b"9" * 200_000,
        b"",
    ],
    ids=lambda left: f"{len(left)} bytes, {left.count(0)} zeros",
)
def test_what_a_cut_left_of_an_event_goes_with_the_next_one(tmp_path, caplog, left):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    whole = b"".join(map(event_line, EVENTS[:2]))
    ledger.path.write_bytes(whole + left)
    ledger.append(EVENTS[2])
    assert ledger.path.read_bytes().startswith(whole + b'{"time"')
    assert [replace(event, time=0.0) for event in ledger.read()] == EVENTS
    assert not caplog.messages


def test_half_a_line_that_another_process_may_be_writing_stays(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"1\n2")
    with open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        append_whole(path, b"3\n")
    assert path.read_bytes() == b"1\n2\n3\n"


def test_lines_of_many_writers_all_stay(tmp_path):
    path, context = tmp_path / "log", multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, each)) for each in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(path.read_bytes().split()) == sorted(
        b"%d" % number * 2000 for number in range(4) for _ in range(50)
    )


def _append_many(path: Path, number: int) -> None:
    for _ in range(50):
        append_whole(path, b"%d" % number * 2000 + b"\n")


def test_shards_that_a_cut_took_are_built_again(tmp_path, monkeypatch, caplog):
    config = config_of(tmp_path, [f"text {number} " * 90 for number in range(40)], shard_bytes=6000)
    whole = build_corpus(replace(config, output=tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(BuildJournal, "finish", lambda journal: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_corpus(config)
    shards = sorted((config.output / "train").glob("*.mds"))
    assert len(shards) > 4
    for path in shards[3:]:
        path.unlink()
    caplog.set_level(logging.WARNING)
    assert build_corpus(config).manifests == whole.manifests
    assert f"{shards[3]} is missing" in caplog.text
    assert contents(config.output) == contents(tmp_path / "whole")
