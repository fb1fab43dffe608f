"""Raw input: what each format gives, which records and files are rejected, and where it says so.

With `format: auto` nothing is read as what it is not.
"""

import codecs
import gzip
import io
import json
import os
import shutil
import socket
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipeline.builder import records
from data_pipeline.builder.documents import Document, Reject, read_documents
from data_pipeline.builder.sources import list_sources
from data_pipeline.config import CorpusConfig
from foundation.errors import ConfigError, DataError
from tests.helpers.corpora import make_tiny_corpus, write_jsonl
from tests.helpers.memory_limit import memory_limit


@pytest.fixture
def short_documents(monkeypatch):
    monkeypatch.setattr(records, "LONGEST_DOCUMENT_BYTES", 1000)


def read_all(*paths: Path, notes: list | None = None, **settings) -> list[Document | Reject]:
    config = CorpusConfig(input=paths, output=paths[0].parent / "unused", **settings)
    sources = list_sources(config.input, config, [].append if notes is None else notes.append)
    return [record for source in sources for record in read_documents(source, config)]


def ids_and_texts(found: list[Document | Reject]) -> list[tuple[str, str]]:
    assert all(isinstance(each, Document) for each in found), found
    return [(each.id, each.text) for each in found if isinstance(each, Document)]


def refuse(path: Path, *roots: Path, **settings) -> None:
    """Reading the roots, or else the path, ends in one line that names the path."""
    with pytest.raises(DataError) as error:
        read_all(*(roots or [path]), **settings)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def write_parquet(path: Path, **columns) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_a_folder_gives_one_document_per_file_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b.txt", "c.md", ".git/config", "a/.hidden", "_temporary/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    documents = read_all(tmp_path, suffixes=(".txt",))
    assert [document.id for document in documents] == ["a/b.txt", "a/z.txt", "b.txt"]
    assert documents[0].text == "a/b.txt"
    assert len(read_all(tmp_path)) == 4


def compressed(name, content):
    """Of two members each, as `cat a.gz b.gz` makes."""
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix.lower())
    return pack(content[:100]) + pack(content[100:]) if pack else content


def test_a_byte_order_mark_at_the_start_of_a_file_is_not_part_of_its_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "one"}\n{"text": "two"}\n')
    assert [document.text for document in read_all(tmp_path, format="jsonl")] == ["one", "two"]
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8 + b"three")
    assert [document.text for document in read_all(tmp_path / "b.txt")] == ["three"]


@pytest.mark.parametrize(
    "name", ["x.jsonl", "x.json", "X.JSONL", "x.JsonL.GZ", "c4-train.0-of-9.json.gz", "x.jsonl.zst"]
)
def test_jsonl_gives_a_document_per_line_whatever_the_case_of_its_name(tmp_path, name):
    lines = [{"id": f"n{i}", "text": f"text {i} \u00e9\U0001f600\n" * 50} for i in range(300)]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    (tmp_path / name).write_bytes(compressed(name, content))
    found = read_all(tmp_path)
    assert ids_and_texts(found) == [(line["id"], line["text"]) for line in lines]
    assert found[7].source == f"{name}:8"
    assert read_all(tmp_path, suffixes=(".json", ".jsonl")) == found


def test_a_text_file_may_be_compressed_and_jsonl_may_be_forced(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"hello"))
    assert read_all(tmp_path, suffixes=(".txt",)) == [Document("a.txt.gz", "hello", "a.txt.gz")]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b'{"text": "hello"}'))
    assert read_all(tmp_path, format="jsonl")[0].text == "hello"


def test_fields_have_the_configured_names_and_lines_without_id_their_number(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "a", "key": 17}\n\n{"body": "b"}\n')
    found = read_all(tmp_path, text_field="body", id_field="key")
    assert ids_and_texts(found) == [("17", "a"), ("x.jsonl:3", "b")]


