"""A router that mounts nothing learns from the operator who it is, and is nobody else."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from rose_core.api import RolloutLease
from rose_core.wire.enrolment import EnrolRouterRequest, RouterIdentity
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_core.wire.sync import RouterProof
from rose_dev.cluster.pki import Authority as Maker
from rose_dev.process_testing import CLI, spawn_process
from rose_dev.waiting import until
from rose_operator.kube.api import Api
from rose_operator.sync.enrolment import NodeAuthority, RouterEnrolment, RouterTrust
from rose_router.config import Enrolment, Settings
from rose_router.enrolment import enrolled
from rose_router.main import RunningRouter, running
from rose_router.replicas.peers import Peer
from rose_wire import certificates, tls
from rose_wire.bearer import BATCHES, INGEST, lease_token, service_token
from rose_wire.errors import Refused, Unavailable
from rose_wire.ports import free_ports
from rose_wire.rpc import Server, connect, converse
from rose_wire.services import ATTACH
from tests.api.objects import LEASE, changed

ACCOUNT = "system:serviceaccount:rose-routers:rose-router"
INSTALLATION = "the installation's"
MINE, OTHER = "default/grpo", "default/other"


@dataclass
class Reviews:
    """The API server: a token is good for the audience that it spells."""

    async def review_token(self, token: str, audience: str) -> dict[str, Any]:
        if token != audience:
            return {"authenticated": False, "error": "invalid audience"}
        return {"authenticated": True, "audiences": [audience], "user": {"username": ACCOUNT}}


@dataclass
class Operator:
    """The operator's enrolment on a real port with TLS, and what agents get by their grants."""

    folder: Path
    address: str = ""
    token: str = INSTALLATION
    hours: float = 24.0
    servers: list[Server] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = Maker(self.folder / "own")
        self.own.issue("operator", "operator", hosts=("127.0.0.1",))
        self.tls = self.folder / "operator"
        self.tls.mkdir()
        for ending in ("crt", "key"):
            source = self.own.folder / f"operator.{ending}"
            (self.tls / f"tls.{ending}").write_bytes(source.read_bytes())
        self.routers = Maker(self.folder / "routers").export(self.folder / "router-authority")
        self.nodes = Maker(self.folder / "nodes").export(self.folder / "node-authority")

    async def start(self, address: str = "127.0.0.1:0") -> None:
        leases = {
            key: RolloutLease.model_validate(
                changed(LEASE, {"metadata.name": key.partition("/")[2]})
            )
            for key in (MINE, OTHER)
        }
        trust = RouterTrust(
            self.token,
            "rose-routers",
            ACCOUNT,
            NodeAuthority(self.routers, dt.timedelta(hours=self.hours)),
            self.nodes / tls.CERTIFICATE,
            self.own.certificate,
        )
        server = Server(credentials=tls.server_credentials(self.tls))
        RouterEnrolment(cast("Api", Reviews()), trust, leases.get, lambda: "").serve_on(server)
        port = await server.start(address)
        self.address = f"tls://127.0.0.1:{port}"
        self.servers.append(server)

    async def stop(self) -> None:
        while self.servers:
            await self.servers.pop().stop()

    def proof(self, lease: str) -> RouterProof:
        """What a node's grant says of the lease's router."""
        authority = (self.routers / tls.CERTIFICATE).read_bytes()
        return RouterProof(lease_token(self.token, lease), authority)

    def node(self, folder: Path) -> Path:
        """A node's own pair, as ``Enrol`` signs it."""
        key, asked = certificates.request("x")
        pair = (self.nodes / tls.KEY).read_bytes(), (self.nodes / tls.CERTIFICATE).read_bytes()
        signed = certificates.sign(asked, "system:node:n1", pair, dt.timedelta(hours=1))
        certificates.keep(folder, {tls.KEY: key, tls.CERTIFICATE: signed})
        return folder


@pytest.fixture
async def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operator]:
    made = Operator(tmp_path / "installation")
    monkeypatch.setenv(tls.TRUST_TEXT, made.own.certificate.read_text())
    await made.start()
    yield made
    await made.stop()


async def alone() -> list[Peer]:
    return []


