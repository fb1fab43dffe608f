"""Corpora in stores, copied there by any tool: verified, inspected and audited in place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipeline.cli import main
from data_pipeline.commands.verify import problems_at
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.stores import QUICK, FileServer, put_directory


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_tiny_corpus(tmp_path_factory.mktemp("built") / "corpus", documents=30)


def test_verify_reads_every_byte_and_names_each_file_that_is_not_the_manifests(
    built, tmp_path, bucket, s3_endpoint, capsys
):
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    put_directory(s3_endpoint, copy, f"{bucket}/c")
    assert main(["verify", f"{bucket}/c"]) == 0
    assert f"{bucket}/c: every shard matches its manifest" in capsys.readouterr().out
    names = ("validation/shard.00000.mds", "train/shard.00001.mds.lengths", "train/shard.00002.mds")
    for name, change in zip(names, (None, lambda c: c[:-1] + b"x", lambda c: c[:-1]), strict=True):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(change(content)) if change else (copy / name).unlink()
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    with FileServer(copy) as server:
        problems = problems_at(server.url, lambda line: None, QUICK)
        for name in names:
            assert (
                sum(f"{server.url}/{name} could not be fetched" in each for each in problems) == 1
            )
        tokenizer = f"{server.url}/tokenizer/tokenizer.json could not be fetched"
        assert sum(tokenizer in each for each in problems) == 2, "for each split"
        assert len(problems) == 5


def test_a_corpus_in_a_store_is_inspected_and_audited_in_place(
    built, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with FileServer(built) as server:
        for command in ("inspect", "audit"):
            said = []
            for location in (str(built), server.url):
                assert main([command, location, "--lanes", "2"]) == 0
                said.append(capsys.readouterr().out.splitlines())
            differing = [pair for pair in zip(*said, strict=True) if pair[0] != pair[1]]
            assert len(differing) == (2 if command == "inspect" else 0), "only the places differ"


def test_ctrl_c_does_not_wait_for_a_silent_store_and_leaves_no_file(built, tmp_path):
    with FileServer(built) as server:
        server.fault, server.faulty, server.stall_seconds = "stall", 1000, 600.0
        command = [sys.executable, "-m", "data_pipeline", "verify", server.url]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        while sum(server.requests.values()) < 4:  # the manifest, the tokenizer and some shards
            time.sleep(0.01)
            assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
        assert time.monotonic() - began < 300
    assert (process.returncode, error.splitlines()[-1]) == (130, "interrupted")
    assert not [path for path in Path(tmp_path).rglob("*") if path.is_file()]
