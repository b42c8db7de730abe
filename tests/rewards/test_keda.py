"""The chart's rewards on a real node, scaled by KEDA itself: ``make test-keda``.

0 workers, a burst of 200 rewards, workers come, one pod is killed, and they go again. Nothing is
lost or doubled. How long cold starts took is printed and not asserted: of thirty, or of as many as
seven minutes hold.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose_core.stats import quantile
from rose_dev import keda
from rose_dev.cluster.node import Node
from rose_dev.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

CHART = Path(__file__).resolve().parents[2] / "helm" / "rose"
SYSTEM = "rose-system"
WORKER = "rose-reward-worker-a"
COUNT = 200
STARTS, LONGEST_S = 30, 420.0
# Random, so that a reward that was computed twice is seen, and never 0.
CHECKS = """
import random, time
draw = random.SystemRandom()
def score(reward):
    time.sleep(reward["data"])
    return 1.0 + draw.random()
"""
VALUES: dict[str, Any] = {
    "image": {
        "repository": "localhost/rose",
        "tag": "dev",
        "pullPolicy": "Never",
        "perComponent": False,
    },
    "agent": {"enabled": False},
    "operator": {"replicas": 1},
    "rewards": {
        "enabled": True,
        "targetSeconds": 20,
        "functions": {"score": {"module": "checks:score", "path": "/team", "team": "a"}},
        "keda": {"enabled": True},
        "workers": [
            {
                "name": "a",
                "most": 4,
                "places": 2,
                "extraVolumes": [{"name": "team", "configMap": {"name": "checks"}}],
                "extraVolumeMounts": [{"name": "team", "mountPath": "/team", "readOnly": True}],
                "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
            }
        ],
    },
}


@pytest.fixture
def url(node: Node, tmp_path: Path) -> Iterator[str]:
    """The gateway of an installation beside KEDA; both are gone afterwards."""
    if not keda.built():
        pytest.skip("KEDA is not built: make keda")

    def remove() -> None:
        if '"rose"' in node.helm("list", f"--namespace={SYSTEM}", "--all", "--output=json"):
            node.helm("uninstall", "rose", f"--namespace={SYSTEM}", "--no-hooks")
        names = ("namespace/rose-routers", f"namespace/{SYSTEM}")
        node.kubectl("delete", "--ignore-not-found", *names, seconds=150)

    keda.install(node)
    remove()
    try:
        node.kubectl("create", "namespace", SYSTEM)
        for name, data in (
            ("rose-rewards-teams", {"teams": "a word-a\n"}),
            ("rose-rewards-workers", {"workers": "a work-a\n", "a": "work-a\n"}),
        ):
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": SYSTEM},
                "stringData": data,
            }
            node.kubectl("apply", "--filename=-", stdin=json.dumps(secret))
        code = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "checks", "namespace": SYSTEM},
            "data": {"checks.py": CHECKS},
        }
        node.kubectl("apply", "--filename=-", stdin=json.dumps(code))
        (tmp_path / "values.json").write_text(json.dumps(VALUES))
        where = ("rose", str(CHART), f"--namespace={SYSTEM}", f"--values={tmp_path}/values.json")
        node.helm("install", *where, "--timeout=120s", seconds=150)
        rolled = ("deployment/rose-rewards", f"--namespace={SYSTEM}", "--timeout=120s")
        node.kubectl("rollout", "status", *rolled, seconds=130)
        path = "--output=jsonpath={.spec.clusterIP}"
        address = node.kubectl("get", "service/rose-rewards", f"--namespace={SYSTEM}", path)
        yield f"http://{address.strip()}:8100"
    finally:
        remove()
        node.kubectl("delete", "--ignore-not-found", f"namespace/{keda.NAMESPACE}", "--wait=false")
        node.kubectl("delete", "--ignore-not-found", "apiservice/v1beta1.external.metrics.k8s.io")


def pods(node: Node) -> list[str]:
    """Workers that run."""
    found = node.kubectl(
        *("get", "pods", f"--namespace={SYSTEM}", "--output=jsonpath={.items[*].metadata.name}"),
        f"--selector=app.kubernetes.io/name={WORKER}",
        "--field-selector=status.phase=Running",
    )
    return found.split()


def scaled(node: Node) -> int:
    """Workers that the Deployment is to have."""
    path = "--output=jsonpath={.spec.replicas}"
    return int(node.kubectl("get", f"deployment/{WORKER}", f"--namespace={SYSTEM}", path) or 0)


async def ask(session: aiohttp.ClientSession, url: str, number: int, seconds: float) -> Any:  # noqa: ANN401
    body = {"trajectory": f"t{number}", "function": "score", "answer": "", "data": seconds}
    while True:
        async with session.post(f"{url}/v1/rewards", json=body) as reply:
            assert reply.status in {200, 429}, await reply.text()
            answer = await reply.json()
            if answer.get("outcome") == "scored":
                return answer["reward"]
        await asyncio.sleep(0.2)


def test_workers_come_from_zero_and_go_again_and_no_reward_is_lost_or_doubled(
    node: Node, url: str
) -> None:
    asyncio.run(_scales(node, url))


async def _scales(node: Node, url: str) -> None:
    def gone() -> bool:
        return scaled(node) == 0 and not pods(node)

    async def waited(condition: Any, what: str, seconds: float = 180.0) -> None:  # noqa: ANN401
        await asyncio.to_thread(wait_until, condition, what, seconds=seconds, pause=0.5)

    shown = {"Authorization": "Bearer word-a"}
    async with aiohttp.ClientSession(
        headers=shown, timeout=aiohttp.ClientTimeout(total=300)
    ) as session:
        await waited(gone, "KEDA has taken the idle worker away")
        cold = list[float]()
        until = time.monotonic() + LONGEST_S
        while len(cold) < STARTS and time.monotonic() < until:
            began = time.monotonic()
            await ask(session, url, COUNT + len(cold), 0.0)
            cold.append(time.monotonic() - began)
            await waited(gone, "the worker has gone again")
        most = 0

        async def watch() -> None:
            nonlocal most
            killed = False
            while True:
                running = await asyncio.to_thread(pods, node)
                most = max(most, len(running))
                if len(running) >= 2 and not killed:
                    killed = True
                    words = ("pod", running[0], f"--namespace={SYSTEM}")
                    await asyncio.to_thread(
                        node.kubectl, "delete", *words, "--force", "--grace-period=0"
                    )
                await asyncio.sleep(1)

        watching = asyncio.create_task(watch())
        try:
            first = await asyncio.gather(*(ask(session, url, n, 0.5) for n in range(COUNT)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        again = await asyncio.gather(*(ask(session, url, n, 0.5) for n in range(COUNT)))
        await waited(gone, "every worker has gone")
    print(  # noqa: T201  # what the page states
        f"\n{len(cold)} cold starts: median {statistics.median(cold):.1f} s, p99 "
        f"{quantile(cold, 0.99):.1f} s, worst {max(cold):.1f} s; most workers {most}"
    )
    assert most >= 2, "KEDA asked the gateway how many, and its autoscaler followed"
    assert first == again, "a trajectory has one reward"
    assert len(set(first)) == COUNT
    assert all(1.0 <= reward <= 2.0 for reward in first), "none is a zero that nobody computed"
