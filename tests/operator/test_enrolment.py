"""A node gets a certificate for the pod that its token is bound to, and for no other node."""

import asyncio
import datetime as dt
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from cryptography import x509

from rose_agent.guard.sync.identity import Identity
from rose_core.api import RolloutLease
from rose_core.rotation import SPREAD_SECONDS
from rose_core.wire.enrolment import (
    EnrolReply,
    EnrolRequest,
    EnrolRouterRequest,
    RouterIdentity,
)
from rose_core.wire.sync import SyncRequest
from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.cluster.pki import Authority as Maker
from rose_operator.errors import ApiUnavailable, ConfigurationError
from rose_operator.kube.api import Api
from rose_operator.settings import parse
from rose_operator.sync.enrolment import NodeAuthority, NodeEnrolment, RouterEnrolment, RouterTrust
from rose_wire import certificates, tls
from rose_wire.api_server import ApiServer, find_access
from rose_wire.bearer import BATCHES, INGEST, lease_token, service_token
from rose_wire.errors import Refused, Unavailable
from rose_wire.rpc import call, connect
from rose_wire.service_accounts import ServiceAccounts
from rose_wire.services import SYNC
from tests.api.objects import LEASE, changed
from tests.operator.harness import Cluster, OperatorProcess

ACCOUNT = "system:serviceaccount:rose-system:rose-agent"


def review(node: str = "n1", **changes: Any) -> dict[str, Any]:  # noqa: ANN401  # any field
    """What an API server says of the good token of an agent on that node."""
    extra = {"authentication.kubernetes.io/node-name": [node]} if node else {}
    good = {
        "authenticated": True,
        "audiences": ["rose-operator"],
        "user": {"username": ACCOUNT, "extra": extra},
    }
    return good | changes


@dataclass
class Reviewer:
    """The API server, as far as it is asked here."""

    status: dict[str, Any] | Exception

    async def review_token(self, token: str, audience: str) -> dict[str, Any]:
        assert (token, audience) == ("mine", "rose-operator")
        if isinstance(self.status, Exception):
            raise self.status
        return self.status


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An authority as the chart's Secret holds it."""
    return Maker(tmp_path / "pki").export(tmp_path / "authority")


async def enrol(folder: Path, status: dict[str, Any] | Exception, node: str = "n1") -> EnrolReply:
    authority = NodeAuthority(folder, dt.timedelta(hours=24))
    service = NodeEnrolment(cast("Api", Reviewer(status)), authority, ACCOUNT)
    _, asked = certificates.request("system:node:somebody")
    return await service.enrol(EnrolRequest(node, "mine", asked))


async def test_the_certificate_names_the_node_whatever_the_request_calls_itself(
    folder: Path,
) -> None:
    reply = await enrol(folder, review())
    found = x509.load_pem_x509_certificate(reply.certificate)
    assert found.subject.rfc4514_string() == "CN=system:node:n1"
    found.verify_directly_issued_by(
        x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    )
    life = found.not_valid_after_utc - found.not_valid_before_utc
    assert life < dt.timedelta(hours=25)
    # Guards of other nodes dial it by that name, and know it by what came along.
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["n1"]
    assert reply.authority == (folder / "tls.crt").read_bytes()
    constraints = found.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.value.ca is False


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (review("n2"), "pod is on node n2, the request is for n1"),
        (review(authenticated=False, error="expired"), "not good: expired"),
        (review(audiences=["https://kubernetes.default.svc"]), "not for rose-operator"),
        (review(user={"username": "system:serviceaccount:a:b"}), "not the agents' account"),
        (review(""), "Kubernetes 1.30 or later"),
    ],
    ids=["other-node", "expired", "other-audience", "other-account", "old-server"],
)
async def test_a_token_that_proves_something_else_gets_none(
    folder: Path, status: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        await enrol(folder, status)


async def test_without_the_api_server_the_agent_is_told_to_try_again(folder: Path) -> None:
    with pytest.raises(Unavailable):
        await enrol(folder, ApiUnavailable("down"))


async def test_nonsense_instead_of_a_request_is_refused(folder: Path) -> None:
    authority = NodeAuthority(folder, dt.timedelta(hours=1))
    service = NodeEnrolment(cast("Api", Reviewer(review())), authority, ACCOUNT)
    with pytest.raises(Refused):
        await service.enrol(EnrolRequest("n1", "mine", b"nonsense"))


def test_a_token_does_not_show_in_logs() -> None:
    assert "mine" not in repr(EnrolRequest("n1", "mine", b""))


def settings(tmp_path: Path, *more: str) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "stores.yaml").write_text("main: store:7446")
    files = (f"--stores-file={tmp_path / 'stores.yaml'}", f"--token-file={tmp_path / 'token'}")
    parse(["--router-image=i", *files, "--enrol-address=127.0.0.1:0", *more])


