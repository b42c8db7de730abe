"""How the chart has containers shown GPUs, mode by mode; tests/gpu_node runs them."""

from __future__ import annotations

import pytest

from tests.chart.rendering import HELM, LENDING, Object, Rendered, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")
SEEING = {"rose-agent": "guard", "rose-engine-host": "engine-host", "rose-mps": "mps"}
INJECTION = "nvidia.cdi.k8s.io/container."
MPS: Object = {"mps": {"enabled": True}}


def rendered(access: str, **values: Object) -> Rendered:
    return render({**LENDING, "gpus": {"access": access, **values.pop("gpus", {})}, **values})


def pod(of: Rendered, workload: str) -> Object:
    found: Object = of.one("DaemonSet", workload)["spec"]["template"]
    return found


def environment(of: Rendered, workload: str) -> dict[str, str]:
    listed = of.container("DaemonSet", workload, SEEING[workload]).get("env", [])
    return {item["name"]: item.get("value", "") for item in listed}


@pytest.mark.parametrize("workload", SEEING)
def test_a_runtime_class_comes_with_the_variable_without_which_it_shows_nothing(
    workload: str,
) -> None:
    made = rendered("RuntimeClass", **MPS)
    assert pod(made, workload)["spec"]["runtimeClassName"] == "nvidia"
    assert environment(made, workload)["NVIDIA_VISIBLE_DEVICES"] == "all"


@pytest.mark.parametrize("workload", SEEING)
def test_nri_names_each_container_that_sees_gpus_and_needs_no_class(workload: str) -> None:
    made = rendered("NRI", **MPS)
    noted = pod(made, workload)["metadata"]["annotations"]
    assert noted[f"{INJECTION}{SEEING[workload]}"] == "management.nvidia.com/gpu=all"
    assert [key for key in noted if key.startswith(INJECTION)] == [INJECTION + SEEING[workload]]
    assert "runtimeClassName" not in pod(made, workload)["spec"]
    assert "NVIDIA_VISIBLE_DEVICES" not in environment(made, workload)


def test_cdi_asks_the_runtime_for_the_device_by_its_name() -> None:
    made = rendered("CDI", gpus={"runtimeClassName": "nvidia-cdi"})
    assert pod(made, "rose-agent")["spec"]["runtimeClassName"] == "nvidia-cdi"
    asked = environment(made, "rose-agent")["NVIDIA_VISIBLE_DEVICES"]
    assert asked == "management.nvidia.com/gpu=all"


def test_hostpath_mounts_the_driver_read_only_and_says_that_it_takes_privilege() -> None:
    made = rendered("HostPath", gpus={"driverRoot": "/opt/driver"})
    for workload in ("rose-agent", "rose-engine-host"):
        container = made.container("DaemonSet", workload, SEEING[workload])
        mount = next(item for item in container["volumeMounts"] if item["name"] == "driver")
        assert (mount["mountPath"], mount["readOnly"]) == ("/usr/local/nvidia", True)
        assert container["securityContext"]["privileged"] is True
        volumes = {item["name"]: item for item in pod(made, workload)["spec"]["volumes"]}
        assert volumes["driver"]["hostPath"]["path"] == "/opt/driver"
    tap = made.container("DaemonSet", "rose-agent", "tap")
    assert tap["securityContext"]["privileged"] is False


def test_hostpath_gives_the_mps_daemon_the_drivers_programs_and_files() -> None:
    made = Rendered({**LENDING, **MPS, "gpus": {"access": "HostPath"}})
    container = made.container("DaemonSet", "rose-mps", "mps")
    mounted = {item["name"]: item["mountPath"] for item in container["volumeMounts"]}
    assert mounted["driver"] == environment(made, "rose-mps")["ROSE_DRIVER_ROOT"]
    assert container["securityContext"]["privileged"] is True
    assert "driver" in {item["name"] for item in pod(made, "rose-mps")["spec"]["volumes"]}


def test_a_rendering_that_sees_no_cluster_asks_in_ways_that_harm_nowhere() -> None:
    made = render(LENDING)
    for workload in ("rose-agent", "rose-engine-host"):
        spec = pod(made, workload)["spec"]
        assert not {"runtimeClassName", "resourceClaims", "affinity"} & set(spec)
        assert environment(made, workload)["NVIDIA_VISIBLE_DEVICES"] == "all"
        noted = pod(made, workload)["metadata"]["annotations"]
        assert INJECTION + SEEING[workload] in noted
    assert environment(made, "rose-agent")["ROSE_GPU_ACCESS"] == "Auto"


@pytest.mark.parametrize("access", ["RuntimeClass", "CDI"])
def test_what_needs_a_handler_stays_off_nodes_that_have_no_gpu(access: str) -> None:
    made = rendered(access)
    for workload in ("rose-agent", "rose-engine-host"):
        assert "nvidia.com/gpu.present" in labels_sought(made, workload)


def labels_sought(made: Rendered, workload: str) -> list[str]:
    affinity = pod(made, workload)["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return [term["matchExpressions"][0]["key"] for term in terms]


def test_which_nodes_is_a_value_of_its_own() -> None:
    everywhere = rendered("RuntimeClass", gpus={"nodes": "Any"})
    assert "affinity" not in pod(everywhere, "rose-agent")["spec"]
    own = rendered("NRI", gpus={"nodes": "Labelled", "nodeLabels": ["example.com/gpu"]})
    assert labels_sought(own, "rose-agent") == ["example.com/gpu"]


def test_every_label_keeps_the_nodes_of_a_variant_apart() -> None:
    variant = {"name": "newer", "engineClasses": ["n"], "nodeSelector": {"zone": "b"}}
    made = rendered("RuntimeClass", engineHost={"variants": [variant]})
    affinity = pod(made, "rose-engine-host")["spec"]["affinity"]["nodeAffinity"]
    for term in affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]:
        assert term["matchExpressions"][-1] == {"key": "zone", "operator": "NotIn", "values": ["b"]}


def test_machines_without_gpus_are_asked_for_nothing() -> None:
    made = render({**LENDING, "agent": {"devices": "static"}})
    assert not [name for name in environment(made, "rose-agent") if "NVIDIA" in name]
    assert "affinity" not in pod(made, "rose-agent")["spec"]


def test_how_many_agents_are_replaced_at_once_is_a_value() -> None:
    def most(made: Rendered) -> object:
        strategy = made.one("DaemonSet", "rose-agent")["spec"]["updateStrategy"]
        return strategy["rollingUpdate"]["maxUnavailable"]

    assert most(render()) == "10%"
    assert most(render({"agent": {"maxUnavailable": 3}})) == 3


def test_probes_can_be_stretched() -> None:
    made = render({"probes": {"liveness": {"timeoutSeconds": 30}}})
    guard = made.container("DaemonSet", "rose-agent", "guard")
    assert guard["livenessProbe"]["timeoutSeconds"] == 30
    assert guard["livenessProbe"]["failureThreshold"] == 6
