"""Data sets that list their own files, with one lost, one too many, and one of another version."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from foundation.errors import UserError
from tests.helpers.corpora import stored, write_jsonl
from tests.helpers.token_files import write_mds, write_megatron

BYTES = TokenizerConfig(kind="bytes")
IDS = TokenizerConfig(kind="unknown", vocab_size=400, end_id=399)
TEXTS = [f"text {number}" for number in range(9)]


def build(folder: Path, **settings) -> tuple[list[str], list[str]]:
    """Build a corpus of the folder; return its texts or tokens, and the notes."""
    out, notes = folder.parent / "out", []
    shutil.rmtree(out, ignore_errors=True)
    options = {"input": (folder,), "tokenizer": BYTES, "validation_fraction": 0.0, "threads": 1}
    config = CorpusConfig(output=out, **{**options, **settings})
    build_corpus(config, lambda event: notes.append(str(event)))
    documents = [tokens for _, tokens in stored(out / "train")]
    if config.tokenizer.kind == "unknown":
        return [str(tokens[0]) for tokens in documents], notes
    return [bytes(tokens[:-1]).decode() for tokens in documents], notes


def table(texts: list[str]):
    import datasets

    return datasets.Dataset.from_dict({"text": texts})


def save(folder: Path, texts: list[str] = TEXTS, shards: int = 3) -> None:
    table(texts).save_to_disk(str(folder), num_shards=shards)


def save_splits(folder: Path) -> None:
    for split in ("train", "test"):
        save(folder / split, [f"{split} {text}" for text in TEXTS], 1)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def save_mds(folder: Path, **settings) -> None:
    samples = [{"text": text * 20} for text in TEXTS]
    write_mds(folder, {"text": "str"}, samples, size_limit=600, **settings)


def save_parquet(folder: Path, total: int = 3) -> None:
    for number in range(total):
        rows = pyarrow.table({"text": TEXTS[number::total]})
        path = folder / "data" / f"train-{number:05}-of-{total:05}.parquet"
        path.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(rows, path)


def save_megatron(folder: Path) -> None:
    for number, name in enumerate("ab"):
        write_megatron(folder / name, [[5 + number, 6], [7 + number]])


def save_tars(folder: Path) -> None:
    from webdataset import TarWriter

    for name in ("a.tar", "b.tar"):
        with TarWriter(str(folder / name)) as writer:
            writer.write({"__key__": name[0], "txt": name})
    shards = [{"url": name, "nsamples": 1} for name in ("a.tar", "b.tar")]
    index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards}
    (folder / "shardindex.json").write_text(json.dumps(index))


def save_hashed(folder: Path) -> None:
    save_parquet(folder)
    for number, path in enumerate(sorted(folder.rglob("*-of-00003.parquet"))):
        path.rename(path.with_name(f"{path.stem}-a09b74b3ef9c3b5{number}.parquet"))


def replace_tar(folder: Path) -> None:
    from webdataset import TarWriter

    with TarWriter(str(folder / "a.tar")) as writer:
        for key in "ab":
            writer.write({"__key__": key, "txt": key})


def lose(pattern: str) -> Callable[[Path], None]:
    return lambda folder: sorted(folder.rglob(pattern))[1].unlink()


def double(pattern: str, name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        first = sorted(folder.rglob(pattern))[0]
        shutil.copy(first, first.with_name(name))

    return change


def shrink(pattern: str) -> Callable[[Path], None]:
    """Put a file of an older version, smaller or larger, in the place of one."""

    def change(folder: Path) -> None:
        first, second = sorted(folder.rglob(pattern))[:2]
        second.write_bytes(first.read_bytes() + first.read_bytes())

    return change


def add(name: str) -> Callable[[Path], object]:
    return lambda folder: write_jsonl(folder / name, [name])


def rewrite(name: str, old: str, new: str) -> Callable[[Path], object]:
    """Put a text in the place of another one in a list."""

    def change(folder: Path) -> None:
        content = (folder / name).read_text()
        assert old in content
        (folder / name).write_text(content.replace(old, new))

    return change


def save_card(folder: Path) -> None:
    """Write a data set of the hub whose splits only its card tells."""
    for name in ("data/a.jsonl", "data/b.jsonl"):
        write_jsonl(folder / name, [name])
    (folder / "README.md").write_text(CARD)


CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - {split: train_sft, path: data/*.jsonl}
  - {split: test_sft, path: [data/z.jsonl, "q/**"]}
- config_name: other
  data_files: {train: "other/*", dev: "other/dev*"}
---
# Some texts
"""
REFUSED = "refused"
MEGATRON = {"format": "megatron", "tokenizer": IDS}
ZSTD = {"compression": "zstd"}


