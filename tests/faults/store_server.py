"""A server of S3's protocol (moto) behind a proxy that fails on purpose, for tests of object stores."""

from __future__ import annotations

import base64
import http.client
import logging
import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

KINDS = (
    "500",
    "503",
    "delay",
    "cut",
    "flip",
    "flip-sent",
    "lost",
    "frozen",
)  # and silent, which random plans leave out
Plan = Callable[[str, str], str | None]


class FaultProxy(ThreadingHTTPServer):
    """Forwards to `target`, but for what `plan` says of a request (method, path with query): one of KINDS, or None.

    500, 503: an error without the work. delay: `delay` seconds before. cut: half of the answer. flip, flip-sent: one
    bit of the answer's, or the request's, body. lost: the work is done and the line goes dead. frozen: a listing as it
    was the first time. silent: no answer for a minute. It checks the CRC-32 of what is sent, which moto does not.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: int, plan: Plan = lambda method, path: None, delay: float = 0.05) -> None:
        self.target, self.plan, self.delay = target, plan, delay
        self.seen: Counter[str] = Counter()
        self.listings: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str | None]:
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.plan(self.command, self.path)
        self.server.seen[fault or self.command] += 1
        if fault in ("500", "503"):
            self._answer(int(fault), [], b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault in ("delay", "silent"):
            time.sleep(self.server.delay if fault == "delay" else 60.0)
        sent = _flipped(body) if fault == "flip-sent" else body
        crc = self.headers.get("x-amz-checksum-crc32")
        if crc is not None and base64.b64decode(crc) != zlib.crc32(sent).to_bytes(4, "big"):
            self._answer(400, [], b"<Error><Code>BadDigest</Code></Error>")
            return
        status, headers, answer = self._forward(sent)
        if self.command == "GET" and "list-type" in self.path:
            first = self.server.listings.setdefault(self.path, (status, headers, answer))
            status, headers, answer = first if fault == "frozen" else (status, headers, answer)
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
            return
        self._answer(status, headers, _flipped(answer) if fault == "flip" else answer, cut=fault == "cut")

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        line = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        line.request(self.command, self.path, body, dict(self.headers))
        found = line.getresponse()
        kept = [(k, v) for k, v in found.getheaders() if k.lower() not in ("transfer-encoding", "connection")]
        answer = found.read()
        line.close()
        return found.status, kept, answer

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for key, value in headers:
            if key.lower() != "content-length" or self.command == "HEAD":
                self.send_header(key, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # a client that was killed, or that hung up
            pass

    def log_message(self, *_: Any) -> None:
        pass


def _flipped(data: bytes) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def random_plan(seed: int, share: float, kinds: tuple[str, ...] = KINDS) -> Plan:
    """A fault for this share of the requests; listings are frozen and bodies flipped only where that makes sense."""
    rng, lock = random.Random(seed), threading.Lock()

    def plan(method: str, path: str) -> str | None:
        with lock:
            kind = rng.choice(kinds) if rng.random() < share else None
        is_list = "list-type" in path
        if kind == "frozen" and not is_list or kind == "flip" and (method != "GET" or is_list):
            return None
        return kind

    return plan


@contextmanager
def moto_server() -> Iterator[int]:
    """The port of a server in this process; skips where moto or s3fs is not installed."""
    pytest.importorskip("s3fs", reason="stores are not tested: s3fs is not installed")
    server_of = pytest.importorskip("moto.server", reason="stores are not tested: moto is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def make_bucket(port: int, name: str) -> None:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    line.request(
        "PUT", f"/{name}", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request"}
    )
    assert line.getresponse().status == 200
    line.close()
