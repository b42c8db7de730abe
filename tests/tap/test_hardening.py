"""What the tap's processes can still do once they have begun: as the kernel says, not as we say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from rose_agent.os import kernel, seccomp
from tests.tap.net import refusal

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "can tap")
_CONFINED = """
import ctypes, os, socket, sys
from rose_agent.os import bpf_maps, kernel, seccomp
kernel.forbid_dumps()
kernel.keep_capabilities()
seccomp.confine(seccomp.PARSER, bpf_maps.COMMANDS)
nothing = ctypes.create_string_buffer(1)
def attempt(what, *arguments):
    try:
        what(*arguments)
    except OSError as error:
        return error.errno
    return 0
print(
    attempt(socket.socket, socket.AF_INET),
    attempt(socket.socket, socket.AF_INET6, socket.SOCK_DGRAM),
    attempt(socket.socket, socket.AF_PACKET),
    attempt(os.execv, "/bin/true", ["true"]),
    attempt(socket.socket, socket.AF_UNIX),
    attempt(bpf_maps.call, 5, nothing),
    attempt(bpf_maps.call, 7, nothing),
    attempt(bpf_maps.call, 1, nothing) != 1,
)
"""


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def network(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def core_limit(pid: int) -> str:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line.split()[4] for line in lines if line.startswith("Max core file size"))


@contextlib.asynccontextmanager
async def tap(folder: Path, *more: str) -> AsyncIterator[psutil.Process]:
    run = ("-m", "rose_cli.main", "tap", "--rundir", str(folder), "--http-host", "127.0.0.1")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *run, "--http-port", "0", *more, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while b"for metrics" not in await process.stderr.readline():
                pass
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.engine
async def test_neither_process_can_do_more_than_its_work(short_dir: Path) -> None:
    async with tap(short_dir) as opener:
        (parser,) = opener.children()
        kept = sum(1 << n for n in (kernel.NET_RAW, kernel.SYS_ADMIN, kernel.SYS_PTRACE))
        for pid, capabilities in ((opener.pid, kept), (parser.pid, 0)):
            reported = status(pid)
            for name in ("CapEff", "CapPrm"):
                assert int(reported[name], 16) == capabilities, (pid, name)
            assert int(reported["CapInh"], 16) == 0
            assert reported["NoNewPrivs"] == "1"
            assert core_limit(pid) == "0"
            if platform.machine() in {"x86_64", "aarch64"}:
                assert reported["Seccomp"] == "2"
        assert network(parser.pid) != network(os.getpid()), "a network of its own, empty"


def test_a_confined_process_reaches_no_network_and_starts_no_program() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _CONFINED], capture_output=True, text=True, check=True
    )
    loaded_a_program, opened_a_pin, may_look_up = ran.stdout.split()[5:]
    assert ran.stdout.split()[:5] == ["1", "1", "1", "1", "0"]
    assert (loaded_a_program, opened_a_pin, may_look_up) == ("1", "1", "True")


def test_system_calls_of_an_unknown_machine_are_not_guessed() -> None:
    with pytest.raises(KeyError):
        seccomp.program(seccomp.PARSER, "vax", frozenset())
