"""A mirror under real kills and faults: uploads to a real S3 server, and what is restored from it.

Also who may write to it, and what mirror.json keeps, deletes and accepts.

A checkpoint here is one of `tests.helpers.checkpoints`, which verifies and which no model has.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from data_pipeline.corpora.writable_store import WritableStore
from foundation.errors import ConfigError, DataError
from foundation.files import Content, content_of, write_text
from pretrain.checkpoint import object_store
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.mirror import Mirror, Publication
from pretrain.checkpoint.object_store import (
    MIRROR_INDEX,
    RUN_FILES,
    SCRATCH,
    MirrorIndex,
    ObjectStore,
    StoredCheckpoint,
)
from pretrain.cli import main
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.errors import CheckpointError
from pretrain.rundir import restore
from pretrain.rundir.events import Restored, TrainingBegan
from pretrain.rundir.restore import restore_run
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import flip_a_bit
from tests.helpers.jobs import until
from tests.helpers.mirrors import FAST, RANKS, names_in, over_http, restored, run_in, save, upload
from tests.helpers.stores import CREDENTIALS, QUICK, FileServer, client, make_bucket


@pytest.fixture
def url(bucket: str) -> str:
    return f"{bucket}/runs/tiny"


def killed_at(number: int, what: str, where: object, action: Callable[[], object]) -> bool:
    """Whether SIGKILL ended a process that does `action`, before its call `number` of `what`."""
    child = os.fork()
    if child == 0:
        calls, original = 0, getattr(where, what)

        def counting(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        try:
            with mock.patch.object(where, what, counting):
                action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_an_upload_killed_anywhere_leaves_the_checkpoint_before_it(tmp_path, url, s3_endpoint):
    run_dir = run_in(tmp_path / "run", [100])
    upload(run_dir, url, 100, tmp_path / "scratch")
    save(run_dir, 200)
    shutil.rmtree(run_dir.checkpoints / "step-00000100")

    def second() -> None:
        upload(run_dir, url, 200, tmp_path / "scratch", keep_last=1)

    last = RANKS + 4 + 2 + 1  # its files, the run's, index and marker, mirror.json
    mirror = over_http(url, s3_endpoint)
    for number in (1, RANKS + 1, last - 1, last):
        assert killed_at(number, "put", WritableStore, second)
        assert restored(mirror, tmp_path / f"restored-{number}") == 100
    # mirror.json is there: from now on the new one counts
    assert killed_at(2, "delete", WritableStore, second)
    assert restored(mirror, tmp_path / "deleting") == 200
    second()
    assert restored(mirror, tmp_path / "restored") == 200
    left = {name.split("/")[0][:13] for name in names_in(url, s3_endpoint)}
    assert left == {"mirror.json", "step-00000200"}


@pytest.mark.parametrize("what", ["fetch_file", "move"])
def test_a_restore_that_is_killed_anywhere_is_no_run_until_it_has_gone_on(what, tmp_path, stored):
    where = {"move": restore, "fetch_file": object_store}[what]
    target, number = tmp_path / "restored", 1
    with FileServer(stored) as server:
        # What has arrived stays, so that each kill comes later than the one before.
        while killed_at(number, what, where, lambda: restore_run(server.url, target, QUICK)):
            number += 1
            if not RunDir(target).exists():  # else only the clean-up was left
                with pytest.raises(ConfigError):
                    RunDir.open(target)
        assert restored(server.url, target, QUICK) == 200
    assert number > {"fetch_file": 5, "move": 4}[what]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, s3_endpoint: str) -> Path:
    """A mirror as files, for servers that go wrong."""
    home = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "S3_ENDPOINT_URL": s3_endpoint}.items():
            patch.setenv(name, value)
        bucket = make_bucket(s3_endpoint, "stored")
        run_dir = run_in(home / "run", [100, 200])
        for step in (100, 200):
            upload(run_dir, f"{bucket}/x", step, home / "scratch")
    s3 = client(s3_endpoint)
    for each in s3.list_objects_v2(Bucket="stored")["Contents"]:
        path = home / "files" / each["Key"].removeprefix("x/")
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file("stored", each["Key"], str(path))
    return home / "files"


def damaged(stored: Path, copy: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(stored, copy)
    change(copy)
    return copy


def newest(home: Path) -> Path:
    return max(home.glob("step-*"))


def change_root(home: Path, change: Callable[[dict], object]) -> None:
    tree = json.loads((home / MIRROR_INDEX).read_bytes())
    change(tree)
    (home / MIRROR_INDEX).write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "change",
    [
        lambda home: (newest(home) / "rank-00001.safetensors").unlink(),
        lambda home: flip_a_bit(newest(home) / "rank-00000.safetensors"),
        lambda home: (newest(home) / "index.json").write_bytes(b"{}"),
        lambda home: (newest(home) / "ledger.jsonl").write_bytes(b"\n"),
    ],
    ids=["a file gone", "another bit", "another index", "another ledger"],
)
def test_a_checkpoint_that_is_not_as_indexed_gives_way_when_asked(change, tmp_path, stored):
    target = tmp_path / "restored"
    with FileServer(damaged(stored, tmp_path / "store", change)) as server:
        with pytest.raises(CheckpointError, match=r"^http://.*200.*--step 100$"):
            restore_run(server.url, target, QUICK)
        with pytest.raises(ConfigError, match=r"no step 150; it has 100, 200$"):
            restore_run(server.url, target, QUICK, step=150)
        assert restored(server.url, target, QUICK, step=100) == 100


def test_a_checkpoint_that_is_damaged_on_the_disk_is_fetched_again(tmp_path, stored, capsys):
    target = tmp_path / "restored"
    with FileServer(stored) as server:
        assert restored(server.url, target, QUICK) == 200
        flip_a_bit(target / "checkpoints" / "step-00000200" / "rank-00000.safetensors")
        assert main(["checkpoint", "fetch", server.url, str(target), "--step", "200"]) == 0
        assert main(["checkpoint", "fetch", server.url, str(target), "--step", "100"]) == 0
    assert main(["checkpoint", "verify", str(target)]) == 0
    assert "2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda home: (home / MIRROR_INDEX).unlink(), DataError),
        (lambda home: (home / MIRROR_INDEX).write_text("[]"), CheckpointError),
        (lambda home: change_root(home, lambda tree: tree.update(checkpoints=[])), CheckpointError),
        (lambda home: change_root(home, lambda tree: tree.update(run="another")), CheckpointError),
    ],
    ids=["no index", "not an index", "empty", "of another run"],
)
def test_a_store_without_a_valid_checkpoint_leaves_no_run(change, error, tmp_path, stored):
    copy = damaged(stored, tmp_path / "store", change)
    with FileServer(copy) as server, pytest.raises(error, match=server.url) as raised:
        restore_run(server.url, tmp_path / "restored", QUICK)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "restored" / "run.json").exists()
    assert not (tmp_path / "restored" / "checkpoints").exists()


def test_a_store_that_is_away_is_no_reason_to_take_an_older_checkpoint(tmp_path, stored):
    with FileServer(stored) as server:
        server.fault, server.faulty, server.content = "500", 99, "rank"
        with pytest.raises(DataError, match=r"step-00000200.* 500"):
            restore_run(server.url, tmp_path / "restored", QUICK)
        assert not RunDir(tmp_path / "restored").exists()
        server.fault = ""
        server.requests.clear()
        assert restored(server.url, tmp_path / "restored", QUICK) == 200
        assert server.requests["metrics.jsonl"] == 0, "what had arrived is not fetched again"


def test_a_second_fetch_into_a_directory_leaves_what_the_first_one_brings(tmp_path, monkeypatch):
    first = RunDir(tmp_path / "restored")
    with first.locked("restore"):
        arrived = first.path / SCRATCH / "mirror.json"
        arrived.parent.mkdir()
        arrived.touch()
        monkeypatch.setattr(Path, "exists", lambda path: False)  # as it was when they started
        with pytest.raises(ConfigError, match="is in use by process"):
            restore_run("file:///nowhere", first.path, QUICK)
    assert arrived.is_file()


def test_jobs_of_the_cluster_it_comes_from_are_not_in_the_restored_ledger(tmp_path, stored):
    with FileServer(stored) as server:
        restored(server.url, tmp_path / "restored", QUICK)
        events = RunDir(tmp_path / "restored").ledger.read()
        assert [type(each) for each in events] == [TrainingBegan, Restored]
        # Again, on a machine that has it: nothing happens; where it is another run: refused.
        assert restored(server.url, tmp_path / "restored", QUICK) == 200
        assert RunDir(tmp_path / "restored").ledger.read() == events
        run_in(tmp_path / "other", [100])
        with pytest.raises(ConfigError, match=str(tmp_path / "other")):
            restore_run(server.url, tmp_path / "other", QUICK)
        shutil.rmtree(tmp_path / "restored" / "checkpoints" / "step-00000200")
        (tmp_path / "restored" / "metrics.jsonl").unlink()  # as an older copy of it
        with pytest.raises(ConfigError, match=r"measured 0 steps, .* step 200"):
            restore_run(server.url, tmp_path / "restored", QUICK)


def test_what_the_store_returns_is_compared_and_repaired(tmp_path, url, s3_endpoint):
    write_text(tmp_path / "file", "right")
    name, _, prefix = url.removeprefix("s3://").partition("/")
    key = {"Bucket": name, "Key": f"{prefix}/a/file"}
    client(s3_endpoint).put_object(**key, Body=b"wrong")
    store = WritableStore(url, tmp_path, FAST)
    store.put("a/file", tmp_path / "file", content_of(tmp_path / "file"))
    assert client(s3_endpoint).get_object(**key)["Body"].read() == b"right"
    with pytest.raises(DataError, match=r"a/file .* 2 of 2"):
        store.put("a/file", tmp_path / "file", Content(5, "0" * 64))


def mirror_of(run_dir: RunDir, url: str, world) -> tuple[Mirror, list[tuple[int, float | str]]]:
    """A run's mirror, and what it will note of each upload."""
    run = RunConfig(name="tiny", checkpoint=CheckpointConfig(mirror=url))
    notes: list[tuple[int, float | str]] = []
    disk = Disk(run_dir.checkpoints, "a", run_dir.identity.id)
    return Mirror(run, disk, world, 0, 0, lambda *note: notes.append(note)), notes


