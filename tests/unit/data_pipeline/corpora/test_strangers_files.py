"""Files of strangers take no memory, time or address that their size does not show."""

import base64
import json
import mmap
import os
import signal
import socket
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.records import MOST_BESIDE_TEXT, Reject, document_of_json
from data_pipeline.builder.sources import list_sources
from data_pipeline.cli import main
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.stores import store_at
from data_pipeline.corpora.web_requests import RetryPolicy, StoreError
from data_pipeline.shards.mds import InvalidShard
from data_pipeline.shards.wds import read_layout
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.vocabularies import confined
from foundation.errors import DataError
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.token_files import write_megatron


def header(size: bytes, kind: bytes = b"0") -> bytes:
    block = bytearray(512)
    block[0:18] = b"00000000-a.tokens."
    block[124:135], block[156:157], block[257:262] = size, kind, b"ustar"
    block[148:156] = b" " * 8
    block[148:154] = b"%06o" % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ({0: b"00000000000", 1: b"0000000.000", 5: b"00000000000"}, 8),  # a size of -1024: back
        ({0: b"0000000000.", 2: b"00000000000"}, 6),
        ({0: b"////////// ", 3: b"00000000000"}, 7),
        ({0: b"00000001000", 1: b"00000000000", 4: b"9999999999/"}, 8),
    ],
)
def test_headers_of_a_tar_shard_lead_forward_only(sizes, blocks):
    memory = mmap.mmap(-1, blocks * 512)
    for block, size in sizes.items():
        memory[block * 512 : (block + 1) * 512] = header(size)
    problems: list[InvalidShard] = []

    def read() -> None:
        with pytest.raises(InvalidShard) as caught:
            read_layout(memory, "uint16")
        problems.append(caught.value)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert problems, "still looking for the end"


def test_headers_that_announce_headers_without_end_are_refused(tmp_path):
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 200
    chain = (name.tobuf(tarfile.GNU_FORMAT) + b"a" * 200 + bytes(312)) * 3000
    (tmp_path / "x.tar").write_bytes(chain + bytes(1024))
    config = CorpusConfig(input=(tmp_path / "x.tar",), output=tmp_path / "out")
    with pytest.raises(DataError, match=r"x\.tar"):
        list(read_documents(list_sources(config.input, config)[0], config))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"text": "t", "x": [' + b"[]," * MOST_BESIDE_TEXT + b"[]]}", "beside its texts"),
        (b'{"text": "t", "x": [' + b'"",' * MOST_BESIDE_TEXT + b"0]}", "beside its texts"),
        (b'{"text": "t", "x": [' + b'"\\"",' * (MOST_BESIDE_TEXT // 3) + b"0]}", "beside its"),
        (b'{"text": "' + b"a[], " * MOST_BESIDE_TEXT + b'"}', ""),
        (b'{"text": "' + b'\\",\\\\' * MOST_BESIDE_TEXT + b'"}', ""),
    ],
)
def test_a_record_may_have_much_text_but_little_beside_it(raw, reason):
    found = document_of_json(raw, "a", "a", CorpusConfig(input=(Path("x"),), output=Path("y")))
    assert reason in found.reason if isinstance(found, Reject) else not reason


def test_sequences_of_megatron_are_summed_before_they_are_read(tmp_path):
    path = tmp_path / "x.bin"
    write_megatron(path, [[1] * 50, [2] * 50])
    head, rest = path.with_suffix(".idx").read_bytes()[:34], 1000
    lengths = np.full(rest, 100, "<i4")
    ends = np.array([0, 1, rest], "<i8")
    counted = head[:18] + np.array([rest, 3], "<u8").tobytes()
    index = counted + lengths.tobytes() + np.zeros(rest, "<i8").tobytes() + ends.tobytes()
    path.with_suffix(".idx").write_bytes(index)
    tokenizer = TokenizerConfig(kind="unknown", vocab_size=300, end_id=8)
    config = CorpusConfig(
        input=(path,), output=tmp_path / "out", tokenizer=tokenizer, format="megatron"
    )
    with pytest.raises(DataError, match=r"100,000 tokens, the file 100"):
        list(read_documents(list_sources(config.input, config)[0], config))


def test_a_shard_that_was_changed_is_hashed_again_whatever_its_time_says(tmp_path):
    corpus = Corpus.open(make_tiny_corpus(tmp_path / "corpus") / "train")
    info = corpus.manifest.shards[0]
    path = corpus.directory / info.path
    corpus._source.open(info, corpus.manifest.dtype)
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-2] ^= 1
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="SHA-256"):
        corpus._source.open(info, corpus.manifest.dtype)


