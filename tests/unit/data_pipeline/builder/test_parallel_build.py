import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.parallel_build import (
    build_in_processes,
    build_part,
    merge_parts,
    parts_directory,
)
from data_pipeline.cli import main
from data_pipeline.commands.verify import verify_split
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.corpus import Corpus
from foundation.errors import EXIT_INTERRUPTED, ConfigError, DataError
from tests.helpers.corpora import contents, some_texts, stored
from tests.helpers.jobs import until

BPE = TokenizerConfig(kind="bpe", vocab_size=350)
BYTES = TokenizerConfig(kind="bytes")
FILES = 90


def folder_config(tmp_path: Path, **settings) -> CorpusConfig:
    folder = tmp_path / "in"
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(some_texts(FILES, seed=4)):
        (folder / f"{number:04d}.txt").write_text(text)
    usual = {"validation_fraction": 0.2, "shard_bytes": 2500, "tokenizer": BYTES, "threads": 1}
    return CorpusConfig(input=(folder,), output=tmp_path / "out", **usual | settings)


def test_merged_parts_hold_the_documents_of_the_whole_build_in_its_order(tmp_path):
    config = folder_config(tmp_path)
    whole = replace(config, output=tmp_path / "whole")
    build_corpus(whole)
    for part in (3, 1, 2, 4):
        build_part(config, part, 4)
    result = merge_parts(config, 4)
    for split in ("train", "validation"):
        assert stored(config.output / split) == stored(whole.output / split)
        assert not verify_split(config.output / split, lambda line: None)
        assert result.manifests[split].text_bytes == Corpus.open(whole.output / split).num_bytes
    assert not parts_directory(config).exists()
    assert merge_parts(config, 4).was_finished


def test_killed_processes_resume_to_the_bytes_of_the_uninterrupted_build(tmp_path):
    config = folder_config(tmp_path, tokenizer=BPE)
    (tmp_path / "in" / "0001.txt").write_text("SentencePiece writes a space as \u2581")
    reports = []
    build_in_processes(config, 2, reports.append)
    (note,) = (str(report) for report in reports if "0001.txt" in str(report))
    assert "'\u2581'" in note, "the character that is lost"
    assert f"{FILES} documents" in str(reports[-2])
    assert "100% " in str(reports[-2])
    killed = replace(config, output=tmp_path / "killed")
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=build_in_processes, args=(killed, 2))
    process.start()
    while process.is_alive() and len(list(parts_directory(killed).glob("*/train/*.mds"))) < 3:
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    until(lambda: all_locks_are_free(parts_directory(killed)))  # its processes notice
    assert not killed.output.exists()
    build_in_processes(killed, 2)
    assert contents(killed.output) == contents(config.output)


