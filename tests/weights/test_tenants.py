"""Tenants of a store: their credentials, their rights, and what one cannot do to another."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import stat
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from rose_weights.errors import BadTenants, Fenced, Forbidden
from rose_weights.main import _callers, parser
from rose_weights.receive.client import WeightsClient
from rose_weights.send.publishing import WeightsWriter
from rose_weights.serve import tenant_verbs, tenants
from rose_weights.serve.access import AUDIENCE, Identification, StoreAccess
from rose_weights.serve.service import WeightService
from rose_weights.serve.tenants import Tenants
from rose_weights.store.open_store import open_store
from rose_wire.errors import Refused
from rose_wire.rpc import Server
from tests.weights.models import Model
from tests.weights.test_service import publish

NOW = dt.datetime(2026, 11, 23, tzinfo=dt.UTC)


@dataclass
class Time:
    """A clock and a calendar that the test moves."""

    seconds: float = 0.0

    def clock(self) -> float:
        return self.seconds

    def now(self) -> dt.datetime:
        return NOW + dt.timedelta(seconds=self.seconds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.json"


# --- the file


def test_a_credential_is_in_the_file_by_its_hash_alone(path: Path) -> None:
    credential = tenants.grant(path, "team-a", publish=("a-*",))
    assert credential.startswith("rose_team-a_")
    assert credential not in path.read_text()
    assert credential.rpartition("_")[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0


def test_a_right_that_nobody_was_granted_is_not_in_the_file(path: Path) -> None:
    """A store of before that right refuses a file that names it, and keeps the rights of before."""
    tenants.grant(path, "team-a", publish=("a-*",))
    tenants.grant(path, "team-b", read=("b-*",))
    tenants.revoke(path, "team-b")
    assert json.loads(path.read_bytes())["tenants"]["team-a"].keys() == {"publish", "credentials"}
    tenants.grant(path, "team-a", record=("a-*",), issue=False)
    assert json.loads(path.read_bytes())["tenants"]["team-a"]["record"] == ["a-*"]


def test_a_second_grant_adds_rights_and_keeps_the_first_credential(path: Path) -> None:
    first = tenants.grant(path, "team-a", publish=("a-*",))
    second = tenants.grant(path, "team-a", read=("b-1",))
    known = Tenants(path)
    assert known.tenant_of(first) == known.tenant_of(second) == "team-a"
    tenant = tenants.load(path).tenants["team-a"]
    assert (tenant.publish, tenant.read) == (("a-*",), ("b-1",))


def test_grants_at_the_same_time_lose_none(path: Path) -> None:
    threads = [
        threading.Thread(target=tenants.grant, args=(path, f"t{n}"), kwargs={"read": ("*",)})
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tenants.load(path).tenants) == 20


@pytest.mark.parametrize("name", ["", "Team", "a/b", "a_b", "-a", "a" * 64, "a\n"])
def test_a_name_that_is_none_is_refused(path: Path, name: str) -> None:
    with pytest.raises(BadTenants, match="no tenant's name"):
        tenants.grant(path, name)
    assert not path.exists()


def test_revoking_who_is_not_there_says_who_is(path: Path) -> None:
    tenants.grant(path, "team-a")
    with pytest.raises(BadTenants, match="no tenant 'team-b'; it has: team-a"):
        tenants.revoke(path, "team-b")
    with pytest.raises(BadTenants, match="no credential 'x'"):
        tenants.revoke(path, "team-a", "x")


def test_a_running_store_notices_a_revocation(path: Path) -> None:
    time = Time()
    credential = tenants.grant(path, "team-a", read=("*",))
    other = tenants.grant(path, "team-a")
    known = Tenants(path, time.clock, time.now)
    assert known.tenant_of(credential) == "team-a"
    revoked = tenants.load(path).tenants["team-a"].credentials[0].id
    assert tenants.revoke(path, "team-a", revoked) == 1
    time.seconds += 1
    assert known.tenant_of(credential) == ""
    assert known.tenant_of(other) == "team-a"
    assert tenants.revoke(path, "team-a") == 1
    time.seconds += 1
    assert known.tenant_of(other) == ""


def test_a_credential_expires(path: Path) -> None:
    time = Time()
    credential = tenants.grant(path, "t", lifetime=dt.timedelta(days=1))
    expires = tenants.load(path).tenants["t"].credentials[0].expires
    assert expires is not None
    time.seconds = (expires - NOW).total_seconds() - 1
    known = Tenants(path, time.clock, time.now)
    assert known.tenant_of(credential) == "t"
    time.seconds += 1
    assert known.tenant_of(credential) == ""


def test_a_file_that_was_spoilt_keeps_what_was_known_and_says_so(path: Path) -> None:
    time = Time()
    credential = tenants.grant(path, "t", read=("*",))
    known = Tenants(path, time.clock, time.now)
    path.write_text('{"tenants": {"t": {"reads": ["*"]}}}')
    time.seconds += 1
    assert known.tenant_of(credential) == "t"
    assert "unknown field" in known.problem
    with pytest.raises(BadTenants, match="unknown field"):
        Tenants(path)


# --- who is who


def test_a_caller_is_who_it_proves_to_be(path: Path) -> None:
    credential = tenants.grant(path, "team-a", certificates=("spiffe://a/*",))
    who = Identification(Tenants(path), token="installation-token")
    assert who(f"Bearer {credential}", ()) == ("tenant:team-a",)
    assert who("Bearer installation-token", ("node",)) == ("installation", "node")
    assert who("", ("spiffe://a/trainer",)) == ("spiffe://a/trainer",)
    for refused in ("", "Bearer ", f"Bearer {credential}x", f"Basic {credential[:-1]}", "Bearer é"):
        assert who(refused, ()) is None


@pytest.mark.parametrize("name", ["tenant:team-a", "installation", "serviceaccount:team-a/sa"])
def test_a_certificate_cannot_bear_a_name_that_only_we_give(path: Path, name: str) -> None:
    tenants.grant(path, "team-a", publish=("*",))
    who = Identification(Tenants(path), anonymous=True)
    assert who("", (name,)) == ()


@dataclass
class Cluster:
    """Signs service accounts' tokens, as an API server does."""

    key: rsa.RSAPrivateKey = field(
        default_factory=lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048)
    )

    def keys(self, folder: Path) -> Path:
        text = jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        path = folder / "keys.json"
        path.write_bytes(msgspec.json.encode({"keys": [{**text, "kid": "k", "use": "sig"}]}))
        return path

    def token(self, **changed: object) -> str:
        claims = {
            "sub": "system:serviceaccount:team-a:trainer",
            "aud": [AUDIENCE],
            "exp": int(time.time()) + 24 * 3600,
        }
        return jwt.encode({**claims, **changed}, self.key, "RS256", headers={"kid": "k"})


