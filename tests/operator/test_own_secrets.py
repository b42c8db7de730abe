"""The operator's own token, authorities and certificate: made once, renewed, nobody locked out."""

import asyncio
import base64
import datetime as dt
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.rotation import SPREAD_SECONDS, HeldAuthority, RotationStep, ValidityWindow, decide
from rose_core.wire.sync import SyncReply, SyncRequest
from rose_operator.errors import ApiRefused, ApiUnavailable
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import Raw
from rose_operator.own_secrets import OwnSecrets, SecretOptions, options, turned
from rose_operator.settings import parse
from rose_wire import certificates, tls
from rose_wire.errors import Unavailable
from rose_wire.rpc import Server, call, connect
from rose_wire.services import SYNC

DAY = 86_400.0
NAMES = ("*.rose-system.svc", "localhost")
SECRETS = {
    "token": "rose-token",
    "authority": "rose-authority",
    "certificate": "rose-tls",
    "nodes": "rose-node-authority",
    "routers": "rose-router-authority",
}
START = dt.datetime(2027, 1, 1, tzinfo=dt.UTC).timestamp()


class Secrets:
    """The API server's Secrets, empty as the chart makes them; refuses what is out of date."""

    def __init__(self, *names: str) -> None:
        self.objects: dict[str, Raw] = {
            name: {"metadata": {"name": name, "resourceVersion": "1"}} for name in names
        }
        self.writes = 0
        self.down = 0

    async def get(self, kind: ObjectKind, name: str) -> Raw | None:
        assert kind is ObjectKind.SECRET
        if self.down:
            self.down -= 1
            raise ApiUnavailable("down")
        await asyncio.sleep(0)  # another may read before this one writes
        found = self.objects.get(name)
        return None if found is None else {**found, "metadata": dict(found["metadata"])}

    async def replace(self, kind: ObjectKind, manifest: Raw) -> Raw:
        name, version = (manifest["metadata"][key] for key in ("name", "resourceVersion"))
        if self.objects[name]["metadata"]["resourceVersion"] != version:
            raise ApiUnavailable("409: conflict")
        made = {**manifest, "metadata": {"name": name, "resourceVersion": f"{int(version) + 1}"}}
        self.objects[name] = made
        self.writes += 1
        return made

    def data(self, name: str) -> dict[str, bytes]:
        return {k: base64.b64decode(v) for k, v in (self.objects[name].get("data") or {}).items()}


class Installation:
    """One operator's Secrets, and a clock that the test turns."""

    def __init__(self, folder: Path, api: Secrets | None = None) -> None:
        self.now = START
        self.api = api or Secrets(*SECRETS.values())
        self.folder = folder
        wanted = SecretOptions(
            folder,
            token="rose-token",
            authority="rose-authority",
            certificate="rose-tls",
            nodes="rose-node-authority",
            routers="rose-router-authority",
            names=NAMES,
        )
        self.own = OwnSecrets(self.api, wanted, wall=lambda: self.now)

    def file(self, folder: str, name: str) -> bytes:
        return (self.folder / folder / name).read_bytes()


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "own")


async def test_empty_secrets_are_filled_once_and_then_left_alone(
    installation: Installation,
) -> None:
    await installation.own.make()
    assert installation.api.writes == 5
    first = {name: installation.api.data(name) for name in SECRETS.values()}
    assert set(first["rose-tls"]) == {"tls.crt", "tls.key", "ca.crt"}
    assert len(first["rose-token"]["token"]) >= 32
    for _ in range(20):
        installation.now += DAY
        await installation.own.refresh()
    assert installation.api.writes == 5
    assert {name: installation.api.data(name) for name in SECRETS.values()} == first
    tls.check_pair(installation.folder / "tls")
    assert installation.file("token", "token") == first["rose-token"]["token"]


async def test_keys_lie_in_files_of_this_user_alone(installation: Installation) -> None:
    await installation.own.make()
    for file in installation.folder.rglob("*.key"):
        assert file.stat().st_mode & 0o077 == 0
    assert installation.folder.stat().st_mode & 0o077 == 0


async def test_two_operators_that_start_at_once_agree(tmp_path: Path) -> None:
    api = Secrets(*SECRETS.values())
    both = [Installation(tmp_path / name, api) for name in ("a", "b")]
    await asyncio.gather(*(one.own.make() for one in both))
    for folder, name in (("tls", "tls.key"), ("nodes", "tls.key"), ("token", "token")):
        assert both[0].file(folder, name) == both[1].file(folder, name)


