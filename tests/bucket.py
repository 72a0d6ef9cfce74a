"""An S3 server on this machine for tests, which notes every request: what was asked for, and how many bytes went out."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto.server")


@dataclass
class Server:
    endpoint: str
    requests: list[tuple[str, str, int]] = field(default_factory=list)  # method, path, bytes of the answer
    denies: bool = False

    def place(self, prefix: str) -> str:
        return f"s3://bucket/{prefix}?endpoint={self.endpoint}"

    def upload(self, folder: Path, prefix: str) -> str:
        from kvsim.s3 import s3_path

        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            assert (s3_path(self.place(prefix)) / file.relative_to(folder).as_posix()).create(file.read_bytes())
        return self.place(prefix)

    def read(self) -> int:
        """Bytes of objects that were read since the last call."""
        many = sum(size for method, _, size in self.requests if method == "GET")
        self.requests.clear()
        return many


@contextlib.contextmanager
def serving():
    """moto's server in a thread, with a bucket named bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = Server(f"http://{host}:{port}")
    app = server._server.app

    def noted(environ, start_response):
        if found.denies:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message></Error>"]
        sizes = []

        def start(status, headers, *rest):
            sizes.append(next((int(v) for k, v in headers if k.lower() == "content-length"), 0))
            return start_response(status, headers, *rest)

        answer = app(environ, start)
        found.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], sizes[-1] if sizes else 0))
        return answer

    server._server.app = noted
    urlopen(Request(f"{found.endpoint}/bucket", method="PUT"))
    try:
        yield found
    finally:
        server.stop()


@pytest.fixture(scope="module")
def bucket():
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with serving() as found:
        yield found
    patch.undo()
