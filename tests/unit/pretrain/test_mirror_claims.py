"""Who may write to a mirror: one run, and of that run the attempt that has claimed it."""

from __future__ import annotations

import re
import shutil
import time

import pytest

from foundation.errors import CheckpointError, ConfigError
from pretrain.checkpoint.destinations import ROOT, Disk, ObjectStore, Publication
from pretrain.checkpoint.uploads import Mirror
from pretrain.config.run import CheckpointConfig, RunConfig
from tests.helpers.mirrors import FAST, names_in, over_http, restored, run_in, save, upload


@pytest.fixture
def url(bucket: str) -> str:
    return f"{bucket}/runs/tiny"


def test_a_mirror_of_another_run_is_neither_overwritten_nor_deleted(
    tmp_path, url, s3_endpoint, world
):
    first = run_in(tmp_path / "first", [100])
    upload(first, url, 100, tmp_path / "scratch")
    second = run_in(tmp_path / "second", [300])
    stored = names_in(url, s3_endpoint)
    run = RunConfig(name="tiny", checkpoint=CheckpointConfig(mirror=url.removesuffix("/tiny")))
    notes: list[tuple[int, float | str]] = []
    disk = Disk(second.checkpoints, "a", second.identity.id)
    with Mirror(run, disk, world, 0, 0, lambda *note: notes.append(note)) as mirror:
        deadline = time.monotonic() + 300
        mirror.agree(mirror.is_due(300), 300)
        while not notes:
            assert time.monotonic() < deadline
            mirror.agree(False, 300)
            time.sleep(0.05)
        mirror.finish(stop_requests=iter(range(9)).__next__)
    assert [step for step, _ in notes] == [300, 300]
    assert re.search(r"holds run .* choose another checkpoint\.mirror", str(notes[-1][1]))
    assert names_in(url, s3_endpoint) == stored
    assert restored(over_http(url, s3_endpoint), tmp_path / "restored") == 100


def test_of_runs_that_start_together_at_one_url_none_replaces_the_others_index(
    tmp_path, url, s3_endpoint
):
    first, second = (run_in(tmp_path / name, [100, 200]) for name in ("first", "second"))
    store = ObjectStore(url, tmp_path, FAST)
    kept = CheckpointConfig(keep_last=1)
    ours = Publication(store, Disk(first.checkpoints, "", first.identity.id), 0, kept)
    ours.publish(first.checkpoints / "step-00000100", lambda: None)
    store.writable.delete([ROOT])  # as if it had come after the second one looked
    upload(second, url, 100, tmp_path / "scratch")
    stored = names_in(url, s3_endpoint)
    with pytest.raises(CheckpointError, match="holds run"):
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