async def test_an_api_server_that_comes_later_is_waited_for(installation: Installation) -> None:
    installation.api.down = 2
    await installation.own.make()
    assert installation.api.writes == 5


async def test_a_secret_that_the_chart_has_not_made_is_named(tmp_path: Path) -> None:
    lacking = Installation(tmp_path / "own", Secrets("rose-token"))
    with pytest.raises(ApiRefused, match="no Secret rose-node-authority; apply the chart again"):
        await lacking.own.make()


async def test_what_somebody_broke_is_made_anew_and_a_token_is_kept(
    installation: Installation,
) -> None:
    await installation.own.make()
    token = installation.file("token", "token")
    for name in ("rose-tls", "rose-authority"):
        data = installation.api.objects[name]["data"]
        data["tls.crt"] = base64.b64encode(b"no certificate").decode()
    await installation.own.refresh()
    tls.check_pair(installation.folder / "tls")
    assert installation.file("token", "token") == token
    assert_believed(installation.file("tls", "tls.crt"), installation.file("tls", "ca.crt"), START)


def assert_believed(leaf: bytes, bundle: bytes, now: float) -> None:
    """One of the bundle's living authorities signed the leaf, which is good now."""
    begins, ends = certificates.window(leaf)
    assert begins <= now < ends
    living = [one for one in certificates.split(bundle) if certificates.window(one)[1] > now]
    assert any(certificates.is_signed_by(leaf, one) for one in living)


async def test_for_thirty_years_nobody_is_locked_out(tmp_path: Path) -> None:
    """Whoever reads bundles a day late believes whoever serves certificates a day late."""
    one = Installation(tmp_path / "own")
    await one.own.make()
    bundles, leaves, signers = [], [], set()
    for day in range(0, 30 * 365, 10):
        one.now = START + day * DAY
        bundles.append(one.file("tls", "ca.crt"))
        leaves.append(one.file("tls", "tls.crt"))
        await one.own.refresh()
        now_bundle, now_leaf = one.file("tls", "ca.crt"), one.file("tls", "tls.crt")
        signers.add(one.file("authority", "tls.crt"))
        for bundle in (bundles[-1], now_bundle):
            for leaf in (leaves[-1], now_leaf):
                assert_believed(leaf, bundle, one.now)
        assert len(certificates.split(now_bundle)) <= 2
    assert len(signers) >= 4


def test_nodes_that_hold_a_day_old_certificate_are_believed_through_every_turn() -> None:
    life = dt.timedelta(days=30)
    files: dict[str, bytes] = {}
    held: bytes | None = None
    for half_days in range(2 * 120):  # a node renews at half of its certificate's day
        now = START + half_days * DAY / 2
        files = turned(files, "rose-nodes", life, now)
        key, asked = certificates.request("system:node:n1")
        assert key
        if held is not None:
            assert_signed(held, files["ca.crt"])
        pair = files["tls.key"], files["tls.crt"]
        held = certificates.sign(asked, "system:node:n1", pair, dt.timedelta(hours=24))


def assert_signed(leaf: bytes, bundle: bytes) -> None:
    assert any(certificates.is_signed_by(leaf, one) for one in certificates.split(bundle))


@settings(deadline=None)
@given(st.floats(1, 4000), st.lists(st.floats(0, 400), max_size=30))
def test_an_authority_never_signs_before_it_is_believed_for_long_enough(
    life: float, pauses: list[float]
) -> None:
    """However seldom somebody looks: a successor waits its time, unless nobody is left to wait."""
    now, held = START, HeldAuthority()
    for pause in [0.0, *pauses]:
        now += pause * DAY
        for _ in range(10):
            step = decide(held, now)
            if step is RotationStep.NONE:
                break
            if step is RotationStep.SWITCH:
                assert now - held.prepared_at >= SPREAD_SECONDS
            held = after(held, step, now, life * DAY)
        assert decide(held, now) is RotationStep.NONE
        assert held.signer is not None
        assert now < held.signer.ends


def after(held: HeldAuthority, step: RotationStep, now: float, life: float) -> HeldAuthority:
    """What the step makes of it."""
    new = ValidityWindow(now, now + life)
    if step is RotationStep.MAKE:
        return HeldAuthority(new)
    if step is RotationStep.PREPARE:
        return HeldAuthority(held.signer, new, now, held.former)
    assert held.signer is not None
    if step is RotationStep.SWITCH:
        return HeldAuthority(held.successor, None, 0.0, (*held.former, held.signer))
    living = tuple(one for one in held.former if one.ends > now)
    return HeldAuthority(held.signer, held.successor, held.prepared_at, living)