def all_locks_are_free(parts: Path) -> bool:
    for path in parts.glob("*/.build/lock"):
        with open(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
    return True


def test_an_error_in_one_process_ends_all_with_its_message(tmp_path):
    config = folder_config(tmp_path, max_rejects=0)
    (tmp_path / "in" / "0089.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"0089\.txt"):
        build_in_processes(config, 2)
    assert not multiprocessing.active_children()
    (tmp_path / "in" / "0089.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"0089\.txt"):
        build_in_processes(replace(config, output=tmp_path / "out2"), 2)


@pytest.mark.parametrize("tokenizer", [BPE, BYTES])
def test_processes_killed_in_the_merge_resume(tmp_path, monkeypatch, tokenizer):
    config = folder_config(tmp_path, tokenizer=tokenizer)
    whole = replace(config, output=tmp_path / "whole")
    build_in_processes(whole, 2)
    moves = []

    def failing(source, target, sync):
        moves.append(target)
        if len(moves) == 5:
            raise KeyboardInterrupt
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.builder.parallel_build.move", failing)
        with pytest.raises(KeyboardInterrupt):
            build_in_processes(config, 2)
    build_in_processes(config, 2)
    assert contents(config.output) == contents(whole.output)


def test_settings_that_parts_do_not_support_are_rejected(tmp_path):
    config = folder_config(tmp_path)
    with pytest.raises(ConfigError, match="3 of 2"):
        build_part(config, 3, 2)
    with pytest.raises(ConfigError, match="tokenizer"):
        build_part(replace(config, tokenizer=TokenizerConfig()), 1, 2)
    build_part(config, 1, 2)
    with pytest.raises(DataError, match="2 of 2"):
        merge_parts(config, 2)


class Stopped(BaseException):
    """Like a kill: nothing in the code handles it."""


def test_processes_resume_only_with_the_text_and_settings_they_started_with(tmp_path, monkeypatch):
    config = folder_config(tmp_path, tokenizer=BPE)

    def stop(*arguments):
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.builder.parallel_build._run_parts", stop)
        with pytest.raises(Stopped):  # the tokenizer is trained, no part has started
            build_in_processes(config, 2)
    other = replace(config, tokenizer=TokenizerConfig(kind="bpe", vocab_size=400))
    with pytest.raises(ConfigError):
        build_in_processes(other, 2)
    assert build_in_processes(config, 2).manifests["train"].vocab_size == 350


def test_a_merge_removes_nothing_but_parts(tmp_path):
    config = folder_config(tmp_path)
    others = parts_directory(config) / "notes.txt"
    others.parent.mkdir()
    others.write_text("not the build's")
    build_part(config, 1, 4)  # of an abandoned build
    build_in_processes(config, 2)
    assert list(contents(parts_directory(config))) == ["notes.txt"]
    assert merge_parts(config, 2).was_finished
    assert list(contents(parts_directory(config))) == ["notes.txt"]


def test_a_merge_names_a_shard_that_a_part_has_lost(tmp_path):
    config = folder_config(tmp_path)
    for part in (1, 2):
        build_part(config, part, 2)
    lost = sorted(parts_directory(config).glob("00002-*/train/*.mds"))[1]
    lost.unlink()
    with pytest.raises(DataError, match=r"shard\.\d+\.mds"):
        merge_parts(config, 2)
    assert not (config.output / "train" / "manifest.json").exists()


def test_a_build_does_not_read_its_own_output_as_input(tmp_path, monkeypatch):
    config = folder_config(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    build_in_processes(replace(config, output=Path(".")), 2)
    inside = replace(config, output=tmp_path / "in" / "corpus")
    build_in_processes(inside, 2)
    assert build_in_processes(inside, 2).was_finished, "its own files are no text"
    assert stored(inside.output / "train") == stored(tmp_path / "here" / "train")
    (tmp_path / "text.parts").mkdir()
    with pytest.raises(ConfigError):
        build_corpus(replace(config, input=(tmp_path / "text.parts",), output=tmp_path / "text"))


def test_an_output_that_takes_no_parts_is_rejected_before_they_are_built(tmp_path, monkeypatch):
    config = folder_config(tmp_path)

    def stop(*arguments):
        raise Stopped

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.builder.build_corpus._write_splits", stop)
        with pytest.raises(Stopped):  # a build by one process, which is not finished
            build_corpus(replace(config, output=tmp_path / "started", tokenizer=BPE))
    for build in (lambda each: build_in_processes(each, 2), lambda each: build_part(each, 1, 2)):
        for name in ("other/file", "other/file/new", "other", "started"):
            with pytest.raises(ConfigError, match=str(tmp_path / name)):
                build(replace(config, output=tmp_path / name))
    assert not list(tmp_path.glob("*.parts"))


def test_a_part_that_is_restarted_after_the_merge_finds_everything_done(tmp_path):
    config = folder_config(tmp_path)
    build_in_processes(config, 2)
    assert build_part(config, 1, 2).was_finished
    with pytest.raises(ConfigError, match="2 -> 3"):
        build_part(config, 1, 3)
    assert not parts_directory(config).exists()


def test_ctrl_c_ends_all_processes_with_one_word_and_the_same_command_resumes(tmp_path):
    config = folder_config(tmp_path)
    flags = [f"--input={config.input[0]}", f"--output={config.output}", "--processes=2"]
    flags.append("tokenizer.kind=bytes")
    command = [sys.executable, "-m", "data_pipeline", "build", *flags]
    with open(tmp_path / "errors", "w") as errors:
        process = subprocess.Popen(command, stderr=errors, start_new_session=True)
        until(lambda: list(parts_directory(config).glob("00000-*/.build")))
        time.sleep(0.2)  # the server of the processes imports what they need
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == EXIT_INTERRUPTED
    assert (tmp_path / "errors").read_text().splitlines() == ["interrupted"]
    assert main(["build", *flags]) == 0
