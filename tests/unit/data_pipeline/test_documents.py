from __future__ import annotations

import codecs
import errno
import gzip
import json
import os
import shutil
import tracemalloc

import pytest
import zstandard

from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.records import Document, Reject
from data_pipeline.builder.sources import list_sources
from data_pipeline.config import CorpusConfig
from foundation.errors import ConfigError, DataError, exit_status_of


def config_of(*inputs, **settings):
    return CorpusConfig(input=inputs, output=inputs[0] / "unused", **settings)


def read_all(config):
    return [
        record
        for source in list_sources(config.input, config)
        for record in read_documents(source, config)
    ]


def test_a_folder_gives_one_document_per_file_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b.txt", "c.md", ".git/config", "a/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    documents = read_all(config_of(tmp_path, suffixes=(".txt",)))
    assert [document.id for document in documents] == ["a/b.txt", "a/z.txt", "b.txt"]
    assert documents[0].text == "text of a/b.txt"
    assert len(read_all(config_of(tmp_path))) == 4


def test_line_ends_and_spaces_of_a_text_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b" one\r\n\ttwo \n\n")
    assert read_all(config_of(tmp_path))[0].text == " one\r\n\ttwo \n\n"


def compressed(name, content):
    if name.endswith(".gz"):
        return gzip.compress(content[:100]) + gzip.compress(
            content[100:]
        )  # two members, as `cat a.gz b.gz` makes
    if name.endswith(".zst"):
        packer = zstandard.ZstdCompressor()
        return packer.compress(content[:100]) + packer.compress(content[100:])
    return content


def test_a_byte_order_mark_at_the_start_of_a_file_is_not_part_of_its_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "one"}\n{"text": "two"}\n')
    assert [document.text for document in read_all(config_of(tmp_path, format="jsonl"))] == [
        "one",
        "two",
    ]
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8 + b"three")
    assert [document.text for document in read_all(config_of(tmp_path / "b.txt"))] == ["three"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst"])
def test_jsonl_gives_a_document_per_line_plain_or_compressed(tmp_path, name):
    records = [{"id": f"n{i}", "text": f"text {i} \u00e9\U0001f600\n" * 50} for i in range(300)]
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    (tmp_path / name).write_bytes(compressed(name, content))
    documents = read_all(config_of(tmp_path / name))
    assert [(document.id, document.text) for document in documents] == [
        (r["id"], r["text"]) for r in records
    ]
    assert documents[7].source == f"{name}:8"


def test_a_text_file_may_be_compressed_and_jsonl_may_be_forced(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"hello"))
    assert read_all(config_of(tmp_path, suffixes=(".txt",))) == [
        Document("a.txt.gz", "hello", "a.txt.gz")
    ]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b'{"text": "hello"}'))
    assert read_all(config_of(tmp_path, format="jsonl"))[0].text == "hello"


