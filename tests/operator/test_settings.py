"""Settings from files and flags, and the router objects they shape."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose_core.api import RolloutLease
from rose_core.rollouts.placement.views import Policy
from rose_core.wire.enrolment import lease_digest
from rose_operator.apply import routers
from rose_operator.errors import ConfigurationError
from rose_operator.settings import Settings, parse
from rose_operator.weight_stores import may_follow
from rose_router.flags import parser as router_parser
from rose_router.flags import settings as router_settings
from tests.api.objects import LEASE, changed
from tests.chart.rendering import HELM, SANDBOXES, render
from tests.chart.test_sandboxes import template_of
from tests.operator.bench import SETTINGS


def test_router_names_are_unique_and_short_enough() -> None:
    pairs = [("a-b", "c"), ("a", "b-c"), ("a", "b.c"), ("a", "b"), ("n" * 63, "l" * 253)]
    names = [routers.router_name(*pair) for pair in pairs]
    assert len(set(names)) == len(pairs)
    assert all(len(name) <= 63 for name in names)
    assert routers.router_name("research", "grpo-main") == "router-research-grpo-main"


def test_a_router_template_extends_the_pod() -> None:
    base = {"volumes": [{"name": "token"}], "a": {"b": 1, "c": 2}}
    extra = {"volumes": [{"name": "engine"}], "a": {"b": 3}, "d": 4}
    assert routers.merge(base, extra) == {
        "volumes": [{"name": "token"}, {"name": "engine"}],
        "a": {"b": 3, "c": 2},
        "d": 4,
    }


def flags(folder: Path, stores: str, token: str) -> list[str]:
    (folder / "stores.yaml").write_text(stores)
    (folder / "token").write_text(token)
    return [
        "--router-image=x",
        f"--stores-file={folder / 'stores.yaml'}",
        f"--token-file={folder / 'token'}",
    ]


def test_settings_from_files(tmp_path: Path) -> None:
    found = parse(flags(tmp_path, "main: store.example:7446\n", "secret\n"))
    assert found.stores == {"main": "store.example:7446"}
    assert found.token == "secret"


@pytest.mark.parametrize(
    ("stores", "token", "text"),
    [
        ("main: nowhere\n", "t", "expected host:port"),
        ("- main\n", "t", "expected a YAML mapping"),
        ("main: {address: 'a:1', run: {}}\n", "t", "expected address and runs"),
        ("main: {address: 'a:1', runs: {a: b}}\n", "t", "expected NAMESPACE"),
        ("main: {runs: {}}\n", "t", "expected host:port"),
        ("{", "t", "stores.yaml"),
        ("main: a:1\n", " \n", "holds no token"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, stores: str, token: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        parse(flags(tmp_path, stores, token))


SHARED = "shared:\n  address: tls://s:1\n  runs:\n    team-a: ['a-*']\n"


def test_a_store_may_keep_the_runs_of_teams_apart(tmp_path: Path) -> None:
    found = parse(flags(tmp_path, "main: a:1\n" + SHARED, "t"))
    assert found.stores == {"main": "a:1", "shared": "tls://s:1"}
    assert may_follow(found.runs.get("main"), "team-b", "a-1")
    shared = found.runs["shared"]
    assert may_follow(shared, "team-a", "a-1")
    assert not may_follow(shared, "team-a", "b-1")
    assert not may_follow(shared, "team-b", "a-1")


def test_routers_hear_nobody_without_a_token_unless_the_platform_says_so() -> None:
    lease = RolloutLease.model_validate(LEASE)
    (asked,) = deployment_pod(lease, SETTINGS)["containers"]
    assert "--authenticate" in asked["args"]
    (anybody,) = deployment_pod(lease, replace(SETTINGS, router_authentication=False))["containers"]
    assert "--authenticate" not in anybody["args"]


def test_with_turn_secrets_no_router_starts_without_its_callers_tokens() -> None:
    lease = RolloutLease.model_validate(LEASE)
    name = routers.router_name(lease.metadata.namespace, lease.metadata.name)
    asked = deployment_pod(lease, replace(SETTINGS, turn_secrets=True))
    volume = {"name": "turns", "secret": {"secretName": f"{name}-turns"}}
    assert volume in asked["volumes"]
    assert "optional" not in volume["secret"]
    assert "--turn-token-file=/var/run/rose/turns/token" in asked["containers"][0]["args"]
    open_to_all = deployment_pod(lease, SETTINGS)
    assert "turns" not in {one["name"] for one in open_to_all["volumes"]}


@pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")
def test_a_template_names_each_leases_own_sandbox_hosts_and_secret() -> None:
    """What the chart writes for all routers (``helm/rose/templates/config.yaml``)."""
    name = "rose-sandboxes-{namespace}-{lease}-{digest}"
    template = template_of(render({"sandboxes": SANDBOXES}))
    (secret,) = [
        one["secret"] for one in template["podSpec"]["volumes"] if one["name"] == "rose-sandboxes"
    ]
    assert secret["secretName"] == name
    lease = RolloutLease.model_validate(LEASE)
    pod = deployment_pod(lease, replace(SETTINGS, router_template=template))
    (container,) = pod["containers"]
    found = router_settings(router_parser().parse_args(container["args"]))
    digest = lease_digest("default", lease.metadata.name)
    own = f"rose-sandboxes-default-{lease.metadata.name}-{digest}"
    assert found.sandbox_hosts == {"": (f"http://{own}.rose-system.svc:7600",)}
    assert callable(found.sandbox_token)
    assert found.sandbox_token() == "", "its Secret may come later"
    (volume,) = [one for one in pod["volumes"] if one["name"] == "rose-sandboxes"]
    assert volume["secret"] == {**secret, "secretName": own}
    assert volume["secret"]["optional"] is True
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "rose-sandboxes"]
    assert f"--sandbox-token-file={mount['mountPath']}/token" in container["args"]
    assert secret["secretName"] == name, "the template itself is all leases'"


def test_a_template_whose_secret_may_be_another_leases_is_refused(tmp_path: Path) -> None:
    """``a-b``/``c`` and ``a``/``b-c`` are one where they are joined."""
    (tmp_path / "template.yaml").write_text(
        "podSpec: {volumes: [{name: v, secret: {secretName: 'x-{namespace}-{lease}'}}]}"
    )
    given = flags(tmp_path, "main: store.example:7446\n", "secret\n")
    with pytest.raises(ConfigurationError, match=r"may be another lease's.*\{digest\}"):
        parse([*given, f"--router-template={tmp_path / 'template.yaml'}"])


def test_a_routers_pod_holds_nothing_but_a_proof_of_its_lease() -> None:
    lease = RolloutLease.model_validate(LEASE)
    settings = replace(SETTINGS, tls_dir=Path("/tls"), router_namespace="rose-routers")
    made = routers.deployment(lease, settings)
    assert made["metadata"]["namespace"] == "rose-routers"
    assert routers.service(lease, settings)["metadata"]["namespace"] == "rose-routers"
    pod = made["spec"]["template"]["spec"]
    assert not [one for one in pod["volumes"] if "secret" in one or "configMap" in one]
    (proof,) = [one["projected"]["sources"] for one in pod["volumes"] if "projected" in one]
    (token,) = [one["serviceAccountToken"] for one in proof]
    assert token["audience"] == "rose-router/default/grpo"
    assert pod["automountServiceAccountToken"] is False
    found = router_settings(router_parser().parse_args(pod["containers"][0]["args"]))
    assert found.enrolment is not None
    assert found.enrolment.address == "tls://rose-operator.rose-system.svc:7442"
    assert (found.attach_token, found.tls_dir, found.tls_client_ca) == ("", None, None)
    assert routers.attach_address("router-x", settings) == "tls://router-x.rose-routers.svc:7444"


def test_what_the_operator_believes_routers_believe() -> None:
    lease = RolloutLease.model_validate(LEASE)
    (container,) = deployment_pod(lease, replace(SETTINGS, operator_authority="PEM"))["containers"]
    assert container["env"] == [{"name": "ROSE_TLS_CA_PEM", "value": "PEM"}]


def test_replicas_find_each_other_by_name_and_show_the_installations_certificate() -> None:
    lease = RolloutLease.model_validate(changed(LEASE, {"spec.router.replicas": 3}))
    settings = replace(SETTINGS, tls_dir=Path("/tls"))
    name = routers.router_name(lease.metadata.namespace, lease.metadata.name)
    container = deployment_pod(lease, settings)["containers"][0]
    assert routers.deployment(lease, settings)["spec"]["replicas"] == 3
    assert f"--replicas-dns={name}-all.{settings.namespace}.svc" in container["args"]
    assert "--peer-address=0.0.0.0:7445" in container["args"]
    assert container["env"][0]["name"] == "POD_IP"
    strategy = routers.deployment(lease, settings)["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    headless = routers.replicas_service(lease, settings)
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["metadata"]["name"] == f"{name}-all"
    whole = routers.service(lease, settings)
    assert headless["spec"]["selector"] == whole["spec"]["selector"]
    assert headless["metadata"]["annotations"] != whole["metadata"]["annotations"]
    plain = deployment_pod(lease, SETTINGS)["containers"][0]["args"]
    assert not [word for word in plain if word.startswith("--peer")]
    alone = deployment_pod(RolloutLease.model_validate(LEASE), settings)["containers"][0]
    assert not [word for word in alone["args"] if "replicas" in word or "peer" in word]
    assert "env" not in alone


def test_what_the_operator_says_to_replicas_is_what_a_router_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = RolloutLease.model_validate(changed(LEASE, {"spec.router.replicas": 2}))
    settings = replace(SETTINGS, tls_dir=tmp_path)
    container = deployment_pod(lease, settings)["containers"][0]
    found = router_parser().parse_args(container["args"])
    assert found.replicas_dns.endswith(f"-all.{settings.namespace}.svc")
    assert found.peer_address.endswith(":7445")
    monkeypatch.setenv("POD_IP", "10.0.0.1")
    enrolment = router_settings(found).enrolment
    assert enrolment is not None
    assert enrolment.peer_name == found.replicas_dns


def test_names_of_replicas_are_unique_and_short_enough() -> None:
    names = ["router-a-b", "r" * 63, "r" * 62, "r" * 59 + "-x"]
    made = [routers.replicas_name(name) for name in names]
    assert len(set(made)) == len(names)
    assert max(map(len, made)) <= 63


def deployment_pod(lease: RolloutLease, settings: Settings) -> dict[str, Any]:
    pod: dict[str, Any] = routers.deployment(lease, settings)["spec"]["template"]["spec"]
    return pod


def test_slots_go_by_weight_unless_the_platform_says_otherwise(tmp_path: Path) -> None:
    given = flags(tmp_path, "main: a:1\n", "secret\n")
    assert not parse(given).lending.by_gain
    reported = parse([*given, "--lend-by-gain", "--toggle-seconds", "7"]).lending
    assert (reported.by_gain, reported.toggle_seconds) == (True, 7.0)


def test_routers_price_a_lent_gpu_as_the_platform_says(tmp_path: Path) -> None:
    given = flags(tmp_path, "main: a:1\n", "secret\n")
    lease = RolloutLease.model_validate(LEASE)
    for more, weight in ((), Policy().lent_weight), (("--lent-weight", "0.5"), 0.5):
        (container,) = deployment_pod(lease, parse([*given, *more]))["containers"]
        found = [one for one in container["args"] if one.startswith("--lent-weight")]
        assert router_parser().parse_args([*found, "--lease=a/b"]).lent_weight == weight