def test_a_failed_upload_is_followed_by_the_latest(tmp_path, world, bucket, caplog, monkeypatch):
    monkeypatch.setattr("pretrain.checkpoint.storage_retry.FIRST_PAUSE", 0.01)
    problems = iter([DataError("away")] * 2)

    def read(self: Publication, real: Callable[..., Any] = Publication.read) -> Any:
        if error := next(problems, None):
            raise error
        return real(self)

    monkeypatch.setattr(Publication, "read", read)
    run_dir = run_in(tmp_path / "run", [100, 200])
    mirror, notes = mirror_of(run_dir, f"{bucket}/runs", world)
    with mirror:
        mirror.agree(mirror.is_due(100), 100)
        until(lambda: mirror.agree(mirror.is_due(200), 200) or len(notes) > 1)
        assert mirror.held() == ()
        mirror.finish()
    assert notes[0] == (100, "away")
    assert notes[1][0] == 200
    assert isinstance(notes[1][1], float)
    assert len(caplog.messages) == 2, "when it fails first, and when it works again"


def test_another_runs_mirror_is_neither_overwritten_nor_deleted(tmp_path, url, s3_endpoint, world):
    first = run_in(tmp_path / "first", [100])
    upload(first, url, 100, tmp_path / "scratch")
    second = run_in(tmp_path / "second", [300])
    stored = names_in(url, s3_endpoint)
    mirror, notes = mirror_of(second, url.removesuffix("/tiny"), world)
    with mirror:
        mirror.agree(mirror.is_due(300), 300)
        until(lambda: mirror.agree(False, 300) or notes)
        mirror.finish(stop_requests=iter(range(9)).__next__)
    assert [step for step, _ in notes] == [300, 300]
    assert first.identity.id in str(notes[-1][1])
    assert names_in(url, s3_endpoint) == stored
    assert restored(over_http(url, s3_endpoint), tmp_path / "restored") == 100