def test_fields_have_the_configured_names_and_lines_without_an_id_are_named_by_their_number(
    tmp_path,
):
    (tmp_path / "x.jsonl").write_text('{"body": "a", "key": 17}\n\n{"body": "b"}\n')
    documents = read_all(config_of(tmp_path, text_field="body", id_field="key"))
    assert [(document.id, document.text) for document in documents] == [
        ("17", "a"),
        ("x.jsonl:3", "b"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', "invalid UTF-8 at byte 13 of the JSON"),
        (b'{"text": "cut', "invalid JSON: Unterminated string"),
        (b"[" * 100000, "invalid JSON"),
        (b'["text"]', "found list, expected a JSON object"),
        (b'{"body": "x"}', "no field 'text'"),
        (b'{"text": null}', "field 'text' holds NoneType, expected text"),
        (b'{"text": " \\n"}', "empty"),
        (b'{"text": "\\ud800"}', "half a surrogate pair at character 0"),
        (b'{"text": "' + b"x" * 1001 + b'"}', "longer than max_document_bytes=1000"),
        (b'{"text": "' + b"x" * 3_000_000 + b'"}', "longer than max_document_bytes=1000"),
    ],
)
def test_a_bad_line_is_rejected_with_location_and_reason_and_its_neighbors_are_kept(
    tmp_path, line, reason
):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}')
    before, rejected, after = read_all(config_of(tmp_path, max_document_bytes=1000))
    assert (before.text, after.text) == ("before", "after")
    assert isinstance(rejected, Reject)
    assert rejected.source == "x.jsonl:2"
    assert reason in rejected.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"ab\xff", "invalid UTF-8 at byte 2"),
        (b" \n", "empty"),
        (b"", "empty"),
        (b"x" * 1001, "longer than"),
    ],
)
def test_a_bad_text_file_is_rejected(tmp_path, content, reason):
    (tmp_path / "x.txt").write_bytes(content)
    (rejected,) = read_all(config_of(tmp_path, max_document_bytes=1000))
    assert rejected.source == "x.txt"
    assert reason in rejected.reason


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_corrupted_archive_is_named(tmp_path, name, damage):
    content = b"".join(b'{"text": "%d"}\n' % number for number in range(5000))
    pack_zst = zstandard.ZstdCompressor(write_checksum=True).compress  # as the zstd command does
    packed = bytearray(gzip.compress(content) if name.endswith(".gz") else pack_zst(content))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[len(packed) // 2] ^= 0xFF
        packed[len(packed) // 2 + 1] ^= 0xFF
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(DataError, match=rf"{name} is corrupted or truncated"):
        read_all(config_of(tmp_path, max_rejects=10**6))


@pytest.mark.parametrize("name", ["x.txt.zst", "x.txt.gz", "x.jsonl.zst"])
def test_a_small_archive_of_a_huge_text_is_rejected_in_little_memory(tmp_path, name):
    pack = gzip.compress if name.endswith(".gz") else zstandard.compress
    (tmp_path / name).write_bytes(pack(bytes(128 << 20), 1))
    tracemalloc.start()
    try:
        (rejected,) = read_all(config_of(tmp_path, max_document_bytes=1000))
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()
    assert rejected.reason == "longer than max_document_bytes=1000"


def test_input_that_is_absent_or_without_files_is_rejected(tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        read_all(config_of(tmp_path / "nowhere"))
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(DataError, match=r"no files whose name ends in .txt found"):
        read_all(config_of(tmp_path, suffixes=(".txt",)))


def test_several_folders_keep_their_documents_apart(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    documents = read_all(config_of(tmp_path / "two", tmp_path / "one"))
    assert [(document.id, document.text) for document in documents] == [
        ("two/a.txt", "two"),
        ("one/a.txt", "one"),
    ]
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "one")
    with pytest.raises(ConfigError, match=r"the same name 'one/a.txt'"):
        read_all(config_of(tmp_path / "one", tmp_path / "two" / "one"))


def test_a_file_name_that_is_not_utf8_still_names_its_document(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as file:
        file.write("x")
    (document,) = read_all(config_of(tmp_path))
    assert document.id.encode().endswith(b".txt")


def test_symlinks_are_followed_and_broken_ones_are_named(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("text")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "file.txt").symlink_to("../elsewhere/a.txt")
    (folder / "linked").symlink_to("../elsewhere")
    assert [document.id for document in read_all(config_of(folder))] == ["file.txt", "linked/a.txt"]
    (tmp_path / "elsewhere" / "back").symlink_to("../in")
    with pytest.raises(DataError, match=r"in/linked/back is a link to one of its parent folders"):
        read_all(config_of(folder))
    (tmp_path / "elsewhere" / "back").unlink()
    (folder / "lost.txt").symlink_to("gone.txt")
    with pytest.raises(DataError, match=r"lost.txt is a link to gone.txt, which does not exist"):
        read_all(config_of(folder))


def test_a_folder_without_read_permission_is_an_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "closed").mkdir()
    list_folder = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)  # root may list everything
    assert exit_status_of(lambda: len(read_all(config_of(tmp_path)))) == 2
    assert "closed: Permission denied; give this user the permissions" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
def test_an_empty_file_is_a_truncated_archive_and_an_archive_of_nothing_is_not(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{name} is corrupted or truncated \(it is empty\)"):
        read_all(config_of(tmp_path))
    (tmp_path / name).write_bytes(
        gzip.compress(b"") if name.endswith("gz") else zstandard.compress(b"")
    )
    assert read_all(config_of(tmp_path)) == []


def test_zstd_files_with_a_long_window_are_read(tmp_path):
    settings = zstandard.ZstdCompressionParameters(
        window_log=28, compression_level=1
    )  # beyond the usual 27
    packer = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    (tmp_path / "x.jsonl.zst").write_bytes(packer.compress(b'{"text": "far"}\n') + packer.flush())
    assert [document.text for document in read_all(config_of(tmp_path))] == ["far"]
