"""Where the platform has a Gateway, each router has a route, and the lease's URL follows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rose_core.api import RolloutLease
from rose_dev.cluster.parts import GATEWAY_KINDS
from rose_dev.waiting import wait_until_established
from rose_operator.apply import routers
from rose_operator.errors import ConfigurationError
from rose_operator.kube.api import ObjectKind
from rose_operator.settings import GatewaySettings, parse
from tests.api.objects import LEASE, POOL, changed
from tests.operator import harness as env
from tests.operator.bench import SETTINGS, Bench
from tests.operator.harness import Cluster, OperatorProcess, until
from tests.operator.stub_agent import StubAgent, replica

GATEWAY = GatewaySettings("infra", "public", "https", "turns.example.com")
SETTINGS_WITH = replace(SETTINGS, gateway=GATEWAY)
INSIDE = "http://router-default-grpo.rose-system.svc:8000"
OUTSIDE = "https://router-default-grpo.turns.example.com"


def accepted(generation: int = 1, *, word: str = "True") -> dict[str, Any]:
    """What a Gateway's controller writes into the status of a route."""
    found = {"status": word, "observedGeneration": generation, "reason": "R", "message": ""}
    found["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    parent = {"parentRef": {"namespace": "infra", "name": "public"}, "controllerName": "a.b/c"}
    conditions = [
        {"type": "Accepted", **found},
        {"type": "ResolvedRefs", **found, "status": "True"},
    ]
    return {"parents": [{**parent, "conditions": conditions}]}


def test_the_route_leads_to_the_router_and_not_to_what_needs_no_token() -> None:
    made = routers.route(RolloutLease.model_validate(LEASE), SETTINGS_WITH, GATEWAY)
    assert made["spec"]["hostnames"] == ["router-default-grpo.turns.example.com"]
    assert made["spec"]["parentRefs"] == [
        {"namespace": "infra", "name": "public", "sectionName": "https"}
    ]
    closed, open_ = made["spec"]["rules"]
    assert closed == {"matches": [{"path": {"type": "PathPrefix", "value": "/metrics"}}]}
    assert open_["backendRefs"] == [{"name": "router-default-grpo", "port": 8000}]
    assert open_["timeouts"] == {"request": "0s"}


@pytest.mark.parametrize(
    ("status", "routed"),
    [
        ({}, False),
        ({"parents": []}, False),
        (accepted(), True),
        (accepted(word="False"), False),
        (accepted(generation=0), False),
    ],
    ids=["new", "no-controller", "accepted", "refused", "of-an-older-route"],
)
def test_a_route_counts_once_a_gateway_has_accepted_it_as_it_is(
    status: dict[str, Any], routed: bool
) -> None:
    assert routers.is_routed({"metadata": {"generation": 1}, "status": status}) is routed


async def test_the_leases_url_follows_its_route_and_the_route_goes_with_the_lease() -> None:
    bench = Bench(settings=SETTINGS_WITH)
    bench.pool()
    bench.lease(spec__slots={"min": 1, "max": 1})
    bench.report()
    await bench.turn(2)

    def url() -> str:
        return str(bench.api.objects[ObjectKind.LEASE, "default/grpo"]["status"]["routerURL"])

    assert url() == INSIDE
    (route,) = bench.api.all(ObjectKind.ROUTE)
    found = {**route, "status": accepted(route["metadata"]["generation"])}
    await bench.api.apply_status(ObjectKind.ROUTE, found)
    await bench.turn()
    bench.now += 30  # a change that is no condition's may wait for others
    bench.report()
    await bench.turn(2)
    assert url() == OUTSIDE
    bench.lease("later")
    del bench.api.objects[ObjectKind.LEASE, "default/grpo"]
    await bench.turn(2)
    assert [one["metadata"]["name"] for one in bench.api.all(ObjectKind.ROUTE)] == [
        "router-default-later"
    ]


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (["--gateway=public"], "expected NAMESPACE/NAME"),
        (["--gateway=infra/public/"], "expected NAMESPACE/NAME"),
        (["--gateway=infra/public"], "needs --gateway-domain"),
        (["--gateway=infra/public", "--gateway-domain=*.example.com"], "needs --gateway-domain"),
        (["--gateway-domain=example.com"], "expected NAMESPACE/NAME"),
    ],
)
def test_half_a_gateway_is_told_at_the_start(tmp_path: Path, given: list[str], wrong: str) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "stores.yaml").write_text("main: store:7446")
    files = [f"--stores-file={tmp_path / 'stores.yaml'}", f"--token-file={tmp_path / 'token'}"]
    with pytest.raises(ConfigurationError, match=wrong):
        parse(["--router-image=i", *files, *given])


