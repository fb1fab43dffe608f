"""Who may write to a mirror: one run, and of that run the attempt that has claimed it."""

from __future__ import annotations

import re
import shutil
import time

import pytest

from data_pipeline.corpora.writable_store import WritableStore
from foundation.errors import CheckpointError, ConfigError
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.mirror.layout import ROOT
from pretrain.mirror.mirror import Mirror, Publication
from pretrain.rundir.events import MirrorFailed
from pretrain.rundir.ledger import last_of
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
    with Mirror(run, second, world, 0) as mirror:
        deadline = time.monotonic() + 300
        while not mirror.flags(300)[1]:  # its store fails
            assert time.monotonic() < deadline
            mirror.agree(mirror.flags(300), 300)
            time.sleep(0.05)
        mirror.finish(stop_requests=iter(range(9)).__next__)
    last = last_of(second.ledger.read(), MirrorFailed)
    assert last is not None
    assert re.search(r"holds run .* choose another checkpoint\.mirror", last.problem)
    assert names_in(url, s3_endpoint) == stored
    assert restored(over_http(url, s3_endpoint), tmp_path / "restored") == 100


def test_of_runs_that_start_together_at_one_url_none_replaces_the_others_index(
    tmp_path, url, s3_endpoint
):
    first, second = (run_in(tmp_path / name, [100, 200]) for name in ("first", "second"))
    store = WritableStore(url, tmp_path, FAST)
    ours = Publication(
        first.path, first.identity.id, 0, CheckpointConfig(keep_last=1), lambda: None
    )
    ours.publish(store, first.checkpoints / "step-00000100", tmp_path, lambda: None)
    store.delete([ROOT])  # as if it had come after the second one looked
    upload(second, url, 100, tmp_path / "scratch")
    stored = names_in(url, s3_endpoint)
    with pytest.raises(CheckpointError, match="holds run"):
        ours.publish(store, first.checkpoints / "step-00000200", tmp_path, lambda: None)
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
