"""A real S3 server on the loopback, and buckets that die or lose answers at any single request."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.store import MemoryStore
from werkzeug.serving import WSGIRequestHandler, make_server

from rose_weights.store.bucket import Objects
from tests.weights.faulty import Crash


class _Quiet(WSGIRequestHandler):
    def log(self, *_arguments: object, **_more: object) -> None:
        """Not on stderr: a warning there is an error."""


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve S3; yields the endpoint. One request at a time, so that its compare-and-swap is one."""
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415  # most tests of weights use none
        DomainDispatcherApplication,
        create_backend_app,
    )

    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=False, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def make_bucket(endpoint: str, name: str) -> None:
    host = endpoint.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


class FaultyObjects(Objects):
    """The process dies at the ``at``-th request, before it is sent or after it was done.

    Args:
        store: holds the objects; survives.
        at: requests that still work; None = all.
        done: the last request is done, only its answer is lost.
    """

    def __init__(self, store: MemoryStore, at: int | None = None, *, done: bool = False) -> None:
        super().__init__(store, "memory://bucket")
        self._left = at
        self._done = done
        self._gone = threading.Lock()
        self.operations = 0

    def get(self, key: str) -> tuple[bytes, str] | None:
        self._count()
        return super().get(key)

    def put(self, key: str, data: bytes) -> None:
        if not self._count():
            super().put(key, data)
            raise Crash
        super().put(key, data)

    def swap(self, key: str, data: bytes, tag: str | None) -> None:
        if not self._count():
            super().swap(key, data, tag)
            raise Crash
        super().swap(key, data, tag)

    def _count(self) -> bool:
        """Whether the process lives on after this request."""
        with self._gone:
            self.operations += 1
            over = self.operations - self._left if self._left is not None else -1
        if over > 0 or (over == 0 and not self._done):
            raise Crash
        return over < 0
