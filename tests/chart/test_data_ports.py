"""Another ``engineHost.dataPort`` under policies: routers reach hosts that still have the old one.

Nothing is installed: helm renders against a real API server, so that its look-up finds a host's
DaemonSet as the release before has left it.
"""

from __future__ import annotations

import json

import pytest
import yaml

from rose_dev.control_plane import ControlPlane
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
    said = run(command, seconds=120).stdout
    _, _, manifests = said.partition("MANIFEST:\n")
    manifests, _, _ = manifests.partition("\nNOTES:")
    (host,) = [
        one
        for one in yaml.safe_load_all(manifests)
        if one and (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", "rose-engine-host")
    ]
    from_routers: Object = host["spec"]["ingress"][0]
    return [one["port"] for one in from_routers["ports"]]


def test_an_upgrade_keeps_the_port_open_on_which_hosts_still_listen(
    control_plane: ControlPlane,
) -> None:
    control_plane.kubectl("create", "namespace", SPACE)
    try:
        assert ports(control_plane) == [NEXT]
        host = render({"lending": {"enabled": True}}).one("DaemonSet", "rose-engine-host")
        host["metadata"]["namespace"] = SPACE
        # As helm marks what is its own: it takes nothing over that somebody else has made.
        host["metadata"]["annotations"] = {
            "meta.helm.sh/release-name": "rose",
            "meta.helm.sh/release-namespace": SPACE,
        }
        control_plane.kubectl("apply", "--filename=-", stdin=json.dumps(host))
        assert ports(control_plane) == [NEXT, FORMER]
    finally:
        control_plane.kubectl("delete", "namespace", SPACE, "--wait=false")