def tar_of(members: list[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


TAR_FORMATS = pytest.mark.parametrize(
    "tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]
)
LONG_KEY = "m" * 90 + "/" + "n" * 80
MEMBERS = [
    ("folder/a.txt", "first \u00e9\n".encode()),
    ("folder/a.jpg", b"\xff" * 5000),
    ("b.json", b'{"text": "second", "id": "own"}'),
    (f"{LONG_KEY}.json", b'{"title": "no text"}'),
    (f"{LONG_KEY}.txt", b"third" * 200),
    ("\u6f22.txt", b"fourth"),
]


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tar.zst"])
@TAR_FORMATS
def test_a_tar_gives_a_document_for_each_sample_in_order(tmp_path, name, tar_format):
    content = tar_of(MEMBERS, tar_format)
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress, ".tar": bytes}
    (tmp_path / name).write_bytes(pack[Path(name).suffix](content))
    assert read_all(tmp_path / name) == [
        Document("folder/a", "first \u00e9\n", f"{name}:folder/a"),
        Document("own", "second", f"{name}:b"),
        Document(LONG_KEY, "third" * 200, f"{name}:{LONG_KEY}"),
        Document("\u6f22", "fourth", f"{name}:\u6f22"),
    ]


def test_a_tar_written_by_webdataset_itself_is_read(tmp_path):
    from webdataset.writer import TarWriter

    with open(tmp_path / "x.tar", "wb") as file:
        writer = TarWriter(file)
        writer.write({"__key__": "a", "txt": "one", "cls": 3})
        writer.write({"__key__": "b", "json": {"body": "two"}})
        writer.write({"__key__": "c", "body": b"three"})
        writer.close()
    found = read_all(tmp_path / "x.tar", text_field="body")
    assert ids_and_texts(found) == [("a", "one"), ("b", "two"), ("c", "three")]


def lines(path: Path, record: bytes) -> None:
    path.write_bytes(b'{"text": "before"}\n' + record + b'\n{"text": "after"}')


def members(path: Path, record: tuple[str, bytes]) -> None:
    path.write_bytes(tar_of([("a.txt", b"before"), record, ("z.txt", b"after")]))


def rows(path: Path, record: bytes | None) -> None:
    write_parquet(path, text=pyarrow.array([b"before", record, b"after"], pyarrow.binary()))


LONG = b"x" * 1001
UNUSABLE = [
    ("x.jsonl", lines, b'{"text": "caf\xe9"}', "x.jsonl:2"),
    ("x.jsonl", lines, b'{"text": "cut', "x.jsonl:2"),
    ("x.jsonl", lines, b"[" * 100000, "x.jsonl:2"),
    ("x.jsonl", lines, b'["text"]', "x.jsonl:2"),
    ("x.jsonl", lines, b'{"body": "x"}', "x.jsonl:2"),
    ("x.jsonl", lines, b'{"text": null}', "x.jsonl:2"),
    ("x.jsonl", lines, b'{"text": " \\n"}', "x.jsonl:2"),
    ("x.jsonl", lines, b'{"text": "\\ud800"}', "x.jsonl:2"),
    ("x.jsonl", lines, b'{"text": "%s"}' % LONG, "x.jsonl:2"),
    ("x.jsonl", lines, b'{"text": "%s"}' % (LONG * 3000), "x.jsonl:2"),
    ("x.jsonl", Path.write_bytes, b'{"text": "a"}{"text": "b"}', "x.jsonl:1"),
    ("x.txt", Path.write_bytes, b"ab\xff", "x.txt"),
    ("x.txt", Path.write_bytes, b" \n", "x.txt"),
    ("x.txt", Path.write_bytes, LONG, "x.txt"),
    ("x.tar", members, ("k.txt", b"caf\xe9"), "x.tar:k"),
    ("x.tar", members, ("k.txt", LONG), "x.tar:k"),
    ("x.tar", members, ("k.json", b'{"body": 1}'), "x.tar:k"),
    ("x.tar", members, ("k.jpg", b"x"), "x.tar:k"),
    ("x.tar", members, ("k", b"x"), "x.tar:k"),
    ("x.parquet", rows, None, "x.parquet:2"),
    ("x.parquet", rows, b"caf\xe9", "x.parquet:2"),
    ("x.parquet", rows, LONG, "x.parquet:2"),
]


@pytest.mark.parametrize(("name", "write", "record", "location"), UNUSABLE)
def test_a_bad_record_is_rejected_with_its_location_and_its_neighbors_are_kept(
    tmp_path, short_documents, name, write: Callable, record, location
):
    write(tmp_path / name, record)
    *good, rejected = sorted(read_all(tmp_path / name), key=lambda each: isinstance(each, Reject))
    assert [text for _, text in ids_and_texts(good)] == ["before", "after"][: len(good)]
    assert len(good) == (0 if write is Path.write_bytes else 2)
    assert isinstance(rejected, Reject)
    assert rejected.source == location


JSON_LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(5000))
THIRD = 512 * 5  # the header of a tar's third member: folder, two members of a header and a block