def settings(operator: Operator, folder: Path, lease: str = MINE) -> Settings:
    folder.mkdir(exist_ok=True)
    proof = folder / "proof"
    proof.write_text(f"rose-router/{lease}")
    name = f"router-{lease.replace('/', '-')}"
    where = Enrolment(operator.address, proof, folder / "identity", f"{name}-all.rose-routers.svc")
    return Settings(
        lease, enrolment=where, replica="me", replicas=alone, authenticate=True, drain_seconds=0
    )


@asynccontextmanager
async def router(made: Settings) -> AsyncIterator[RunningRouter]:
    async with enrolled(made) as identity, running(identity.settings) as serving:
        yield serving


async def attach(
    running: RunningRouter, operator: Operator, proof: RouterProof, identity: Path
) -> None:
    """Attach an engine as a node's agent does."""
    credentials = tls.client_credentials(proof.authority, identity)
    name = "router-default-grpo.rose-routers.svc"
    where = f"127.0.0.1:{running.attach_port}"
    update = EngineUpdate("e", EngineKind.BORROWED, MINE, "http://127.0.0.1:9/slots/u")

    async def updates() -> AsyncIterator[EngineUpdate]:
        yield update
        await asyncio.sleep(5)

    async with connect(where, credentials=credentials, name=name) as channel:
        async for _ in converse(channel, ATTACH, updates(), token=proof.token):
            return


async def test_an_agent_with_a_grant_attaches_and_nobody_else(
    operator: Operator, tmp_path: Path
) -> None:
    node = operator.node(tmp_path / "node")
    good = operator.proof(MINE)
    async with router(settings(operator, tmp_path / "mine")) as serving:
        await attach(serving, operator, good, node)
        for token in (INSTALLATION, operator.proof(OTHER).token):
            with pytest.raises(Refused):
                await attach(serving, operator, RouterProof(token, good.authority), node)
        # The certificate of another lease's router is none of a node's, nor of this lease.
        other = settings(operator, tmp_path / "other", OTHER)
        async with enrolled(other):
            assert other.enrolment is not None
            with pytest.raises((Refused, Unavailable)):
                await attach(serving, operator, operator.proof(OTHER), other.enrolment.folder)


async def test_a_router_shows_a_certificate_for_no_other_name(
    operator: Operator, tmp_path: Path
) -> None:
    made = settings(operator, tmp_path / "mine")
    async with router(made) as serving:
        trust = tls.client_credentials(
            operator.proof(MINE).authority, operator.node(tmp_path / "n")
        )
        for name in ("rose-operator.rose-system.svc", "router-default-other.rose-routers.svc"):
            where = f"127.0.0.1:{serving.attach_port}"
            async with connect(where, credentials=trust, name=name) as channel:
                with pytest.raises(Unavailable):
                    async for _ in converse(channel, ATTACH, nothing()):
                        pass


async def nothing() -> AsyncIterator[EngineUpdate]:
    await asyncio.sleep(5)
    yield EngineUpdate("e", EngineKind.BORROWED, MINE, "")


async def test_the_port_of_replicas_takes_no_router_of_another_lease(
    operator: Operator, tmp_path: Path
) -> None:
    own = settings(operator, tmp_path / "mine")
    replica = settings(operator, tmp_path / "replica")
    other = settings(operator, tmp_path / "other", OTHER)
    async with router(own) as serving, enrolled(replica), enrolled(other):
        assert await answer(serving, replica) == 200
        with pytest.raises(aiohttp.ClientError):
            await answer(serving, other)


async def answer(serving: RunningRouter, caller: Settings) -> int:
    """Ask the port of replicas with this router's certificate."""
    assert caller.enrolment is not None
    folder = caller.enrolment.folder
    context = ssl.create_default_context(cafile=folder / "routers.crt")
    context.load_cert_chain(folder / tls.CERTIFICATE, folder / tls.KEY)
    url = f"https://127.0.0.1:{serving.peer_port}/healthz"
    name = "router-default-grpo-all.rose-routers.svc"
    async with (
        aiohttp.ClientSession() as http,
        http.get(url, ssl=context, server_hostname=name) as reply,
    ):
        return reply.status