ENDLESS = {
    "a header": (b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "an interim answer": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X-A: a\r\n"),
    "a body": (b"HTTP/1.1 200 OK\r\n\r\n", b"a"),
    "a body in chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_server_that_sends_without_end_is_left_and_its_connection_closed(tmp_path, method, what):
    start, again = ENDLESS[what]
    ended = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        try:
            connection.sendall(start)
            while not ended.wait(0.02):
                connection.sendall(again)
        except OSError:
            ended.set()

    policy = RetryPolicy(attempts=1, timeout=0.3, bytes_per_second=1e4)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        store = store_at(f"http://127.0.0.1:{listener.getsockname()[1]}", policy)
        if method == "HEAD":
            assert store.version("x") == ""
        else:
            with pytest.raises(StoreError, match="too slowly"):
                store.download("x", tmp_path / "x", 1000)
        assert ended.wait(60), "the connection is still open"


def hugging_face(normalizer: dict | None = None, split: str = "") -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, [], unk_token="a"))
    tree = json.loads(made.to_str()) | {"normalizer": normalizer}
    if split:
        pattern = {"Regex": split}
        tree["pre_tokenizer"] = {
            "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False,
        }  # fmt: skip
    return Tokenizer("huggingface", json.dumps(tree).encode(), {"end_token": "</s>"})


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
DAMAGED = base64.b64encode(b"\xff\xff\xff\x7f" + b"\xff" * 396).decode()


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLED] * 36}}, "takes more than"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 50_000_000}}, "takes more than"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": DAMAGED}}, "GiB of host"),
        ({"split": "(a+)+$"}, "the tokenizer fails"),
    ],
)
def test_what_a_tokenizer_of_others_does_is_one_error_and_the_next_text_is_encoded(
    monkeypatch, tokenizer, reason
):
    monkeypatch.setattr(confined, "SECONDS", 3)
    monkeypatch.setattr(confined, "MEMORY_BYTES", 1 << 30)
    with pytest.raises(DataError, match=reason) as caught:  # at once, or at the text
        hugging_face(**tokenizer).encode("a" * 4000 + "b")
    assert "\n" not in str(caught.value)


def test_a_child_that_has_ended_is_replaced_also_after_a_fork():
    tokenizer = hugging_face()
    expected = tokenizer.encode("abba").tolist()
    os.kill(tokenizer.vocabulary._child.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="SIGKILL"):
        tokenizer.encode("abba")
    assert tokenizer.encode("abba").tolist() == expected
    if (forked := os.fork()) == 0:
        os._exit(tokenizer.encode("abba").tolist() != expected)
    assert os.waitpid(forked, 0)[1] == 0
    assert tokenizer.encode("abba").tolist() == expected


def test_a_tokenizer_that_is_loaded_again_starts_no_other_child():
    first, second, other = hugging_face(), hugging_face(), hugging_face({"type": "NFC"})
    assert first.vocabulary is second.vocabulary
    assert first.vocabulary is not other.vocabulary


@pytest.mark.parametrize("damage", ["lost", "{", '{"shards": []}', '{"shards": [{"samples": 9}]}'])
def test_verify_looks_at_the_index_that_stock_readers_need(tmp_path, capsys, damage):
    corpus = make_tiny_corpus(tmp_path / "corpus")
    assert main(["verify", str(corpus)]) == 0
    index = corpus / "train" / "index.json"
    index.unlink() if damage == "lost" else index.write_text(damage)
    assert main(["verify", str(corpus)]) != 0
    assert str(index) in capsys.readouterr().err
