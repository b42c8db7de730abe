"""The fleet's nodes and serving pods as objects of the API server; KWOK plays their kubelets.

Node status is refreshed every 5 minutes, as kubelets do at rest. Node leases are renewed ten times
slower than kubelets do: nothing of ROSE reads them, and the API server shares its machine with all
else that is measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from bench.operator.agents import Replaced
from bench.operator.fleet import NAMESPACE, Fleet
from rose_dev.api_client import ApiClient
from rose_dev.cluster import kwok
from rose_dev.waiting import wait_for_answer
from rose_operator.kube.api import RESOURCES, ObjectKind
from rose_wire.api_server import Resource

_NODE = RESOURCES[ObjectKind.NODE]
_POD = Resource("", "v1", "Pod", "pods")
_ACCOUNT = Resource("", "v1", "ServiceAccount", "serviceaccounts")
_THREADS = 8
STATUS_SECONDS = 300
LEASE_SECONDS = 400


class Machines:
    """Nodes and pods of a fleet.

    Attributes:
        pods: serving pod -> its uid, of those that stand now.
    """

    def __init__(self, client: ApiClient, fleet: Fleet) -> None:
        self.pods: dict[str, str] = {}
        self._client, self._random = client, random.Random(2)
        self._fleet = fleet
        self._places = {
            pod: (node, pool)
            for node, replicas in fleet.nodes_by_name().items()
            for pool, pod, _ in replicas
        }
        self._made = 0

    def build(self) -> None:
        """Make all of them and wait until every node is ready and every pod runs.

        Raises:
            StartFailed: KWOK does not get them there.
        """
        account = {"metadata": {"name": "default", "namespace": NAMESPACE}}
        self._client.create(_ACCOUNT, account)
        nodes = kwok.node_manifests(self._fleet.nodes_by_name())
        pods = [_pod(name, node, pool) for name, (node, pool) in self._places.items()]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(partial(self._client.create, _NODE), nodes))
            self.pods = {
                one["metadata"]["name"]: one["metadata"]["uid"]
                for one in threads.map(partial(self._client.create, _POD), pods)
            }
        wait_for_answer(self._all_run, f"{len(self.pods)} pods run", 300, pause=1.0)

    def replace(self) -> Replaced:
        """Delete a serving pod, anywhere, and make its successor, as a Deployment would."""
        old = self._random.choice(list(self.pods))
        node, pool = self._places[old]
        self._made += 1
        new = f"{old.partition('-r')[0]}-r{self._made}"
        uid = str(self._client.create(_POD, _pod(new, node, pool))["metadata"]["uid"])
        self._client.delete(_POD, old, NAMESPACE)
        del self.pods[old]
        self.pods[new], self._places[new] = uid, (node, pool)
        return Replaced(old, new, uid)

    def cordon(self, names: Iterable[str], *, cordoned: bool) -> None:
        """Mark nodes as unschedulable, or no longer."""
        change = {"spec": {"unschedulable": cordoned or None}}
        for name in names:
            self._client.merge(_NODE, name, change)

    def _all_run(self) -> bool:
        # Those that do not run yet, so that a look costs less the further KWOK is.
        return not self._client.list(_POD, NAMESPACE, fields="status.phase!=Running")


def _pod(name: str, node: str, pool: str) -> dict[str, Any]:
    labels = {"app": pool.partition("/")[2]}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "containers": [{"name": "serving", "image": "serving"}],
            "nodeName": node,
            "terminationGracePeriodSeconds": 5,
        },
    }