@pytest.fixture(scope="module")
def gateway_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The API server with Gateway API's own definitions."""
    if not GATEWAY_KINDS.place.is_dir():
        pytest.skip("Gateway API's kinds are not there: rose dev build")
    files = [f"--filename={path}" for path in sorted(GATEWAY_KINDS.place.glob("*routes.yaml"))]
    cluster.plane.kubectl("apply", "--server-side", *files)
    names = [f"crd/{kind}.gateway.networking.k8s.io" for kind in ("httproutes", "grpcroutes")]
    wait_until_established(cluster.plane.kubectl, *names)
    yield cluster
    cluster.plane.kubectl("delete", "--ignore-not-found", "--wait=false", *names)


@pytest.mark.cluster
def test_a_real_api_server_with_gateway_apis_own_kinds_takes_the_routes(
    gateway_cluster: Cluster, tmp_path: Path
) -> None:
    cluster = gateway_cluster
    suffix = uuid4().hex[:8]
    system, edge, team = (cluster.namespace(f"{word}-{suffix}") for word in ("sys", "edge", "team"))
    more = ("--gateway=infra/public/https", "--gateway-domain=turns.example.com")
    where = (f"--router-namespace={edge}", *more)
    operator = OperatorProcess(cluster.plane.kubeconfig, tmp_path, system, more=where)
    operator.start()
    try:
        lease = {"metadata.namespace": team, "spec.poolRef.namespace": team}
        cluster.apply(changed(LEASE, lease))
        cluster.apply(pool(team))

        def url() -> str:
            found = cluster.get(env.LEASE, "grpo", team) or {}
            return str(found.get("status", {}).get("routerURL", ""))

        with agent(operator, team):
            until(url, "the lease has a URL")
            assert url() == f"http://router-{hashed(team)}.{edge}.svc:8000"
            name = url().removeprefix("http://").split(".")[0]
            named = ("httproute", name, f"--namespace={edge}")
            made = json.loads(cluster.plane.kubectl("get", *named, "--output=json"))
            assert made["spec"]["rules"][1]["matches"], "the kind's own defaults are there"
            status = {"status": accepted(made["metadata"]["generation"])}
            patch = ("--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")
            cluster.plane.kubectl("patch", *named, *patch)
            until(lambda: url() == f"https://{name}.turns.example.com", "the URL follows the route")
            cluster.delete(env.LEASE, "grpo", team)
            until(
                lambda: not cluster.plane.kubectl("get", *named, "-o=name", check=False).strip(),
                "the route goes with its lease",
            )
    finally:
        operator.kill()


def hashed(namespace: str) -> str:
    return routers.router_name(namespace, "grpo").removeprefix("router-")


def pool(namespace: str) -> dict[str, Any]:
    """A pool that lends in this namespace."""
    lending = {"maxReplicasPercent": 100, "minUnlentReplicas": 1}
    slo = {"ttftMilliseconds": 500}
    place = {"metadata.namespace": namespace, "spec.mode": "Lend", "spec.slo": slo}
    return changed(POOL, place | {"spec.lending": lending})


def agent(operator: OperatorProcess, namespace: str) -> StubAgent:
    """A node of this pool."""
    names = (f"a-{namespace}", f"b-{namespace}")
    replicas = tuple(replica(f"{namespace}/chat", name) for name in names)
    return StubAgent(operator.sync_port, f"node-{namespace}", replicas)