def three_texts() -> bytes:
    return tar_of([(f"{i}.txt", b"text %d" % i) for i in range(3)])


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes(each ^ 0xFF for each in content[at : at + 2]) + content[at + 2 :]


TAR_DAMAGE = {
    "header": lambda tar: flipped(tar, THIRD + 3),
    "zeroed": lambda tar: tar[:THIRD] + bytes(300) + tar[THIRD + 300 :],
    "cut in a member": lambda tar: tar[: THIRD + 600],
    "cut in a header": lambda tar: tar[: THIRD + 100],
    "without its end": lambda tar: tar[: 512 * 7],
    "with half of its end": lambda tar: tar[: 512 * 8],
    "size": lambda tar: tar[: THIRD + 124] + b"x" * 12 + tar[THIRD + 136 :],
}


@pytest.mark.parametrize("damage", ["cut", "flipped", *TAR_DAMAGE])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_corrupted_archive_is_named_and_never_silently_truncated(tmp_path, suffix, damage):
    checked = zstandard.ZstdCompressor(write_checksum=True).compress  # as the command does
    pack = gzip.compress if suffix == "gz" else checked
    packed = pack(JSON_LINES)
    middle = len(packed) // 2
    files = {f"x.jsonl.{suffix}": packed[:middle] if damage == "cut" else flipped(packed, middle)}
    if damage in TAR_DAMAGE:
        content = TAR_DAMAGE[damage](three_texts())
        assert content != three_texts()
        files = {"x.tar": content, f"x.tar.{suffix}": pack(content)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        refuse(tmp_path / name, max_rejects=10**6)


@pytest.mark.parametrize("name", ["x.txt.zst", "x.txt.gz", "x.jsonl.zst"])
def test_a_small_archive_of_a_huge_text_needs_little_memory(tmp_path, short_documents, name):
    pack = gzip.compress if name.endswith(".gz") else zstandard.compress
    (tmp_path / name).write_bytes(pack(b"x" * (128 << 20), 1))
    tracemalloc.start()
    try:
        (rejected,) = read_all(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()
    assert isinstance(rejected, Reject)


def test_parquet_gives_a_document_for_each_row(tmp_path):
    texts = [f"text {i} \u00e9" for i in range(3000)]
    keys = [f"k{i}" if i != 7 else None for i in range(3000)]
    table = pyarrow.table({"n": range(3000), "body": texts, "key": keys})
    path = tmp_path / "x.PARQUET"
    pyarrow.parquet.write_table(table, path, row_group_size=700)
    found = read_all(path, text_field="body", id_field="key")
    assert [text for _, text in ids_and_texts(found)] == texts
    assert [name for name, _ in ids_and_texts(found)][6:9] == ["k6", "x.PARQUET:8", "k8"]
    assert found[7].source == "x.PARQUET:8"
    for text_type in (pyarrow.large_string(), pyarrow.string_view(), None):
        column = table["body"].cast(text_type) if text_type else table["body"].dictionary_encode()
        write_parquet(path, text=column)
        assert [text for _, text in ids_and_texts(read_all(path))] == texts


def test_a_long_text_of_many_rows_of_parquet_is_in_memory_once(tmp_path):
    words = pyarrow.array(["a " * (1 << 16)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), words)
    for text in (column, column.cast(pyarrow.string())):
        table = pyarrow.table({"text": text})
        pyarrow.parquet.write_table(table, tmp_path / "x.parquet", compression="zstd")
        del table
        pyarrow.default_memory_pool().release_unused()
        before = pyarrow.total_allocated_bytes()
        config = CorpusConfig(input=(tmp_path / "x.parquet",), output=tmp_path)
        source = next(iter(list_sources(config.input, config)))
        found = read_documents(source, config)
        first = next(found)
        assert isinstance(first, Document)
        assert first.id == "x.parquet:1"
        assert pyarrow.total_allocated_bytes() - before < 20 << 20
        assert sum(1 for _ in found) == 999


def test_parquet_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    write_parquet(path, n=[1, 2], body=["a", "b"])
    refuse(path)
    refuse(path, text_field="n")
    path.write_bytes(path.read_bytes()[:100])
    refuse(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError):
        read_all(path)


@TAR_FORMATS
def test_a_link_in_a_tar_is_rejected_and_its_neighbors_are_kept(tmp_path, tar_format):
    with tarfile.open(tmp_path / "x.tar", "w", format=tar_format) as archive:
        for name in ("a.txt", "b.txt", "c.txt"):
            info = tarfile.TarInfo(name)
            info.size = 4
            if name == "b.txt":
                info.type, info.size = tarfile.LNKTYPE, 0
                info.linkname = "a.txt" if tar_format == tarfile.USTAR_FORMAT else "l" * 150
            archive.addfile(info, io.BytesIO(b"text"))
    before, rejected, after = read_all(tmp_path / "x.tar")
    assert (before.id, after.id) == ("a", "c")
    assert isinstance(rejected, Reject)
    assert rejected.source == "x.tar:b"


@pytest.mark.parametrize("size", ["-1", "9" * 5000, "\u00b2", ""])
def test_an_impossible_size_in_a_tar_is_a_corrupted_tar(tmp_path, size):
    info = tarfile.TarInfo("a.txt")
    info.size, info.pax_headers = 4, {"size": size}
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(b"text"))
    refuse(tmp_path / "x.tar")
    content = bytearray(tar_of([("a.txt", b"text")], tarfile.USTAR_FORMAT))
    member = content[512:1024]
    member[124:136] = b"-0000000001\0"
    member[148:156] = b" " * 8
    member[148:156] = f"{sum(member):06o}\0 ".encode()
    content[512:1024] = member
    (tmp_path / "y.tar").write_bytes(content)
    refuse(tmp_path / "y.tar")


def test_several_folders_keep_their_documents_apart(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    found = read_all(tmp_path / "two", tmp_path / "one")
    assert ids_and_texts(found) == [("two/a.txt", "two"), ("one/a.txt", "one")]
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "one")
    with pytest.raises(ConfigError, match=r"'one/a\.txt'"):
        read_all(tmp_path / "one", tmp_path / "two" / "one")


def test_a_file_name_that_is_not_utf8_still_names_its_document(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as file:
        file.write("x")
    (document,) = read_all(tmp_path)
    assert document.id.encode().endswith(b".txt")


def test_symlinks_are_followed_and_broken_ones_are_named(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "file.txt").symlink_to("../b.txt")
    (folder / "linked").symlink_to("../elsewhere")
    assert [document.id for document in read_all(folder)] == ["file.txt", "linked/a.txt"]
    (folder / "twice.txt").hardlink_to(tmp_path / "b.txt")
    with pytest.raises(ConfigError, match=r"twice\.txt"):
        read_all(folder)
    (folder / "twice.txt").unlink()
    (tmp_path / "elsewhere" / "back").symlink_to("../in")
    refuse(folder / "linked" / "back", folder)
    (tmp_path / "elsewhere" / "back").unlink()
    (folder / "lost.txt").symlink_to("gone.txt")
    refuse(folder / "lost.txt", folder)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
def test_an_empty_file_is_a_truncated_archive_and_an_archive_of_nothing_is_not(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    refuse(tmp_path / name, tmp_path)
    pack = gzip.compress if name.endswith("gz") else zstandard.compress
    (tmp_path / name).write_bytes(pack(b""))
    assert read_all(tmp_path) == []


def test_zstd_files_with_a_long_window_are_read(tmp_path):
    settings = zstandard.ZstdCompressionParameters(window_log=28, compression_level=1)  # 27: usual
    packer = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    (tmp_path / "x.jsonl.zst").write_bytes(packer.compress(b'{"text": "far"}\n') + packer.flush())
    assert [document.text for document in read_all(tmp_path)] == ["far"]


def arrow_bytes() -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({"text": ["a"]})
    with pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.json", b'[\n {"text": "a"}\n]'),
        ("x.json", b'{\n "text": "a"\n}'),
        ("part-00000", b'{"text": "one"}\n{"text": "two"}\n'),
        ("shard.00000.mds", b"text"),
        ("shard.00000.mds.zstd", b"text"),
        ("shard.00000.mds", b"\x01\0\0\0" + b"\xff" * 9),
        ("train.bin", np.arange(500, dtype=np.uint16).tobytes()),
        ("train.tokens", np.arange(500, dtype=np.uint16).tobytes()),
        ("cafe", b"caf\xe9"),
        ("x.csv", b"id,text\n"),
        ("x.jsonl.bz2", b"BZh9"),
        ("x.tgz", gzip.compress(b"", mtime=0)),
        ("x", gzip.compress(b"text", mtime=0)),
        ("x.data", b"PAR1....PAR1"),
        ("x.arrow", b"ARROW1 and no more"),
        ("x.dataset", arrow_bytes()),
    ],
)
def test_a_file_that_is_not_text_is_refused_and_named(tmp_path, name, content):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / name).write_bytes(content)
    refuse(tmp_path / name, tmp_path)


