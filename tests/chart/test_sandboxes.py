"""Hosts of sandboxes from the chart: off by default, a DaemonSet for each lease, found by name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import yaml

from rose_agent.guard.main import arguments as guard_arguments
from rose_core.sandboxes.tunnels import TunnelLimits
from rose_core.wire.enrolment import lease_digest
from rose_dev.errors import CommandFailed
from rose_router import flags as router_flags
from rose_sandbox.main import parser
from tests.chart.rendering import HELM, LENDING, SANDBOXES, Object, Rendered, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")

NAME = f"rose-sandboxes-research-grpo-{lease_digest('research', 'grpo')}"
DAPO = f"rose-sandboxes-team-b-dapo-{lease_digest('team-b', 'dapo')}"
TWO: Object = {
    **SANDBOXES,
    "leases": [*SANDBOXES["leases"], {"namespace": "team-b", "name": "dapo", "run": "b-dapo"}],
}
STORE: Object = {"ipBlock": {"cidr": "192.0.2.7/32"}}
CLOSED: Object = {**LENDING, "networkPolicy": {"enabled": True, "stores": [STORE]}}


def template_of(rendered: Rendered) -> dict[str, Any]:
    text = rendered.one("ConfigMap", "rose-config")["data"]["router-template.yaml"]
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_nobody_has_sandboxes_until_they_are_asked_for() -> None:
    rendered = render(LENDING)
    assert not [one for one in rendered.objects if "sandbox" in one["metadata"]["name"]]
    assert "sandbox" not in yaml.safe_dump(template_of(rendered))


def test_each_lease_has_hosts_of_its_own_with_a_secret_of_its_own() -> None:
    rendered = render({"sandboxes": TWO})
    for name, run in ((NAME, "grpo"), (DAPO, "b-dapo")):
        container = rendered.container("DaemonSet", name, "sandbox-host")
        given = parser().parse_args(container["args"])
        assert (given.run, given.store) == (run, "tls://weights.example:7446")
        assert given.egress == (["*.example.org"] if run == "grpo" else [])
        spec = rendered.one("DaemonSet", name)["spec"]["template"]["spec"]
        assert not [one for one in spec["volumes"] if "secret" in one]
        (sources,) = [one["projected"]["sources"] for one in spec["volumes"] if "projected" in one]
        assert [one["secret"]["name"] for one in sources] == [name, name]
        assert [one["secret"].get("optional", False) for one in sources] == [False, True]
        paths = {item["path"] for one in sources for item in one["secret"]["items"]}
        assert {given.token_file.name, given.traffic_token_file.name} < paths
        assert spec["automountServiceAccountToken"] is False
        assert not spec.get("hostNetwork")
        assert not spec.get("hostPID")
        assert container["resources"]["limits"]["memory"]


def test_agents_of_several_teams_meet_a_kernel_of_their_own_unless_it_is_said_otherwise() -> None:
    ours = {"namespace": "research", "name": "grpo"}
    theirs = {"namespace": "team-b", "name": "dapo"}

    def runtimes(leases: list[Object], runtime: str = "") -> list[str]:
        of = {**SANDBOXES, "leases": leases, "runtime": runtime}
        rendered = render({"sandboxes": of})
        names = [NAME, DAPO][: len(leases)]
        found = [rendered.container("DaemonSet", name, "sandbox-host")["args"] for name in names]
        return [parser().parse_args(args).runtime for args in found]

    assert runtimes([ours]) == ["runc"]
    assert runtimes([ours, theirs]) == ["runsc", "runsc"]
    assert runtimes([{**ours, "runtime": "runc"}, theirs]) == ["runc", "runsc"]
    assert runtimes([ours, theirs], "runc") == ["runc", "runc"]
    assert runtimes([ours], "runsc") == ["runsc"]


def test_a_router_finds_the_hosts_of_its_lease_by_its_name_and_no_others_secret() -> None:
    rendered = render({"sandboxes": TWO})
    template = template_of(rendered)
    parsed = argparse.ArgumentParser()
    router_flags._about_sandboxes(parsed.add_argument)
    given = parsed.parse_args(template["container"]["args"])
    hosts = router_flags._sandbox_hosts(given.sandbox_host, "research/grpo")
    assert hosts == {"": (f"http://{NAME}.rose-system.svc:7600",)}
    (volume,) = [one for one in template["podSpec"]["volumes"] if one["name"] == "rose-sandboxes"]
    assert volume["secret"]["secretName"] == "rose-sandboxes-{namespace}-{lease}-{digest}"
    assert volume["secret"]["optional"] is True, "a lease without hosts has a router too"
    assert volume["secret"]["items"] == [{"key": "token", "path": "token"}], "not the store's"
    service = rendered.one("Service", NAME)["spec"]
    assert service["clusterIP"] == "None", "an address for each host"


def test_a_guard_tells_the_hosts_of_its_own_node() -> None:
    rendered = render({**LENDING, "sandboxes": TWO})
    container = rendered.container("DaemonSet", "rose-agent", "guard")
    given = guard_arguments().parse_args(container["args"])
    assert len(given.sandbox_host) == len(given.sandbox_token_file) == 2
    for url in given.sandbox_host:
        name = url.removeprefix("http://").split(".")[0]
        assert rendered.one("Service", name)["spec"]["internalTrafficPolicy"] == "Local"


def test_a_guard_holds_what_opens_traffic_alone_and_starts_without_it() -> None:
    rendered = render({**LENDING, "sandboxes": TWO})
    spec = rendered.one("DaemonSet", "rose-agent")["spec"]["template"]["spec"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "rose-sandboxes"]
    for source, name in zip(volume["projected"]["sources"], (NAME, DAPO), strict=True):
        items = [{"key": "traffic", "path": name}]
        assert source == {"secret": {"name": name, "optional": True, "items": items}}
    container = rendered.container("DaemonSet", "rose-agent", "guard")
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "rose-sandboxes"]
    given = guard_arguments().parse_args(container["args"])
    assert {str(file.parent) for file in given.sandbox_token_file} == {mount["mountPath"]}


def test_leases_whose_joined_names_are_one_have_hosts_of_their_own() -> None:
    """As the operator and routers spell them: whoever may make a lease must not get another's."""
    pairs = [("team-a", "b-c"), ("team", "a-b-c"), ("team-a-b", "c")]
    leases = [{"namespace": one, "name": other} for one, other in pairs]
    rendered = render({"sandboxes": {**SANDBOXES, "leases": leases}})
    names = [f"rose-sandboxes-team-a-b-c-{lease_digest(*pair)}" for pair in pairs]
    assert len(set(names)) == len(pairs)
    for name, (namespace, lease) in zip(names, pairs, strict=True):
        arguments = rendered.container("DaemonSet", name, "sandbox-host")["args"]
        assert f"--run={lease}" in arguments
        (url,) = template_of(rendered)["container"]["args"][:1]
        flag, _, value = url.partition("=")
        assert flag == "--sandbox-host"
        hosts = router_flags._sandbox_hosts([value], f"{namespace}/{lease}")
        assert hosts == {"": (f"http://{name}.rose-system.svc:7600",)}


