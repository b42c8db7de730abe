"""What surrounds the processes: monitors, network policies, hooks."""

from __future__ import annotations

import ast
import io
import json
import math
import re
import runpy
import urllib.error
from typing import Any

import pytest
import yaml

from rose_dev.errors import CommandFailed
from rose_operator.apply.routers import ATTACH_PORT, HTTP_PORT, PEER_PORT
from tests.chart.network import named_ports
from tests.chart.rendering import (
    BATCHES,
    CHART,
    EVERYTHING,
    HELM,
    LENDING,
    MONITORING,
    REWARDS,
    SANDBOXES,
    Rendered,
    render,
)

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")


# Monitoring.


MONITORS = ("PodMonitor", "ServiceMonitor")
STORE = {"ipBlock": {"cidr": "192.0.2.7/32"}}


def test_a_label_of_a_metric_is_not_replaced_by_that_of_the_scraped_pod() -> None:
    """Else an alert about a serving pod (label ``pod``) would name the agent's pod."""
    rendered = render(EVERYTHING)
    specs = [item["spec"] for kind in MONITORS for item in rendered.all(kind)]
    found = [one for s in specs for one in s.get("podMetricsEndpoints", s.get("endpoints"))]
    assert len(found) > 5
    assert all(endpoint["honorLabels"] is True for endpoint in found)


def test_monitors_reach_every_port_that_serves_metrics() -> None:
    rendered = render(EVERYTHING)
    ports = {
        port["name"]
        for item in rendered.objects
        if item["kind"] in {"Deployment", "DaemonSet"}
        for container in item["spec"]["template"]["spec"]["containers"]
        for port in container["ports"]
        if port["name"].endswith("http")
    }
    scraped = {
        endpoint["port"]
        for item in rendered.all("PodMonitor")
        for endpoint in item["spec"]["podMetricsEndpoints"]
    } | {
        endpoint["port"]
        for item in rendered.all("ServiceMonitor")
        for endpoint in item["spec"]["endpoints"]
    }
    assert scraped == ports
    names = {item["metadata"]["name"] for item in rendered.all("PodMonitor")}
    assert names == {"rose-agent", "rose-engine-host", "rose-router", "rose-relay"}


def test_scrapers_can_be_asked_for_a_token_of_their_own() -> None:
    asked = {**EVERYTHING["monitoring"], "tokenSecret": "scrape"}
    rendered = render({**EVERYTHING, "monitoring": asked})
    reference = {"name": "scrape", "key": "token"}
    variable = {"name": "ROSE_METRICS_TOKEN", "valueFrom": {"secretKeyRef": reference}}
    for item in rendered.all("Deployment") + rendered.all("DaemonSet") + rendered.all("Job"):
        for container in item["spec"]["template"]["spec"]["containers"]:
            assert variable in container["env"], container["name"]
    template = yaml.safe_load(rendered.one("ConfigMap", "rose-config")["data"][ROUTER])
    assert variable in template["container"]["env"]
    for monitor in rendered.all("PodMonitor") + rendered.all("ServiceMonitor"):
        spec = monitor["spec"]
        for endpoint in spec.get("podMetricsEndpoints") or spec["endpoints"]:
            assert endpoint["authorization"] == {"credentials": reference}
    assert "ROSE_METRICS_TOKEN" not in json.dumps(render(EVERYTHING).all("DaemonSet"))


ROUTER = "router-template.yaml"


def test_alerts_and_dashboards_arrive_as_they_are_tested() -> None:
    extra = {"name": "mine", "rules": []}
    monitoring = {**MONITORING, "prometheusRule": {"enabled": True, "extraGroups": [extra]}}
    rendered = render({"monitoring": monitoring})
    rules = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    assert rendered.one("PrometheusRule", "rose")["spec"]["groups"] == [*rules["groups"], extra]
    for path in (CHART / "files/dashboards").iterdir():
        board = rendered.one("ConfigMap", f"rose-dashboard-{path.stem}")
        assert board["data"][path.name].strip() == path.read_text().strip()
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


