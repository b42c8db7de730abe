"""TLS on a real gRPC connection: who is believed, and what a renewed certificate changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rose_dev.cluster.pki import Authority
from rose_wire import tls
from rose_wire.errors import Unavailable
from rose_wire.rpc import Method, Server, call, connect

ECHO = Method("test.Service", "Echo", bytes, bytes)


async def echo(block: bytes) -> bytes:
    return block


def issue(authority: Authority, folder: Path) -> Path:
    """A certificate for this machine in the layout of a Secret."""
    authority.issue("served", "rose", hosts=["localhost", "127.0.0.1"])
    folder.mkdir(exist_ok=True)
    for name, source in ((tls.CERTIFICATE, "served.crt"), (tls.KEY, "served.key")):
        (folder / name).write_bytes((authority.folder / source).read_bytes())
    return folder


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[int]:
    server = Server(token="t", credentials=tls.server_credentials(folder))
    server.unary(ECHO, echo)
    port = await server.start("127.0.0.1:0")
    try:
        yield port
    finally:
        await server.stop()


async def ask(address: str) -> bytes:
    async with connect(address) as channel:
        return await call(channel, ECHO, b"x", timeout=5, token="t")


async def test_a_peer_of_the_trusted_authority_is_believed(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tls.TRUST, str(authority.folder / "ca.crt"))
    async with serving(issue(authority, tmp_path / "served")) as port:
        assert await ask(f"tls://127.0.0.1:{port}") == b"x"


async def test_a_peer_of_another_authority_is_not_believed(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority(tmp_path / "other")
    monkeypatch.setenv(tls.TRUST, str(other.folder / "ca.crt"))
    async with serving(issue(authority, tmp_path / "served")) as port:
        with pytest.raises(Unavailable):
            await ask(f"tls://127.0.0.1:{port}")


async def test_plain_text_is_not_answered_by_a_tls_port(
    authority: Authority, tmp_path: Path
) -> None:
    async with serving(issue(authority, tmp_path / "served")) as port:
        with pytest.raises(Unavailable):
            await ask(f"127.0.0.1:{port}")


async def test_a_renewed_certificate_is_served_without_a_restart(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Authority(tmp_path / "later")
    folder = issue(authority, tmp_path / "served")
    async with serving(folder) as port:
        issue(later, folder)
        monkeypatch.setenv(tls.TRUST, str(later.folder / "ca.crt"))
        assert await ask(f"tls://localhost:{port}") == b"x"


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tls\.key"):
        tls.server_credentials(tmp_path)


def test_a_missing_authority_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tls.TRUST, "/nowhere/ca.crt")
    with pytest.raises(FileNotFoundError, match=r"ca\.crt"):
        tls.dial("tls://rose-operator.rose-system.svc:7443")


def test_an_address_without_a_scheme_is_plain() -> None:
    assert tls.dial("host:7443") == ("host:7443", None)
