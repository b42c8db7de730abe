"""Certificates both ways, and what a name in one may do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from rose_dev.cluster.pki import Authority
from rose_weights.errors import Forbidden
from rose_weights.main import main
from rose_weights.receive.client import WeightsClient
from rose_weights.send.publishing import WeightsWriter
from rose_weights.serve.access import OPEN, AccessRights, StoreAccess
from rose_weights.serve.relay import RelayHandlers
from rose_weights.serve.service import WeightService
from rose_weights.store.blocks import Blocks
from rose_weights.store.store import Store
from rose_wire import rpc, tls
from rose_wire.errors import Unavailable
from rose_wire.rpc import Server
from tests.weights.models import Model
from tests.weights.test_service import publish

RULES = {
    "trainer": AccessRights(publish=("run",)),
    "reader": AccessRights(read=("ru*",)),
    "other": AccessRights(),
}


def secret(authority: Authority, name: str) -> Path:
    """A certificate in the layout of a Secret; servers and callers have the same kind here."""
    authority.issue(name, name, hosts=[name, "127.0.0.1"])
    folder = authority.folder / f"{name}.d"
    folder.mkdir()
    for target, source in ((tls.CERTIFICATE, f"{name}.crt"), (tls.KEY, f"{name}.key")):
        (folder / target).write_bytes((authority.folder / source).read_bytes())
    return folder


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[Authority, str]]:
    authority = Authority(tmp_path / "pki")
    trust = authority.folder / "ca.crt"
    server = Server(credentials=tls.server_credentials(secret(authority, "store"), trust))
    service = WeightService(Store(tmp_path / "store"), access=StoreAccess(RULES))
    service.bind(server)
    port = await server.start("127.0.0.1:0")
    try:
        yield authority, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await service.close()


def caller(authority: Authority, name: str) -> grpc.ChannelCredentials:
    return tls.client_credentials(authority.folder / "ca.crt", secret(authority, name))


async def test_each_name_may_do_what_is_listed_and_nothing_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as (authority, address):
        model = Model(seed=1)
        async with (
            WeightsWriter(address, credentials=caller(authority, "trainer")) as trainer,
            WeightsClient(address, credentials=caller(authority, "reader")) as reader,
            WeightsClient(address, credentials=caller(authority, "other")) as other,
            WeightsClient(address, credentials=caller(authority, "stranger")) as stranger,
        ):
            await publish(trainer, model, 1)
            await reader.pull("run", tmp_path / "b")
            assert (tmp_path / "b" / "manifest.msgpack").exists()
            with pytest.raises(Forbidden, match="trainer"):
                await trainer.open("another", "x")
            with pytest.raises(Forbidden, match="may not read"):
                await trainer.describe("run")
            for nobody in (other, stranger):
                with pytest.raises(Forbidden, match="may not read run 'run'"):
                    await nobody.plan("run")
                with pytest.raises(Forbidden):
                    await anext(nobody.watch("run"))


async def test_who_may_only_read_is_never_taken_for_the_trainer(tmp_path: Path) -> None:
    async with serving(tmp_path) as (authority, address):
        trusted = caller(authority, "trainer")
        async with (
            WeightsWriter(address, credentials=trusted) as writer,
            WeightsClient(address, credentials=trusted) as trainer,
            WeightsClient(address, credentials=caller(authority, "reader")) as nameless,
        ):
            (found,) = await publish(writer, Model(seed=1), 1)
            at = (found.version, found.digest)
            with pytest.raises(Forbidden, match="may not publish"):
                await nameless.compare(*at, (-9.0,), trainer=True)
            await nameless.compare(*at, (-9.0,))
            assert (await nameless.compare(*at, ())).trainer == ()
            await trainer.compare(*at, (-1.0,), trainer=True)
            await nameless.compare(*at, (-9.0,))
            assert (await nameless.compare(*at, ())).trainer == (-1.0,)


async def test_without_a_certificate_nobody_is_heard(tmp_path: Path) -> None:
    async with serving(tmp_path) as (authority, address):
        only_trusts = tls.client_credentials(authority.folder / "ca.crt")
        async with WeightsClient(address, credentials=only_trusts) as client:
            with pytest.raises(Unavailable):
                await client.describe()


async def test_the_address_and_two_variables_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (authority, address):
        monkeypatch.setenv(tls.TRUST, str(authority.folder / "ca.crt"))
        monkeypatch.setenv(tls.IDENTITY, str(secret(authority, "reader")))
        async with WeightsClient(f"tls://{address}") as client:
            assert (await client.describe()).runs == ()


async def test_a_relay_asks_the_same_of_its_receivers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (authority, address):
        model = Model(seed=1)
        async with WeightsWriter(address, credentials=caller(authority, "trainer")) as trainer:
            await publish(trainer, model, 1)
        upstream = rpc.connect(address, credentials=caller(authority, "reader"))
        server = Server(
            credentials=tls.server_credentials(
                secret(authority, "relay"), authority.folder / "ca.crt"
            )
        )
        rules = StoreAccess(
            {"engine": AccessRights(read=("run",)), "other": AccessRights(read=("another",))}
        )
        RelayHandlers(upstream, Blocks(tmp_path / "relay"), access=rules).bind(server)
        port = await server.start("127.0.0.1:0")
        async with (
            WeightsClient(f"127.0.0.1:{port}", credentials=caller(authority, "engine")) as engine,
            WeightsClient(f"127.0.0.1:{port}", credentials=caller(authority, "other")) as other,
        ):
            await engine.pull("run", tmp_path / "b")
            with pytest.raises(Forbidden, match=r"other .*may not read run 'run'"):
                await other.plan("run")
        await server.stop(0)
        await upstream.close()


def test_names_may_be_patterns_and_the_widest_right_counts() -> None:
    rules = StoreAccess(
        {"*.nodes.rose": AccessRights(read=("grpo*",)), "a.nodes.rose": AccessRights(read=("dpo",))}
    )
    rules.check(["b.nodes.rose"], "read", "grpo-2")
    rules.check(["a.nodes.rose"], "read", "grpo-2")
    rules.check(["a.nodes.rose"], "read", "dpo")
    for name, run in (("b.nodes.rose", "dpo"), ("nodes.rose", "grpo-2"), ("a.nodes.rose", "x")):
        with pytest.raises(Forbidden, match="may not read"):
            rules.check([name], "read", run)


def test_a_file_that_says_nothing_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "access.json"
    path.write_text(json.dumps({"trainer": {"write": ["*"]}}))
    assert main(["serve", "--root", str(tmp_path / "s"), "--access", str(path)]) == 1
    assert "does not say who may do what" in capsys.readouterr().err
    path.write_text(json.dumps({"trainer": {"publish": ["grpo*"]}}))
    StoreAccess.load(path).check(["trainer"], "publish", "grpo-2")
    StoreAccess(OPEN).check([], "publish", "anything")
    with pytest.raises(Forbidden, match="a caller without a name"):
        StoreAccess().check([], "read", "anything")
    assert main(["serve", "--root", str(tmp_path / "s"), "--tls-client-ca", str(path)]) == 1
    assert "--tls-dir" in capsys.readouterr().err
