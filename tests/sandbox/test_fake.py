"""The runtime in this process keeps the contract."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rose_sandbox.errors import CannotCheckpoint
from rose_sandbox.runtimes.fake import FakeRuntime
from rose_sandbox.runtimes.runtime import Handle, Kind, Runtime, SandboxSpec
from tests.sandbox.contract import Contract, output_of

Serve = Callable[[FakeRuntime, Handle, int, bytes], Awaitable[None]]


class TestFake(Contract):
    @pytest.fixture
    def runtime(self) -> Runtime:
        return FakeRuntime()

    @pytest.fixture
    def serve(self) -> Serve:
        async def start(runtime: FakeRuntime, box: Handle, port: int, answer: bytes) -> None:
            runtime.serve(box, port, answer)

        return start


async def test_what_cannot_be_saved_is_named_and_the_sandbox_lives_on(tmp_path: Path) -> None:
    runtime = FakeRuntime(undumpable=["uring"])
    box = await runtime.create(SandboxSpec("box"))
    await output_of(runtime, box, "uring &")
    for kind in (Kind.PROCESSES, Kind.FULL):
        with pytest.raises(CannotCheckpoint) as refused:
            await runtime.checkpoint(box, kind, tmp_path)
        assert refused.value.what == "uring"
    assert os.listdir(tmp_path) == []  # noqa: PTH208
    await runtime.checkpoint(box, Kind.FILES, tmp_path)
    await output_of(runtime, box, "pgrep -x uring")


async def test_files_of_an_image_that_were_removed_stay_removed(tmp_path: Path) -> None:
    runtime = FakeRuntime({"base": {"/etc/a": b"1", "/etc/b": b"2"}})
    box = await runtime.create(SandboxSpec("box"))
    await output_of(runtime, box, "rm /etc/a")
    parts = await runtime.checkpoint(box, Kind.FULL, tmp_path)
    await runtime.end(box)
    box = await runtime.restore(parts, parts.spec)
    assert (await runtime.exec(box, "test -e /etc/a", 1)).exit_code == 1
    assert await output_of(runtime, box, "cat /etc/b") == "2"
