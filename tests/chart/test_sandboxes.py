"""Hosts of sandboxes from the chart: off by default, a DaemonSet for each lease, found by name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import yaml

from rose_agent.guard.main import arguments as guard_arguments
from rose_dev.errors import CommandFailed
from rose_router import flags as router_flags
from rose_sandbox.main import parser
from tests.chart.rendering import HELM, LENDING, SANDBOXES, Object, Rendered, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")

NAME = "rose-sandboxes-research-grpo"
TWO: Object = {
    **SANDBOXES,
    "leases": [*SANDBOXES["leases"], {"namespace": "team-b", "name": "dapo", "run": "b-dapo"}],
}
CLOSED: Object = {**LENDING, "networkPolicy": {"enabled": True}}


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
    for name, run in ((NAME, "grpo"), ("rose-sandboxes-team-b-dapo", "b-dapo")):
        container = rendered.container("DaemonSet", name, "sandbox-host")
        given = parser().parse_args(container["args"])
        assert (given.run, given.store) == (run, "tls://weights.example:7446")
        assert given.egress == (["*.example.org"] if run == "grpo" else [])
        spec = rendered.one("DaemonSet", name)["spec"]["template"]["spec"]
        secrets = [one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one]
        assert secrets == [name]
        assert spec["automountServiceAccountToken"] is False
        assert not spec.get("hostNetwork")
        assert not spec.get("hostPID")
        assert container["resources"]["limits"]["memory"]


def test_a_router_finds_the_hosts_of_its_lease_by_its_name_and_no_others_secret() -> None:
    rendered = render({"sandboxes": TWO})
    template = template_of(rendered)
    parsed = argparse.ArgumentParser()
    router_flags._about_sandboxes(parsed.add_argument)
    given = parsed.parse_args(template["container"]["args"])
    hosts = router_flags._sandbox_hosts(given.sandbox_host, "research/grpo")
    assert hosts == {"": (f"http://{NAME}.rose-system.svc:7600",)}
    (volume,) = [one for one in template["podSpec"]["volumes"] if one["name"] == "sandboxes"]
    assert volume["secret"]["secretName"] == "rose-sandboxes-{namespace}-{lease}"
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
    assert all("to" not in one for one in policy["egress"]), "names alone, until stores are named"


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
        (
            {"leases": [{"namespace": "a-b", "name": "c"}, {"namespace": "a", "name": "b-c"}]},
            "two are called",
        ),
        ({"leases": [{"namespace": "n" * 40, "name": "l" * 10}]}, "too long"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change: Object, words: str) -> None:
    with pytest.raises(CommandFailed, match=words):
        Rendered({"sandboxes": {**SANDBOXES, **change}})