def test_a_made_certificate_is_believed_by_openssl_and_is_no_authority(tmp_path: Path) -> None:
    now = dt.datetime.now(dt.UTC)
    authority = certificates.make_authority("rose", dt.timedelta(days=30), now)
    key, leaf = certificates.issue(NAMES, authority, dt.timedelta(days=90), now)
    for name, content in (("key", key), ("leaf", leaf), ("ca", authority[1])):
        (tmp_path / name).write_bytes(content)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "leaf", tmp_path / "key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca"))
    assert shaken(client, server, "localhost")
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(client, server, "elsewhere")
    found = x509.load_pem_x509_certificate(leaf)
    assert found.not_valid_after_utc <= now + dt.timedelta(days=30, seconds=1)
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def shaken(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> bool:
    """A TLS handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=name)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    done: set[Any] = set()
    for _ in range(10):
        for side in (here, there):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    return done == {here, there}


async def test_a_node_with_a_certificate_of_ours_is_heard_by_a_listener_of_ours(
    tmp_path: Path,
) -> None:
    one = Installation(tmp_path / "own")
    one.now = time.time()
    await one.own.make()
    key, asked = certificates.request("system:node:n1")
    pair = one.file("nodes", "tls.key"), one.file("nodes", "tls.crt")
    certificate = certificates.sign(asked, "system:node:n1", pair, dt.timedelta(hours=24))
    certificates.keep(tmp_path / "node", {tls.KEY: key, tls.CERTIFICATE: certificate})
    own = one.folder
    server = Server(credentials=tls.server_credentials(own / "tls", own / "nodes" / "ca.crt"))
    received: list[str] = []

    async def sync(request: SyncRequest) -> SyncReply:
        received.append(request.node)
        return SyncReply(1, complete=True)

    server.unary(SYNC, sync)
    port = await server.start("127.0.0.1:0")
    for identity in (tmp_path / "node", None):
        credentials = tls.client_credentials(own / "tls" / "ca.crt", identity)
        channel = connect(f"localhost:{port}", credentials=credentials)
        if identity is None:
            with pytest.raises(Unavailable):
                await call(channel, SYNC, SyncRequest("stranger", "t", 0), timeout=5)
        else:
            await call(channel, SYNC, SyncRequest("n1", "t", 0), timeout=20)
        await channel.close()
    await server.stop()
    assert received == ["n1"]


def test_flags_say_what_is_made_here(tmp_path: Path) -> None:
    assert options(["--namespace=x"]) is None
    folder = tmp_path / "own"
    given = ["--own-secrets-dir", str(folder), "--own-token=rose-token", "--own-names=a,b"]
    found = options(["--router-image=x", *given])
    assert found == SecretOptions(folder, token="rose-token", names=("a", "b"))
    (tmp_path / "stores.yaml").write_text("{}")
    (tmp_path / "token").write_text("t")
    parsed = parse(
        [
            "--router-image=x",
            f"--stores-file={tmp_path / 'stores.yaml'}",
            f"--token-file={tmp_path / 'token'}",
            *given,
        ]
    )
    assert parsed.own_secrets == found


def test_a_certificate_authority_of_somebody_elses_is_believed_and_not_who_signed_it(
    tmp_path: Path,
) -> None:
    now = dt.datetime.now(dt.UTC)
    root, own, following = (
        certificates.make_authority(name, dt.timedelta(days=30), now)[1] for name in "abc"
    )
    (tmp_path / "tls.crt").write_bytes(own)
    assert tls.bundle_of(tmp_path) == own
    (tmp_path / "ca.crt").write_bytes(root)
    assert tls.bundle_of(tmp_path) == own
    (tmp_path / "ca.crt").write_bytes(own + following)
    assert tls.bundle_of(tmp_path) == own + following


@pytest.mark.looptime
async def test_they_are_looked_at_as_often_as_the_flag_says(tmp_path: Path) -> None:
    """Every minute where it says nothing."""
    for words, seconds in ((), 60.0), (("--own-look-seconds=5",), 5.0):
        wanted = options([f"--own-secrets-dir={tmp_path}", "--own-token=rose-token", *words])
        assert wanted is not None
        api = Secrets("rose-token")
        keeping = asyncio.create_task(OwnSecrets(api, wanted, wall=lambda: START).keep())
        await asyncio.sleep(seconds * 0.9)
        assert api.writes == 0
        await asyncio.sleep(seconds * 0.2)
        assert api.writes == 1
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
