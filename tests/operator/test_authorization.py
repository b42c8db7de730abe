"""An agent speaks for the node that its certificate names, on a real TLS connection."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rose_core.wire.sync import NoticeRequest, SyncReply, SyncRequest
from rose_dev.cluster.pki import Authority
from rose_operator.errors import ConfigurationError
from rose_operator.kube.leader import LeaderLock
from rose_operator.settings import parse
from rose_operator.sync.service import SyncService, check_node
from rose_wire import tls
from rose_wire.errors import Refused
from rose_wire.rpc import Server, call, connect, receive
from rose_wire.services import NOTICES, SYNC
from tests.operator.bench import SETTINGS, running


def folder(authority: Authority, name: str, common_name: str, hosts: tuple[str, ...] = ()) -> Path:
    authority.issue(name, common_name, hosts=hosts)
    made = authority.folder / f"{name}.d"
    made.mkdir()
    (made / tls.CERTIFICATE).write_bytes((authority.folder / f"{name}.crt").read_bytes())
    (made / tls.KEY).write_bytes((authority.folder / f"{name}.key").read_bytes())
    return made


@pytest.fixture
async def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A leading operator's Sync that demands certificates; we are the agent of node n1."""
    authority = Authority(tmp_path / "pki")
    monkeypatch.setenv(tls.TRUST, str(authority.certificate))
    monkeypatch.setenv(tls.IDENTITY, str(folder(authority, "agent", "system:node:n1")))
    own = folder(authority, "operator", "operator", ("localhost", "127.0.0.1"))
    settings = replace(SETTINGS, tls_dir=own, tls_client_ca=authority.certificate)
    bench = await running()
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    await lock.step()
    service = SyncService(
        settings, bench.stores, bench.telemetry, lock, clock=lambda: bench.now, wake=lambda: None
    )
    server = Server(token="t", credentials=tls.server_credentials(own, authority.certificate))
    server.unary(SYNC, service.sync)
    server.server_stream(NOTICES, service.notices)
    port = await server.start("127.0.0.1:0")
    yield f"tls://127.0.0.1:{port}"
    await server.stop()


async def sync(address: str, node: str) -> SyncReply:
    async with connect(address) as channel:
        return await call(channel, SYNC, SyncRequest(node, "t", 0), timeout=10, token="t")


async def test_an_agent_gets_the_grants_of_its_own_node(address: str) -> None:
    assert len((await sync(address, "n1")).grants) == 1


async def test_an_agent_can_neither_report_for_another_node_nor_listen_there(address: str) -> None:
    with pytest.raises(Refused, match="certificate names system:node:n1"):
        await sync(address, "n2")
    async with connect(address) as channel:
        with pytest.raises(Refused, match="speaks for node n2"):
            await anext(receive(channel, NOTICES, NoticeRequest("n2"), token="t"))


def test_names_count_only_where_certificates_are_demanded() -> None:
    check_node("n1", (), demanded=False)
    check_node("n1", ("n1", "other"), demanded=True)
    for names in ((), ("n10",), ("system:node:n10",)):
        with pytest.raises(Refused):
            check_node("n1", names, demanded=True)


def test_demanding_certificates_without_having_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "stores.yaml").write_text("main: store:7446")
    flags = [
        "--namespace=n",
        "--router-image=i",
        f"--stores-file={tmp_path / 'stores.yaml'}",
        f"--token-file={tmp_path / 'token'}",
        f"--tls-client-ca={tmp_path / 'token'}",
    ]
    with pytest.raises(ConfigurationError, match="--tls-client-ca needs --tls-dir"):
        parse(flags)
