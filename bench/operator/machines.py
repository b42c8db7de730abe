"""The fleet's nodes and serving pods as objects of the API server; KWOK plays their kubelets.

Node status is refreshed every 5 minutes, as kubelets do at rest. Node leases are renewed ten times
slower than kubelets do: nothing of ROSE reads them, and the API server shares its machine with all
else that is measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from lightkube import Client, codecs
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.operators import not_equal
from lightkube.resources.core_v1 import Node, Pod, ServiceAccount
from lightkube.types import PatchType

from bench.operator.agents import Replaced
from bench.operator.fleet import NAMESPACE, Fleet
from rose_dev import kwok
from rose_dev.waiting import wait_for_answer

_THREADS = 8
_PAGE = 500
STATUS_SECONDS = 300
LEASE_SECONDS = 400


class Machines:
    """Nodes and pods of a fleet.

    Attributes:
        pods: serving pod -> its uid, of those that stand now.
    """

    def __init__(self, client: Client, fleet: Fleet) -> None:
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
        account = ServiceAccount(metadata=ObjectMeta(name="default", namespace=NAMESPACE))
        self._client.create(account)
        manifests = kwok.node_manifests(self._fleet.nodes_by_name())
        nodes = [codecs.from_dict(manifest) for manifest in manifests]
        pods = [_pod(name, node, pool) for name, (node, pool) in self._places.items()]
        # The first use completes lightkube's classes, which threads must not do at the same time.
        for one in (nodes[0], pods[0]):
            one.to_dict()  # type: ignore[no-untyped-call]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(self._client.create, nodes))
            self.pods = {
                one.metadata.name: one.metadata.uid
                for one in threads.map(self._client.create, pods)
                if one.metadata and one.metadata.name and one.metadata.uid
            }
        wait_for_answer(self._all_run, f"{len(self.pods)} pods run", 300, pause=1.0)

    def replace(self) -> Replaced:
        """Delete a serving pod, anywhere, and make its successor, as a Deployment would."""
        old = self._random.choice(list(self.pods))
        node, pool = self._places[old]
        self._made += 1
        new = f"{old.partition('-r')[0]}-r{self._made}"
        made = self._client.create(_pod(new, node, pool))
        self._client.delete(Pod, old, namespace=NAMESPACE)
        uid = str(made.metadata.uid) if made.metadata else ""
        del self.pods[old]
        self.pods[new], self._places[new] = uid, (node, pool)
        return Replaced(old, new, uid)

    def cordon(self, names: Iterable[str], *, cordoned: bool) -> None:
        """Mark nodes as unschedulable, or no longer."""
        change = {"spec": {"unschedulable": cordoned or None}}
        for name in names:
            self._client.patch(Node, name, change, patch_type=PatchType.MERGE)

    def _all_run(self) -> bool:
        # Those that do not run yet, so that a look costs less the further KWOK is.
        late = self._client.list(
            Pod,
            namespace=NAMESPACE,
            fields={"status.phase": not_equal("Running")},
            chunk_size=_PAGE,
        )
        return next(iter(late), None) is None


def _pod(name: str, node: str, pool: str) -> Pod:
    labels = {"app": pool.partition("/")[2]}
    return Pod(
        metadata=ObjectMeta(name=name, namespace=NAMESPACE, labels=labels),
        spec=PodSpec(
            containers=[Container(name="serving", image="serving")],
            nodeName=node,
            terminationGracePeriodSeconds=5,
        ),
    )
