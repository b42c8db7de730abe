"""A node gets a certificate for the pod that its token is bound to, and for no other node."""

import asyncio
import datetime as dt
import json
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from cryptography import x509
from lightkube import AsyncClient, KubeConfig

from rose_agent.guard.identity import Identity
from rose_core.api import RolloutLease
from rose_core.wire.enrolment import EnrolReply, EnrolRequest
from rose_core.wire.sync import SyncRequest
from rose_dev.control_plane import ControlPlane
from rose_dev.pki import Authority as Maker
from rose_operator.apply.routers import deployment
from rose_operator.errors import ApiUnavailable, ConfigurationError
from rose_operator.kube.api import Api
from rose_operator.settings import Settings, parse
from rose_operator.sync.enrolment import Authority, Enrolment
from rose_wire import certificates, tls
from rose_wire.errors import Refused, Unavailable
from rose_wire.rpc import call, connect
from rose_wire.service_accounts import ServiceAccounts
from rose_wire.services import SYNC
from tests.api.objects import LEASE, changed
from tests.operator.bench import SETTINGS
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
    authority = Authority(folder, dt.timedelta(hours=24))
    service = Enrolment(cast("Api", Reviewer(status)), authority, ACCOUNT)
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
    authority = Authority(folder, dt.timedelta(hours=1))
    service = Enrolment(cast("Api", Reviewer(review())), authority, ACCOUNT)
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
    with pytest.raises(ConfigurationError, match="needs --tls-dir and --node-authority"):
        settings(tmp_path)
    own = f"--tls-dir={Maker(tmp_path / 'other').export(tmp_path / 'own')}"
    settings(tmp_path, own, f"--node-authority={folder}")
    other, _ = certificates.request("x")
    (folder / tls.KEY).write_bytes(other)
    with pytest.raises(ConfigurationError, match="do not belong together"):
        settings(tmp_path, own, f"--node-authority={folder}")


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
    config = KubeConfig.from_file(str(plane.kubeconfig)).get()
    client = AsyncClient(config=config, trust_env=False)
    try:
        service = Enrolment(
            Api(client, namespace), Authority(folder, dt.timedelta(hours=1)), account
        )
        _, asked = certificates.request("x")
        assert (await service.enrol(EnrolRequest(node, token, asked))).certificate
        with pytest.raises(Refused, match=f"pod is on node {node}"):
            await service.enrol(EnrolRequest("elsewhere", token, asked))
        with pytest.raises(Refused, match="not good"):
            await service.enrol(EnrolRequest(node, other, asked))
    finally:
        await client.close()
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
    config = KubeConfig.from_file(str(plane.kubeconfig)).get()
    client = AsyncClient(config=config, trust_env=False)
    try:
        keys = await Api(client, namespace).signing_keys()
    finally:
        await client.close()
    lease = RolloutLease.model_validate(LEASE)
    asking = replace(SETTINGS, account_keys=keys)
    (container,) = deployment(lease, asking)["spec"]["template"]["spec"]["containers"]
    (given,) = [one["value"] for one in container["env"] if one["name"] == "ROSE_ACCOUNT_KEYS"]
    assert "--authenticate" in container["args"]
    accounts = ServiceAccounts([given.encode()])
    assert accounts.account_of(token, audience) == f"{namespace}/trainer"
    assert accounts.account_of(token, "rose-lease/other/grpo") == ""
    assert accounts.account_of(plane.kubectl(*make).strip(), audience) == ""
    plane.kubectl("delete", f"namespace/{namespace}", "--wait=false")


def test_routers_ask_agents_for_certificates_unless_engines_elsewhere_have_none() -> None:
    asking = replace(SETTINGS, router_client_ca="/trust/tls.crt")
    lease = RolloutLease.model_validate(LEASE)
    elsewhere = RolloutLease.model_validate(changed(LEASE, {"spec.dedicatedEngines": ["d-0"]}))

    def arguments(of: RolloutLease, settings: Settings) -> list[str]:
        pod = deployment(of, settings)["spec"]["template"]["spec"]
        found: list[str] = pod["containers"][0]["args"]
        return [word for word in found if word.startswith("--tls-client-ca")]

    assert arguments(lease, asking) == ["--tls-client-ca=/trust/tls.crt"]
    assert arguments(elsewhere, asking) == []
    assert arguments(lease, SETTINGS) == []


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
            with pytest.raises(Refused, match=f"certificate names system:node:{node}"):
                await call(channel, SYNC, SyncRequest("x", "t", 0), timeout=10, token="secret")
    finally:
        operator.kill()
