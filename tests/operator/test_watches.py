"""kopf in its thread: an API server that refuses it ends it, and it is started again."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

# Watches until its standard input ends, as a user whom the system does not know.
WATCHER = """
import getpass, sys, threading
import kopf
from rose_operator.kube import watches

def nameless():
    raise KeyError("getpwuid(): uid not found: 65532")

getpass.getuser = nameless  # as in an image without an entry for its user

handlers, stop = kopf.OperatorRegistry(), threading.Event()

@kopf.on.login(registry=handlers)
def login(**_):
    return kopf.ConnectionInfo(server=sys.argv[1])

@kopf.on.event("example.com", "v1", "things", registry=handlers)
def changed(**_):
    return

thread = threading.Thread(target=watches._run_kopf, args=(handlers, stop))
thread.start()
sys.stdin.read()
stop.set()
thread.join()
"""


class Refusing(ThreadingHTTPServer):
    """Answers everything with 415, which kopf takes as its end; counts its starts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.starts = threading.Semaphore(0)


class _Handler(BaseHTTPRequestHandler):
    server: Refusing

    def do_GET(self) -> None:  # http.server's own name
        if self.path == "/api":
            self.server.starts.release()
        self.send_error(415)

    def log_message(self, *_: Any) -> None:  # noqa: ANN401  # http.server's own signature
        return


@pytest.fixture
def refusing() -> Iterator[Refusing]:
    with Refusing() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(30)


@pytest.mark.slow
def test_a_kopf_that_ended_is_started_again_and_ends_when_told(refusing: Refusing) -> None:
    command = [sys.executable, "-c", WATCHER, f"http://127.0.0.1:{refusing.server_port}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        try:
            assert refusing.starts.acquire(timeout=60)
            assert refusing.starts.acquire(timeout=60), "kopf ended for ever"
            assert child.stdin is not None
            child.stdin.close()
            assert child.wait(60) == 0
        finally:
            child.kill()
