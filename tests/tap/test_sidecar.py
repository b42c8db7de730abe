"""A tap inside a pod, with NET_RAW only, heard by the guard through the node's tap."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bench.tap.watcher import Listener, tap_process
from rose_agent.os import kernel
from rose_agent.tap.frames import TapWatch
from rose_agent.tap.parser import socket_of
from rose_core.identity import PodUid
from tests.tap.net import PORT, Namespace, refusal
from tests.tap.test_hardening import status
from tests.telemetry.wire import END, HEAD, event, post

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "can tap")
POD = PodUid("53099174-d551-433b-9350-adf44bee898e")
_IN_POD = """
import sys
from rose_agent.os import kernel
from rose_agent.tap.main import main
from tests.tap.inside import loopback_up
kernel.leave_network()
loopback_up()
kernel.keep_capabilities(frozenset({kernel.NET_RAW}))
sys.exit(main(["--sidecar", "--rundir", sys.argv[1], "--http-host", "127.0.0.1"]))
"""


@contextmanager
def sidecar(folder: Path) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    run = [sys.executable, "-c", _IN_POD, str(folder)]
    process = subprocess.Popen(run, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "for metrics" not in process.stderr.readline():
            assert process.poll() is None
        yield process
    finally:
        process.terminate()
        process.communicate()


async def until(listener: Listener, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await listener.beat(0)


def problem(listener: Listener) -> str:
    health = listener.watched.health
    return "not heard" if health is None else health.problem


def serve_one(pod: Namespace) -> None:
    with pod.listen() as server:
        client = pod.connect()
        engine, _ = server.accept()
        client.sendall(post())
        engine.recv(4096)
        engine.sendall(HEAD + event(0) + event(1) + END)
        client.recv(65536)
        client.close()
        engine.close()


@pytest.mark.engine
async def test_the_guard_hears_a_pods_own_tap_and_its_end(short_dir: Path) -> None:
    own = short_dir / "taps" / POD
    with sidecar(own) as process:
        opener = psutil.Process(process.pid)
        (parser,) = opener.children()
        assert int(status(opener.pid)["CapEff"], 16) == 1 << kernel.NET_RAW
        assert int(status(parser.pid)["CapEff"], 16) == 0
        # A process that is no longer there: only the pod's own tap can follow it.
        watch = TapWatch(POD, 2**22 - 1, PORT)
        async with tap_process(short_dir, watch) as (listener, _):
            await until(listener, lambda: problem(listener) == "")
            await asyncio.to_thread(serve_one, Namespace(process))
            await until(listener, lambda: bool(listener.watched.tap))
            (done,) = listener.watched.tap.values()
            assert (done.tokens, done.status, done.path) == (2, 200, "/generate")
            process.terminate()
            await until(listener, lambda: "own tap" in problem(listener))


def test_names_that_are_no_folder_have_no_tap_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "tap.sock").touch()
    assert socket_of(tmp_path / "taps", PodUid("../..")) is None
    assert socket_of(tmp_path, POD) is None