@pytest.mark.parametrize(
    ("make", "settings", "change", "outcome"),
    [
        (save, {}, lose("*.arrow"), REFUSED),
        (save, {}, double("*.arrow", "cache-1f.arrow"), "cache-1f.arrow"),
        (save, {}, lambda f: save(f, shards=1), "data-00002-of-00003.arrow"),
        (save, {}, lambda f: (f / "state.json").write_text("{"), REFUSED),
        (save, {}, rewrite("state.json", "00001-of", "00000-of"), REFUSED + "lists data-00000-of"),
        (save, {}, lambda f: (f / "state.json").write_text('{"_data_files": []}'),
         REFUSED + "state.json lists no files"),
        (save, {}, rewrite("state.json", '"_data_files"', '"_indices_data_files": [1], "x"'),
         REFUSED + "/in/state.json has an index of its rows"),
        (save_splits, {}, lambda f: shutil.rmtree(f / "train"), REFUSED),
        (save_splits, {}, lambda f: save(f / "old", TEXTS, 1), "old/data-00000-of-00001.arrow"),
        (save_splits, {}, double("train/*.arrow", "cache-2.arrow"), "not listed in train/"),
        (save_mds, {}, lose("*.mds"), REFUSED),
        (save_mds, {}, double("*.mds", "shard.00009.mds"), "shard.00009.mds"),
        (save_mds, {}, shrink("*.mds"), REFUSED),
        (save_mds, {}, lambda f: (f / "index.json").write_text('{"shards": 1}'), REFUSED),
        (save_mds, {}, rewrite("index.json", "1.mds", "0.mds"), REFUSED + "0.mds twice"),
        (save_mds, {}, rewrite("index.json", '"mds"', '"jsonl"'), REFUSED + "format jsonl"),
        (lambda f: save_mds(f, **ZSTD), {}, lose("*.zstd"), REFUSED),
        (lambda f: save_mds(f, **ZSTD), {}, double("*.zstd", "x.mds.zstd"), "x.mds.zstd"),
        (lambda f: save_mds(f, **ZSTD), {}, shrink("*.zstd"), REFUSED),
        (save_parquet, {}, lose("*.parquet"), "found 2 of 3 files"),
        (save_parquet, {}, double("*.parquet", "test-00000-of-00001.parquet"), "data/test-00000"),
        (save_parquet, {}, lambda f: save_parquet(f, 1), REFUSED),
        (save_parquet, {}, lambda f: (f / "data" / "_delta_log").mkdir(), REFUSED),
        (save_parquet, {}, lambda f: (f / ".hoodie").mkdir(), REFUSED),
        (save_hashed, {}, lose("*.parquet"), "found 2 of 3 files"),
        (save_hashed, {}, lambda f: save_parquet(f, 1), REFUSED),
        (save_hashed, {}, double("*.parquet", "train-00000-of-00003-0123456789abcdef.parquet"),
         REFUSED),
        (save_megatron, MEGATRON, lose("*.bin"), REFUSED),
        (save_megatron, MEGATRON, lose("*.idx"), REFUSED),
        (save_megatron, MEGATRON, shrink("*.bin"), REFUSED),
        (save_megatron, MEGATRON, lambda f: (f / "x.py").write_text("ab"), "x.py"),
        (save_tars, {}, lose("*.tar"), REFUSED),
        (save_tars, {}, double("*.tar", "c.tar"), "c.tar"),
        (save_tars, {}, replace_tar, REFUSED),
        (save_tars, {}, rewrite("shardindex.json", '"nsamples": 1', '"nsamples": [1]'), REFUSED),
        (save_card, {}, lambda f: shutil.rmtree(f / "data"), REFUSED),
        (save_card, {}, double("data/*", "z.jsonl"), "data/z.jsonl"),
        (save_card, {}, add("q/x/train.jsonl"), "q/x/train.jsonl"),
        (save_card, {}, add("other/x.jsonl"), "other/x.jsonl"),
        (save_card, {}, lambda f: (f / "old").symlink_to("data"), "old/a.jsonl"),
        (save_card, {}, rewrite("README.md", "data/*.jsonl", "data/c*"), REFUSED + "lists data/c*"),
        (save_card, {}, rewrite("README.md", "- {split", "- {[split"), REFUSED),
    ],
)  # fmt: skip
def test_a_data_set_is_what_it_lists_of_itself(tmp_path, make, settings, change, outcome):
    folder = tmp_path / "in"
    folder.mkdir()
    make(folder)
    whole, _ = build(folder, **settings)
    change(folder)
    if outcome.startswith(REFUSED):
        with pytest.raises(UserError) as error:
            build(folder, **settings)
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)
        assert outcome.removeprefix(REFUSED) in str(error.value)
        return
    texts, notes = build(folder, **settings)
    assert outcome in "\n".join(notes)
    assert len(texts) == len(set(texts))
    assert texts == whole or (set(texts) < set(whole) and "found 2 of 3" in outcome)


