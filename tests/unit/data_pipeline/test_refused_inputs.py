"""Input that is not what was listed or promised: one line, and nothing is left of the build."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.builder import build_corpus as builder
from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.documents import read_documents
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.errors import UserError
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


@pytest.mark.parametrize("change", [shrink, rewrite, lambda path: write_jsonl(path, ["1"] * 9)])
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


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("hashes", [["sha1"], ["xxh64"]])
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_an_mds_data_set_that_is_not_what_its_index_says(folder, compression, hashes, damage):
    write_mds(
        folder, {"text": "str"}, [{"text": f"text {number}"} for number in range(200)],
        compression=compression, hashes=hashes, size_limit=2000,
    )  # fmt: skip
    build(folder)
    shutil.rmtree(folder.parent / "out")
    shard = sorted(folder.glob("shard.*"))[1]
    if damage == "missing":
        shard.unlink()
        assert f"{shard.name}, which is missing" in refusal(folder)
    else:
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1  # of the last text, or of the frame's checksum
        shard.write_bytes(content)
        assert f"its {hashes[0]} is " in refusal(folder)


def test_an_index_that_ends_before_its_file(folder):
    documents = [[5, 6, 7], [8], [9, 10, 11, 12]]
    write_megatron(folder / "x", documents)
    np.array([token for each in documents for token in each], "<i4").tofile(folder / "x.bin")
    message = refusal(folder, format="megatron", tokenizer=UNKNOWN)
    assert "its index ends at byte 16, the file at 32" in message


def test_a_stream_with_a_byte_that_is_no_text(folder):
    (folder / "enwik").write_bytes(b"some words " * 30_000 + b"\xff" + b" and more" * 30_000)
    message = refusal(folder, format="stream", tokenizer=BYTES, max_rejects=100)
    assert "(enwik:299997: invalid UTF-8 at byte 30003)" in message


def test_ranks_of_tiktoken_that_were_cut(folder, tmp_path):
    (folder / "x.txt").write_text("text")
    ranks = [bytes([value]) for value in range(256)]
    ranks += [bytes([97 + one, 97 + other]) for one in range(10) for other in range(10)]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)]
    path = tmp_path / "ranks.tiktoken"
    settings = TokenizerConfig(path=path, pattern=r"\w+|\W+", special_tokens={"<|end|>": 356},
                               end_token="<|end|>")  # fmt: skip
    path.write_bytes(b"".join(lines[:-60]))
    message = refusal(folder, tokenizer=settings)
    assert "60 ids below 356, the first special token, have no token" in message
    path.write_bytes(b"".join(lines))
    build(folder, tokenizer=settings)


def test_after_a_refusal_the_same_command_with_other_settings_builds(folder):
    """A tokenizer was saved and shards were begun before the record that is refused."""
    np.save(folder / "x.npy", np.array([1, 2, 3, 399, 4, 5], "uint16"))
    settings = {"format": "array", "tokenizer": UNKNOWN}
    assert "set tokens_separator to it" in refusal(folder, **settings)
    build(folder, tokens_separator=399, **settings)
    recipe = json.loads((folder.parent / "out" / "build.json").read_text())
    assert recipe["settings"]["tokens_separator"] == 399