def test_an_authority_that_cannot_sign_is_told_at_the_start(folder: Path, tmp_path: Path) -> None:
    settings(tmp_path)  # without TLS routers still ask for their token
    with pytest.raises(ConfigurationError, match="--node-authority needs --tls-dir"):
        settings(tmp_path, f"--node-authority={folder}")
    own = f"--tls-dir={Maker(tmp_path / 'other').export(tmp_path / 'own')}"
    with pytest.raises(ConfigurationError, match="needs --router-authority"):
        settings(tmp_path, own, f"--node-authority={folder}")
    routers = f"--router-authority={folder}"
    settings(tmp_path, own, routers, f"--node-authority={folder}")
    other, _ = certificates.request("x")
    (folder / tls.KEY).write_bytes(other)
    with pytest.raises(ConfigurationError, match="do not belong together"):
        settings(tmp_path, own, routers)


def agent_pod(plane: ControlPlane, namespace: str) -> tuple[str, tuple[str, ...]]:
    """A node with an agent's pod; its name, and the words that make a token of that pod."""
    node = f"node-{namespace}"
    plane.kubectl("create", "namespace", namespace)
    plane.kubectl("create", "serviceaccount", "rose-agent", f"--namespace={namespace}")
    for manifest in (
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}},
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "agent", "namespace": namespace},
            "spec": {
                "nodeName": node,
                "serviceAccountName": "rose-agent",
                "containers": [{"name": "guard", "image": "i"}],
            },
        },
    ):
        plane.kubectl("create", "--filename=-", stdin=json.dumps(manifest))
    bound = ("--bound-object-kind=Pod", "--bound-object-name=agent", "--duration=10m")
    return node, ("create", "token", "rose-agent", f"--namespace={namespace}", *bound)


@pytest.mark.cluster
async def test_a_real_api_server_says_which_node_a_token_is_from(
    cluster: Cluster, folder: Path
) -> None:
    namespace = f"enrol-{uuid4().hex[:8]}"
    plane = cluster.plane
    node, make = agent_pod(plane, namespace)
    token = plane.kubectl(*make, "--audience=rose-operator").strip()
    other = plane.kubectl(*make).strip()
    account = f"system:serviceaccount:{namespace}:rose-agent"
    server = ApiServer(await find_access(plane.kubeconfig), trust_env=False)
    try:
        service = NodeEnrolment(
            Api(server, namespace), NodeAuthority(folder, dt.timedelta(hours=1)), account
        )
        _, asked = certificates.request("x")
        assert (await service.enrol(EnrolRequest(node, token, asked))).certificate
        with pytest.raises(Refused, match=f"pod is on node {node}"):
            await service.enrol(EnrolRequest("elsewhere", token, asked))
        with pytest.raises(Refused, match="not good"):
            await service.enrol(EnrolRequest(node, other, asked))
    finally:
        await server.close()
    plane.kubectl("delete", f"namespace/{namespace}", f"node/{node}", "--wait=false")


@pytest.mark.cluster
async def test_routers_believe_the_service_accounts_of_a_real_api_server(cluster: Cluster) -> None:
    namespace = f"callers-{uuid4().hex[:8]}"
    plane = cluster.plane
    plane.kubectl("create", "namespace", namespace)
    plane.kubectl("create", "serviceaccount", "trainer", f"--namespace={namespace}")
    make = ("create", "token", "trainer", f"--namespace={namespace}")
    audience = f"rose-lease/{namespace}/grpo"
    token = plane.kubectl(*make, f"--audience={audience}").strip()
    server = ApiServer(await find_access(plane.kubeconfig), trust_env=False)
    try:
        keys = await Api(server, namespace).signing_keys()
    finally:
        await server.close()
    accounts = ServiceAccounts([keys.encode()])
    found = accounts.account_of(token, audience)
    assert found is not None
    assert found.name == f"{namespace}/trainer"
    assert accounts.account_of(token, "rose-lease/other/grpo") is None
    assert accounts.account_of(plane.kubectl(*make).strip(), audience) is None
    plane.kubectl("delete", f"namespace/{namespace}", "--wait=false")


GRPO = "default/grpo"
ROUTERS = "system:serviceaccount:rose-routers:rose-router"