def test_of_runs_that_start_together_none_replaces_an_index(tmp_path, url, s3_endpoint):
    first, second = (run_in(tmp_path / name, [100, 200]) for name in ("first", "second"))
    store = ObjectStore(url, tmp_path, FAST)
    kept = CheckpointConfig(keep_last=1)
    ours = Publication(store, Disk(first.checkpoints, "", first.identity.id), 0, kept)
    ours.publish(first.checkpoints / "step-00000100", lambda: None)
    store.writable.delete([MIRROR_INDEX])  # as if it had come after the second one looked
    upload(second, url, 100, tmp_path / "scratch")
    stored = names_in(url, s3_endpoint)
    with pytest.raises(CheckpointError, match=second.identity.id):
        ours.publish(first.checkpoints / "step-00000200", lambda: None)
    assert names_in(url, s3_endpoint) == stored


def test_an_attempt_that_a_newer_one_has_replaced_deletes_nothing(tmp_path, url, s3_endpoint):
    run_dir = run_in(tmp_path / "run", [100])
    upload(run_dir, url, 100, tmp_path / "scratch")
    stored = names_in(url, s3_endpoint)
    save(run_dir, 200)
    shutil.rmtree(run_dir.checkpoints / "step-00000100")
    claims = iter((None, ConfigError("a newer attempt has claimed the run")))

    def may_write() -> None:  # mirror.json, and nothing after it
        if error := next(claims):
            raise error

    upload(run_dir, url, 200, tmp_path / "scratch", keep_last=1, may_write=may_write)
    assert stored < names_in(url, s3_endpoint)


