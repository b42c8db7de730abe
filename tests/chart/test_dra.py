"""GPUs by dynamic resource allocation: templates, and the real API server's word about them."""

import json

import pytest

from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.errors import CommandFailed
from tests.chart.rendering import HELM, LENDING, Object, Rendered, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")
DRA: Object = {**LENDING, "gpus": {"access": "DRA"}}
WORKLOADS = {"rose-agent": "guard", "rose-engine-host": "engine-host"}


def test_without_it_nothing_claims_devices() -> None:
    assert "ResourceClaimTemplate" not in {item["kind"] for item in render(LENDING).objects}
    for workload, container in WORKLOADS.items():
        pod = render(LENDING).one("DaemonSet", workload)["spec"]["template"]["spec"]
        assert "resourceClaims" not in pod
        assert (
            "claims" not in render(LENDING).container("DaemonSet", workload, container)["resources"]
        )


@pytest.mark.parametrize("workload", WORKLOADS)
def test_those_that_see_gpus_claim_them_and_keep_their_resources(workload: str) -> None:
    pod = render(DRA).one("DaemonSet", workload)["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "rose-gpus"}]
    claiming = {one["name"] for one in pod["containers"] if "claims" in one["resources"]}
    assert claiming == {WORKLOADS[workload]}
    container = render(DRA).container("DaemonSet", workload, WORKLOADS[workload])
    assert container["resources"]["claims"] == [{"name": "gpus"}]
    plain = render(LENDING).container("DaemonSet", workload, WORKLOADS[workload])
    assert container["resources"] == {**plain["resources"], "claims": [{"name": "gpus"}]}


def test_the_older_switch_means_the_same() -> None:
    older = Rendered({**LENDING, "dra": {"enabled": True}})
    assert older.all("ResourceClaimTemplate") == render(DRA).all("ResourceClaimTemplate")


def test_a_template_of_ones_own_takes_the_place_of_the_charts() -> None:
    rendered = render({**DRA, "dra": {"existingTemplate": "mine"}})
    assert rendered.all("ResourceClaimTemplate") == []
    pod = rendered.one("DaemonSet", "rose-agent")["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "mine"}]


def test_a_cluster_without_admin_access_says_so_before_it_is_installed() -> None:
    with pytest.raises(CommandFailed, match=r"needs Kubernetes 1\.34"):
        Rendered(DRA, kubernetes="1.33.0")


@pytest.mark.cluster
def test_the_api_server_takes_the_claims_where_the_namespace_is_labelled(
    control_plane: ControlPlane,
) -> None:
    namespace = "rose-dra"
    control_plane.kubectl("create", "namespace", namespace)
    made = [render(DRA).one("ResourceClaimTemplate", "rose-gpus")]
    made += [render(DRA).one("DaemonSet", workload) for workload in WORKLOADS]
    apply = ["apply", "--dry-run=server", "--filename=-"]
    for item in made:
        moved = {**item, "metadata": {**item["metadata"], "namespace": namespace}}
        document = json.dumps(moved)
        if item["kind"] == "ResourceClaimTemplate":
            with pytest.raises(CommandFailed, match="admin access"):
                control_plane.kubectl(*apply, stdin=document)
            label = "resource.kubernetes.io/admin-access=true"
            control_plane.kubectl("label", "namespace", namespace, label)
        control_plane.kubectl(*apply, stdin=document)
