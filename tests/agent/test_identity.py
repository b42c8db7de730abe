"""A node's agent gets its certificate before it calls the operator, keeps it, and renews it."""

import asyncio
import datetime as dt
import stat
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rose_agent.guard.main import main
from rose_agent.guard.sync.identity import Identity
from rose_core.wire.enrolment import EnrolReply, EnrolRequest
from rose_dev.cluster.pki import Authority
from rose_wire import certificates, tls
from rose_wire.errors import Refused
from rose_wire.rpc import Server
from rose_wire.services import ENROL


@dataclass
class Town:
    """An operator that signs, and a place on a node."""

    authority: tuple[bytes, bytes]
    address: str = ""
    folder: Path = Path()
    life: dt.timedelta = dt.timedelta(hours=1)
    refuse: bool = False
    asked: list[EnrolRequest] = field(default_factory=list)
    refused: asyncio.Event = field(default_factory=asyncio.Event)

    async def enrol(self, request: EnrolRequest) -> EnrolReply:
        self.asked.append(request)
        if self.refuse:
            self.refused.set()
            raise Refused("the token is not good")
        name = f"system:node:{request.node}"
        return EnrolReply(certificates.sign(request.request, name, self.authority, self.life))

    def identity(self) -> Identity:
        token = self.folder.parent / "token"
        token.write_text("mine\n")
        return Identity("n1", self.address, token, self.folder)


@pytest.fixture
async def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Town]:
    maker = Authority(tmp_path / "pki")
    maker.issue("operator", "operator", hosts=("127.0.0.1",))
    own = tmp_path / "own"
    own.mkdir()
    for ending in ("crt", "key"):
        (own / f"tls.{ending}").write_bytes((maker.folder / f"operator.{ending}").read_bytes())
    exported = maker.export(tmp_path / "authority")
    pair = ((exported / tls.KEY).read_bytes(), (exported / tls.CERTIFICATE).read_bytes())
    monkeypatch.setenv(tls.TRUST, str(maker.certificate))
    found = Town(pair, folder=tmp_path / "run" / "identity")
    monkeypatch.setenv(tls.IDENTITY, str(found.folder))  # as in the pod: nothing is there yet
    server = Server(credentials=tls.server_credentials(own))
    server.unary(ENROL, found.enrol)
    found.address = f"tls://127.0.0.1:{await server.start('127.0.0.1:0')}"
    yield found
    await server.stop()


async def running(identity: Identity, *, seconds: float = 20) -> asyncio.Task[None]:
    task = asyncio.create_task(identity.run())
    async with asyncio.timeout(seconds):
        await identity.wait()
    return task


async def test_the_certificate_lies_where_callers_look_and_nobody_else_reads_it(
    town: Town,
) -> None:
    (town.folder.parent).mkdir(mode=0o700)
    task = await running(town.identity())
    assert town.asked[0].token == "mine"
    key = town.folder / tls.KEY
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(town.folder.resolve().stat().st_mode) == 0o700
    tls.client_credentials(identity=town.folder)
    task.cancel()


async def test_a_renewal_replaces_key_and_certificate_together(town: Town) -> None:
    town.folder.parent.mkdir(mode=0o700)
    for _ in range(4):
        (await running(town.identity())).cancel()
        before = len(town.asked)
        async with asyncio.timeout(20):
            identity = town.identity()
            await identity._enrol()
        assert len(town.asked) > before
    left = [path for path in town.folder.parent.iterdir() if path.name.startswith("identity.")]
    assert len(left) == 2, "the pair in use and the one before"


async def test_a_kept_certificate_serves_while_the_operator_refuses(town: Town) -> None:
    town.folder.parent.mkdir(mode=0o700)
    (await running(town.identity())).cancel()
    town.refuse = True
    task = await running(town.identity())
    task.cancel()


async def test_without_a_good_one_nobody_dials(town: Town) -> None:
    town.folder.parent.mkdir(mode=0o700)
    town.life = dt.timedelta(seconds=-60)
    await town.identity()._enrol()
    assert certificates.window((town.folder / tls.CERTIFICATE).read_bytes())[1] < time.time()
    town.refuse = True
    identity = town.identity()
    task = asyncio.create_task(identity.run())
    async with asyncio.timeout(20):
        await town.refused.wait()
    assert not identity._enrolled.is_set()
    task.cancel()


def test_enrolment_without_a_place_for_the_certificate_is_refused(
    short_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tls.IDENTITY, raising=False)
    replicas = short_dir / "replicas.yaml"
    replicas.write_text("replicas: []\n")
    flags = ["--node=n", f"--rundir={short_dir / 'run'}", "--devices=static"]
    more = [f"--static-replicas={replicas}", "--operator=tls://o:1", "--enrol=tls://o:2"]
    assert main([*flags, *more]) == 1
    assert "--enrol needs --identity-token-file" in caplog.text
