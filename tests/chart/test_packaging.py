"""What operating ROSE needs of the chart: images, TLS, relay, variants, monitors, hooks."""

from __future__ import annotations

import argparse
import importlib.metadata

import pytest
import yaml

from rose_dev.errors import CommandFailed
from rose_weights import main as weights
from tests.chart.rendering import (
    CHART,
    EVERYTHING,
    HELM,
    LENDING,
    RELAY,
    Object,
    Rendered,
    render,
)

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")


def pod(rendered: Rendered, kind: str, name: str) -> Object:
    found: Object = rendered.one(kind, name)["spec"]["template"]["spec"]
    return found


# Every object.


def test_nothing_is_switched_on_that_needs_somebody_elses_kinds() -> None:
    own = {"v1", "apps/v1", "batch/v1", "policy/v1", "rbac.authorization.k8s.io/v1"}
    own |= {"apiextensions.k8s.io/v1", "admissionregistration.k8s.io/v1"}
    assert {item["apiVersion"] for item in render().objects} <= own


def test_the_chart_has_the_version_of_the_code() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == importlib.metadata.version("rose-gpu")


def test_every_object_of_a_full_installation_carries_the_recommended_labels() -> None:
    rendered = render({**EVERYTHING, "commonLabels": {"team": "serving"}})
    for item in rendered.objects:
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "rose", item["metadata"]["name"]
        assert labels["team"] == "serving"


def test_every_container_is_bounded_and_its_root_read_only() -> None:
    for item in render(EVERYTHING).objects:
        spec = item.get("spec", {}).get("template", {}).get("spec") or item.get("spec", {})
        for container in spec.get("containers", []) if item["kind"] != "Pod" else []:
            assert container["resources"]["requests"], container["name"]
            context = container["securityContext"]
            assert not context.get("privileged"), container["name"]
            assert context["readOnlyRootFilesystem"] is True


def test_pods_get_the_labels_and_annotations_that_were_asked_for() -> None:
    values = {**EVERYTHING, "podLabels": {"cost": "a"}, "podAnnotations": {"mesh": "off"}}
    made = render(values)
    workloads = [one for kind in ("Deployment", "DaemonSet", "Job") for one in made.all(kind)]
    pods = [*(one["spec"]["template"] for one in workloads), *made.all("Pod")]
    assert len(pods) > len(made.all("DaemonSet"))
    for pod in pods:
        assert pod["metadata"]["labels"]["cost"] == "a"
        assert pod["metadata"]["annotations"]["mesh"] == "off"


def test_pods_get_the_priority_that_was_asked_for() -> None:
    values: Object = {"operator": {"priorityClassName": "a"}, "agent": {"priorityClassName": "b"}}
    values["relay"] = {"enabled": True, "upstream": "store:1", "priorityClassName": "c"}
    made = render(values)
    assert pod(made, "Deployment", "rose-operator")["priorityClassName"] == "a"
    assert pod(made, "DaemonSet", "rose-agent")["priorityClassName"] == "b"
    assert pod(made, "Deployment", "rose-relay")["priorityClassName"] == "c"


def test_further_objects_are_passed_on() -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}}
    assert render({"extraObjects": [extra]}).one("ConfigMap", "mine") == extra


# Images.


def test_components_have_images_of_their_own() -> None:
    rendered = render(LENDING)
    images = {
        "operator": rendered.container("Deployment", "rose-operator", "operator")["image"],
        "agent": rendered.container("DaemonSet", "rose-agent", "guard")["image"],
        "weights": rendered.container("DaemonSet", "rose-engine-host", "weight-sync")["image"],
        "engine": rendered.container("DaemonSet", "rose-engine-host", "engine-host")["image"],
    }
    for component, image in images.items():
        assert image == f"ghcr.io/rose-gpu/rose-{component}:0.1.0"
    arguments = rendered.container("Deployment", "rose-operator", "operator")["args"]
    assert "--router-image=ghcr.io/rose-gpu/rose-router:0.1.0" in arguments
    dockerfile = (CHART.parents[1] / "Dockerfile").read_text()
    for component in (*images, "router"):
        assert f" AS {component}\n" in dockerfile


def test_a_digest_pins_an_image() -> None:
    digest = "sha256:" + "a" * 64
    image_of = {"repository": "mine/agent", "digest": digest}
    values = {"agent": {"image": image_of, "tap": {"enabled": True}}}
    image = render(values).container("DaemonSet", "rose-agent", "tap")["image"]
    assert image == f"mine/agent@{digest}"


# Availability.