# Network.


def test_every_listener_is_closed_but_for_named_callers() -> None:
    rendered = render(EVERYTHING)
    names = {item["metadata"]["name"] for item in rendered.all("NetworkPolicy")}
    assert names == {
        f"rose-{part}" for part in ("operator", "agent", "router", "engine-host", "relay")
    }
    for item in rendered.all("NetworkPolicy"):
        for rule in item["spec"]["ingress"]:
            turns = [port["port"] for port in rule["ports"]] == [8000]
            assert turns or rule["from"], item["metadata"]["name"]


def test_a_policy_names_callers_of_every_port_that_a_pod_declares() -> None:
    variant = {
        "name": "newer",
        "engineClasses": ["sglang-newer"],
        "nodeSelector": {"engine": "newer"},
        "dataPort": 30801,
    }
    rendered = render(
        {
            **EVERYTHING,
            "engineHost": {"variants": [variant]},
            "rewards": {**REWARDS, "workers": [{"name": "shared"}]},
            "batches": BATCHES,
            "sandboxes": {**SANDBOXES, "egressTo": [STORE]},
        }
    )
    policies = rendered.all("NetworkPolicy")
    declared = {
        (item["metadata"]["name"], port["containerPort"]): port["containerPort"]
        in named_ports(
            policies, item["metadata"]["namespace"], item["spec"]["template"]["metadata"]["labels"]
        )
        for item in rendered.objects
        if item["kind"] in {"Deployment", "DaemonSet"}
        for container in item["spec"]["template"]["spec"]["containers"]
        for port in container.get("ports", [])
    }
    assert ("rose-engine-host-newer", 30801) in declared
    assert [one for one, is_named in declared.items() if not is_named] == []
    routers = named_ports(policies, "rose-routers", {"app.kubernetes.io/name": "rose-router"})
    assert routers == {HTTP_PORT, ATTACH_PORT, PEER_PORT}


def test_what_the_chart_runs_sends_turns_from_namespaces_that_nobody_named() -> None:
    judges = {"enabled": True, "functions": {"good": {"judge": "http://r.rose-routers.svc:8000"}}}
    policy = {"enabled": True, "turnNamespaces": ["trainers"]}
    rendered = render({"networkPolicy": policy, "rewards": judges, "batches": BATCHES})
    turns = rendered.one("NetworkPolicy", "rose-router")["spec"]["ingress"][0]["from"]
    names = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        for peer in turns
        if "podSelector" in peer
    ]
    assert names == ["rose-batches", "rose-rewards", "rose-give-back", "rose-test"]
    plain = render({"networkPolicy": policy, "rewards": REWARDS})
    turns = plain.one("NetworkPolicy", "rose-router")["spec"]["ingress"][0]["from"]
    assert "rose-rewards" not in json.dumps(turns), "a rule asks no lease"


def test_batches_are_known_by_their_namespaces_and_not_by_a_label_alone() -> None:
    leases = [
        {"namespace": "research", "name": "one"},
        {"namespace": "research", "name": "two"},
        {"namespace": "more", "name": "three"},
    ]
    policy = {"enabled": True, "turnNamespaces": ["trainers"]}
    rendered = render({"networkPolicy": policy, "batches": {"leases": leases}})
    router = rendered.one("NetworkPolicy", "rose-router")["spec"]
    wanted = [across("batches", namespace) for namespace in ("research", "more")]
    turns = router["ingress"][0]["from"]
    assert [peer for peer in turns if "rose-batches" in json.dumps(peer)] == wanted
    assert {"to": wanted, "ports": [{"port": 8200}]} in router["egress"]


def test_a_policy_that_would_keep_engine_hosts_from_every_store_is_refused() -> None:
    values = {
        **LENDING,
        "stores": [{"name": "main", "address": "weights.example:7446"}],
        "networkPolicy": {"enabled": True},
    }
    with pytest.raises(
        CommandFailed, match=r"name their pods or addresses in networkPolicy\.stores"
    ):
        Rendered(values)
    rendered = render({**values, "networkPolicy": {"enabled": True, "stores": [STORE]}})
    assert {"to": [STORE]} in rendered.one("NetworkPolicy", "rose-engine-host")["spec"]["egress"]


