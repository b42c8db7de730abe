"""The installation that is attacked, and what its parties are and see."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from rose_dev.cluster.node import Node
from rose_dev.errors import CommandFailed, StartFailed
from rose_dev.gpu.state import State
from rose_dev.waiting import wait_until
from rose_weights.serve import tenants
from tests.chart.installation import CHART, RESEARCH, SERVING, SYSTEM, field, secret, seen
from tests.faults import doors
from tests.gpu_node.lending import UP
from tests.gpu_node.serving_pods import ServingPod, hold, serving_pods

HERE = Path(__file__).parent
EVIL = "evil"
EVE = ("--as=eve", "--as-group=system:authenticated")
SECONDS = 180.0
Object = dict[str, Any]


class Installed:
    """ROSE on the GPU node, with one GPU lent to a team.

    Attributes:
        victim: the serving pod whose GPU is lent.
        credentials: at the store, by tenant.
    """

    def __init__(self, node: Node, state: State, models: Path) -> None:
        self.node, self.state, self.models = node, state, models
        self.victim: ServingPod
        self.credentials: dict[str, str] = {}

    def install(self) -> None:
        """Everything of ``parties.yaml``; ends when the victim's GPU is lent."""
        file = self.models / "tenants.json"
        own = ("grpo", doors.RUN)
        self.credentials["research"] = tenants.grant(file, "research", publish=own, read=own)
        self.credentials["evil"] = tenants.grant(
            file, "evil", publish=("evil-*",), read=("evil-*",)
        )
        cluster = tenants.grant(file, "cluster", read=("*",))
        self.credentials["cluster"] = cluster
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}}
        self.apply(namespace, secret(SYSTEM, "rose-store-credential", token=cluster))
        given = (
            f"--values={HERE.parent / 'gpu_node' / 'values.yaml'}",
            f"--values={HERE / 'values.yaml'}",
            f"--set=engineHost.modelsPath={self.models}",
            # The development node's kubelet keeps its root elsewhere.
            f"--set=agent.podResourcesPath={self.node.place.pod_resources}",
        )
        where = ("rose", str(CHART), f"--namespace={SYSTEM}")
        try:
            self.node.helm("install", *where, *given, "--wait", "--timeout=150s")
        except CommandFailed as error:
            self.fail(str(error))
        self.node.kubectl("apply", "--filename=-", stdin=(HERE / "parties.yaml").read_text())
        self.apply(secret(RESEARCH, "store-credentials", tenants=file.read_text()))
        self.wait(lambda: len(serving_pods(self.node, SERVING)) == 1, "the victim serves")
        (self.victim,) = serving_pods(self.node, SERVING)
        hold(self.state, self.victim, 30)
        self.wait(lambda: self.slot()[1] in UP, "the victim's GPU is lent")

    def apply(self, *objects: Object, as_eve: bool = False) -> None:
        """Make objects, as the platform or as the tenant."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        words = EVE if as_eve else ()
        self.node.kubectl("apply", *words, "--filename=-", stdin=json.dumps(listed))

    def get(self, *words: str) -> list[Object]:
        """Objects, whatever namespace."""
        listed: list[Object] = json.loads(self.node.kubectl("get", *words, "-o", "json"))["items"]
        return listed

    def slots(self) -> list[Object]:
        return self.get("rslot", "-A")

    def slot(self) -> tuple[str, str]:
        """Uid and state of the victim's slot; empty words without one."""
        for one in self.slots():
            if one["spec"]["members"][0]["podName"] == self.victim.name:
                return one["metadata"]["uid"], one.get("status", {}).get("state", "")
        return "", ""

    def reason_of(self, kind: str, name: str, condition: str) -> str:
        """Reason of a condition of the tenant's object."""
        path = f"{{.status.conditions[?(@.type=='{condition}')].reason}}"
        return field(self.node, kind, name, EVIL, path)

    def wait(self, condition: Any, what: str, seconds: float = SECONDS) -> None:  # noqa: ANN401
        try:
            wait_until(condition, what, seconds=seconds, pause=1.0)
        except StartFailed as error:
            self.fail(str(error))

    def fail(self, words: str) -> None:
        pytest.fail("\n\n".join([words, *seen(self.node)]))

    def pods(self) -> list[Object]:
        """Running pods of ROSE, in whatever namespace, and the team's store."""
        chosen = self.get("pods", "-n", SYSTEM)
        routers = self.get("pods", "-A", "-l", "app.kubernetes.io/name=rose-router")
        store = self.get("pods", "-n", RESEARCH, "-l", "app=weights")
        found = {one["metadata"]["uid"]: one for one in (*chosen, *routers, *store)}
        return [one for one in found.values() if one["status"].get("phase") == "Running"]

    def restarts(self) -> dict[str, int]:
        """Of every container of ROSE."""
        return {
            f"{pod['metadata']['name']}/{one['name']}": one["restartCount"]
            for pod in self.pods()
            for one in pod["status"]["containerStatuses"]
        }

    def router(self) -> Object:
        """The pod of the team's router."""
        (found,) = self.get("pods", "-A", "-l", "app.kubernetes.io/name=rose-router")
        return found

    def secret(self, name: str, key: str, namespace: str = SYSTEM) -> bytes:
        path = f"{{.data.{key.replace('.', chr(92) + '.')}}}"
        return base64.b64decode(field(self.node, "secret", name, namespace, path))

    def token(self, account: str, audience: str) -> str:
        """A service account's, ``NAMESPACE/NAME``, as whoever may `edit` there makes one."""
        namespace, _, name = account.partition("/")
        words = (name, f"--namespace={namespace}", f"--audience={audience}")
        return self.node.kubectl("create", "token", *words).strip()