def test_a_host_is_told_how_many_tunnels_there_may_be_and_for_how_long() -> None:
    usual = TunnelLimits()
    for more, most, idle in (
        ({}, usual.most, usual.idle_seconds),
        ({"tunnels": 0, "tunnelIdleSeconds": 60}, 0, 60.0),
    ):
        rendered = render({"sandboxes": {**SANDBOXES, **more}})
        reported = parser().parse_args(
            rendered.container("DaemonSet", NAME, "sandbox-host")["args"]
        )
        assert (reported.tunnels, reported.tunnel_idle_seconds) == (most, idle)


def test_a_host_is_told_how_much_disk_it_may_take_and_the_node_gives_it() -> None:
    rendered = render({"sandboxes": {**SANDBOXES, "gibibytes": 9}})
    container = rendered.container("DaemonSet", NAME, "sandbox-host")
    assert parser().parse_args(container["args"]).gibibytes == 9
    assert container["resources"]["requests"]["ephemeral-storage"] == "9Gi"
    assert container["resources"]["requests"]["memory"] == "512Mi", "beside what values ask for"
    given = {"requests": {"ephemeral-storage": "1Gi"}}
    own = render({"sandboxes": {**SANDBOXES, "resources": given}})
    requests = own.container("DaemonSet", NAME, "sandbox-host")["resources"]["requests"]
    assert requests["ephemeral-storage"] == "1Gi"
    bound = {"requests": {"memory": "1Gi"}, "limits": {"ephemeral-storage": "1Gi"}}
    limited = render({"sandboxes": {**SANDBOXES, "resources": bound}})
    resources = limited.container("DaemonSet", NAME, "sandbox-host")["resources"]
    assert "ephemeral-storage" not in resources["requests"], "the limit is the request"
    assert resources["limits"]["ephemeral-storage"] == "1Gi"