def test_a_lost_index_takes_no_whole_checkpoint_with_it(tmp_path, url, s3_endpoint):
    run_dir = run_in(tmp_path / "run", [100, 200, 300])
    for step in (100, 200):
        upload(run_dir, url, step, tmp_path / "scratch")
    store = ObjectStore(url, tmp_path, FAST)
    (damaged_folder,) = (each.folder for each in store.index().checkpoints if each.step == 100)
    store.writable.delete([MIRROR_INDEX, f"{damaged_folder}/config.yaml"])
    upload(run_dir, url, 300, tmp_path / "scratch")
    assert [each.step for each in store.index().checkpoints] == [200, 300]
    assert restored(over_http(url, s3_endpoint), tmp_path / "restored", step=200) == 200


def listed(step: int, version: str = "a") -> StoredCheckpoint:
    content = Content(10, version * 64)
    return StoredCheckpoint(step, content, dict.fromkeys(RUN_FILES, content))


def index_with(*steps: int) -> MirrorIndex:
    return MirrorIndex("0123abcd", tuple(map(listed, steps)))


@pytest.mark.parametrize(
    ("before", "new", "on_disk", "settings", "kept"),
    [
        ([100, 200, 300], 400, [400], {"keep_last": 1, "keep_every": 200}, [200, 400]),
        ([100, 200], 300, [100, 300], {"keep_last": 1}, [100, 300]),
        # a machine that has only what it was given: the store still keeps as many
        ([100, 200], 300, [200, 300], {"keep_last": 3}, [100, 200, 300]),
    ],
    ids=["every", "on disk for a rewind", "a new disk"],
)
def test_the_store_keeps_what_the_retention_of_the_run_keeps(before, new, on_disk, settings, kept):
    after = index_with(*before).adding(listed(new), on_disk, CheckpointConfig(**settings))
    assert [each.step for each in after.checkpoints] == kept


def test_a_step_that_is_made_again_replaces_the_one_of_before_a_rewind_in_another_folder():
    before = index_with(100, 200, 300).until(100)
    assert [each.step for each in before.checkpoints] == [100]
    again = listed(200, version="b")
    after = before.adding(again, [100, 200], CheckpointConfig())
    assert after.has(again)
    assert not after.has(listed(200))
    assert again.folder != listed(200).folder


def test_nothing_that_is_not_of_an_older_step_is_ever_deleted():
    kept, gone, uploading = listed(200), listed(100), listed(300)
    names = [f"{uploading.folder}/z"]
    names += [f"{each.folder}/{name}" for each in (kept, gone) for name in ("COMPLETE", "z", "a")]
    foreign = ["mirror.json", "notes/step-00000001/x", f"{gone.folder}/deep/er", "step-1-a/x"]
    assert MirrorIndex("r", (kept,)).unnamed([*names, *foreign]) == [
        f"{gone.folder}/{name}" for name in ("COMPLETE", "z", "a")
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda tree: tree.update(format=2), "format 2"),
        (lambda tree: tree.update(extra=1), "extra"),
        (lambda tree: tree["checkpoints"].reverse(), "order"),
        (lambda tree: tree["checkpoints"][1].update(step=100), "order"),
        (lambda tree: tree["checkpoints"][0].update(step=10**8), "step"),
        (lambda tree: tree["checkpoints"][0]["files"].pop("run.json"), "run.json"),
        (lambda tree: tree["checkpoints"][0]["files"].update({"../x": {}}), "'../x'"),
        (lambda tree: first_file(tree).update(bytes=1 << 40), "bytes"),
        (lambda tree: first_file(tree).update(sha256="../../x"), "sha256"),
    ],
)
def test_an_index_with_a_wrong_field_is_refused_by_its_name(change, field):
    tree = json.loads(index_with(100, 200).to_bytes())
    change(tree)
    with pytest.raises(CheckpointError, match=f"^s3://b/mirror.json: .*{field}") as refused:
        MirrorIndex.parse("s3://b/mirror.json", json.dumps(tree).encode())
    assert "\n" not in str(refused.value)


def first_file(tree: dict[str, Any]) -> dict[str, Any]:
    return tree["checkpoints"][0]["files"]["run.json"]
