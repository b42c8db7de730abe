"""Who counts tokens is chosen when sockets are opened, and whoever cannot count says why."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from contextlib import closing
from pathlib import Path

import pytest

from bench.tap.watcher import connected
from rose_agent.errors import NoKernelCounts
from rose_agent.tap import frames, kernel_counts, kernel_program, opener
from rose_agent.tap.frames import TapWatch
from rose_agent.tap.sockets import PER_INTERFACE
from rose_core.identity import PodUid
from tests.tap import kernel
from tests.tap.net import PORT, refusal

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "can tap")
COUNTS = pytest.mark.skipif(bool(kernel.refusal()), reason=kernel.refusal() or "can count")
WATCH = TapWatch(PodUid("pod"), 0, PORT, interfaces=("lo",))


@COUNTS
def test_where_the_kernel_counts_the_map_comes_with_the_sockets() -> None:
    reply, handles = opener.answer(WATCH, count=True)
    assert (reply.error, reply.uncounted) == ("", "")
    assert len(handles.descriptors()) == PER_INTERFACE + 1
    with closing(kernel_counts.streams(os.dup(handles.descriptors()[-1]))) as streams:
        assert not list(streams.all())
    handles.close()


@COUNTS
def test_the_counting_filter_is_locked_like_the_others() -> None:
    _, handles = opener.answer(WATCH, count=True)
    with kernel_program.loaded(22) as other, pytest.raises(NoKernelCounts, match="permitted"):
        other.attach(handles.taps[0].unsampled)
    handles.close()


def test_without_a_program_the_sockets_are_opened_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_program, "FOLDER", tmp_path)
    reply, handles = opener.answer(WATCH, count=True)
    assert (reply.error, len(handles.descriptors())) == ("", PER_INTERFACE)
    assert reply.uncounted
    handles.close()


@COUNTS
def test_a_program_of_another_version_is_refused_and_the_reason_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_program, "RECORD", struct.Struct("=QQ"))
    reply, handles = opener.answer(WATCH, count=True)
    assert (reply.error, len(handles.descriptors())) == ("", PER_INTERFACE)
    assert "another version: `make tap`" in reply.uncounted
    handles.close()


def test_packets_are_read_where_somebody_asked_for_it() -> None:
    reply, handles = opener.answer(WATCH, count=False)
    assert (reply.uncounted, len(handles.descriptors())) == (
        "--tokens=packets",
        PER_INTERFACE,
    )
    handles.close()


@COUNTS
@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ((), "the kernel counts"),
        (("--sidecar",), "the kernel refuses"),
        (("--tokens=packets",), "--tokens=packets"),
    ],
)
async def test_the_log_says_who_counts_and_why(
    short_dir: Path, flags: tuple[str, ...], word: str
) -> None:
    run = ("-m", "rose_cli.main", "tap", "--rundir", str(short_dir), "--http-host", "127.0.0.1")
    tap = await asyncio.create_subprocess_exec(
        *(sys.executable, *run, "--http-port", "0", *flags), stderr=asyncio.subprocess.PIPE
    )
    try:
        _, writer = await connected(short_dir / "tap.sock")
        writer.write(frames.pack([WATCH]))
        assert tap.stderr is not None
        async with asyncio.timeout(60):
            while b"pod: " not in (line := await tap.stderr.readline()):
                pass
        assert word.encode() in line
        writer.close()
    finally:
        tap.terminate()
        await tap.wait()