@pytest.mark.parametrize(
    ("files", "read"),
    [
        ("train.jsonl test.jsonl", "train.jsonl"),
        ("wiki.train.txt wiki.valid.txt wiki.test.txt", "wiki.train.txt"),
        ("en/c4-train.jsonl en/c4-validation.jsonl x.jsonl", "en/c4-train.jsonl x.jsonl"),
        ("train/a.jsonl val/a.jsonl dev.jsonl", "train/a.jsonl"),
        ("a/training/x.txt a/testing/x.txt b/testing/x.txt", "a/training/x.txt b/testing/x.txt"),
        ("test.jsonl contest.jsonl", "contest.jsonl test.jsonl"),
        ("train.py test.py", "test.py train.py"),
        ("trains.txt tests.txt latest.txt", "latest.txt tests.txt trains.txt"),
        ("train_sft.jsonl test_sft.jsonl TEST-2.jsonl", "train_sft.jsonl"),
        ("train.jsonl holdout.jsonl heldout.jsonl held_out.jsonl hold-outs.jsonl", "train.jsonl"),
        ("trainset.txt testset.txt dev_set.txt development.txt hold.txt", "hold.txt trainset.txt"),
    ],
)
def test_validation_and_test_splits_beside_a_training_split_are_no_training_text(
    tmp_path, files, read
):
    for name in files.split():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            write_jsonl(path, [name])
        else:
            path.write_text(name)
    texts, notes = build(tmp_path / "in")
    assert texts == read.split()
    assert ("of a validation or test split" in "".join(notes)) == (len(texts) < len(files.split()))
    held_out = [name for name in files.split() if name not in texts]
    if held_out:  # they are read where they are named
        asked = tmp_path / "in" / held_out[0]
        assert build(tmp_path / "in", input=(asked,))[0] == held_out[:1]


@pytest.mark.parametrize(
    "names",
    ["a.jsonl a.jsonl.gz", "x-0-of-2.jsonl x-0-of-3.jsonl", "x-1-of-2.jsonl x-01-of-2.jsonl"],
)
def test_a_file_in_two_forms_or_versions_is_refused(tmp_path, names):
    for name in names.split():
        write_jsonl(tmp_path / "in" / name, [name])
    with pytest.raises(UserError, match="remove one"):
        build(tmp_path / "in")


