"""The chart on a real node, from a registry where there is one; every certificate turns meanwhile.

That a successor waits for a day until it signs is in its date: the test makes one that is nearly a
day old. The certificates of engines' data routes turn every minute here, and the operator looks at
its Secrets every five seconds.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from rose_dev.cluster import parts
from rose_dev.cluster.node import Node
from rose_dev.release import Releaser
from rose_dev.waiting import wait_until
from rose_wire import certificates
from rose_wire.ports import free_port
from tests.chart.installation import CHART, HERE, SECONDS, SYSTEM, field, installation, make_models
from tests.chart.test_end_to_end import callers_token, publish, service, wait_for
from tests.chart.turns import Turns

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

VALUES = yaml.safe_load((HERE / "values.yaml").read_text())
AUTHORITIES = ("rose-authority", "rose-node-authority", "rose-router-authority")
SPREAD = dt.timedelta(days=1)
# Until everybody believes the successor: the operator looks every five seconds (``QUICK``), this
# node's kubelet every five, and a router hears of it within ten.
LEARNT = dt.timedelta(seconds=45)
DATA_PORT = 30800
# ``--set`` takes the place of a list, so the operator's other arguments stand here again.
OPERATOR = (*VALUES["operator"]["extraArgs"], "--own-look-seconds=5")
QUICK = (
    "--set=engineHost.extraArgs={--data-tls-seconds=61}",
    f"--set-json=operator.extraArgs={json.dumps(OPERATOR)}",
)
HOST = "app.kubernetes.io/name=rose-engine-host"
CRANE = next(part for part in parts.RELEASE if part.name == "crane")


@contextmanager
def registry(crane: Path) -> Iterator[str]:
    """A registry on this machine."""
    port = free_port()
    serve = [str(crane), "registry", "serve", f"--address=127.0.0.1:{port}"]
    with subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: _listens(port), "the registry", seconds=30)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def tools() -> tuple[Path, Path] | None:
    """crane and helm; None where a chart can be in no registry."""
    crane, helm = (parts.find(part) for part in (CRANE, parts.HELM_PART))
    return (crane, helm) if crane is not None and helm is not None else None


@pytest.fixture
def chart() -> Iterator[tuple[str, ...]]:
    """What ``helm install`` is given: the chart in a registry, pushed as ``make release`` does.

    Its folder, where there are no tools; ``test_there_is_a_registry_to_install_from`` says so.
    """
    if (found := tools()) is None:
        yield (str(CHART),)
        return
    crane, helm = found
    with registry(crane) as place:
        made = Releaser(f"{place}/rose", Path(), {"crane": crane, "helm": helm}, plain_http=True)
        name, _, version = made.chart(CHART).name.rpartition(":")
        yield f"oci://{name}", f"--version={version}", "--plain-http"


def test_there_is_a_registry_to_install_from() -> None:
    if tools() is None:
        pytest.skip("no registry here, and the chart is in none (make release-parts)")


def secret(node: Node, name: str) -> dict[str, bytes]:
    data = json.loads(field(node, "secret", name, SYSTEM, "{.data}"))
    return {key: base64.b64decode(text) for key, text in data.items()}


def prepare(node: Node, name: str) -> bytes:
    """Give an authority a successor that was made nearly a day ago; returns who signs now."""
    held, now = secret(node, name), dt.datetime.now(dt.UTC)
    key, successor = certificates.make_authority(
        "successor", dt.timedelta(days=3650), now - SPREAD + LEARNT
    )
    added = {"next.key": key, "next.crt": successor, "ca.crt": held["ca.crt"] + successor}
    data = {word: base64.b64encode(content).decode() for word, content in added.items()}
    where = ("secret", name, f"--namespace={SYSTEM}", "--type=merge")
    node.kubectl("patch", *where, f"--patch={json.dumps({'data': data})}")
    return held["tls.crt"]


def test_while_every_certificate_turns_no_turn_fails(
    node: Node, tmp_path: Path, chart: tuple[str, ...]
) -> None:
    with installation(node, make_models(tmp_path), *QUICK, chart=chart):
        listed = json.loads(node.helm("list", f"--namespace={SYSTEM}", "--output=json"))
        assert [one["status"] for one in listed] == ["deployed"]
        wait_for(node, "Granted")
        publish(node, tmp_path)
        wait_for(node, "Ready")
        hosts = ("pods", f"--namespace={SYSTEM}", f"--selector={HOST}")
        address = node.kubectl("get", *hosts, "--output=jsonpath={.items[0].status.podIP}")
        shown = {data_certificate(address)}
        leaf = secret(node, "rose-tls")["tls.crt"]
        url = f"http://{service(node)}:8000/generate"
        with Turns(url, callers_token(node)) as turns:
            before = {name: prepare(node, name) for name in AUTHORITIES}

            def turned() -> bool:
                return all(secret(node, name)["tls.crt"] != old for name, old in before.items())

            wait_until(turned, "every authority has turned", seconds=SECONDS * 2, pause=2.0)
            wait_until(
                lambda: secret(node, "rose-tls")["tls.crt"] != leaf,
                "the listeners' certificate is the new authority's",
                seconds=SECONDS,
                pause=2.0,
            )
            wait_for(node, "Ready")

            def shows_another() -> bool:
                shown.add(data_certificate(address))
                return len(shown) > 1

            wait_until(
                shows_another, "the data route has another certificate", seconds=SECONDS, pause=2.0
            )
            count = turns.answered
            wait_until(
                lambda: turns.answered > count + 20, "turns after it", seconds=SECONDS, pause=0.5
            )
        assert turns.failed == []
        for name, old in before.items():
            assert secret(node, name)["ca.crt"].startswith(old)  # believed until it ends
        signer = secret(node, "rose-authority")["tls.crt"]
        assert certificates.is_signed_by(secret(node, "rose-tls")["tls.crt"], signer)


def data_certificate(address: str) -> str:
    """What the engine host's data route shows."""
    return ssl.get_server_certificate((address, DATA_PORT), timeout=10)
