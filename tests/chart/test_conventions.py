"""What people expect of a chart: annotations, volumes, images of models, early refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rose_dev.errors import CommandFailed
from tests.chart.rendering import CHART, HELM, LENDING, Object, Rendered, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")

IMAGE: Object = {"name": "qwen3-8b", "image": "registry.example.com/models/qwen3-8b@sha256:0"}


def test_service_accounts_take_annotations_of_their_own() -> None:
    rendered = render({"serviceAccounts": {"annotations": {"agent": {"cloud/role": "x"}}}})
    accounts = {
        item["metadata"]["name"]: item["metadata"] for item in rendered.all("ServiceAccount")
    }
    assert accounts["rose-agent"]["annotations"] == {"cloud/role": "x"}
    assert "annotations" not in accounts["rose-operator"]


def test_operator_and_agent_take_further_volumes_and_environment() -> None:
    more: Object = {
        "extraVolumes": [{"name": "ca", "configMap": {"name": "company"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/company"}],
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
    }
    rendered = render({"operator": more, "agent": more})
    for kind, name, container in (
        ("Deployment", "rose-operator", "operator"),
        ("DaemonSet", "rose-agent", "guard"),
    ):
        found = rendered.container(kind, name, container)
        assert more["extraVolumeMounts"][0] in found["volumeMounts"]
        assert more["env"][0] in found["env"]
        volumes = rendered.one(kind, name)["spec"]["template"]["spec"]["volumes"]
        assert more["extraVolumes"][0] in volumes


def test_a_model_may_be_an_image_that_the_kubelet_mounts() -> None:
    rendered = render({**LENDING, "engineHost": {"modelImages": [{**IMAGE, "subPath": "model"}]}})
    pod = rendered.one("DaemonSet", "rose-engine-host")["spec"]["template"]["spec"]
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert volumes["model-0"]["image"] == {
        "reference": IMAGE["image"],
        "pullPolicy": "IfNotPresent",
    }
    assert "models" not in volumes
    host = rendered.container("DaemonSet", "rose-engine-host", "engine-host")
    assert "--models=/models" in host["args"]
    mount = {
        "name": "model-0",
        "mountPath": "/models/qwen3-8b",
        "subPath": "model",
        "readOnly": True,
    }
    assert mount in host["volumeMounts"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"operator": {"grantSeconds": 10}}, r"operator\.grantSeconds: 10 is too short.*24 s"),
        ({"stores": [{"name": "main", "address": "http://x:1"}]}, r"stores.*address"),
        ({"stores": [{"name": "main", "address": "x"}]}, r"stores.*address"),
        ({**LENDING, "engineHost": {"modelImages": [IMAGE, IMAGE]}}, "two are called"),
        ({"engineHost": {"modelImages": [{**IMAGE, "name": "../x"}]}}, "modelImages"),
    ],
)
def test_what_would_end_in_a_crash_loop_is_refused_before(values: Object, words: str) -> None:
    with pytest.raises(CommandFailed, match=f"(?s){words}"):
        Rendered(values)


@pytest.mark.parametrize("address", ["tls://weights.example:7446", "10.0.0.1:7446", "[fd00::1]:1"])
def test_addresses_of_stores_are_taken(address: str) -> None:
    data = render({"stores": [{"name": "main", "address": address}]}).one(
        "ConfigMap", "rose-config"
    )["data"]
    assert yaml.safe_load(data["stores.yaml"]) == {"main": address}


def test_a_shorter_lock_allows_shorter_grants() -> None:
    shorter = {"operator": {"grantSeconds": 10, "extraArgs": ["--lock-seconds=3"]}}
    assert (
        "--grant-seconds=10"
        in render(shorter).container("Deployment", "rose-operator", "operator")["args"]
    )


def test_the_chart_says_where_it_comes_from() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["icon"].startswith(chart["home"])
    assert chart["sources"]
    icon = Path("docs") / chart["icon"].removeprefix(chart["home"])
    assert (CHART.parents[1] / icon).is_file()
