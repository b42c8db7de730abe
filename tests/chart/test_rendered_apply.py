"""Deployed by rendering, as Argo CD does: again and again on a real API server, nothing changes."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.shell import run
from rose_operator.errors import ApiRefused
from rose_operator.kube.api import Api
from rose_operator.own_secrets import OwnSecrets, SecretOptions
from rose_wire import tls
from rose_wire.api_server import ApiServer, access_to
from tests.chart.rendering import CHART, HELM

pytestmark = [
    pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build"),
    pytest.mark.cluster,
    pytest.mark.slow,
]

SYSTEM = "rose-system"
OWN = (
    "rose-authority",
    "rose-node-authority",
    "rose-router-authority",
    "rose-tls",
    "rose-token",
)
VALUES = (
    "--set=lending.enabled=true",
    "--set=relay.enabled=true",
    "--set=relay.upstream=tls://weights.example:7446",
    "--set=networkPolicy.enabled=true",
)


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        plane.kubectl("create", "namespace", SYSTEM)
        yield plane


def rendered_and_applied(plane: ControlPlane) -> list[str]:
    """One turn of whoever deploys by rendering; a line per object."""
    template = (str(HELM), "template", "rose", str(CHART), f"--namespace={SYSTEM}", "--no-hooks")
    text = run([*template, "--kube-version=1.36.3", *VALUES], seconds=60).stdout
    # Argo CD, as it recommends: the kinds are too long for the annotation of a client-side apply.
    how = ("apply", "--server-side", "--field-manager=argocd-controller", "--filename=-")
    return plane.kubectl(*how, stdin=text).splitlines()


def versions(plane: ControlPlane) -> dict[str, str]:
    """Resource version of every object that the chart made."""
    kinds = "crd,clusterroles,clusterrolebindings,roles,rolebindings,serviceaccounts,secrets,"
    kinds += "configmaps,services,deployments,daemonsets,networkpolicies,pdb,priorityclasses"
    where = (kinds, "--all-namespaces", "--selector=app.kubernetes.io/part-of=rose")
    listed = json.loads(plane.kubectl("get", *where, "--output=json"))
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for item in listed["items"]
    }


async def test_a_second_rendering_changes_nothing(plane: ControlPlane, tmp_path: Path) -> None:
    first = rendered_and_applied(plane)
    assert len(first) > 30
    await fill(plane, tmp_path / "own", "rose-operator")
    tls.check_pair(tmp_path / "own" / "tls")
    before = versions(plane)
    assert {f"Secret/{name}" for name in OWN} < set(before)
    second = rendered_and_applied(plane)
    assert len(second) == len(first)
    assert versions(plane) == before
    token = plane.kubectl("get", "secret", "rose-token", f"--namespace={SYSTEM}", "--output=json")
    assert len(base64.b64decode(json.loads(token)["data"]["token"])) >= 32


async def test_only_the_operator_may_fill_them_and_it_may_fill_no_other(
    plane: ControlPlane, tmp_path: Path
) -> None:
    rendered_and_applied(plane)
    for name in ("rose-agent", "rose-engine-host", "rose-relay"):
        with pytest.raises(ApiRefused, match="forbidden"):
            await fill(plane, tmp_path / name, name)
    plane.kubectl("create", "secret", "generic", "others", f"--namespace={SYSTEM}")
    with pytest.raises(ApiRefused, match='"others" is forbidden'):
        await fill(plane, tmp_path / "others", "rose-operator", first="others")


def account(plane: ControlPlane, name: str) -> ApiServer:
    """A client with the rights of one of the chart's service accounts."""
    token = plane.kubectl("create", "token", name, f"--namespace={SYSTEM}").strip()
    authority = plane.kubeconfig.parent / "ca.crt"
    return ApiServer(access_to(plane.server, token, authority), trust_env=False)


async def fill(plane: ControlPlane, folder: Path, name: str, *, first: str = "rose-token") -> None:
    """What the operator does as it starts, as this service account."""
    wanted = SecretOptions(
        folder,
        token=first,
        authority="rose-authority",
        certificate="rose-tls",
        nodes="rose-node-authority",
        routers="rose-router-authority",
        names=("*.rose-system.svc",),
    )
    server = account(plane, name)
    try:
        own = OwnSecrets(Api(server, SYSTEM), wanted, wall=time.time)
        await own.make()
    finally:
        await server.close()