@pytest.mark.parametrize("name", ["x.arrow", "x.parquet"])
def test_a_table_that_states_sizes_beyond_memory_is_refused(tmp_path, name):
    """An Arrow stream of the bytes `null` announces 1.8 GB."""
    (tmp_path / name).write_bytes(b"null" if name == "x.arrow" else b"PAR1\xff\xff\xff\x70PAR1")
    with memory_limit(1 << 28):
        refuse(tmp_path / name, tmp_path)


def test_text_of_any_name_is_text_and_a_stated_format_is_taken_at_its_word(tmp_path):
    (tmp_path / "Makefile").write_text("all:\n\ttrue\n")
    (tmp_path / "\u00e9.py").write_text("\u00e9" * 700_000)  # cut inside a character by the head
    assert [record.id for record in read_all(tmp_path)] == ["Makefile", "\u00e9.py"]
    (tmp_path / "x.json").write_text("[1]")
    records = read_all(tmp_path, format="text")
    assert [record.text for record in records][1:2] == ["[1]"]


def test_a_binary_file_among_many_is_listed_as_unusable_when_it_is_read(tmp_path):
    for number in range(17):
        (tmp_path / f"{number:02}.log").write_text("text")
    (tmp_path / "99.log").write_bytes(b"text\0")
    *good, bad = read_all(tmp_path)
    assert len(ids_and_texts(good)) == 17
    assert isinstance(bad, Reject)
    assert bad.source == "99.log"


