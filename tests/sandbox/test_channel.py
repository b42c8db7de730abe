"""A host's two pipes to a sandbox, whose other end is a tenant's."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from pathlib import Path

import pytest

from rose_sandbox.errors import UnknownSandbox
from rose_sandbox.runtimes.channel import FROM, TO, Channel, Silent


async def test_a_tenant_who_floods_its_pipe_does_not_hold_the_host(tmp_path: Path) -> None:
    Channel.make(tmp_path)
    (tmp_path / FROM).unlink()
    (tmp_path / FROM).symlink_to("/dev/zero")  # there is always more
    channel = Channel(tmp_path, lambda: True)
    try:
        with pytest.raises(Silent):
            await channel.ask("hello", within=0.2)
    finally:
        channel.close()


async def test_a_request_under_way_ends_with_its_channel_and_reads_no_later_one(
    tmp_path: Path,
) -> None:
    """A sandbox of the same key may live by then, so that there is somebody who could answer."""
    Channel.make(tmp_path)
    channel = Channel(tmp_path, lambda: True)
    asked = asyncio.create_task(channel.ask("hello"))
    waits = asyncio.create_task(channel.ask("hello"))
    await asyncio.to_thread(select.select, [channel._to], [], [])  # it is asked
    channel.close()
    Channel.make(tmp_path)
    later = Channel(tmp_path, lambda: True)
    for one in (asked, waits):
        with pytest.raises(UnknownSandbox):
            await one
    later.close()
    with pytest.raises(UnknownSandbox):
        await later.ask("hello")


async def test_an_answer_is_found_behind_what_a_tenant_wrote(tmp_path: Path) -> None:
    Channel.make(tmp_path)
    to, back = (os.open(tmp_path / name, os.O_RDWR) for name in (TO, FROM))

    def answer() -> None:
        for _ in range(3):
            while not (line := os.read(to, 4096).strip(b"\0\n")):
                pass
            os.write(back, b"noise\n0123 ok 3\nxyz" + line.partition(b" ")[0] + b" ok 5\nhello")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    channel = Channel(tmp_path, lambda: True)
    try:
        reply = await asyncio.gather(*(channel.ask("hello") for _ in range(3)))
    finally:
        channel.close()
    assert reply == [("ok", b"hello")] * 3
    thread.join()
    os.close(to)
    os.close(back)
