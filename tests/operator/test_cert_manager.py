"""What the chart asks of cert-manager is what its kinds take, and its controllers issue."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from rose_dev.cluster.build import build
from rose_dev.cluster.parts import CERT_MANAGER_KINDS, CERT_MANAGER_PART
from rose_dev.errors import CommandFailed
from rose_dev.waiting import wait_until_established
from rose_wire import tls
from tests.chart.rendering import HELM, Object, render
from tests.operator.harness import Cluster, until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build"),
]
# A controller waits a while before it tries again what came before its issuer.
ISSUE_SECONDS = 300.0
ISSUER: Object = {"tls": {"certManager": {"issuerRef": {"kind": "ClusterIssuer", "name": "own"}}}}
KINDS = ("certificates", "certificaterequests", "issuers", "clusterissuers")


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
    wait_until_established(cluster.plane.kubectl, *names)
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
    reported = offered(cluster, place, asked)
    assert reported.count("serverside-applied") == len(asked) > 0
    certificate = rendered.one("Certificate", "rose")
    wrong = {**certificate, "spec": {**certificate["spec"], "dnsName": "one"}}
    with pytest.raises(CommandFailed, match="dnsName"):
        offered(cluster, place, [wrong])


@pytest.fixture(scope="module")
def controllers(
    cluster: Cluster, place: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The namespace, with cert-manager's own controllers behind the API server."""
    program = build([CERT_MANAGER_PART])[CERT_MANAGER_PART.name]
    log = tmp_path_factory.mktemp("cert-manager") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(program), f"--kubeconfig={cluster.plane.kubeconfig}", f"--namespace={place}"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    yield place
    ended = process.poll()
    process.terminate()
    process.wait(30)
    assert ended is None, log.read_text()[-3000:]


def secret(cluster: Cluster, place: str, name: str) -> dict[str, bytes]:
    """What a Secret holds; nothing where there is none."""
    get = ("get", "secret", name, f"--namespace={place}", "--ignore-not-found", "--output=json")
    reported = cluster.plane.kubectl(*get)
    return {
        key: base64.b64decode(value)
        for key, value in (json.loads(reported)["data"] if reported else {}).items()
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_its_controllers_issue_what_the_chart_asks_and_issue_it_again(
    cluster: Cluster, controllers: str, tmp_path: Path
) -> None:
    rendered = render({}, "cert-manager.io/v1")
    wanted = rendered.one("Certificate", "rose")["spec"]["dnsNames"]
    for one in rendered.all("Issuer") + rendered.all("Certificate"):
        moved = {**one, "metadata": {**one["metadata"], "namespace": controllers}}
        cluster.plane.kubectl("apply", "--server-side", "--filename=-", stdin=json.dumps(moved))

    def issued(but: bytes = b"") -> dict[str, bytes]:
        found = secret(cluster, controllers, "rose-tls")
        return found if found.get("tls.crt") and found["tls.crt"] != but else {}

    first = until(issued, "cert-manager issues rose-tls", ISSUE_SECONDS)
    for name, content in first.items():
        (tmp_path / name).write_bytes(content)
    tls.check_pair(tmp_path)  # as every process of ROSE does
    (certificate,) = x509.load_pem_x509_certificates(first["tls.crt"])
    (authority,) = x509.load_pem_x509_certificates(first["ca.crt"])
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == wanted
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}

    cluster.plane.kubectl("delete", "secret", "rose-tls", f"--namespace={controllers}")
    again = until(lambda: issued(first["tls.crt"]), "it issues rose-tls anew", ISSUE_SECONDS)
    assert again["tls.key"] != first["tls.key"]
    assert again["ca.crt"] == first["ca.crt"]