def test_a_service_account_is_believed_for_our_audience_alone(path: Path, tmp_path: Path) -> None:
    cluster = Cluster()
    tenants.grant(path, "team-a", publish=("a-*",), service_accounts=("team-a/*",), issue=False)
    known = Tenants(path)
    who = Identification(known, keys=[cluster.keys(tmp_path)])
    names = who(f"Bearer {cluster.token()}", ())
    assert names == ("serviceaccount:team-a/trainer",)
    assert StoreAccess(tenants=known).allows(names, "publish", "a-1")
    other = {"sub": "system:serviceaccount:team-b:trainer"}
    theirs = who(f"Bearer {cluster.token(**other)}", ())
    assert theirs is not None
    assert not StoreAccess(tenants=known).allows(theirs, "publish", "a-1")
    for claims in ({"aud": ["api"]}, {"exp": int(time.time()) - 1}, {"sub": "admin"}):
        assert who(f"Bearer {cluster.token(**claims)}", ()) is None
    assert who(f"Bearer {Cluster().token()}", ()) is None, "another cluster's signature"
    unsigned = jwt.encode({"sub": "system:serviceaccount:team-a:t"}, "", "none")
    assert who(f"Bearer {unsigned}", ()) is None


# --- over the wire


@dataclass
class Shop:
    """A store with two teams and a serving cluster."""

    address: str
    path: Path
    credentials: dict[str, str]

    def client(self, who: str) -> WeightsClient:
        return WeightsClient(self.address, token=self.credentials.get(who, who))

    async def publish(self, who: str) -> None:
        async with WeightsWriter(self.address, token=self.credentials[who]) as writer:
            await publish(writer, Model(seed=1), 1)


@pytest.fixture
async def shop(tmp_path: Path, path: Path) -> AsyncIterator[Shop]:
    credentials = {
        "team-a": tenants.grant(path, "team-a", publish=("run",), read=("run",)),
        "team-b": tenants.grant(path, "team-b", publish=("b-*",), read=("b-*",)),
        "cluster": tenants.grant(path, "cluster", read=("*",)),
        "nobody": tenants.grant(path, "nobody"),
        "installation": "installation-token",
    }
    known = Tenants(path)
    server = Server(identify=Identification(known, token="installation-token"))
    service = WeightService(open_store(str(tmp_path / "store")), access=StoreAccess(tenants=known))
    service.bind(server)
    port = await server.start("127.0.0.1:0")
    yield Shop(f"127.0.0.1:{port}", path, credentials)
    await server.stop(0)
    await service.close()


async def test_a_team_publishes_and_reads_its_own_runs(shop: Shop) -> None:
    await shop.publish("team-a")
    async with shop.client("team-a") as team:
        assert (await team.describe()).runs == ("run",)


async def until_admitted(shop: Shop, who: str) -> None:
    """The store looks at the file of tenants a few times a second."""
    async with asyncio.timeout(20), shop.client(who) as client:
        while True:
            try:
                await client.describe()
            except Refused:
                await asyncio.sleep(0.1)
            else:
                return


