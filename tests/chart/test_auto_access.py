"""``gpus.access: Auto`` on a real API server: what it looks for, in which order, what it then says.

Nothing is installed: helm renders against the server, so that its look-ups find what is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest

from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.shell import run
from rose_dev.waiting import wait_until_established
from tests.chart.rendering import CHART, HELM, Object

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build"),
]
SPACE = "auto-access"
ADMIN = "resource.kubernetes.io/admin-access"
POLICIES: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "clusterpolicies.nvidia.com"},
    "spec": {
        "group": "nvidia.com",
        "names": {"kind": "ClusterPolicy", "plural": "clusterpolicies"},
        "scope": "Cluster",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


def policy(*, nri: bool) -> Object:
    """The GPU operator's, as its chart makes it."""
    return {
        "apiVersion": "nvidia.com/v1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "cluster-policy"},
        "spec": {"cdi": {"enabled": True, "nriPluginEnabled": nri}},
    }


RUNTIME: Object = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "nvidia"},
    "handler": "nvidia",
}
DEVICES: Object = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": "gpu.nvidia.com"},
    "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}]},
}
GKE: Object = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {
        "name": "gke-gpu",
        "labels": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
    },
}


@contextmanager
def there(plane: ControlPlane, thing: Object) -> Iterator[None]:
    plane.kubectl("apply", "--filename=-", stdin=json.dumps(thing))
    kind, name = thing["kind"].lower(), thing["metadata"]["name"]
    try:
        yield
    finally:
        plane.kubectl("delete", kind, name, "--ignore-not-found")


@contextmanager
def claims_allowed(plane: ControlPlane) -> Iterator[None]:
    plane.kubectl("label", "namespace", SPACE, f"{ADMIN}=true", "--overwrite")
    try:
        yield
    finally:
        plane.kubectl("label", "namespace", SPACE, f"{ADMIN}-")


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    control_plane.kubectl("create", "namespace", SPACE)
    # The definition has to be there for its objects to be found.
    with there(control_plane, POLICIES):
        name = POLICIES["metadata"]["name"]
        wait_until_established(control_plane.kubectl, f"crd/{name}")
        yield control_plane
    control_plane.kubectl("delete", "namespace", SPACE, "--wait=false")


def notes(plane: ControlPlane, *values: str) -> str:
    """What helm would say to whoever installs now."""
    command = [
        *(str(HELM), "install", "rose", str(CHART), f"--namespace={SPACE}", "--dry-run=server"),
        # Other tests have installed the kinds on this server by other means.
        *("--set=crds.install=false", "--set=lending.enabled=true"),
        *(f"--kubeconfig={plane.kubeconfig}", "--hide-secret"),
        *(f"--set={value}" for value in values),
    ]
    return run(command, seconds=120).stdout


def found(plane: ControlPlane, *values: str) -> str:
    reported = notes(plane, *values)
    assert "gpus.access is Auto" in reported
    _, _, rest = reported.partition(", which found ")
    return rest.partition(" ")[0] if rest else "nothing"


ORDER: list[tuple[str, list[Callable[[ControlPlane], AbstractContextManager[None]]]]] = [
    ("RuntimeClass", [lambda plane: there(plane, RUNTIME)]),
    ("NRI", [lambda plane: there(plane, policy(nri=True))]),
    ("DRA", [lambda plane: there(plane, DEVICES), claims_allowed]),
    ("HostPath", [lambda plane: there(plane, GKE)]),
]


@pytest.mark.parametrize("first", range(len(ORDER) + 1))
def test_the_first_row_that_fits_is_taken_with_all_later_ones_there_too(
    plane: ControlPlane, first: int
) -> None:
    """The order of the table in docs/ecosystem.md."""
    with ExitStack() as stack:
        for _, surroundings in ORDER[first:]:
            for surrounding in surroundings:
                stack.enter_context(surrounding(plane))
        wanted = ORDER[first][0] if first < len(ORDER) else "nothing"
        assert found(plane) == wanted


def test_a_policy_without_nri_is_no_sign_of_it(plane: ControlPlane) -> None:
    with there(plane, policy(nri=False)):
        assert found(plane) == "nothing"


def test_a_device_class_is_of_no_use_to_a_namespace_that_may_not_claim(
    plane: ControlPlane,
) -> None:
    with there(plane, DEVICES):
        assert found(plane) == "nothing"


def test_a_runtime_class_of_another_name_is_looked_for_by_that_name(plane: ControlPlane) -> None:
    other = {**RUNTIME, "metadata": {"name": "nvidia-cdi"}}
    with there(plane, other):
        assert found(plane) == "nothing"
        assert found(plane, "gpus.runtimeClassName=nvidia-cdi") == "RuntimeClass"


def test_where_nothing_is_found_the_notes_say_what_was_sought_and_where_to_look(
    plane: ControlPlane,
) -> None:
    text = " ".join(notes(plane).split())
    assert "no runtime class nvidia, no NRI policy of the GPU operator, no device class" in text
    assert "no GKE node was found" in text
    assert "rose_guard_device_access" in text


def test_a_mode_that_is_named_is_not_looked_for(plane: ControlPlane) -> None:
    with there(plane, RUNTIME):
        reported = notes(plane, "gpus.access=NRI")
    assert "gpus.access is NRI" in reported
    assert "which found" not in reported
