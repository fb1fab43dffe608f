"""Input that is not what was listed or promised: one line, and nothing is left of the build."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from data_pipeline.builder import build_corpus as builder
from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.parts import build_in_processes
from data_pipeline.config import CorpusConfig, TokenizerConfig
from foundation.errors import UserError
from tests.helpers.corpora import write_jsonl
from tests.helpers.token_files import write_mds, write_megatron

BYTES = TokenizerConfig(kind="bytes")
UNKNOWN = TokenizerConfig(kind="unknown", vocab_size=400, end_id=399)


def build(folder: Path, **settings) -> None:
    options = {"input": (folder,), "tokenizer": BYTES, "validation_fraction": 0.0, "threads": 1}
    build_corpus(CorpusConfig(output=folder.parent / "out", **{**options, **settings}))


def refusal(folder: Path, **settings) -> str:
    """The line with which a build is refused that leaves nothing."""
    with pytest.raises(UserError) as error:
        build(folder, **settings)
    assert "\n" not in str(error.value)
    assert not (folder.parent / "out").exists()
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("inputs", "validation", "file"),
    [
        ([""], ["valid"], "valid/x"), (["valid"], [""], "valid/x"), ([""], [""], "train/x"),
        (["train/x"], ["train/x"], "train/x"), (["train"], ["train/x"], "train/x"),
        (["train"], ["link"], "link/x"), (["train"], ["links"], "links/y"),
        (["train", "valid"], ["valid"], "valid/x"), (["", "train"], [], "train/x"),
        (["train/x", ""], [], "train/x"), (["train", "links"], [], "links/y"),
        (["train/x", "train/x"], [], "train/x"),
    ],
)  # fmt: skip
def test_a_file_of_two_inputs(folder, inputs, validation, file):
    for name in ("train/x", "valid/x"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("some words")
    (folder / "links").mkdir()
    (folder / "links" / "y").symlink_to("../train/x")
    (folder / "link").symlink_to("train")
    roots = [tuple(folder / name for name in names) for names in (inputs, validation)]
    message = refusal(folder, input=roots[0], validation_input=roots[1])
    harm = "is training text and validation text" if validation else "would be read twice"
    assert message == f"{folder / file} {harm}; name inputs that share no file"


def shrink(path: Path) -> None:
    os.truncate(path, path.read_bytes().index(b"\n") + 1)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def shrink_unseen(path: Path) -> None:
    before = path.stat().st_mtime_ns
    shrink(path)
    os.utime(path, ns=(before, before))


@pytest.mark.parametrize(
    "change", [shrink, shrink_unseen, rewrite, lambda path: write_jsonl(path, ["1"] * 9)]
)
def test_a_file_that_changes_between_the_listing_and_its_end(
    folder, monkeypatch, change: Callable[[Path], object]
):
    first, second = (write_jsonl(folder / name, ["one", "two"]) for name in ("1.jsonl", "2.jsonl"))
    before = second.stat().st_mtime_ns - 10**9
    os.utime(second, ns=(before, before))

    def reading(source, *arguments):
        if source.path == first:
            change(second)
        return read_documents(source, *arguments)

    monkeypatch.setattr(builder, "read_documents", reading)
    assert f"{second} was changed while it was read" in refusal(folder)


def flip(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # of the last text, or of what the compression ends with
    shard.write_bytes(content)


def name_another_hash(shard: Path) -> None:
    index = shard.with_name("index.json")
    index.write_text(index.read_text().replace('"sha1"', '"shake_128"'))


@pytest.mark.parametrize(
    ("compression", "hashes", "damage", "reason"),
    [
        (None, [], Path.unlink, "{name}, expected one of them, found 0; fetch"),
        ("zstd", ["sha1"], Path.unlink, "{name}, expected one of them, found 0; fetch"),
        ("gz", [], lambda shard: shutil.copy(shard, shard.with_suffix("")),
         "{name}, expected one of them, found 2; fetch or remove one"),
        (None, ["xxh64"], flip, "its xxh64 is "),
        ("zstd", ["sha1"], flip, "its sha1 is "),
        ("gz", ["blake2b", "xxh3_128"], flip, "its blake2b is "),
        (None, ["sha1"], name_another_hash, "its 'shake_128', which is no known hash"),
    ],
)  # fmt: skip
def test_an_mds_data_set_that_is_not_what_its_index_says(
    folder, compression, hashes, damage, reason
):
    write_mds(
        folder, {"text": "str"}, [{"text": f"text {number}"} for number in range(200)],
        compression=compression, hashes=hashes, size_limit=2000,
    )  # fmt: skip
    build(folder)
    shutil.rmtree(folder.parent / "out")
    shard = sorted(folder.glob("shard.*"))[1]
    damage(shard)
    assert reason.format(name=shard.name) in refusal(folder)


@pytest.mark.parametrize(
    ("code", "dtype", "reason"),
    [
        (8, "<i4", "its index ends at byte 16, the file at 32"),
        (4, "<u2", "puts sequence 3 outside"),
    ],
)
def test_an_index_of_another_type_than_its_file(folder, code, dtype, reason):
    documents = [[5, 6, 7], [8], [9, 10, 11, 12]]
    write_megatron(folder / "x", documents, {8: "<u2", 4: "<i4"}[code], code)
    np.array([token for each in documents for token in each], dtype).tofile(folder / "x.bin")
    assert reason in refusal(folder, format="megatron", tokenizer=UNKNOWN)


@pytest.mark.parametrize(
    ("content", "byte"),
    [
        (b"words " * 50_000 + b"\xff" + b" more" * 50_000, 300_000),
        (b"\x80words " * 50_000, 0),
        (b"words " * 50_000 + "ä".encode()[:1], 300_000),
        (b"\x80" * 250_000, 0),
    ],
)
def test_a_stream_with_a_byte_that_is_no_text(folder, content, byte):
    (folder / "x").write_bytes(content)
    assert f"(invalid UTF-8 at byte {byte})" in refusal(folder, format="stream", max_rejects=100)


def test_an_arrow_stream_that_was_cut_after_a_batch(folder):
    with pyarrow.OSFile(str(folder / "x.arrow"), "wb") as file:
        batch = pyarrow.record_batch({"text": ["one", "two"]})
        writer = pyarrow.ipc.new_stream(file, batch.schema)
        for _ in range(3):
            writer.write_batch(batch)
            end = file.tell()
        writer.close()
    build(folder)
    shutil.rmtree(folder.parent / "out")
    os.truncate(folder / "x.arrow", end)
    assert "it does not end with the mark of a stream's end" in refusal(folder)


@pytest.mark.parametrize("name", ["x.txt", "x.md", "x.TXT.gz"])
def test_records_in_a_file_named_like_text(folder, name):
    write = gzip.open if name.endswith(".gz") else open
    with write(folder / name, "wb") as file:
        file.write(b'{"text": "one"}\n{"text": "two"}\n')
    assert "is JSON Lines by its first line" in refusal(folder)
    with write(folder / name, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(__file__, "a.txt")
    assert "is a tar" in refusal(folder)
    build(folder, format="text")


def test_ranks_of_tiktoken_that_were_cut(folder, tmp_path):
    (folder / "x.txt").write_text("text")
    ranks = [bytes([value]) for value in range(256)]
    ranks += [bytes([97 + one, 97 + other]) for one in range(10) for other in range(10)]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)]
    path = tmp_path / "ranks.tiktoken"
    settings = TokenizerConfig(path=path, pattern=r"\w+|\W+", special_tokens={"<|end|>": 356},
                               end_token="<|end|>")  # fmt: skip
    for cut in (60, 2):
        path.write_bytes(b"".join(lines[:-cut]))
        message = refusal(folder, tokenizer=settings)
        assert f"{cut} ids below 356, the first special token, have no token" in message
    path.write_bytes(b"".join(lines))
    build(folder, tokenizer=settings)


def test_after_a_refusal_the_same_command_with_other_settings_builds(folder):
    """A tokenizer was saved and shards were begun before the record that is refused."""
    np.save(folder / "x.npy", np.array([1, 2, 3, 399, 4, 5], "uint16"))
    tokenizer = replace(UNKNOWN, vocab_size=399, end_id=398)
    assert "has the id 399" in refusal(folder, format="array", tokenizer=tokenizer)
    build(folder, format="array", tokenizer=UNKNOWN)
    recipe = json.loads((folder.parent / "out" / "build.json").read_text())
    assert recipe["settings"]["tokenizer"]["end_id"] == 399


@pytest.mark.parametrize("run", [build_corpus, partial(build_in_processes, processes=2)])
def test_after_a_refusal_with_a_list_of_rejects_other_settings_build(folder, run):
    for name in ("1.jsonl", "2.jsonl"):
        (folder / name).write_text('{"content": "words"}\n' * 20)
    config = CorpusConfig(
        input=(folder,), output=folder.parent / "out", tokenizer=BYTES, validation_fraction=0.0,
        max_rejects=9,
    )  # fmt: skip
    with pytest.raises(UserError, match="more than max_rejects=9") as error:
        run(config)
    assert Path(re.findall(r"in (\S+rejects.jsonl)", str(error.value))[0]).read_text()
    run(replace(config, text_field="content"))