def test_the_relay_opens_no_other_store() -> None:
    """Its egress is known; that of engine hosts to what stands beside it is not."""
    further = {
        **EVERYTHING,
        "stores": [{"name": "further", "address": "weights.example:7446"}],
    }
    with pytest.raises(CommandFailed, match=r"\(further\).*networkPolicy\.stores"):
        Rendered(further)


def test_ports_of_before_stay_open_to_routers_while_nodes_change() -> None:
    values = {
        **EVERYTHING,
        "engineHost": {"dataPort": 30900},
        "networkPolicy": {"enabled": True, "formerDataPorts": [30800]},
    }
    rendered = render(values)
    both = [{"port": 30900}, {"port": 30800}]
    host = rendered.one("NetworkPolicy", "rose-engine-host")["spec"]["ingress"]
    assert host[0]["ports"] == both
    router = rendered.one("NetworkPolicy", "rose-router")["spec"]["egress"]
    assert both in [rule.get("ports") for rule in router]


def test_on_openshift_the_name_service_has_a_port_of_its_own() -> None:
    openshift = {
        **EVERYTHING,
        "rewards": {**REWARDS, "workers": [{"name": "shared"}]},
        "batches": BATCHES,
        "sandboxes": {**SANDBOXES, "egressTo": [STORE]},
    }
    for enabled, wanted in ((False, {53}), (True, {53, 5353})):
        rendered = render({**openshift, "openshift": {"enabled": enabled}})
        names = [
            {port["port"] for port in rule["ports"]}
            for item in rendered.all("NetworkPolicy")
            for rule in item["spec"].get("egress", [])
            if "to" not in rule
        ]
        assert names == [wanted] * 5


def test_engine_hosts_dial_names_and_weights_only() -> None:
    (host,) = [
        item["spec"]
        for item in render(EVERYTHING).all("NetworkPolicy")
        if item["metadata"]["name"] == "rose-engine-host"
    ]
    dns, weights = host["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert weights["to"] == [
        {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "rose-relay"}}}
    ]


def test_a_serving_pod_reaches_the_engine_host_of_its_own_node() -> None:
    rendered = render(
        {**EVERYTHING, "networkPolicy": {"enabled": True, "servingNamespaces": ["s"]}}
    )
    service = rendered.one("Service", "rose-engine-host")["spec"]
    assert service["internalTrafficPolicy"] == "Local"
    host = rendered.one("NetworkPolicy", "rose-engine-host")["spec"]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "s"}}} in host[
        "ingress"
    ][1]["from"]


def test_replicas_of_routers_reach_each_other_and_prove_themselves() -> None:
    rendered = render(EVERYTHING)
    router = rendered.one("NetworkPolicy", "rose-router")["spec"]
    selector = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "rose-router"}}}
    among = [
        [port["port"] for port in rule["ports"]]
        for rule in (*router["ingress"], *router["egress"])
        if selector in (*rule.get("from", []), *rule.get("to", []))
    ]
    assert among == [[7444, 7445]] * 2
    assert rendered.one("NetworkPolicy", "rose-router")["metadata"]["namespace"] == "rose-routers"


def test_what_crosses_the_border_of_the_routers_namespace_is_named_with_it() -> None:
    rendered = render(EVERYTHING)
    router = rendered.one("NetworkPolicy", "rose-router")["spec"]
    dialled = [(rule.get("to"), rule["ports"]) for rule in router["egress"]]
    assert ([across("operator", "rose-system")], [{"port": 7442}]) in dialled
    assert across("engine-host", "rose-system") in [to[0] for to, _ in dialled if to]
    operator = rendered.one("NetworkPolicy", "rose-operator")["spec"]
    assert {"from": [across("router", "rose-routers")], "ports": [{"port": 7442}]} in operator[
        "ingress"
    ]
    host = rendered.one("NetworkPolicy", "rose-engine-host")["spec"]
    assert across("router", "rose-routers") in host["ingress"][0]["from"]