def review_router(lease: str = GRPO, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """What an API server says of the good token of a lease's router."""
    good = {
        "authenticated": True,
        "audiences": [f"rose-router/{lease}"],
        "user": {"username": ROUTERS},
    }
    return good | changes


@dataclass
class RouterReviewer:
    """The API server, which is asked about one audience at a time."""

    status: dict[str, Any] | Exception

    async def review_token(self, _token: str, _audience: str) -> dict[str, Any]:
        if isinstance(self.status, Exception):
            raise self.status
        return self.status


def router_enrolment(
    folder: Path,
    status: dict[str, Any] | Exception,
    lease: dict[str, Any] = LEASE,
    keys: Callable[[], str] = lambda: "{}",
    hours: float = 24,
) -> RouterEnrolment:
    """The operator's side, for one lease."""
    found = RolloutLease.model_validate(lease)
    signing = NodeAuthority(folder, dt.timedelta(hours=hours))
    agents = folder / "tls.crt"
    trust = RouterTrust("secret", "rose-routers", ROUTERS, signing, agents, agents)
    return RouterEnrolment(
        cast("Api", RouterReviewer(status)),
        trust,
        lambda key: found if key == found.metadata.key else None,
        keys,
    )


async def first(service: RouterEnrolment, lease: str = GRPO) -> RouterIdentity:
    _, asked = certificates.request("somebody")
    stream = service.enrol(EnrolRouterRequest(lease, "mine", asked))
    try:
        return await anext(stream)
    finally:
        await stream.aclose()


async def test_a_router_is_given_what_is_good_for_its_lease_alone(folder: Path) -> None:
    result = await first(router_enrolment(folder, review_router()))
    found = x509.load_pem_x509_certificate(result.certificate)
    found.verify_directly_issued_by(x509.load_pem_x509_certificate(result.routers))
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    own = "router-default-grpo"
    assert set(names.get_values_for_type(x509.DNSName)) == {
        f"{name}.rose-routers.{end}"
        for name in (own, f"{own}-all")
        for end in ("svc", "svc.cluster.local")
    }
    usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {usage._name for usage in usages} == {"serverAuth", "clientAuth"}
    assert found.not_valid_after_utc - found.not_valid_before_utc < dt.timedelta(hours=25)
    assert result.token == lease_token("secret", GRPO)
    assert result.token not in {lease_token("secret", "default/other"), "secret"}
    assert result.batches == service_token("secret", GRPO, BATCHES)
    assert result.ingest == service_token("secret", GRPO, INGEST)
    others = {service_token("secret", "default/other", one) for one in (BATCHES, INGEST)}
    assert len({result.token, result.batches, result.ingest} | others) == 5
    assert result.token not in repr(result)
    assert result.batches not in repr(result)


@pytest.mark.parametrize(
    ("status", "lease", "reason"),
    [
        (review_router(authenticated=False, error="expired"), GRPO, "not good: expired"),
        (review_router("default/other"), GRPO, "not for rose-router/default/grpo"),
        (review_router(user={"username": ACCOUNT}), GRPO, "not the routers' account"),
        (review_router("default/gone"), "default/gone", "no lease default/gone"),
    ],
    ids=["expired", "other-lease", "other-account", "no-lease"],
)
async def test_a_router_of_something_else_is_told_nothing(
    folder: Path, status: dict[str, Any], lease: str, reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        await first(router_enrolment(folder, status), lease)


async def test_agents_need_certificates_unless_engines_elsewhere_have_none(folder: Path) -> None:
    assert (await first(router_enrolment(folder, review_router()))).agents
    elsewhere = changed(LEASE, {"spec.dedicatedEngines": ["d-0"]})
    assert not (await first(router_enrolment(folder, review_router(), elsewhere))).agents


async def test_new_keys_of_the_cluster_reach_a_router_that_runs(folder: Path) -> None:
    keys = ["{}"]
    service = router_enrolment(folder, review_router(), keys=lambda: keys[-1])
    _, asked = certificates.request("somebody")
    stream = service.enrol(EnrolRouterRequest(GRPO, "mine", asked))
    result = await anext(stream)
    keys.append('{"keys": []}')
    after = await anext(stream)
    assert (result.account_keys, after.account_keys) == ("{}", '{"keys": []}')
    assert after.certificate == result.certificate
    await stream.aclose()


async def test_the_leases_own_list_of_callers_follows_it(folder: Path) -> None:
    entry = {"name": "laptop", "sha256": "ab" * 32, "expires": "2030-01-01T00:00:00Z"}
    wrong = {"name": "typo", "sha256": "cd" * 32, "expires": "tomorrow"}
    callers = [[entry, wrong], []]

    def lease(_key: str) -> RolloutLease:
        changes = {"spec.router.callers": callers[0] if len(callers) > 1 else []}
        return RolloutLease.model_validate(changed(LEASE, changes))

    trust = RouterTrust("secret", "rose-routers", ROUTERS)
    reviewer = cast("Api", RouterReviewer(review_router()))
    service = RouterEnrolment(reviewer, trust, lease, lambda: "")
    stream = service.enrol(EnrolRouterRequest(GRPO, "mine"))
    (reported,) = (await anext(stream)).callers
    assert (reported.name, reported.sha256, reported.expires) == ("laptop", "ab" * 32, 1893456000.0)
    callers.pop(0)
    assert (await anext(stream)).callers == ()
    await stream.aclose()


@pytest.mark.looptime
@pytest.mark.parametrize(("hours", "seconds"), [(0.1, 180), (8760, SPREAD_SECONDS / 2)])
async def test_the_stream_ends_at_half_of_the_certificates_life_or_when_authorities_may_be_others(
    folder: Path, hours: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half a day of looks, one a second, took 8 s of a core.
    monkeypatch.setattr("rose_operator.sync.enrolment._LOOK_SECONDS", 8.0)
    service = router_enrolment(folder, review_router(), hours=hours)
    _, asked = certificates.request("somebody")
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert len([one async for one in service.enrol(EnrolRouterRequest(GRPO, "mine", asked))]) == 1
    assert 0 <= loop.time() - began - seconds < 10


@pytest.mark.cluster
async def test_a_real_api_server_says_which_lease_a_routers_token_is_for(
    cluster: Cluster, folder: Path
) -> None:
    namespace = f"routers-{uuid4().hex[:8]}"
    plane = cluster.plane
    plane.kubectl("create", "namespace", namespace)
    for account in ("rose-router", "other"):
        plane.kubectl("create", "serviceaccount", account, f"--namespace={namespace}")

    def token(account: str, lease: str) -> str:
        named = (account, f"--namespace={namespace}", f"--audience=rose-router/{lease}")
        return plane.kubectl("create", "token", *named).strip()

    leases = {
        key: RolloutLease.model_validate(changed(LEASE, {"metadata.name": key.partition("/")[2]}))
        for key in (GRPO, "default/other")
    }
    server = ApiServer(await find_access(plane.kubeconfig), trust_env=False)
    try:
        trust = RouterTrust(
            "secret",
            namespace,
            f"system:serviceaccount:{namespace}:rose-router",
            NodeAuthority(folder, dt.timedelta(hours=1)),
        )
        service = RouterEnrolment(Api(server, namespace), trust, leases.get, lambda: "")
        _, asked = certificates.request("x")

        async def ask(lease: str, shown: str) -> RouterIdentity:
            stream = service.enrol(EnrolRouterRequest(lease, shown, asked))
            try:
                return await anext(stream)
            finally:
                await stream.aclose()

        mine = token("rose-router", GRPO)
        assert (await ask(GRPO, mine)).certificate
        with pytest.raises(Refused, match="not good"):
            await ask("default/other", mine)
        with pytest.raises(Refused, match="not the routers' account"):
            await ask(GRPO, token("other", GRPO))
        with pytest.raises(Refused, match="not good"):
            await ask(GRPO, "x.y.z")
    finally:
        await server.close()
    plane.kubectl("delete", f"namespace/{namespace}", "--wait=false")


@pytest.mark.cluster
async def test_a_node_enrols_with_a_real_operator_and_is_then_heard_for_itself_alone(
    cluster: Cluster, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = f"enrol-{uuid4().hex[:8]}"
    node, make = agent_pod(cluster.plane, namespace)
    token = cluster.plane.kubectl(*make, "--audience=rose-operator")
    (tmp_path / "agent.token").write_text(token)
    server = Maker(tmp_path / "server")
    server.issue("operator", "operator", hosts=("127.0.0.1",))
    own = tmp_path / "own"
    own.mkdir()
    for ending in ("crt", "key"):
        (own / f"tls.{ending}").write_bytes((server.folder / f"operator.{ending}").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as found:
        enrol_port = found.getsockname()[1]
    more = (
        f"--tls-dir={own}",
        f"--tls-client-ca={folder / 'tls.crt'}",
        f"--node-authority={folder}",
        f"--router-authority={folder}",
        f"--enrol-address=127.0.0.1:{enrol_port}",
    )
    operator = OperatorProcess(cluster.plane.kubeconfig, tmp_path, namespace, more=more)
    monkeypatch.setenv(tls.TRUST, str(server.certificate))
    identity = tmp_path / "run" / "identity"
    monkeypatch.setenv(tls.IDENTITY, str(identity))
    operator.start()
    try:
        address = f"tls://127.0.0.1:{enrol_port}"
        keeper = Identity(node, address, tmp_path / "agent.token", identity)
        task = asyncio.create_task(keeper.run())
        async with asyncio.timeout(60):
            await keeper.wait()
        task.cancel()
        async with connect(f"tls://127.0.0.1:{operator.sync_port}") as channel:
            await call(channel, SYNC, SyncRequest(node, "t", 0), timeout=10, token="secret")
            with pytest.raises(Refused, match=f"certificate names {node}"):
                await call(channel, SYNC, SyncRequest("x", "t", 0), timeout=10, token="secret")
    finally:
        operator.kill()
