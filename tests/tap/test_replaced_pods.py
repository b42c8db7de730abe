"""A pod is replaced under the eyes of the tap: another namespace, the same name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.tap.watcher import Listener, tap_process
from rose_agent.tap import frames
from rose_agent.tap.frames import TapWatch
from rose_core.identity import PodUid
from tests.tap.net import PORT, Namespace, namespace, refusal
from tests.tap.test_sidecar import problem, serve_one, until

POD = PodUid("pod")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "can tap"),
]


async def served(listener: Listener, pod: Namespace) -> None:
    listener.watched.tap.clear()
    await until(listener, lambda: problem(listener) == "")
    await asyncio.to_thread(serve_one, pod)
    await until(listener, lambda: bool(listener.watched.tap))


async def test_the_tap_follows_the_new_pod_and_says_so_when_there_is_none(short_dir: Path) -> None:
    with namespace() as second:
        with namespace() as first:
            watch = TapWatch(POD, first.holder.pid, PORT)
            async with tap_process(short_dir, watch) as (listener, _):
                await served(listener, first)
                assert listener.watched.health is not None
                seen = listener.watched.health.seen
        async with tap_process(short_dir, watch) as (listener, _):
            await until(listener, lambda: "cannot tap port" in problem(listener))
            reader, writer = await asyncio.open_unix_connection(str(short_dir / "tap.sock"))
            writer.write(frames.pack([TapWatch(POD, second.holder.pid, PORT)]))
            newest = Listener(reader)
            await served(newest, second)
            assert newest.watched.health is not None
            assert newest.watched.health.seen == seen, "counted anew"
            writer.close()


async def test_a_namespace_file_serves_instead_of_a_process(short_dir: Path) -> None:
    with namespace() as pod:
        watch = TapWatch(POD, 0, PORT, netns=pod.path)
        async with tap_process(short_dir, watch) as (listener, _):
            await served(listener, pod)