def across(component: str, namespace: str) -> dict[str, object]:
    return {
        "podSelector": {"matchLabels": component_labels(component)},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
    }


def component_labels(component: str) -> dict[str, str]:
    if component == "engine-host":
        return {"rose-gpu.dev/engine-host": "true"}
    return {"app.kubernetes.io/name": f"rose-{component}"}


@pytest.mark.parametrize("named", ["ingests", "batches", "collectors", "sandboxHosts"])
def test_routers_dial_the_peers_that_were_named(named: str) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "research"}}}
    rendered = render({"networkPolicy": {"enabled": True, named: [peer]}})
    assert {"to": [peer]} in rendered.one("NetworkPolicy", "rose-router")["spec"]["egress"]


def test_turns_come_from_the_namespaces_that_were_named() -> None:
    policy = {"enabled": True, "turnNamespaces": ["research"], "metricsNamespaces": ["monitoring"]}
    rendered = render({"networkPolicy": policy})
    router = rendered.one("NetworkPolicy", "rose-router")["spec"]
    callers = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for peer in router["ingress"][0]["from"]
        if "namespaceSelector" in peer
    ]
    # The last two are the chart's own hooks.
    assert callers == ["research", "monitoring", "rose-system", "rose-system"]


# Hooks.


def test_uninstalling_gives_everything_back_first() -> None:
    job = render().one("Job", "rose-give-back")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    assert job["spec"]["activeDeadlineSeconds"] == 180
    assert render({"uninstall": {"giveBack": False}}).all("Job") == []


def test_the_last_status_speaks_of_nothing_that_is_gone() -> None:
    corrected = runpy.run_path(str(CHART / "files/give_back.py"))["corrected"]
    before = {
        "slotsGranted": 2,
        "slotsReady": 0,
        "routerURL": "http://router",
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "SlotsReady", "observedGeneration": 3},
            {"type": "Accepted", "status": "True", "reason": "Accepted"},
            {"type": "Granted", "status": "False", "reason": "NoReplicaQualifies"},
            {"type": "RouterReady", "status": "True", "reason": "RouterAnswers"},
        ],
    }
    after = corrected(before, "2026-11-23T00:00:00Z")
    ready, accepted, granted, router = after.pop("conditions")
    assert (router["status"], router["reason"]) == ("False", "Uninstalled")
    assert after == {"slotsGranted": 0, "routerURL": ""}
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == (
        "False",
        "Uninstalled",
        3,
    )
    assert [accepted, granted] == before["conditions"][1:3]  # type: ignore[index]  # JSON


def test_helm_test_waits_for_policies_to_let_it_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of policies learns of a pod when it has started; until then nobody answers it."""
    asked = runpy.run_path(str(CHART / "files/smoke.py"))["operator"]
    refusals = [urllib.error.URLError(ConnectionRefusedError("refused"))] * 3

    def answer(*_: object, **__: object) -> io.BytesIO:
        if refusals:
            raise refusals.pop()
        return io.BytesIO(b"Follower\n")

    monkeypatch.setattr("urllib.request.urlopen", answer)
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert "refused" in asked("rose-system", 0.0), "it gives up, and says why"
    assert asked("rose-system", math.inf) == "Follower"


@pytest.mark.parametrize("name", ["give_back", "smoke", "await_kinds"])
def test_scripts_in_hooks_need_nothing_but_python(name: str) -> None:
    """They run with the image's Python, before and after everything else."""
    tree = ast.parse((CHART / "files" / f"{name}.py").read_text())
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported <= {"json", "os", "re", "ssl", "sys", "time", "urllib"}
    script = (CHART / "files" / f"{name}.py").read_text()
    assert any(json.dumps(script) in json.dumps(item) for item in render().objects)


# MPS.


