"""What the chart asks of cert-manager is what cert-manager's own kinds take."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from rose_dev.errors import CommandFailed
from rose_dev.parts import CERT_MANAGER_KINDS
from tests.chart.rendering import HELM, Object, render
from tests.operator.harness import Cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build"),
]
ISSUER: Object = {"tls": {"certManager": {"issuerRef": {"kind": "ClusterIssuer", "name": "own"}}}}
KINDS = ("certificates", "issuers", "clusterissuers")


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[str]:
    """A namespace of an API server that has cert-manager's kinds."""
    folder = CERT_MANAGER_KINDS.place
    if not folder.is_dir():
        pytest.skip("cert-manager's kinds are not there: rose dev build")
    kinds = [yaml.safe_load((folder / f"crd-{kind}.yaml").read_text()) for kind in KINDS]
    for kind in kinds:
        kind["metadata"].pop("labels")  # its chart's templates fill them
    text = "".join(f"---\n{json.dumps(kind)}\n" for kind in kinds)
    cluster.plane.kubectl("apply", "--server-side", "--filename=-", stdin=text)
    names = [f"crd/{kind}.cert-manager.io" for kind in KINDS]
    cluster.plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
    yield cluster.namespace("certificates")
    cluster.plane.kubectl("delete", "--ignore-not-found", "--wait=false", *names)


def offered(cluster: Cluster, place: str, objects: list[Object]) -> str:
    """What the API server says of them; an unknown field is an error."""
    documents = [{**one, "metadata": {**one["metadata"], "namespace": place}} for one in objects]
    text = "".join(f"---\n{json.dumps(one)}\n" for one in documents)
    how = ("--server-side", "--dry-run=server", "--validate=strict", "--filename=-")
    return cluster.plane.kubectl("apply", *how, stdin=text)


@pytest.mark.parametrize("values", [{}, ISSUER], ids=["own authority", "an issuer of the cluster"])
def test_its_kinds_take_the_charts_certificates_and_issuers(
    cluster: Cluster, place: str, values: Object
) -> None:
    rendered = render(values, "cert-manager.io/v1")
    asked = rendered.all("Certificate") + rendered.all("Issuer")
    said = offered(cluster, place, asked)
    assert said.count("serverside-applied") == len(asked) > 0
    certificate = rendered.one("Certificate", "rose")
    wrong = {**certificate, "spec": {**certificate["spec"], "dnsName": "one"}}
    with pytest.raises(CommandFailed, match="dnsName"):
        offered(cluster, place, [wrong])
