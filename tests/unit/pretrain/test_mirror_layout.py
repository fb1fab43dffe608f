"""What a mirror keeps, deletes and accepts: pure functions and the fields of mirror.json."""

from __future__ import annotations

import json

import pytest

from foundation.errors import CheckpointError
from foundation.files import Content
from pretrain.checkpoint.destinations import RUN_FILES, MirrorIndex, StoredCheckpoint
from pretrain.config.run import CheckpointConfig


def stored(step: int, version: str = "a") -> StoredCheckpoint:
    content = Content(10, version * 64)
    return StoredCheckpoint(step, content, dict.fromkeys(RUN_FILES, content))


def index(*steps: int) -> MirrorIndex:
    return MirrorIndex("0123abcd", tuple(map(stored, steps)))


@pytest.mark.parametrize(
    ("before", "new", "on_disk", "settings", "kept"),
    [
        ([], 100, [100], {}, [100]),
        ([100, 200, 300], 400, [200, 300, 400], {"keep_last": 3}, [200, 300, 400]),
        ([100, 200, 300], 400, [400], {"keep_last": 1}, [400]),
        ([100, 200, 300], 400, [400], {"keep_last": 1, "keep_every": 200}, [200, 400]),
        ([100, 200], 300, [100, 300], {"keep_last": 1}, [100, 300]),
        # a machine that has only what it was given: the store still keeps as many
        ([100, 200], 300, [200, 300], {"keep_last": 3}, [100, 200, 300]),
    ],
    ids=["first", "as the run", "only the last", "every", "on disk for a rewind", "a new disk"],
)
def test_the_store_keeps_what_the_retention_of_the_run_keeps(before, new, on_disk, settings, kept):
    after = index(*before).adding(stored(new), on_disk, CheckpointConfig(**settings))
    assert [each.step for each in after.checkpoints] == kept


def test_a_step_that_is_made_again_replaces_the_one_of_before_a_rewind_in_another_folder():
    before = index(100, 200, 300).until(100)
    assert [each.step for each in before.checkpoints] == [100]
    again = stored(200, version="b")
    after = before.adding(again, [100, 200], CheckpointConfig())
    assert after.has(again)
    assert not after.has(stored(200))
    assert again.folder != stored(200).folder


def test_nothing_that_is_not_of_an_older_step_is_ever_deleted():
    kept, gone, uploading = stored(200), stored(100), stored(300)
    names = [f"{uploading.folder}/z"]
    names += [f"{each.folder}/{name}" for each in (kept, gone) for name in ("COMPLETE", "z", "a")]
    foreign = ["mirror.json", "notes/step-00000001/x", f"{gone.folder}/deep/er", "step-1-a/x"]
    assert MirrorIndex("r", (kept,)).unnamed([*names, *foreign]) == [
        f"{gone.folder}/{name}" for name in ("COMPLETE", "z", "a")
    ]


def test_the_index_reads_back_as_it_was_written():
    before = MirrorIndex("r", (stored(100), stored(200)))
    assert MirrorIndex.parse("here", before.to_bytes()) == before


def changed(change) -> bytes:
    tree = json.loads(index(100, 200).to_bytes())
    change(tree)
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(format=2), "found format 2, expected format 1"),
        (lambda tree: tree.update(extra=1), "extra"),
        (lambda tree: tree["checkpoints"].reverse(), "not in order"),
        (lambda tree: tree["checkpoints"][1].update(step=100), "not in order"),
        (lambda tree: tree["checkpoints"][0].update(step=10**8), "step is"),
        (lambda tree: tree["checkpoints"][0]["files"].pop("run.json"), "run.json is missing"),
        (
            lambda tree: tree["checkpoints"][0]["files"].update({"../x": {}}),
            "'../x' is unknown",
        ),
        (
            lambda tree: tree["checkpoints"][0]["files"]["run.json"].update(bytes=1 << 40),
            "run.json.bytes is",
        ),
        (
            lambda tree: tree["checkpoints"][0]["files"]["index.json"].update(sha256="../../x"),
            "64 hexadecimal digits",
        ),
    ],
)
def test_an_index_with_a_wrong_field_is_refused_by_its_name(change, message):
    with pytest.raises(CheckpointError, match=message) as refused:
        MirrorIndex.parse("s3://b/mirror.json", changed(change))
    assert str(refused.value).startswith("s3://b/mirror.json: ")
    assert "\n" not in str(refused.value)