def test_mps_daemons_are_off_until_asked_for_and_replaced_by_hand() -> None:
    assert "rose-mps" not in {item["metadata"]["name"] for item in render(LENDING).objects}
    rendered = render({**LENDING, "mps": {"enabled": True}})
    daemons = rendered.one("DaemonSet", "rose-mps")["spec"]
    assert daemons["updateStrategy"] == {"type": "OnDelete"}
    (daemon,) = daemons["template"]["spec"]["containers"]
    assert daemon["args"] == ["--root=/run/rose-mps"]
    with pytest.raises(CommandFailed, match=r"needs lending\.enabled"):
        Rendered({"mps": {"enabled": True}})


def test_engine_hosts_reach_the_daemons_only_where_there_are_some() -> None:
    plain = render(LENDING).one("DaemonSet", "rose-engine-host")["spec"]["template"]["spec"]
    assert "hostPID" not in plain
    rendered = render({**LENDING, "mps": {"enabled": True}})
    pod = rendered.one("DaemonSet", "rose-engine-host")["spec"]["template"]["spec"]
    assert pod["hostPID"] is True
    assert "hostIPC" not in pod
    (host,) = [item for item in pod["containers"] if item["name"] == "engine-host"]
    assert "--mps-root=/run/rose-mps" in host["args"]
    (daemon,) = rendered.one("DaemonSet", "rose-mps")["spec"]["template"]["spec"]["containers"]
    for container in (host, daemon):
        assert {
            item["mountPath"]: item.get("subPath", "")
            for item in container["volumeMounts"]
            if item["name"] == "mps"
        } == {"/run/rose-mps": "", "/dev/shm": "shm"}, "clients and server share memory there"


def alerts_of(**given: object) -> dict[str, dict[str, Any]]:
    """The chart's alerts by name, with these values of ``monitoring.prometheusRule``."""
    rendered = render({"monitoring": {**MONITORING, "prometheusRule": {"enabled": True, **given}}})
    groups = rendered.one("PrometheusRule", "rose")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_alerts_can_be_left_out_changed_and_linked_elsewhere() -> None:
    changed = alerts_of(
        disabled=["RoseReclaimSlow"],
        overrides={"RoseTurnsWait": {"for": "1h", "labels": {"severity": "critical"}}},
        runbookUrl="https://wiki.example/rose/",
    )
    assert set(alerts_of()) - set(changed) == {"RoseReclaimSlow"}
    waits = changed["RoseTurnsWait"]
    assert (waits["for"], waits["labels"]) == ("1h", {"severity": "critical"})
    assert waits["annotations"]["runbook_url"] == "https://wiki.example/rose/RoseTurnsWait/"


def test_how_fast_a_budget_burns_before_somebody_is_woken_is_a_value() -> None:
    usual = alerts_of()["RoseServingObjectiveMissed"]["expr"]
    given = {"fastBurn": 14.4, "slowBurn": 10, "leastMisses": 7}
    changed = alerts_of(servingObjective=given)["RoseServingObjectiveMissed"]["expr"]

    def numbers(expr: str) -> tuple[list[str], list[str]]:
        bounds = re.findall(r"/ 2, ([\d.]+)\)", expr)
        return bounds, re.findall(r"exposed_misses_total\[\w+\]\)\) >= (\d+)", expr)

    assert numbers(usual) == (["10", "10", "3", "3"], ["3", "3"])
    assert numbers(changed) == (["14.4", "14.4", "10", "10"], ["7", "7"])
    assert re.sub(r"[\d.]+", "", changed) == re.sub(r"[\d.]+", "", usual), "nothing else changed"


@pytest.mark.parametrize("key", ["disabled", "overrides"])
def test_an_alert_that_is_not_there_is_refused_by_name(key: str) -> None:
    given = {"disabled": ["RoseTypo"], "overrides": {"RoseTypo": {}}}
    with pytest.raises(CommandFailed, match='the chart has no alert "RoseTypo"'):
        alerts_of(**{key: given[key]})