async def test_a_credential_that_is_revoked_gets_no_further_message_of_a_stream(shop: Shop) -> None:
    """Its tenant may still read: it is this credential that ended."""
    await shop.publish("team-a")
    leaked = tenants.load(shop.path).tenants["team-a"].credentials[0].id
    async with shop.client("team-a") as team:
        watching = team.watch("run")
        assert (await anext(watching)).version.sequence == 0
        shop.credentials["team-a"] = tenants.grant(shop.path, "team-a")
        tenants.revoke(shop.path, "team-a", leaked)
        await until_admitted(shop, "team-a")
        await shop.publish("team-a")
        with pytest.raises(Refused, match="was revoked"):
            await anext(watching)


async def test_a_team_neither_takes_over_nor_reads_nor_sees_anothers_run(shop: Shop) -> None:
    await shop.publish("team-a")
    with pytest.raises(Forbidden, match="tenant:team-b may not publish run 'run'"):
        await shop.publish("team-b")
    async with shop.client("team-b") as other:
        assert (await other.describe()).runs == ()
        with pytest.raises(Forbidden, match="may not read run 'run'"):
            await other.describe("run")
    await shop.publish("team-a")  # never fenced out


@pytest.mark.parametrize("reader", ["cluster", "installation"])
async def test_a_serving_cluster_reads_every_run_and_publishes_none(
    shop: Shop, reader: str
) -> None:
    await shop.publish("team-a")
    async with shop.client(reader) as nodes:
        assert (await nodes.describe()).runs == ("run",)
        assert (await nodes.describe("run")).head is not None
    with pytest.raises((Forbidden, Fenced)):
        await shop.publish(reader)


async def test_who_was_granted_nothing_may_do_nothing(shop: Shop) -> None:
    await shop.publish("team-a")
    async with shop.client("nobody") as nobody:
        with pytest.raises(Forbidden):
            await nobody.describe()
        with pytest.raises(Forbidden):
            await nobody.describe("run")


async def test_without_a_credential_nobody_gets_in(shop: Shop) -> None:
    for who in ("rose_team-a_wrong", ""):
        async with shop.client(who) as stranger:
            with pytest.raises(Refused, match="no credential"):
                await stranger.describe()


# --- the verbs


def run(*words: str) -> int:
    return tenant_verbs.main([*words])


def test_the_verbs_grant_list_and_revoke(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ("--tenants", str(path))
    assert (
        run("grant", "team-a", "--publish", "a-*", "--read", "a-*", "--expires", "90d", *file) == 0
    )
    credential = capsys.readouterr().out.strip()
    assert Tenants(path).tenant_of(credential) == "team-a"
    assert run("list", *file) == 0
    shown = capsys.readouterr().out
    assert "team-a" in shown
    assert "a-*" in shown
    assert credential not in shown
    assert run("revoke", "team-a", *file) == 0
    assert Tenants(path).tenant_of(credential) == ""
    assert run("revoke", "team-a", *file) == 1
    assert "no tenant 'team-a'" in capsys.readouterr().err


def test_a_credential_can_be_written_where_only_its_owner_reads(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "credential"
    assert run("grant", "t", "--read", "*", "--tenants", str(path), "--out", str(out)) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert Tenants(path).tenant_of(out.read_text().strip()) == "t"
    assert run("grant", "u", "--tenants", str(path), "--out", str(out)) == 1
    assert "u" not in tenants.load(path).tenants, "nothing is granted that cannot be handed over"


def test_a_grant_says_what_the_tenant_may_do_by_now(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ("--tenants", str(path))
    assert run("grant", "t", *file) == 0
    assert "granted t, which may do nothing yet (--publish" in capsys.readouterr().err
    assert run("grant", "t", "--publish", "a-*", "--read", "a-*", "--read", "b", *file) == 0
    assert "granted t, which may publish a-*, read a-* b;" in capsys.readouterr().err


# --- the store's flags: deny by default


def serve(*words: str) -> tuple[Identification | None, StoreAccess]:
    return _callers(parser().parse_args(["serve", "--root", "r", *words]))


def test_a_store_that_others_reach_wants_to_know_who_may(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rose tenant grant"):
        serve()
    with pytest.raises(ValueError, match="rose tenant grant"):
        serve("--address", "10.0.0.1:7446")
    token = tmp_path / "token"
    token.write_text("word")
    with pytest.raises(ValueError, match="needs --tenants"):
        serve("--token-file", str(token), "--service-account-keys", str(token))
    identify, access = serve("--address", "127.0.0.1:0")
    assert identify is None
    assert access.allows((), "publish", "any")


def test_the_installations_token_alone_publishes_nothing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("word")
    identify, access = serve("--token-file", str(token))
    assert identify is not None
    names = identify("Bearer word", ()) or ()
    assert access.allows(names, "read", "any")
    assert not access.allows(names, "publish", "any")