def test_files_about_records_are_left_out_and_said(tmp_path):
    write_jsonl(tmp_path / "data" / "x.jsonl", ["one"])
    mapped = "data/cache-1f2e3d4c5b6a7988.arrow"
    for name in ("README.md", "LICENSE", "data/dataset_info.json", "data/_SUCCESS", mapped):
        (tmp_path / name).write_text("about")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("beside no records")
    notes: list = []
    assert [record.id for record in read_all(tmp_path, notes=notes)] == ["d0", "other/README.md"]
    (note,) = map(str, notes)
    assert all(name in note for name in (str(tmp_path), "LICENSE", "README.md", "data/_SUCCESS"))
    assert len(read_all(tmp_path, format="text")) == 7, "on demand all of them are text"


def test_a_built_corpus_is_not_built_again(tmp_path):
    built = make_tiny_corpus(tmp_path / "corpus", documents=12)
    for folder in (built, built / "train"):
        refuse(folder)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_neither_file_nor_folder_is_named(tmp_path, monkeypatch, kind):
    path = tmp_path / "in" / "x"
    path.parent.mkdir()
    monkeypatch.chdir(path.parent)  # the names of sockets are short
    os.mkfifo("x") if kind == "pipe" else socket.socket(socket.AF_UNIX).bind("x")
    for root in (path, path.parent):
        refuse(path, root)
