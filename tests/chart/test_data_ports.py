"""Another ``engineHost.dataPort`` under policies: routers reach hosts that still have the old one.

Nothing is installed: helm renders against a real API server, so that its look-up finds hosts as
upgrades before have left them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import pytest
import yaml

from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.shell import run
from tests.chart.rendering import CHART, HELM, Object, render

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build"),
]
SPACE = "data-ports"
FORMER, NEXT = 30800, 30900


def ports(plane: ControlPlane) -> list[int]:
    """Of engine hosts, that the policy of an upgrade would open to routers."""
    command = [
        *(str(HELM), "install", "rose", str(CHART), f"--namespace={SPACE}", "--dry-run=server"),
        # Other tests have installed the kinds on this server by other means.
        *("--set=crds.install=false", "--set=lending.enabled=true"),
        *("--set=networkPolicy.enabled=true", f"--set=engineHost.dataPort={NEXT}"),
        *(f"--kubeconfig={plane.kubeconfig}", "--hide-secret"),
    ]
    output = run(command, seconds=120).stdout
    _, _, manifests = output.partition("MANIFEST:\n")
    manifests, _, _ = manifests.partition("\nNOTES:")
    (host,) = [
        one
        for one in yaml.safe_load_all(manifests)
        if one and (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", "rose-engine-host")
    ]
    from_routers: Object = host["spec"]["ingress"][0]
    return [one["port"] for one in from_routers["ports"]]


@pytest.fixture
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    control_plane.kubectl("create", "namespace", SPACE)
    yield control_plane
    control_plane.kubectl("delete", "namespace", SPACE, "--wait=false")


def daemon_set(port: int) -> Object:
    """Of engine hosts, as helm marks what is its own: it takes over nothing else."""
    values = {"lending": {"enabled": True}, "engineHost": {"dataPort": port}}
    host = copy.deepcopy(render(values).one("DaemonSet", "rose-engine-host"))
    host["metadata"]["namespace"] = SPACE
    host["metadata"]["annotations"] = {
        "meta.helm.sh/release-name": "rose",
        "meta.helm.sh/release-namespace": SPACE,
    }
    return host


def pod(port: int) -> Object:
    """An engine host of a node, without what admission would look for on this server."""
    template = daemon_set(port)["spec"]["template"]
    (container,) = [one for one in template["spec"]["containers"] if one["name"] == "engine-host"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "rose-engine-host-1",
            "namespace": SPACE,
            "labels": template["metadata"]["labels"],
        },
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [{key: container[key] for key in ("name", "image", "ports")}],
        },
    }


def test_a_port_stays_open_for_as_long_as_a_host_has_it(plane: ControlPlane) -> None:
    assert ports(plane) == [NEXT]
    plane.kubectl("apply", "--filename=-", stdin=json.dumps(daemon_set(FORMER)))
    assert ports(plane) == [NEXT, FORMER]
    # Once more, before the node's turn has come: its DaemonSet has the new port, its pod has not.
    plane.kubectl("apply", "--filename=-", stdin=json.dumps(daemon_set(NEXT)))
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "default", "namespace": SPACE},
    }
    for item in (account, pod(FORMER)):
        plane.kubectl("apply", "--filename=-", stdin=json.dumps(item))
    assert ports(plane) == [NEXT, FORMER]
    plane.kubectl("delete", "pod", "rose-engine-host-1", f"--namespace={SPACE}", "--now")
    assert ports(plane) == [NEXT]
