"""Rewards and batches in the chart: who runs, scaled by whom, and who reaches whom."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rose_core.rights import Listener, verbs
from rose_dev.errors import CommandFailed
from rose_operator.apply.routers import router_name
from rose_rewards import functions, main, remote
from tests.chart.rendering import EVERYTHING, HELM, Object, Rendered, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")

LIST: Object = {"exact": {"rule": "exact"}, "mine": {"module": "checks:run", "team": "a"}}
WORKERS: list[Object] = [
    {"name": "shared"},
    {"name": "a", "most": 3, "places": 2, "image": {"repository": "team/a", "tag": "1"}},
]
VALUES: Object = {
    **EVERYTHING,
    "rewards": {"enabled": True, "functions": LIST, "workers": WORKERS},
    "batches": {
        "leases": [
            {"namespace": "research", "name": "nightly", "claim": "disk"},
            {"namespace": "team-b", "name": "a" * 55},
        ]
    },
}
KEDA = "keda.sh/v1alpha1"


def spec(rendered: Rendered, name: str) -> Object:
    found: Object = rendered.one("Deployment", name)["spec"]
    return found


def test_by_default_neither_runs() -> None:
    assert [item["metadata"]["name"] for item in render().all("Deployment")] == ["rose-operator"]


def test_gateway_and_workers_are_started_with_flags_that_they_know() -> None:
    rendered = render(VALUES, KEDA)
    gateway = rendered.container("Deployment", "rose-rewards", "rewards")
    given = main.parser().parse_args(gateway["args"])
    assert (given.workers, given.scaler_address) == (0, "0.0.0.0:8101")
    worker = rendered.container("Deployment", "rose-reward-worker-a", "worker")
    given_ = remote.parser().parse_args(worker["args"])
    assert (given_.team, given_.places, worker["image"]) == ("a", 2, "team/a:1")
    shared = rendered.container("Deployment", "rose-reward-worker-shared", "worker")
    assert remote.parser().parse_args(shared["args"]).team == ""
    assert shared["image"] == gateway["image"]


def test_the_list_is_one_that_a_gateway_reads(tmp_path: Path) -> None:
    rendered = render(VALUES, KEDA)
    (found,) = (one for one in rendered.all("ConfigMap") if "functions.yaml" in one["data"])
    path = tmp_path / "functions.yaml"
    path.write_text(found["data"]["functions.yaml"])
    assert set(functions.read(path)) == set(LIST)


@pytest.mark.parametrize(("cooldown", "polls"), [(0, 15), (15, 15), (600, 30)])
def test_keda_polls_as_often_as_a_cool_down_ends_and_no_less_than_it_does_by_itself(
    cooldown: int, polls: int
) -> None:
    found = {**VALUES["rewards"], "keda": {"cooldownSeconds": cooldown}}
    scaled = render({**VALUES, "rewards": found}, KEDA).one("ScaledObject", "rose-reward-worker-a")
    assert scaled["spec"]["cooldownPeriod"] == cooldown
    assert scaled["spec"]["pollingInterval"] == polls


def test_keda_scales_each_teams_workers_from_zero_where_the_cluster_has_it() -> None:
    rendered = render(VALUES, KEDA)
    scaled = rendered.one("ScaledObject", "rose-reward-worker-a")["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 3)
    (trigger,) = scaled["triggers"]
    assert trigger["type"] == "external-push"
    assert trigger["metadata"] == {
        "scalerAddress": "rose-rewards.rose-system.svc:8101",
        "team": "a",
        "places": "2",
    }
    assert "replicas" not in spec(rendered, "rose-reward-worker-a"), "an upgrade would reset it"
    without = render(VALUES)
    assert without.all("ScaledObject") == []
    assert spec(without, "rose-reward-worker-a")["replicas"] == 1


def test_a_worker_holds_its_teams_token_alone_and_dials_the_gateway_alone() -> None:
    rendered = render(VALUES, KEDA)
    pod = spec(rendered, "rose-reward-worker-a")["template"]["spec"]
    secrets = [one["secret"]["items"] for one in pod["volumes"] if "secret" in one]
    assert secrets == [[{"key": "a", "path": "token"}]]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for values in (VALUES, {**VALUES, "networkPolicy": {"enabled": False}}):
        policy = render(values, KEDA).one("NetworkPolicy", "rose-reward-worker-a")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert "ingress" not in policy
        peers = [peer for rule in policy["egress"] for peer in rule.get("to", ())]
        assert peers == [
            {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "rose-rewards"}}}
        ]


def test_nobody_but_keda_reaches_the_scaler() -> None:
    """It asks for no token."""
    assert verbs(Listener.SCALER)
    calls = {"enabled": True, "functions": LIST, "workers": WORKERS, "callerNamespaces": ["rl"]}
    for enabled in (True, False):
        values = {**VALUES, "rewards": calls, "networkPolicy": {"enabled": enabled}}
        policy = render(values, KEDA).one("NetworkPolicy", "rose-rewards")["spec"]
        (rule,) = (one for one in policy["ingress"] if {"port": 8101} in one["ports"])
        (peer,) = rule["from"]
        assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "keda"}
        (asks,) = (one for one in policy["ingress"] if {"port": 8100} in one["ports"])
        assert ("from" in asks) is enabled, "callers show tokens; who they are is asked for"


def test_a_worker_that_has_no_function_is_left_out() -> None:
    """It would not start."""
    judge = {"judge": "http://router-research-judge.rose-routers.svc:8000"}
    mine: Object = {"module": "checks:run", "team": "a"}
    # Longer than any worker has to finish, and of a team that has none: a host runs it.
    programs: Object = {"sandbox": "http://sandboxes:7600", "seconds": 3600, "team": "b"}
    for functions_, workers in (
        ({"helpful": judge}, set()),
        ({"programs": programs}, set()),
        ({"mine": mine}, {"a"}),
    ):
        values: Object = {"enabled": True, "functions": functions_, "workers": WORKERS}
        rendered = render({**VALUES, "rewards": values}, KEDA)
        for kind in ("Deployment", "ScaledObject", "NetworkPolicy"):
            names = {one["metadata"]["name"] for one in rendered.all(kind)}
            found = {one for one in names if one.startswith("rose-reward-worker")}
            assert found == {f"rose-reward-worker-{team}" for team in workers}
        assert rendered.one("NetworkPolicy", "rose-rewards")


def test_batches_stand_beside_their_lease_and_show_its_router_a_token_of_it() -> None:
    rendered = render(VALUES)
    for lease in VALUES["batches"]["leases"]:
        name, namespace = lease["name"], lease["namespace"]
        found = rendered.one("Deployment", f"batches-{name}")
        assert found["metadata"]["namespace"] == namespace
        arguments = found["spec"]["template"]["spec"]["containers"][0]["args"]
        router = router_name(namespace, name)
        assert f"--router=http://{router}.rose-routers.svc:8000" in arguments
        (token,) = (
            one["projected"]["sources"][0]["serviceAccountToken"]
            for one in found["spec"]["template"]["spec"]["volumes"]
            if "projected" in one
        )
        (own,) = (
            one["secret"]
            for one in found["spec"]["template"]["spec"]["volumes"]
            if one["name"] == "token"
        )
        assert own["items"] == [{"key": name, "path": "token"}]
        assert token["audience"] == f"rose-lease/{namespace}/{name}"
    config = rendered.one("ConfigMap", "rose-config")["data"]["router-template.yaml"]
    template = yaml.safe_load(config)
    assert "--batches=http://batches-{lease}.{namespace}.svc:8200" in template["container"]["args"]
    assert "volumes" not in template["podSpec"], "each router has its token from the operator"
    assert (
        "--batches" not in render().one("ConfigMap", "rose-config")["data"]["router-template.yaml"]
    )


def test_gateway_and_batches_are_scraped_where_they_run() -> None:
    monitoring = {"monitoring": {"podMonitor": {"enabled": True}}}
    rendered = render({**VALUES, **monitoring})
    places = {"rose-rewards": ["rose-system"], "rose-batches": ["research", "team-b"]}
    pods = {"rose-rewards": ["rose-rewards"], "rose-batches": ["batches-nightly"]}
    for name, namespaces in places.items():
        monitor = rendered.one("PodMonitor", name)["spec"]
        assert monitor["namespaceSelector"]["matchNames"] == namespaces
        for workload in pods[name]:
            template = spec(rendered, workload)["template"]
            wanted = monitor["selector"]["matchLabels"]
            assert wanted.items() <= template["metadata"]["labels"].items()
            (container,) = template["spec"]["containers"]
            (endpoint,) = monitor["podMetricsEndpoints"]
            assert endpoint["port"] in [port["name"] for port in container["ports"]]
    without = {one["metadata"]["name"] for one in render(monitoring).all("PodMonitor")}
    assert not without & places.keys()


def test_every_container_of_theirs_is_bounded_and_has_no_right() -> None:
    rendered = render({**VALUES, "commonLabels": {"cost": "x"}}, KEDA)
    mine = [
        one
        for one in rendered.objects
        if "reward" in str(one["metadata"]) or (one["metadata"]["name"].startswith("batches-"))
    ]
    assert {one["kind"] for one in mine} >= {"Deployment", "Service", "ScaledObject"}
    for item in mine:
        assert item["metadata"]["labels"]["cost"] == "x", item["metadata"]["name"]
        if item["kind"] != "Deployment":
            continue
        pod = item["spec"]["template"]["spec"]
        assert all(one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if "emptyDir" in one)
        for container in pod["containers"]:
            assert container["resources"]["limits"]["memory"]
            rights = container["securityContext"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert rights["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rewards": {"enabled": True}}, r"rewards\.functions is empty"),
        (
            {"rewards": {"enabled": True, "functions": LIST, "workers": [{"name": "a"}] * 2}},
            "two are called",
        ),
        (
            {
                "rewards": {
                    "enabled": True,
                    "functions": LIST,
                    "workers": [{"name": "a", "least": 65}],
                }
            },
            "least 65 is more than most 64",
        ),
        ({"rewards": {"enabled": True, "functions": LIST}}, r"mine: .* has no \"a\""),
        (
            {"rewards": {"enabled": True, "functions": LIST, "workers": [{"name": "a"}]}},
            r"exact: .* has no \"shared\"",
        ),
        (
            {"rewards": {"enabled": True, "functions": {"x": {"rule": "exact", "team": "shared"}}}},
            "no team may be called shared",
        ),
        ({"batches": {"leases": [{"name": "x"}]}}, "namespace"),
        (
            {"batches": {"leases": [{"namespace": "n", "name": "a" * 56}]}},
            "at most 55 characters",
        ),
        ({"batches": {"leases": [{"namespace": "n", "name": "a.b"}]}}, "no dot"),
    ],
)
def test_what_could_not_run_is_refused(values: Object, words: str) -> None:
    with pytest.raises(CommandFailed, match=f"(?s){words}"):
        Rendered(values)


def test_a_worker_that_keda_lets_go_has_the_time_that_its_functions_may_take() -> None:
    """Workers are told to go while they verify: what was killed then was tried anew, five times."""

    def rendered(seconds: float, grace: int, *kinds: str) -> Rendered:
        listed = {**LIST, "mine": {**LIST["mine"], **({"seconds": seconds} if seconds else {})}}
        workers = [WORKERS[0], {**WORKERS[1], "graceSeconds": grace}]
        return Rendered(
            {"rewards": {"enabled": True, "functions": listed, "workers": workers}}, *kinds
        )

    with pytest.raises(CommandFailed, match=r'(?s)mine: it may take 90\.5 s, and workers of "a"'):
        rendered(90.5, 90, KEDA)
    usual = functions.RewardFunction.model_fields["seconds"].default
    with pytest.raises(CommandFailed, match=f"(?s)mine: it may take {usual:.0f} s"):
        rendered(0, int(usual) - 1, KEDA)
    rendered(90, 90, KEDA).one("Deployment", "rose-reward-worker-a")
    rendered(90.5, 60).one("Deployment", "rose-reward-worker-a")
