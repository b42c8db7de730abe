"""kopf in its thread: an API server that refuses it ends it, and it is started again."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from rose_operator.kube import watches

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


# Both runs of kopf against a server that lists nothing, until its standard input ends.
EVERYTHING = """
import asyncio, sys, threading
import kopf
from rose_operator.kube import watches
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import ObjectCache

plain = watches.registry
def registry(*args):
    handlers = plain(*args)
    @kopf.on.login(registry=handlers)
    def login(**_):
        return kopf.ConnectionInfo(server=sys.argv[1])
    return handlers
watches.registry = registry

async def main():
    caches = {kind: ObjectCache() for kind in watches._LISTED if kind is not ObjectKind.ROUTE}
    watching = asyncio.create_task(watches.watch_kinds(caches, "rose-system", lambda: None))
    await asyncio.to_thread(sys.stdin.read)
    watching.cancel()

asyncio.run(main())
"""
RESOURCES = {
    "/api/v1": {"namespaces": False, "services": True},
    "/apis/apps/v1": {"deployments": True},
    "/apis/rose-gpu.dev/v1alpha1": {
        "servingpools": True,
        "rolloutleases": True,
        "rolloutslots": True,
        "tenantpolicies": False,
    },
}


class Listing(ThreadingHTTPServer):
    """Knows the kinds, has no objects, and notes what is watched."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ListingHandler)
        self.watched: dict[str, str] = {}
        self.seconds: set[int] = set()
        self.news = threading.Condition()

    def wait_for(self, paths: set[str], seconds: float) -> bool:
        with self.news:
            return self.news.wait_for(lambda: paths <= set(self.watched), seconds)


class _ListingHandler(BaseHTTPRequestHandler):
    server: Listing

    def do_GET(self) -> None:  # http.server's own name
        asked = urlsplit(self.path)
        query = dict(parse_qsl(asked.query))
        if query.get("watch") == "true":
            with self.server.news:
                self.server.watched[asked.path] = query.get("labelSelector", "")
                self.server.seconds.add(int(query["timeoutSeconds"]))
                self.server.news.notify_all()
            self._answer(b"")
            return
        self._answer(json.dumps(self._found(asked.path)).encode())

    def _found(self, path: str) -> dict[str, Any]:
        if path in RESOURCES:
            verbs = ["list", "watch", "patch"]
            resources = [
                {
                    "name": plural,
                    "singularName": "",
                    "kind": plural,
                    "namespaced": namespaced,
                    "verbs": verbs,
                }
                for plural, namespaced in RESOURCES[path].items()
            ]
            return {"kind": "APIResourceList", "resources": resources}
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            groups = [("apps", "v1"), ("rose-gpu.dev", "v1alpha1")]
            found = [
                {
                    "name": group,
                    "preferredVersion": {"version": version},
                    "versions": [{"version": version}],
                }
                for group, version in groups
            ]
            return {"groups": found}
        return {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:  # noqa: ANN401  # http.server's own signature
        return


@pytest.mark.slow
def test_kopf_watches_every_kind_where_the_operator_may_read_it() -> None:
    managed = "app.kubernetes.io/managed-by=rose-operator"
    ours = "/apis/rose-gpu.dev/v1alpha1"
    expected = {
        "/api/v1/namespaces": "",
        f"{ours}/servingpools": "",
        f"{ours}/rolloutleases": "",
        f"{ours}/tenantpolicies": "",
        f"{ours}/namespaces/rose-system/rolloutslots": "",
        "/apis/apps/v1/namespaces/rose-system/deployments": managed,
        "/api/v1/namespaces/rose-system/services": managed,
    }
    with Listing() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        command = [sys.executable, "-c", EVERYTHING, f"http://127.0.0.1:{server.server_port}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            try:
                assert server.wait_for(set(expected), 60), f"watched: {server.watched}"
                assert server.watched == expected, "nothing but these, by these labels"
                given_up = watches.settings().watching.client_timeout
                assert given_up is not None
                assert max(server.seconds) < given_up <= 60
                assert child.stdin is not None
                child.stdin.close()
                assert child.wait(60) == 0
            finally:
                child.kill()
        server.shutdown()
        thread.join(30)
