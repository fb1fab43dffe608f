"""Builds that are killed, run out of disk space, or run at the same time."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.cli import main
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpora.manifest import MANIFEST_NAME
from foundation.errors import ConfigError, DataError, UserError
from tests.helpers.corpora import config_of, contents, some_texts


@pytest.fixture(scope="module")
def processes():
    """Starts processes that have imported streaming already."""
    context = multiprocessing.get_context("forkserver")
    loaded = ["streaming", "webdataset.writer", "data_pipeline.builder", "data_pipeline.cli"]
    context.set_forkserver_preload(loaded)
    return context


def many_texts() -> list[str]:
    return some_texts(240, seed=9)


@pytest.mark.parametrize(
    ("kind", "shard_format", "shard_bytes"), [("bytes", "mds", 5000), ("bpe", "webdataset", 8000)]
)
def test_a_killed_build_resumes_identically(tmp_path, processes, kind, shard_format, shard_bytes):
    tokenizer = TokenizerConfig(kind=kind, vocab_size=300 if kind == "bytes" else 350)
    sizes = {"shard_format": shard_format, "shard_bytes": shard_bytes}
    whole = config_of(tmp_path / "whole", many_texts(), tokenizer=tokenizer, **sizes)
    build_corpus(whole)
    config = replace(whole, output=tmp_path / "killed")
    generator = random.Random(kind)
    num_shards = len(list(whole.output.glob("*/shard.*")))
    kills = 0
    for target in (0, 2, num_shards // 2, num_shards // 2 + 1):
        process = processes.Process(target=build_corpus, args=(config,))
        process.start()
        while process.is_alive() and len(list(config.output.glob("*/shard.*"))) < target:
            time.sleep(0.001)
        time.sleep(generator.random() * 0.02)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        assert not list(config.output.rglob(MANIFEST_NAME)) or process.exitcode == 0
        tear_last_line(config.output / ".build" / "journal.jsonl")
    assert kills >= 3
    build_corpus(config)
    assert contents(config.output) == contents(whole.output)


@pytest.mark.parametrize("existed", [True, False])
def test_a_build_rejected_before_it_made_anything_leaves_nothing(tmp_path, existed):
    config = config_of(tmp_path, [""], tokenizer=TokenizerConfig(kind="bpe", vocab_size=300))
    if existed:
        config.output.mkdir()
    with pytest.raises(UserError):
        build_corpus(config)
    assert config.output.exists() == existed
    assert not existed or not list(config.output.iterdir())


def test_a_pipe_in_place_of_a_journal_makes_nobody_wait(tmp_path):
    config = config_of(tmp_path, some_texts(20))
    (config.output / ".build").mkdir(parents=True)
    os.mkfifo(config.output / ".build" / "journal.jsonl")
    with pytest.raises(DataError, match=r"journal\.jsonl"):
        build_corpus(config)


def tear_last_line(journal: Path) -> None:
    """What a power failure during an append leaves."""
    if journal.exists() and journal.read_bytes().count(b"\n") > 1:
        with open(journal, "ab") as file:
            file.write(b'{"info": {"characters": 12')


def test_an_unfinished_build_rejects_other_settings_and_edited_text(tmp_path, processes):
    config = config_of(tmp_path, many_texts(), shard_bytes=5000)
    process = processes.Process(target=build_corpus, args=(config,))
    process.start()
    while len(list(config.output.glob("*/shard.*"))) < 3:
        time.sleep(0.001)
        assert process.is_alive()
    with pytest.raises(ConfigError, match=str(config.output)):
        build_corpus(config)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(ConfigError):
        build_corpus(replace(config, shard_bytes=6000))
    os.utime(config.input[0], ns=(1, 1))
    with pytest.raises(ConfigError):
        build_corpus(config)


def build_with_little_room(arguments: list[str], limit: int, errors: Path) -> None:
    """Run the command with files limited to `limit` bytes: the kernel then fails larger writes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with open(errors, "w") as sys.stderr:
        status = main(arguments)
    os._exit(status)


@pytest.mark.parametrize("limit", [20_000, 1_000])  # in the middle of a shard; in the journal
def test_a_failed_write_gives_one_line_and_the_same_command_resumes(tmp_path, processes, limit):
    config = config_of(tmp_path, many_texts(), shard_bytes=30_000, validation_fraction=0.1)
    arguments = ["build", f"--input={config.input[0]}", f"--output={config.output}"]
    arguments += ["tokenizer.kind=bytes", "shard_bytes=30000", "validation_fraction=0.1"]
    errors = tmp_path / "errors"
    process = processes.Process(target=build_with_little_room, args=(arguments, limit, errors))
    process.start()
    process.join()
    assert process.exitcode == 2
    (line,) = (line for line in errors.read_text().splitlines() if line.startswith("error"))
    assert os.strerror(errno.EFBIG) in line
    assert str(config.output) in line
    assert not list(config.output.rglob(MANIFEST_NAME))
    assert main(arguments) == 0
    build_corpus(replace(config, output=tmp_path / "whole"))
    assert contents(config.output / "train") == contents(tmp_path / "whole" / "train")


@pytest.mark.parametrize(
    "moment",
    [
        "builder.split_writer.write_index",
        "corpora.manifest.write_json",
        "builder.journal.write_json",
        "builder.journal.shutil.rmtree",
    ],
)
def test_a_build_stopped_at_its_end_resumes_to_identical_bytes(tmp_path, monkeypatch, moment):
    class Stopped(BaseException):
        """Like a kill: nothing in the code handles it."""

    def stop(*arguments, **settings):
        # Of rmtree only the last call: shards are written by way of it too.
        if moment.endswith("rmtree") and arguments[0].name != ".build-done":
            return real(*arguments, **settings)
        raise Stopped

    config, real = config_of(tmp_path, some_texts()), shutil.rmtree
    build_corpus(replace(config, output=tmp_path / "whole"))
    with monkeypatch.context() as patched:
        patched.setattr(f"data_pipeline.{moment}", stop)
        with pytest.raises(Stopped):
            build_corpus(config)
    build_corpus(config)
    assert contents(config.output) == contents(tmp_path / "whole")
