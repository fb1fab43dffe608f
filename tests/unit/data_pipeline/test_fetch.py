from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data_pipeline.cli import main
from data_pipeline.corpus import Corpus
from data_pipeline.errors import DataError
from data_pipeline.fetch import Fetcher
from tests.helpers.corpora import make_tiny_corpus, write_numbered_corpus

FAULTS = ("truncate", "reset", "stall", "500", "flip")


class Server(ThreadingHTTPServer):
    """Serves a directory; the first `faulty` answers for each shard go wrong as `fault` says."""

    daemon_threads = True

    def __init__(self, directory):
        super().__init__(("127.0.0.1", 0), Handler)
        self.directory, self.fault, self.faulty = directory, "", 0
        self.asked = Counter()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, name = self.server, self.path[1:]
        content = bytearray((server.directory / name).read_bytes())
        server.asked[name] += 1
        is_faulty = name != "manifest.json" and server.asked[name] <= server.faulty
        fault = server.fault if is_faulty else ""
        self.send_response(500 if fault == "500" else 200)
        if fault == "flip":
            content[-3] ^= 16
        if fault != "truncate":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault in ("truncate", "reset", "stall"):
            self.wfile.write(content[: len(content) // 2])
            if fault == "stall":
                time.sleep(1.5)
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        self.wfile.write(content)


@pytest.fixture
def server(tmp_path):
    corpus = write_numbered_corpus(tmp_path / "remote", [[30] * 10] * 3)
    server = Server(corpus.directory)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def fetcher(server) -> Fetcher:
    return Fetcher(server.url, attempts=3, timeout=0.3, pause=0.01)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_leaves_the_right_bytes(server, tmp_path, fault):
    server.fault, server.faulty = fault, 2
    fetcher(server).fetch_split(tmp_path / "copy")
    copy, original = Corpus.open(tmp_path / "copy"), Corpus.open(server.directory)
    assert copy.manifest.hash == original.manifest.hash
    for info in original.manifest.shards:
        assert (copy.directory / info.path).read_bytes() == (server.directory / info.path).read_bytes()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_names_the_shard_and_leaves_nothing_that_looks_whole(server, tmp_path, fault):
    server.fault, server.faulty = fault, 100
    with pytest.raises(DataError, match=r"shard\.00000\.mds could not be fetched in 3 attempts, the last failed"):
        fetcher(server).fetch_split(tmp_path / "copy")
    assert not [path.name for path in (tmp_path / "copy").iterdir() if not path.name.endswith(".lock")]


def test_several_at_once_transfer_each_shard_once(server, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        for fetched in [pool.submit(fetcher(server).fetch_split, tmp_path / "copy") for _ in range(4)]:
            fetched.result(20)
    assert {count for name, count in server.asked.items() if name != "manifest.json"} == {1}


def test_other_locations_are_refused():
    with pytest.raises(DataError, match="expected a URL that begins with http"):
        Fetcher("ftp://host/corpus")


def test_the_command_copies_a_built_corpus_that_verifies(tmp_path, capsys):
    make_tiny_corpus(tmp_path / "built")
    server = Server(tmp_path / "built")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        assert main(["fetch", server.url, str(tmp_path / "copy")]) == 0
    finally:
        server.shutdown()
        server.server_close()
    assert main(["verify", str(tmp_path / "copy")]) == 0
    assert "every shard is what its manifest says" in capsys.readouterr().out
