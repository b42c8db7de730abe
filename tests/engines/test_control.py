"""The control socket itself: frames, garbage, leftovers of dead engines."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_engines.errors import CommitRefused, EngineUnavailable
from rose_engines.weights.calls import (
    Answer,
    Call,
    Commit,
    GetStatus,
    Refused,
    Stage,
    Staged,
    Status,
)
from rose_engines.weights.control import ControlClient, ControlServer


def answer(call: Call) -> Answer:
    """Plays a session."""
    match call:
        case Stage(bundle):
            return Staged(bundle, "", "d", 1, 2, 0.0)
        case Commit(version, _):
            return Refused("NotStaged", version)
        case GetStatus():
            return Status("v", "d", "Idle")
        case _:
            return Status("other", "d", "Idle")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "plugin.sock"
    path.touch()  # a dead engine's leftover
    server = ControlServer(path, answer)
    server.start()
    yield path
    server.close()
    assert list(tmp_path.iterdir()) == []


async def test_each_call_gets_its_answer_or_the_refusal_with_its_reason(path: Path) -> None:
    async with await ControlClient.connect(path) as control:
        assert (await control.stage(Path("/b"))).version == "/b"
        with pytest.raises(CommitRefused, match=r"NotStaged: r@1\.0") as refused:
            await control.commit("r@1.0")
        assert refused.value.reason == "NotStaged"
        assert (await control.status()).version == "v"
        assert (await control.abort()).version == "other"
        with pytest.raises(EngineUnavailable, match="answered Status"):
            await control.attest()


async def test_callers_take_turns_on_one_connection(path: Path) -> None:
    async with await ControlClient.connect(path) as control:
        staged = await asyncio.gather(*(control.stage(Path(f"/{n}")) for n in range(20)))
        assert [one.version for one in staged] == [f"/{n}" for n in range(20)]


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff\xff", b"\x02\0\0\0xx", b"\x01", b"\0\0\0\0", b"GET / HTTP/1.1\r\n\r\n"],
)
async def test_garbage_ends_only_its_connection(path: Path, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(60)
        caller.connect(str(path))
        caller.sendall(garbage)
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(100) == b""
    async with await ControlClient.connect(path) as control:
        assert (await control.status()).version == "v"


def test_the_control_socket_is_its_users_alone(path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0


def test_the_group_of_a_shared_folder_may_call(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    server = ControlServer(tmp_path / "plugin.sock", answer)
    server.start()
    assert (tmp_path / "plugin.sock").stat().st_mode & 0o077 == 0o060
    server.close()