def test_two_operators_survive_a_drain_of_one() -> None:
    rendered = render()
    assert rendered.one("Deployment", "rose-operator")["spec"]["replicas"] == 2
    budget = rendered.one("PodDisruptionBudget", "rose-operator")["spec"]
    assert budget["maxUnavailable"] == 1
    assert render({"operator": {"replicas": 1}}).all("PodDisruptionBudget") == []


@pytest.mark.parametrize("strategy", ["RollingUpdate", "OnDelete"])
def test_engine_hosts_drain_before_they_are_replaced(strategy: str) -> None:
    values = {**LENDING, "engineHost": {"updateStrategy": strategy, "drainSeconds": 30}}
    rendered = render(values)
    spec = rendered.one("DaemonSet", "rose-engine-host")["spec"]
    assert spec["updateStrategy"]["type"] == strategy
    arguments = rendered.container("DaemonSet", "rose-engine-host", "engine-host")["args"]
    assert "--drain-seconds=30" in arguments
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 30


# Engine host variants.

NEWER: Object = {
    "name": "newer",
    "engineClasses": ["sglang-newer"],
    "nodeSelector": {"rose-gpu.dev/engine": "newer"},
    "image": {"repository": "mine/newer"},
}


def test_a_variant_has_its_own_nodes_and_the_common_hosts_stay_off_them() -> None:
    rendered = render({**LENDING, "engineHost": {"variants": [NEWER]}})
    container = rendered.container("DaemonSet", "rose-engine-host-newer", "engine-host")
    assert container["image"].startswith("mine/newer:")
    assert pod(rendered, "DaemonSet", "rose-engine-host-newer")["nodeSelector"] == {
        "rose-gpu.dev/engine": "newer"
    }
    common = pod(rendered, "DaemonSet", "rose-engine-host")["affinity"]["nodeAffinity"]
    (term,) = common["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "rose-gpu.dev/engine", "operator": "NotIn", "values": ["newer"]}
    ]
    arguments = rendered.container("Deployment", "rose-operator", "operator")["args"]
    assert "--engine-classes=sglang,sglang-newer" in arguments


