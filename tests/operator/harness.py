"""A real operator process against the shared API server, and stub agents over real gRPC."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rose_dev.api_client import ApiClient
from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.engine_template import ProcessHandle
from rose_dev.process_testing import start_process
from rose_dev.waiting import wait_for_answer
from rose_operator.kube.api import RESOURCES, ObjectKind
from rose_wire.api_server import Resource
from rose_wire.errors import StatusError

ROOT = Path(__file__).parents[2]
DEADLINE = 90.0
ResultT = TypeVar("ResultT")


DEPLOYMENT, SERVICE = RESOURCES[ObjectKind.DEPLOYMENT], RESOURCES[ObjectKind.SERVICE]
EVENT = RESOURCES[ObjectKind.EVENT]
POOL, LEASE = RESOURCES[ObjectKind.POOL], RESOURCES[ObjectKind.LEASE]
SLOT = RESOURCES[ObjectKind.SLOT]


def until(look: Callable[[], ResultT], what: str, seconds: float = DEADLINE) -> ResultT:
    """The first truthy answer, within what a test of the operator may take."""
    return wait_for_answer(look, what, seconds, pause=0.2)


@dataclass
class OperatorProcess:
    """``rose operator`` as a child with short periods."""

    kubeconfig: Path
    folder: Path
    namespace: str
    process: ProcessHandle | None = None
    sync_port: int = 0
    http_port: int = 0
    more: tuple[str, ...] = ()
    module: str = "rose_cli.main"

    @property
    def served(self) -> Path:
        """With the module ``tests.faults.served``: what it has bound."""
        return self.folder / "operator.served"

    @property
    def log(self) -> Path:
        return self.folder / "operator.log"

    def start(self) -> None:
        (self.folder / "stores.yaml").write_text("main: store.example:7446\n")
        (self.folder / "token").write_text("secret\n")
        start = self.log.stat().st_size if self.log.exists() else 0
        words = [
            *([str(self.served)] if self.module.endswith("served") else []),
            "operator",
            f"--namespace={self.namespace}",
            f"--sync-address=127.0.0.1:{self.sync_port}",
            f"--http-port={self.http_port}",
            "--router-image=rose:test",
            f"--stores-file={self.folder / 'stores.yaml'}",
            f"--token-file={self.folder / 'token'}",
            "--plan-seconds=1",
            "--sync-seconds=0.5",
            "--lock-seconds=6",
            "--warm-seconds=4",
            "--settle-seconds=1",
            "--cool-seconds=1",
            "--grant-seconds=60",
            "--identity=the-operator",
            "--tenancy=off",
            *self.more,
        ]
        environment = os.environ | {"KUBECONFIG": str(self.kubeconfig)}
        with self.log.open("ab") as log:
            self.process = start_process(
                self.module, *words, env=environment, output=log.fileno(), errors=log.fileno()
            )
        ports = until(lambda: self._ports(start), "the operator tells its ports")
        assert ports is not None
        self.sync_port, self.http_port = ports

    def _ports(self, start: int) -> tuple[int, int] | None:
        assert self.process is not None
        text = self.log.read_bytes()[start:].decode()
        assert self.process.poll() is None, text[-3000:]
        for line in text.splitlines():
            if line.startswith("rose operator: sync="):
                sync, http = (int(part.split("=")[1]) for part in line.split()[2:4])
                return sync, http
        return None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)


@dataclass
class Cluster:
    """The API server as these tests see it."""

    plane: ControlPlane
    client: ApiClient
    folder: Path

    def namespace(self, name: str) -> str:
        self.plane.kubectl("create", "namespace", name)
        return name

    def apply(self, manifest: dict[str, Any]) -> None:
        resource = {"ServingPool": POOL, "RolloutLease": LEASE, "RolloutSlot": SLOT}[
            manifest["kind"]
        ]
        self.client.apply(resource, manifest)

    def get(self, resource: Resource, name: str, namespace: str) -> dict[str, Any] | None:
        try:
            return self.client.get(resource, name, namespace)
        except StatusError as error:
            if error.code == 404:
                return None
            raise

    def slots(self, namespace: str) -> list[dict[str, Any]]:
        return self.client.list(SLOT, namespace)

    def delete(self, resource: Resource, name: str, namespace: str) -> None:
        self.client.delete(resource, name, namespace)


def serving_pod(name: str, node: str, *, grace_seconds: int) -> dict[str, Any]:
    """A serving pod of the pool ``app: chat`` that is on that node already."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "chat"}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": grace_seconds,
            "containers": [{"name": "serving", "image": "serving"}],
        },
    }


def condition(thing: dict[str, Any] | None, kind: str) -> tuple[str, str]:
    """Status and reason of a condition, empty strings when it is not there."""
    found = ((thing or {}).get("status") or {}).get("conditions") or []
    for entry in found:
        if entry["type"] == kind:
            return entry["status"], entry["reason"]
    return "", ""