async def test_a_router_waits_for_the_operator_and_then_serves(
    operator: Operator, tmp_path: Path
) -> None:
    port = operator.address.rpartition(":")[2]
    made = settings(operator, tmp_path / "mine")
    await operator.stop()
    waiting = asyncio.create_task(entered(made))
    await asyncio.sleep(0)
    assert not waiting.done()
    await operator.start(f"127.0.0.1:{port}")
    async with asyncio.timeout(60):
        found = await waiting
    assert found.attach_token == lease_token(INSTALLATION, MINE)
    assert found.batches_token == service_token(INSTALLATION, MINE, BATCHES)
    assert found.ingest_token == service_token(INSTALLATION, MINE, INGEST)
    own = replace(made, batches_token="of a file")
    async with asyncio.timeout(60):
        assert (await entered(own)).batches_token == "of a file"


async def entered(made: Settings) -> Settings:
    async with enrolled(made) as identity:
        return identity.settings


async def test_a_certificate_is_renewed_while_a_stream_goes_on(
    operator: Operator, tmp_path: Path
) -> None:
    await operator.stop()
    operator.hours = 4 / 3600  # renewed after two seconds
    await operator.start()
    made = settings(operator, tmp_path / "mine")
    async with enrolled(made) as identity, running(identity.settings) as serving:
        assert made.enrolment is not None
        pair = made.enrolment.folder / tls.CERTIFICATE
        before = pair.read_bytes()
        credentials = tls.client_credentials(
            operator.proof(MINE).authority, operator.node(tmp_path / "node")
        )
        name = "router-default-grpo.rose-routers.svc"
        where = f"127.0.0.1:{serving.attach_port}"
        async with connect(where, credentials=credentials, name=name) as channel:
            stream = converse(channel, ATTACH, nothing(), token=operator.proof(MINE).token)
            await anext(stream)
            await until(lambda: pair.read_bytes() != before)
            await anext(stream)
        await attach(serving, operator, operator.proof(MINE), tmp_path / "node")
        assert not identity.outdated.is_set()


async def test_another_token_makes_the_router_start_anew(
    operator: Operator, tmp_path: Path
) -> None:
    port = operator.address.rpartition(":")[2]
    async with enrolled(settings(operator, tmp_path / "mine")) as identity:
        await operator.stop()
        operator.token = "another"
        await operator.start(f"127.0.0.1:{port}")
        async with asyncio.timeout(60):
            await identity.outdated.wait()


async def test_nothing_that_was_given_is_readable_by_others(
    operator: Operator, tmp_path: Path
) -> None:
    made = settings(operator, tmp_path / "mine")
    async with enrolled(made):
        assert made.enrolment is not None
        for path in made.enrolment.folder.iterdir():
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_request_is_logged_without_its_token() -> None:
    assert "mine" not in repr(EnrolRouterRequest(MINE, "mine"))
    assert "mine" not in repr(RouterIdentity("mine")) + repr(RouterProof("mine"))


async def test_the_process_waits_serves_asks_for_tokens_and_ends_on_a_signal(
    operator: Operator, tmp_path: Path
) -> None:
    http, attach_port = free_ports(2)
    made = settings(operator, tmp_path / "mine")
    assert made.enrolment is not None
    command = [
        *(CLI, "router", f"--lease={MINE}", "--authenticate"),
        f"--http-address=127.0.0.1:{http}",
        f"--attach-address=127.0.0.1:{attach_port}",
        f"--enrol={operator.address}",
        f"--enrol-token-file={made.enrolment.token_file}",
        f"--identity-dir={made.enrolment.folder}",
    ]
    child = await spawn_process(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with aiohttp.ClientSession() as session:

            async def status(path: str) -> int:
                try:
                    async with session.get(f"http://127.0.0.1:{http}{path}") as reply:
                        return reply.status
                except aiohttp.ClientError:
                    assert child.returncode is None, await output_of(child)
                    return 0

            async with asyncio.timeout(90):
                while await status("/healthz") != 200:  # noqa: ASYNC110  # another process
                    await asyncio.sleep(0.2)
            assert await status("/turns") == 401
        child.terminate()
        assert await asyncio.wait_for(child.wait(), 60) == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def output_of(child: asyncio.subprocess.Process) -> str:
    assert child.stderr is not None
    return (await child.stderr.read()).decode()