REFUSED: dict[str, tuple[Object, str]] = {
    "two of one name": ({"engineHost": {"variants": [NEWER, NEWER]}}, "two are called"),
    "two on one node": (
        {"engineHost": {"variants": [NEWER, {**NEWER, "name": "other"}]}},
        "two select the same nodes",
    ),
    "two labels": (
        {
            "engineHost": {
                "variants": [NEWER, {**NEWER, "name": "other", "nodeSelector": {"zone": "a"}}]
            }
        },
        "use one label",
    ),
    "no time to drain": (
        {"engineHost": {"drainSeconds": 60, "terminationGracePeriodSeconds": 60}},
        "must be longer than",
    ),
    "a relay without a store": ({"relay": {"enabled": True}}, "relay.upstream"),
    "a relay with a store's name": (
        {"relay": RELAY, "stores": [{"name": "main", "address": "a:1"}]},
        "is the relay's name",
    ),
    "a relay without room": (
        {"relay": {**RELAY, "storage": {"gibibytes": 10, "keepGibibytes": 10}}},
        "must be larger",
    ),
    "no certificate": ({"tls": {"source": "existing"}}, "needs tls.existingSecret"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_with_what_to_change(case: str) -> None:
    values, message = REFUSED[case]
    with pytest.raises(CommandFailed, match=message):
        Rendered({**LENDING, **values})


# TLS.


def test_every_grpc_hop_is_encrypted_by_default() -> None:
    rendered = render({**LENDING, "relay": RELAY})
    guard = rendered.container("DaemonSet", "rose-agent", "guard")
    assert "--operator=tls://rose-operator.rose-system.svc:7443" in guard["args"]
    for name, folder in (("operator", "/var/run/rose-own/tls"), ("relay", "/var/run/rose-tls")):
        listening = rendered.container("Deployment", f"rose-{name}", name)["args"]
        assert f"--tls-dir={folder}" in listening
    for kind, name, container in (
        ("DaemonSet", "rose-agent", "guard"),
        ("DaemonSet", "rose-engine-host", "weight-sync"),
    ):
        environment = rendered.container(kind, name, container)["env"]
        assert {"name": "ROSE_TLS_CA", "value": "/var/run/rose-tls/ca.crt"} in environment
    operator = rendered.container("Deployment", "rose-operator", "operator")["args"]
    assert "--router-authority=/var/run/rose-own/routers" in operator
    data = rendered.one("ConfigMap", "rose-config")["data"]
    assert yaml.safe_load(data["stores.yaml"]) == {"main": "tls://rose-relay.rose-system.svc:7446"}


def test_nodes_get_the_authority_and_never_the_key() -> None:
    rendered = render(LENDING)
    for name in ("rose-agent", "rose-engine-host"):
        volumes = {item["name"]: item for item in pod(rendered, "DaemonSet", name)["volumes"]}
        assert volumes["tls"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


def test_every_node_speaks_with_a_certificate_of_its_own() -> None:
    rendered = render({**LENDING, "relay": RELAY})
    operator = rendered.container("Deployment", "rose-operator", "operator")["args"]
    assert "--tls-client-ca=/var/run/rose-own/nodes/ca.crt" in operator
    assert "--node-authority=/var/run/rose-own/nodes" in operator
    relay = rendered.container("Deployment", "rose-relay", "relay")["args"]
    assert "--tls-client-ca=/var/run/rose-node-trust/tls.crt" in relay
    guard = rendered.container("DaemonSet", "rose-agent", "guard")
    assert "--enrol=tls://rose-operator.rose-system.svc:7442" in guard["args"]
    weight_sync = rendered.container("DaemonSet", "rose-engine-host", "weight-sync")
    for container in (guard, weight_sync):
        assert {"name": "ROSE_TLS_IDENTITY", "value": "/run/rose/identity"} in container["env"]
    (role,) = [
        item for item in rendered.all("ClusterRole") if item["metadata"]["name"] == "rose-operator"
    ]
    assert "tokenreviews" in {name for rule in role["rules"] for name in rule["resources"]}


def test_routers_have_a_namespace_of_their_own_and_no_secret() -> None:
    rendered = render(EVERYTHING)
    labels = rendered.one("Namespace", "rose-routers")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    template = yaml.safe_load(rendered.one("ConfigMap", "rose-config")["data"][TEMPLATE])
    assert "volumes" not in template["podSpec"]
    assert "volumeMounts" not in template["container"]
    roles = {
        item["metadata"]["namespace"]: item
        for item in rendered.all("Role")
        if item["metadata"]["name"] == "rose-operator"
    }
    words = {
        place: {name for rule in item["rules"] for name in rule["resources"]}
        for place, item in roles.items()
    }
    assert words["rose-routers"] == {"deployments", "services"}
    assert not words["rose-system"] & {"deployments", "services"}
    everything = {name for names in words.values() for name in names}
    assert not everything & {"serviceaccounts", "pods"}
    # It reads and changes what the chart made empty for it, each by name (test_templates).
    rules = [rule for item in roles.values() for rule in item["rules"]]
    (filling,) = [rule for rule in rules if "secrets" in rule["resources"]]
    assert filling["verbs"] == ["get", "update"]
    assert all(name.startswith("rose-") for name in filling["resourceNames"])


def test_that_namespace_may_be_somebody_elses_but_never_the_privileged_one() -> None:
    given = render({"router": {"createNamespace": False, "namespace": "edge"}})
    assert given.all("Namespace") == []
    assert given.one("ServiceAccount", "rose-router")["metadata"]["namespace"] == "edge"
    operator = given.container("Deployment", "rose-operator", "operator")["args"]
    assert "--router-namespace=edge" in operator
    with pytest.raises(CommandFailed, match="need a namespace of their own"):
        Rendered({"router": {"namespace": "rose-system"}})


def test_the_installations_certificate_is_good_for_operator_and_relay_alone() -> None:
    certificate = render({}, "cert-manager.io/v1").one("Certificate", "rose")["spec"]
    assert not [name for name in certificate["dnsNames"] if "*" in name]


def test_the_keys_that_sign_nodes_and_routers_are_the_operators_alone() -> None:
    rendered = render({**LENDING, "relay": RELAY})
    for item in rendered.all("Deployment") + rendered.all("DaemonSet"):
        for volume in item["spec"]["template"]["spec"]["volumes"]:
            secret = volume.get("secret", {})
            assert secret.get("secretName") not in {"rose-authority", "rose-router-authority"}
            if secret.get("secretName") == "rose-node-authority":
                assert secret["items"] == [{"key": "ca.crt", "path": "tls.crt"}]


TEMPLATE = "router-template.yaml"


def test_certificates_of_nodes_can_be_off_or_from_an_authority_of_ones_own() -> None:
    off = render({**LENDING, "relay": RELAY, "tls": {"nodes": {"enabled": False}}})
    text = yaml.safe_dump_all(item for item in off.objects if "Custom" not in item["kind"])
    for word in ("node-authority", "client-ca", "--enrol=", "TLS_IDENTITY"):
        assert word not in text
    own = render({"tls": {"nodes": {"existingSecret": "company"}}})
    assert "rose-node-authority" not in {item["metadata"]["name"] for item in own.all("Secret")}
    volumes = pod(own, "Deployment", "rose-operator")["volumes"]
    assert {"name": "node-authority", "secret": {"secretName": "company"}} in volumes


def test_a_cluster_that_cannot_tell_nodes_apart_says_so_before_it_is_installed() -> None:
    with pytest.raises(CommandFailed, match=r"needs Kubernetes 1\.30.*tls\.nodes\.enabled=false"):
        Rendered({}, kubernetes="1.29.8")
    off: Object = {"tls": {"nodes": {"enabled": False}}}
    old = Rendered(off, kubernetes="1.29.8")
    assert old.one("Deployment", "rose-operator")
    assert old.all("ValidatingAdmissionPolicy") == []


def test_cert_manager_is_used_where_it_is() -> None:
    rendered = render({}, "cert-manager.io/v1")
    assert "rose-tls" not in {item["metadata"]["name"] for item in rendered.all("Secret")}
    certificate = rendered.one("Certificate", "rose")["spec"]
    assert certificate["secretName"] == "rose-tls"
    assert "rose-operator.rose-system.svc" in certificate["dnsNames"]
    assert certificate["issuerRef"] == {"kind": "Issuer", "name": "rose-authority"}
    issuer = {"kind": "ClusterIssuer", "name": "company"}
    values = {"tls": {"certManager": {"issuerRef": issuer}}}
    named = render(values, "cert-manager.io/v1")
    assert named.one("Certificate", "rose")["spec"]["issuerRef"] == issuer
    assert named.all("Issuer") == []


def test_tls_can_be_off_and_then_nothing_mentions_it() -> None:
    rendered = render({**LENDING, "relay": RELAY, "tls": {"enabled": False}})
    relay = rendered.one("Deployment", "rose-relay")
    others = [item for item in rendered.objects if item is not relay]
    answer = [
        # A token is drawn at random: its letters may spell anything.
        {**item, "data": sorted(item.get("data", {}))} if item["kind"] == "Secret" else item
        for item in others
        if "Custom" not in item["kind"]
    ]
    text = yaml.safe_dump_all(answer)
    assert "tls" not in text.lower()


# Relay.


def test_rights_at_the_relay_go_by_certificates_and_a_change_rolls_it() -> None:
    rights = {"*.nodes.rose": {"read": ["grpo*"]}}
    rendered = render({**LENDING, "relay": {**RELAY, "access": rights}})
    spec = pod(rendered, "Deployment", "rose-relay")
    (container,) = spec["containers"]
    assert "--access=/var/run/rose-access/access.json" in container["args"]
    (mounted,) = [volume for volume in spec["volumes"] if volume["name"] == "access"]
    name = mounted["configMap"]["name"]
    assert yaml.safe_load(rendered.one("ConfigMap", name)["data"]["access.json"]) == rights
    other = render({**LENDING, "relay": {**RELAY, "access": {"*": {"read": ["*"]}}}})
    assert not [item for item in other.objects if item["metadata"]["name"] == name]
    with pytest.raises(CommandFailed, match="certificates"):
        render({"relay": {**RELAY, "access": rights}, "tls": {"nodes": {"enabled": False}}})


def test_the_relay_understands_its_arguments() -> None:
    values = {"relay": {**RELAY, "upstreamTokenSecret": "store", "storage": {"keepGibibytes": 2}}}
    container = render(values).container("Deployment", "rose-relay", "relay")
    parser: argparse.ArgumentParser = weights.parser()
    parsed = parser.parse_args(["relay", *container["args"]])
    assert parsed.keep_bytes == 2 << 30
    assert parsed.upstream == "tls://weights.example:7446"


# Rights.


def test_there_is_a_role_per_kind_and_none_that_edits_slots() -> None:
    names = {item["metadata"]["name"] for item in render().all("ClusterRole")}
    assert {f"rose-{kind}-viewer" for kind in KINDS} <= names
    editors = {name for name in names if name.endswith("-editor")}
    platform = "rose-tenantpolicy-editor"
    assert editors == {"rose-servingpool-editor", "rose-rolloutlease-editor", platform}
    for name in editors - {platform}:
        labels = render().one("ClusterRole", name)["metadata"]["labels"]
        assert labels["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"


KINDS = ("servingpool", "rolloutlease", "rolloutslot")


def test_rights_can_be_granted_by_somebody_else() -> None:
    rendered = render({"rbac": {"create": False}, "uninstall": {"giveBack": False}})
    names = {item["metadata"]["name"] for item in rendered.all("Role")}
    assert names == {"rose-test"}
    assert rendered.all("ClusterRole") == []