@pytest.mark.parametrize(
    ("name", "content", "is_left_out"),
    [
        ("SHA256SUMS", f"{'0a' * 32}  a.txt\n{'9F' * 32} *lost.txt\n", True),
        ("md5sums.txt", f"{'0a' * 16}  a.txt\n", True),
        ("checksums.sha512", f"SHA512 (a.txt) = {'0a' * 64}\n", True),
        ("a.txt.md5", "0a" * 16, True),
        ("MANIFEST", "a.txt\n./b/a.txt\n", True),
        ("file_list.txt", "3 a.txt\n", True),
        ("MANIFEST.in", "include a.txt\nprune docs\n", False),
        ("sha256sums.md", "A list of sums, with their names.\n", False),
        ("hashes.txt", f"{'0a' * 32} is a hash\n", False),
        ("lists.txt", "read about all of this in a.txt\n", False),
        ("list", "", False),
    ],
)
def test_lists_of_files_are_no_text(tmp_path, name, content, is_left_out):
    folder = array_folder(tmp_path / "in", a_txt=b"text")
    (folder / name).write_text(content)
    texts, notes = build(folder)
    assert sorted(texts) == sorted(["text", *([] if is_left_out or not content else [content])])
    assert (name in "".join(notes)) == is_left_out
    if content:  # on demand it is text
        assert len(build(folder, format="text")[0]) == 2


def array_folder(folder: Path, **files: np.ndarray | bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else content.tobytes()
        (folder / name.replace("_", ".")).write_bytes(raw)
    return folder


def test_a_folder_of_arrays_is_read_from_arrays_only(tmp_path):
    tokens = np.array([5, 6, 399, 7, 399], "<u2")
    folder = array_folder(tmp_path / "in", train_bin=tokens, val_bin=tokens, prepare_py=b"import")
    np.save(folder / "x.NPY.npy", tokens + 1 - (tokens == 399))
    (folder / "x.NPY.npy").rename(folder / "x.NPY")
    texts, notes = build(folder, format="array", tokenizer=IDS)
    assert texts == ["5", "7", "6", "8"]
    assert "val.bin" in "".join(notes)
    assert "prepare.py" in "".join(notes)


WIDE = np.arange(70, 130)


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        (WIDE.astype("<u4"), {}),
        (WIDE.astype("<i8"), {}),
        (WIDE.astype(">u4"), {}),
        (WIDE.astype("<f4"), {"tokenizer": replace(IDS, vocab_size=65_536)}),
        (WIDE.astype("<i8"), {"token_dtype": "uint16"}),
        (WIDE.astype("<i8"), {"token_dtype": "uint32"}),
        (WIDE.astype("<u2"), {"token_dtype": "uint8", "tokenizer": replace(IDS, end_id=-1)}),
        (WIDE.astype("<u2"), {"tokenizer": replace(IDS, vocab_size=70_000)}),
        (WIDE.astype("<u2"), {"tokenizer": replace(IDS, vocab_size=70_000, end_id=69_999)}),
        (np.array([20240520, 1], "<i4"), {"tokenizer": replace(IDS, vocab_size=65_536)}),
        (b"\x1f\x8b\x08\0" * 8, {}),
        (b"PK\x03\x04" * 8, {}),
    ],
)  # fmt: skip
def test_ids_that_are_not_of_the_type_they_are_read_as(tmp_path, content, settings):
    folder = array_folder(tmp_path / "in", x_bin=content)
    with pytest.raises(UserError, match=r"x\.bin"):
        build(folder, **{"format": "array", "tokenizer": IDS, **settings})


def test_events_whose_every_second_id_is_small_are_no_halves_of_ids(tmp_path):
    for number, second in enumerate((WIDE % 12, WIDE % 2)):
        events = np.stack([WIDE, second], 1).astype("<u2")
        folder = array_folder(tmp_path / str(number), x_bin=events)
        assert build(folder, format="array", tokenizer=IDS)[0] == ["70"]


def test_numpy_arrays_end_where_their_header_says_and_need_one(tmp_path):
    folder = array_folder(tmp_path / "in", x_npy=np.array([5, 399, 6], "<u4"))
    settings = {"format": "array", "tokenizer": IDS}
    with pytest.raises(UserError, match="token_dtype"):
        build(folder, **settings)
    assert build(folder, token_dtype="uint32", **settings)[0] == ["5", "6"]
    np.save(folder / "x.npy", np.array([5, 399, 6]))
    assert build(folder, **settings)[0] == ["5", "6"]
    with open(folder / "x.npy", "ab") as file:
        file.write(bytes(8))
    with pytest.raises(UserError, match="ends at byte"):
        build(folder, **settings)
