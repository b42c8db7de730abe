"""On OpenShift every pod of the chart fits its constraints, and none is wider than its containers.

``admits`` is what OpenShift's admission checks of a pod (SecurityContextConstraints, version 4);
``RESTRICTED`` is its restricted-v2, which every service account may use.
"""

from __future__ import annotations

from typing import Any

import pytest

from rose_core.api import RolloutLease
from rose_operator.apply.routers import deployment
from rose_operator.settings import parse
from tests.api.objects import LEASE
from tests.chart.rendering import EVERYTHING, HELM, LENDING, Object, Rendered, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")

API = "security.openshift.io/v1"
RESTRICTED: Object = {
    "allowHostDirVolumePlugin": False,
    "allowHostIPC": False,
    "allowHostNetwork": False,
    "allowHostPID": False,
    "allowHostPorts": False,
    "allowPrivilegeEscalation": False,
    "allowPrivilegedContainer": False,
    "allowedCapabilities": ["NET_BIND_SERVICE"],
    "requiredDropCapabilities": ["ALL"],
    "readOnlyRootFilesystem": False,
    "runAsUser": {"type": "MustRunAsRange"},
    "seLinuxContext": {"type": "MustRunAs"},
    "fsGroup": {"type": "MustRunAs"},
    "seccompProfiles": ["runtime/default"],
    "volumes": [
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ],
}
WHOLE: Object = {"agent": {"wholeReplica": {"enabled": True}}}
MPS: Object = {"mps": {"enabled": True}}
PRIVILEGED: Object = {"gpus": {"access": "HostPath"}}


def admits(scc: Object, pod: Object) -> list[str]:
    """Why the constraints refuse the pod; empty when they admit it."""
    answer = [
        f"pod asks for {field}"
        for field, allowed in (
            ("hostPID", "allowHostPID"),
            ("hostNetwork", "allowHostNetwork"),
            ("hostIPC", "allowHostIPC"),
        )
        if pod.get(field) and not scc[allowed]
    ]
    own = pod.get("securityContext", {})
    if scc["fsGroup"]["type"] != "RunAsAny" and "fsGroup" in own:
        answer.append("pod fixes fsGroup")
    if scc["seLinuxContext"]["type"] != "RunAsAny" and "seLinuxOptions" in own:
        answer.append("pod fixes its SELinux context")
    for volume in pod.get("volumes", []):
        (kind,) = set(volume) - {"name"}
        if kind not in scc["volumes"]:
            answer.append(f"volume {volume['name']} is a {kind}")
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        answer += [f"{container['name']}: {why}" for why in _refusals(scc, own, container)]
    return answer


def _refusals(scc: Object, pod: Object, container: Object) -> list[str]:
    own: dict[str, Any] = container.get("securityContext", {})
    received = []
    if own.get("privileged") and not scc["allowPrivilegedContainer"]:
        received.append("privileged")
    if own.get("allowPrivilegeEscalation") and not scc["allowPrivilegeEscalation"]:
        received.append("privilege escalation")
    if scc["readOnlyRootFilesystem"] and not own.get("readOnlyRootFilesystem"):
        received.append("writes to its root")
    if scc["runAsUser"]["type"] != "RunAsAny" and {"runAsUser"} & {*own, *pod}:
        received.append("fixes its user")
    profile = own.get("seccompProfile", pod.get("seccompProfile"))
    if "*" not in scc["seccompProfiles"] and profile != {"type": "RuntimeDefault"}:
        received.append(f"seccomp {profile}")
    capabilities = own.get("capabilities", {})
    over = set(capabilities.get("add", [])) - set(scc["allowedCapabilities"])
    if over and not own.get("privileged"):
        received.append(f"capabilities {sorted(over)}")
    return received


def constraints(rendered: Rendered) -> dict[str, Object]:
    """Service account -> its own constraints."""
    return {
        user.rpartition(":")[2]: scc
        for scc in rendered.all("SecurityContextConstraints")
        for user in scc["users"]
    }


def pods(rendered: Rendered) -> dict[str, Object]:
    found = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for kind in ("Deployment", "DaemonSet", "Job")
        for item in rendered.all(kind)
    }
    return found | {item["metadata"]["name"]: item["spec"] for item in rendered.all("Pod")}


@pytest.mark.parametrize(
    "values",
    [{}, LENDING, {**EVERYTHING, **WHOLE}, {**LENDING, **MPS}, {**LENDING, **PRIVILEGED}],
    ids=["observe", "lend", "everything", "mps", "host-path"],
)
def test_every_pod_fits_its_own_constraints_or_the_restricted_ones(values: Object) -> None:
    rendered = render(values, API)
    own = constraints(rendered)
    for name, pod in pods(rendered).items():
        scc = own.get(pod.get("serviceAccountName", ""), RESTRICTED)
        assert admits(scc, pod) == [], name
    talking = set(pods(rendered)) - {"rose-agent", "rose-engine-host", "rose-mps"}
    assert {"rose-operator", "rose-give-back"} <= talking
    for name in talking:
        assert admits(RESTRICTED, pods(rendered)[name]) == [], name


def test_constraints_are_no_wider_than_their_containers() -> None:
    observing = constraints(render({}, API))
    assert set(observing) == {"rose-agent"}
    assert observing["rose-agent"]["allowedCapabilities"] == []
    assert not observing["rose-agent"]["allowPrivilegedContainer"]
    rendered = render({**LENDING, **WHOLE}, API)
    for account, scc in constraints(rendered).items():
        asked = {
            right
            for pod in pods(rendered).values()
            if pod.get("serviceAccountName") == account
            for container in pod["containers"]
            for right in container["securityContext"]["capabilities"].get("add", [])
        }
        assert set(scc["allowedCapabilities"]) == asked, account
        assert scc["allowHostPID"] is (account == "rose-agent")


def test_elsewhere_there_is_nothing_of_it() -> None:
    rendered = render(EVERYTHING)
    assert rendered.all("SecurityContextConstraints") == []
    assert "seLinuxOptions" not in str(rendered.objects)
    assert admits(RESTRICTED, pods(rendered)["rose-operator"]), "the checker would see it"
    selinux = render({**LENDING, "seLinuxType": "container_engine_t"})
    for name in ("rose-agent", "rose-engine-host"):
        context = pods(selinux)[name]["securityContext"]
        assert context["seLinuxOptions"] == {"type": "container_engine_t"}


def test_routers_run_as_whom_the_cluster_chooses(tmp_path: Any) -> None:  # noqa: ANN401  # a path
    arguments = render({}, API).container("Deployment", "rose-operator", "operator")["args"]
    assert "--router-user=any" in arguments
    (tmp_path / "stores").write_text("{}")
    (tmp_path / "token").write_text("t")
    given = [
        "--router-image=x",
        f"--stores-file={tmp_path / 'stores'}",
        f"--token-file={tmp_path / 'token'}",
    ]
    lease = RolloutLease.model_validate(LEASE)
    chosen = parse([*given, "--router-user=any"])
    pod = deployment(lease, chosen)["spec"]["template"]["spec"]
    assert admits(RESTRICTED, pod) == []
    fixed = deployment(lease, parse(given))["spec"]["template"]["spec"]
    assert fixed["securityContext"]["runAsUser"] == 65532