TEMPLATES: Object = {"enabled": True, "images": {"registry.example/agent:1": "base"}}


def test_hosts_read_templates_of_their_leases_namespace_and_nothing_else_once_it_is_asked_for() -> (
    None
):
    rendered = render({"sandboxes": {**TWO, "templates": TEMPLATES}})
    for name, namespace in ((NAME, "research"), (DAPO, "team-b")):
        given = parser().parse_args(rendered.container("DaemonSet", name, "sandbox-host")["args"])
        assert given.templates == namespace
        assert given.template_image == [("registry.example/agent:1", "base")]
        spec = rendered.one("DaemonSet", name)["spec"]["template"]["spec"]
        assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == (name, True)
        role, binding = rendered.one("Role", name), rendered.one("RoleBinding", name)
        assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == namespace
        (rule,) = role["rules"]
        assert (rule["resources"], rule["verbs"]) == (["sandboxtemplates"], ["get"])
        assert [one["name"] for one in binding["subjects"]] == [name]
        rendered.one("ServiceAccount", name)
    without = render({"sandboxes": TWO})
    assert not [one for one in without.all("Role") if one["metadata"]["name"] in {NAME, DAPO}]
    left = render({"sandboxes": {**TWO, "templates": TEMPLATES}, "rbac": {"create": False}})
    assert not [one for one in left.all("Role") if one["metadata"]["name"] in {NAME, DAPO}]


def test_hosts_that_read_templates_may_reach_the_api_server_where_policies_are_enforced() -> None:
    peer: Object = {"ipBlock": {"cidr": "192.0.2.1/32"}}
    of = {**SANDBOXES, "templates": {**TEMPLATES, "apiServer": [peer]}}
    policy = render({**CLOSED, "sandboxes": of}).one("NetworkPolicy", NAME)["spec"]
    assert {"to": [peer]} in policy["egress"]
    with pytest.raises(CommandFailed, match=r"sandboxes\.templates\.apiServer"):
        Rendered({**CLOSED, "sandboxes": {**SANDBOXES, "templates": TEMPLATES}})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"router": {"template": {"podSpec": {"volumes": [{"name": "rose-sandboxes"}]}}}},
            "router.template.podSpec.volumes: rose-sandboxes",
        ),
        (
            {"agent": {"extraVolumes": [{"name": "rose-sandboxes"}]}},
            "agent.extraVolumes: rose-sandboxes",
        ),
    ],
)
def test_a_volume_with_the_charts_own_name_is_refused(values: Object, words: str) -> None:
    with pytest.raises(CommandFailed, match=words):
        Rendered({**LENDING, "sandboxes": SANDBOXES, **values})


def test_volumes_of_before_called_sandboxes_stay_beside_the_charts_own() -> None:
    """An earlier version of the page had people add them."""
    mine = {"name": "sandboxes", "secret": {"secretName": "mine"}}
    values = {
        "router": {"template": {"podSpec": {"volumes": [mine]}}},
        "agent": {"extraVolumes": [mine]},
    }
    rendered = render({**LENDING, "sandboxes": SANDBOXES, **values})
    guard = rendered.one("DaemonSet", "rose-agent")["spec"]["template"]["spec"]
    for volumes in (template_of(rendered)["podSpec"]["volumes"], guard["volumes"]):
        names = [one["name"] for one in volumes]
        assert len(names) == len(set(names))
        assert {"sandboxes", "rose-sandboxes"} <= set(names)


