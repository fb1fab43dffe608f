"""Builds that shuffle the documents of the training split."""

import multiprocessing
import random
import shutil
import signal
import time
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.builder.build_corpus import build_corpus, result_of
from data_pipeline.builder.parallel_build import (
    build_in_processes,
    build_part,
    merge_parts,
    parts_directory,
)
from data_pipeline.cli import main
from data_pipeline.commands.verify import verify_split
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.manifest import read_manifest
from foundation.errors import ConfigError, DataError
from foundation.files import read_json
from tests.helpers.corpora import contents, some_texts, stored, write_jsonl
from tests.helpers.full_disk import full_disk

DOMAINS = ("books", "code", "web")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> CorpusConfig:
    """Settings by which a corpus was built, in one process and without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    for seed, domain in enumerate(DOMAINS):
        for number in range(4):
            path = folder / "in" / domain / f"{number}.jsonl"
            write_jsonl(path, some_texts(30, seed=10 * seed + number))
    config = CorpusConfig(
        input=(folder / "in",), output=folder / "out", threads=1, validation_fraction=0.1,
        shard_bytes=4000, shuffle_seed=1, shuffle_bytes=60_000,
        tokenizer=TokenizerConfig(kind="bytes"),
    )  # fmt: skip
    build_in_processes(config, 1)
    return config


def arguments_of(config: CorpusConfig) -> list[str]:
    """The flags that say the same."""
    settings = "validation_fraction=0.1 shard_bytes=4000 shuffle_seed=1 shuffle_bytes=60000"
    paths = [f"--input={config.input[0]}", f"--output={config.output}"]
    return [*paths, *settings.split(), "tokenizer.kind=bytes"]


def test_any_number_of_processes_and_array_tasks_give_the_same_bytes(whole, tmp_path):
    several = replace(whole, output=tmp_path / "several")
    build_in_processes(several, 3)
    tasks = replace(whole, output=tmp_path / "tasks")
    flags = arguments_of(tasks)
    for part in (2, 1, 3, 2):  # the last time all parts are there
        assert main(["build", *flags, f"--part={part}/3"]) == 0
    stretches = {path.parts[-2] for path in parts_directory(tasks).glob("*/shuffled")}
    assert stretches == {"00002-of-00003", "00003-of-00003"}
    assert main(["build", *flags, "--merge=3"]) == 0
    assert contents(whole.output) == contents(several.output)
    assert contents(whole.output) == contents(tasks.output)
    assert not parts_directory(several).exists()
    assert build_in_processes(several, 2).was_finished, "the number of processes changes nothing"
    assert not verify_split(whole.output / "train", lambda line: None)


def test_every_document_is_there_once_and_mixed_as_by_a_full_shuffle(whole, tmp_path):
    ordered = replace(whole, output=tmp_path / "ordered", shuffle_seed=-1)
    before = build_corpus(ordered)
    after = result_of(whole.output)
    documents, shuffled = (
        [(name, tuple(tokens)) for name, tokens in stored(each.output / "train")]
        for each in (ordered, whole)
    )
    assert Counter(shuffled) == Counter(documents)
    assert shuffled != documents
    assert stored(whole.output / "validation") == stored(ordered.output / "validation")
    for split in ("train", "validation"):
        for total in ("text_bytes", "characters", "longest_whole"):
            found = getattr(after.manifests[split], total)
            assert found == getattr(before.manifests[split], total)

    # Positions in the input and after the shuffle are not related: Spearman's rho has the standard
    # deviation 1 / sqrt(n - 1).
    place = {document: number for number, document in enumerate(documents)}
    places = np.array([place[document] for document in shuffled])
    rho = np.corrcoef(places, np.arange(len(places)))[0, 1]
    assert abs(rho) < 5 / np.sqrt(len(places) - 1)


def test_the_order_depends_on_the_seed_and_new_text_moves_no_document(whole, tmp_path):
    other = replace(whole, output=tmp_path / "other", shuffle_seed=2)
    build_in_processes(other, 1)
    assert stored(other.output / "train") != stored(whole.output / "train")
    shutil.copytree(whole.input[0], tmp_path / "in")
    write_jsonl(tmp_path / "in" / "zz" / "new.jsonl", ["new"] * 50)
    more = replace(whole, input=(tmp_path / "in",), output=tmp_path / "more")
    build_in_processes(more, 1)
    old = stored(whole.output / "train")
    assert [each for each in stored(more.output / "train") if each in old] == old


@pytest.mark.parametrize("pattern", ["*/train/*.run", "*/shuffled/train/*.mds", "merged"])
def test_a_build_killed_in_any_phase_resumes_to_the_same_bytes(whole, tmp_path, pattern):
    killed = replace(whole, output=tmp_path / "killed")
    parts = parts_directory(killed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_pipeline.builder.parallel_build", "streaming"])
    generator = random.Random(pattern)
    kills = 0
    for target in (1, 2, 5):
        process = context.Process(target=build_in_processes, args=(killed, 1))
        process.start()
        where = killed.output.glob if pattern == "merged" else parts.glob
        while process.is_alive():
            if len(list(where("train/*.mds" if pattern == "merged" else pattern))) >= target:
                break
        time.sleep(generator.random() * 0.003)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    build_in_processes(killed, 1)
    assert contents(whole.output) == contents(killed.output)
    left = killed.output / ".build-done"  # as a kill at the end leaves
    (left / "scratch").mkdir(parents=True)
    build_in_processes(killed, 1)
    assert contents(whole.output) == contents(killed.output)
    assert not left.exists()
    assert kills, "too fast to be killed in time"


class Stopped(BaseException):
    """Like a kill: nothing in the code handles it."""


@pytest.mark.parametrize(
    "moment",
    [
        "data_pipeline.builder.parallel_build.shuffle_one",
        "data_pipeline.builder.shuffle.SplitWriter.finish",
        "data_pipeline.builder.shuffle.BuildJournal.finish",
        "data_pipeline.builder.parallel_build._merge_split",
        "data_pipeline.builder.parallel_build._remove_parts",
    ],
)
def test_a_build_stopped_at_a_phase_resumes_with_others(whole, tmp_path, monkeypatch, moment):
    stopped = replace(whole, output=tmp_path / "stopped")

    def stop(*arguments):
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(moment, stop)
        with pytest.raises(Stopped):
            build_in_processes(stopped, 1)
    if moment.endswith("shuffle_one"):
        path = max(parts_directory(stopped).glob("*/train/*.run"))
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(DataError, match=path.name):
            build_in_processes(stopped, 1)
        path.write_bytes(content)
    build_in_processes(stopped, 2 if moment.endswith("_merge_split") else 1)
    assert contents(whole.output) == contents(stopped.output)
    assert not parts_directory(stopped).exists()


def test_a_full_disk_is_one_line_in_both_phases(whole, tmp_path, monkeypatch, capsys):
    output = tmp_path / "full"
    arguments = ["build", *arguments_of(replace(whole, output=output))]
    with full_disk(9_000):
        assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "00000.run: " in error
    assert len(list(parts_directory(replace(whole, output=output)).glob("**/*.tmp"))) == 0
    with monkeypatch.context() as patched:
        patched.setattr(
            "data_pipeline.builder.parallel_build.shuffle_one", lambda *arguments: 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            main(arguments)
    with full_disk(3_000):
        assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "shuffled/validation/shard.00000.mds" in error
    assert main(arguments) == 0
    assert contents(whole.output) == contents(output)


def test_settings_of_the_shuffle_are_part_of_the_recipe_only_where_it_is_used(whole, tmp_path):
    plain = replace(whole, output=tmp_path / "plain", shuffle_seed=-1)
    build_corpus(plain)
    assert not {"shuffle_seed", "shuffle_bytes"} & set(
        read_json(plain.output / "build.json")["settings"]
    ), "corpora that were built before there was a shuffle are still recognized"
    assert build_corpus(replace(plain, shuffle_bytes=5000)).was_finished
    with pytest.raises(ConfigError, match="shuffle_seed"):
        build_in_processes(replace(plain, shuffle_seed=1), 1)


def test_the_shuffle_needs_no_more_host_memory_than_it_is_given(whole, tmp_path):
    source = write_jsonl(tmp_path / "large.jsonl", some_texts(8000, seed=99))
    # Bytes as tokens: about 8 MB with 512 bytes for each document.
    config = replace(whole, input=(source,), output=tmp_path / "out")
    config = replace(config, shuffle_bytes=1 << 20, shard_bytes=1 << 16)
    build_part(config, 1, 1)
    tracemalloc.start()
    try:
        merge_parts(config, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    total = read_manifest(config.output / "train").tokens * 2
    assert total > 3 * config.shuffle_bytes
    assert peak < 1.5 * config.shuffle_bytes + 10 * config.shard_bytes
