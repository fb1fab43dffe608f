"""Real servers on loopback to fetch corpora from: one of files, which may go wrong, and one that
speaks S3.
"""

import contextlib
import functools
import http.client
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from data_pipeline.corpora.web_requests import RetryPolicy

FAULTS = ("truncate", "reset", "stall", "500", "flip")
QUICK = RetryPolicy(attempts=3, timeout=0.4, pause=0.01, bytes_per_second=1e6)
# An SDK tries again by itself; a busy machine may need more than that.
QUICK_SDK = RetryPolicy(attempts=4, timeout=1.5, pause=0.01, bytes_per_second=1e6)
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class FileServer(ThreadingHTTPServer):
    """Serves the files below a directory, or what another server answers.

    The first `faulty` answers with each shard's content go wrong as `fault` says, one of FAULTS;
    `bytes_per_second` slows all of them.
    """

    daemon_threads = True

    def __init__(self, upstream: Path | str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.fault, self.faulty = "", 0
        self.stall_seconds = 3.0
        self.content = "shard"  # what the names of faulty files begin with
        self.bytes_per_second = 0.0
        self.denied = ""  # a part of paths that are answered with 403
        self.authorization = ""  # the header without which 401 is the answer
        self.redirect = ""  # where everything is instead
        self.length = ""  # in place of the length of the content
        self.seen: list[str] = []  # the header of each request
        self.requests: Counter[str] = Counter()  # by the file's name
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request, client_address):
        """A client that goes away is no error here."""

    def __exit__(self, *exception) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        server = self.server
        status, headers, content = self._content()
        if server.denied and server.denied in self.path:
            status, headers, content = 403, {"Content-Length": "0"}, b""
        server.seen.append(self.headers.get("Authorization", ""))
        if server.authorization and server.seen[-1] != server.authorization:
            status, headers, content = 401, {"Content-Length": "0"}, b""
        if server.redirect:
            where = {"Location": f"{server.redirect}{self.path}", "Content-Length": "0"}
            status, headers, content = 302, where, b""
        name = self.path.rpartition("/")[2]
        is_content = name.startswith(server.content) and self.command == "GET" and status < 300
        server.requests[name] += self.command == "GET"
        fault = server.fault if is_content and server.requests[name] <= server.faulty else ""
        self.send_response(500 if fault == "500" else status)
        if fault == "500":
            headers, content = {"Content-Length": "0"}, b""
        if fault == "flip":
            content = content[:-3] + bytes([content[-3] ^ 16]) + content[-2:]
        if server.length:
            headers = {**headers, "Content-Length": server.length}
            self.close_connection = True
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        if fault in ("truncate", "reset", "stall"):
            content = content[: len(content) // 2]
        if self.command == "GET":
            self._send(content)
        if fault == "stall":
            time.sleep(server.stall_seconds)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _send(self, content: bytes) -> None:
        rate = self.server.bytes_per_second
        block = max(1, int(rate / 50)) if rate else len(content) + 1
        for begin in range(0, len(content), block):
            self.wfile.write(content[begin : begin + block])
            time.sleep(block / rate if rate else 0)

    def _content(self) -> tuple[int, dict[str, str], bytes]:
        if isinstance(self.server.upstream, Path):
            path = self.server.upstream / self.path.lstrip("/")
            content = path.read_bytes() if path.is_file() else b""
            headers = {"Content-Length": str(len(content))}
            if path.is_file():
                headers["ETag"] = f'"{path.stat().st_mtime_ns:x}-{len(content):x}"'
            return 200 if path.is_file() else 404, headers, content
        connection = http.client.HTTPConnection(self.server.upstream.removeprefix("http://"))
        with contextlib.closing(connection):
            connection.request(self.command, self.path, headers=dict(self.headers))
            answer = connection.getresponse()
            headers = dict(answer.getheaders())
            for name in ("Connection", "Transfer-Encoding", "Server", "Date"):
                headers.pop(name, None)
            return answer.status, headers, answer.read()


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a real S3 server."""
    from moto.server import ThreadedMotoServer

    # It logs each request, some after the test that sent it; other tests count lines of stderr.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def make_bucket(endpoint: str, name: str) -> str:
    """The URL of a new bucket."""
    client(endpoint).create_bucket(Bucket=name)
    return f"s3://{name}"


def put_directory(endpoint: str, directory: Path, url: str) -> None:
    """Copy every file below `directory` to the URL, whatever its name."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(directory)}".lstrip("/")
            client(endpoint).upload_file(str(path), bucket, key)


@functools.cache  # one takes a tenth of a second, and uploads of a corpus take one each
def client(endpoint: str):
    """For what tests do behind the project's back."""
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