def test_hosts_are_reached_by_their_team_its_router_and_guards_alone() -> None:
    policy = render({**CLOSED, "sandboxes": SANDBOXES}).one("NetworkPolicy", NAME)["spec"]
    (rule,) = policy["ingress"]
    names = [
        peer.get("podSelector", peer.get("namespaceSelector"))["matchLabels"]
        for peer in rule["from"]
    ]
    assert names == [
        {"kubernetes.io/metadata.name": "research"},
        {"app.kubernetes.io/name": "rose-router"},
        {"app.kubernetes.io/name": "rose-agent"},
    ]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [one["to"] for one in policy["egress"] if "to" in one] == [[STORE]]


def test_the_gateway_of_rewards_reaches_the_hosts_that_a_function_names_and_no_others() -> None:
    for at in ("", ".rose-system", ".rose-system.svc.cluster.local"):
        programs = {"sandbox": f"http://{NAME}{at}:7600", "tokenFile": "/etc/rose/token"}
        rewards: Object = {"enabled": True, "functions": {"programs": programs}}
        rendered = render({**CLOSED, "sandboxes": TWO, "rewards": rewards})
        for name, reached in ((NAME, True), (DAPO, False)):
            (rule,) = rendered.one("NetworkPolicy", name)["spec"]["ingress"]
            assert ("rose-rewards" in str(rule["from"])) is reached
    off = render({**CLOSED, "sandboxes": TWO, "rewards": {**rewards, "enabled": False}})
    assert "rose-rewards" not in str(off.one("NetworkPolicy", NAME)["spec"])


def test_a_policy_that_would_keep_hosts_from_their_store_is_refused() -> None:
    values = {**LENDING, "networkPolicy": {"enabled": True}}
    with pytest.raises(CommandFailed, match=r"name its pods or addresses in networkPolicy\.stores"):
        Rendered({**values, "sandboxes": SANDBOXES})
    assert Rendered({**values, "sandboxes": {**SANDBOXES, "egressTo": [STORE]}})


def test_hosts_of_all_leases_are_scraped_where_there_are_any() -> None:
    monitoring = {"monitoring": {"podMonitor": {"enabled": True}}}
    rendered = render({"sandboxes": TWO, **monitoring})
    asked = rendered.one("PodMonitor", "rose-sandbox-host")["spec"]
    (endpoint,) = asked["podMetricsEndpoints"]
    wanted = asked["selector"]["matchLabels"]
    for name in (NAME, DAPO):
        template = rendered.one("DaemonSet", name)["spec"]["template"]
        assert wanted.items() <= template["metadata"]["labels"].items()
        (container,) = template["spec"]["containers"]
        assert endpoint["port"] in [port["name"] for port in container["ports"]]
    without = render(monitoring).all("PodMonitor")
    assert "rose-sandbox-host" not in [one["metadata"]["name"] for one in without]


def test_with_closed_ports_routers_may_dial_the_hosts() -> None:
    def dialled(values: Object) -> bool:
        egress = render(values).one("NetworkPolicy", "rose-router")["spec"]["egress"]
        return "rose-sandbox-host" in yaml.safe_dump(egress)

    assert not dialled(CLOSED)
    assert dialled({**CLOSED, "sandboxes": SANDBOXES})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"store": ""}, "sandboxes.store"),
        ({"store": "s3://bucket/prefix"}, "sandboxes"),
        ({"partsPath": ""}, "sandboxes.partsPath"),
        ({"leases": []}, "sandboxes.leases: name the leases"),
        ({"leases": [*SANDBOXES["leases"], *SANDBOXES["leases"]]}, "two are called"),
        ({"leases": [{"namespace": "a", "name": "b.c"}]}, "has a point"),
        ({"leases": [{"namespace": "n" * 40, "name": "l" * 10}]}, "too long"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change: Object, words: str) -> None:
    with pytest.raises(CommandFailed, match=words):
        Rendered({"sandboxes": {**SANDBOXES, **change}})
