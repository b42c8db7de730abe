"""The installation that the tests on the GPU node share, and what can be asked of it.

That a slot's engine is up says that guard, operator and engine host saw the same GPUs. It waits in
the state Syncing where its store cannot be reached; where no run is published it has version 0.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose_dev.cluster.gpu_node.starting import state_of
from rose_dev.cluster.node import Node
from rose_dev.errors import CommandFailed, StartFailed
from rose_dev.gpu.state import State
from rose_dev.waiting import wait_until
from tests.chart.installation import (
    CHART,
    RESEARCH,
    SERVING,
    SYSTEM,
    make_models,
    namespaces,
    remove,
    seen,
)
from tests.gpu_node.machine import apply
from tests.gpu_node.serving_pods import ServingPod, hold, serving_pods

MARKS = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

UP = frozenset({"Syncing", "Running"})
HERE = Path(__file__).parent
SECONDS = 400.0
USUAL = {"chat_1": 5, "chat_2": 1}
"""Replicas of one and of two GPUs: seven of the node's eight."""


class Lending:
    """The installation, and what it says.

    Attributes:
        pods: serving's, each holding memory on its GPUs.
        models: folder of models, which the node sees.
        notes: what helm said to whoever installed it.
    """

    def __init__(self, node: Node, state: State, models: Path) -> None:
        self.node, self.state, self.models = node, state, models
        self.notes = ""
        self.pods: list[ServingPod] = []
        self._replicas: dict[str, int] = {}
        self._asked: dict[str, object] = {}

    def install(self, *values: str) -> str:
        """Install or upgrade, and wait until all is ready; what helm says to whoever did it."""
        given = (
            f"--values={HERE / 'values.yaml'}",
            f"--set=engineHost.modelsPath={self.models}",
            # The development node's kubelet keeps its root elsewhere.
            f"--set=agent.podResourcesPath={self.node.place.pod_resources}",
        )
        wait = ("--wait", "--timeout=300s")
        where = ("rose", str(CHART), f"--namespace={SYSTEM}", "--create-namespace")
        try:
            return self.node.helm("upgrade", "--install", *where, *given, *values, *wait)
        except CommandFailed as error:
            pytest.fail("\n\n".join([str(error), *seen(self.node)]))

    def serve(self, **replicas: int) -> None:
        """So many replicas of each width; their pods hold memory as a static pool takes it."""
        if replicas == self._replicas:
            return
        self._replicas = replicas
        for pod in self.pods:
            for index in pod.gpus:
                self.state.gpus[index].end(pod.pid)
        others = [name for name in ("chat_1", "chat_2", "chat_8") if name not in replicas]
        for name, count in {**dict.fromkeys(others, 0), **replicas}.items():
            which = (f"deployment/{name.replace('_', '-')}", f"--namespace={SERVING}")
            self.node.kubectl("scale", *which, f"--replicas={count}")
        for name in replicas:
            which = (f"deployment/{name.replace('_', '-')}", f"--namespace={SERVING}")
            self.node.kubectl("rollout", "status", *which, "--timeout=300s", seconds=310)
        wanted = sum(replicas.values())
        wait_until(
            lambda: len(serving_pods(self.node, SERVING)) == wanted, "the pods", seconds=SECONDS
        )
        self.pods = serving_pods(self.node, SERVING)
        for pod in self.pods:
            hold(self.state, pod, 30)

    def slots(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """State and GPUs of each slot, by its pod's name."""
        listed = json.loads(self.node.kubectl("get", "rslot", "-A", "--output=json"))["items"]
        index = {gpu.uuid: number for number, gpu in enumerate(self.state.gpus)}
        found = {}
        for item in listed:
            (member,) = item["spec"]["members"]
            gpus = tuple(sorted(index.get(uuid, -1) for uuid in member["gpuUUIDs"]))
            found[member["podName"]] = (item.get("status", {}).get("state", ""), gpus)
        return found

    def lent(self) -> set[str]:
        """Pods on whose GPUs an engine is up."""
        return {name for name, (state, _) in self.slots().items() if state in UP}

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """A failure says what the lease, the guard and the cluster say."""
        try:
            wait_until(lambda: bool(condition()), what, seconds=SECONDS, pause=1.0)
        except StartFailed as error:
            reported = json.dumps(self.devices(), indent=1)
            pytest.fail("\n\n".join([str(error), self.why(), reported, *seen(self.node)]))

    def single(self) -> list[ServingPod]:
        """The pods of one GPU, by name."""
        return [pod for pod in self.pods if len(pod.gpus) == 1]

    def wait_for_all(self) -> None:
        names = {pod.name for pod in self.pods}
        self.wait(lambda: self.lent() == names, f"engines beside {', '.join(sorted(names))}")

    def why(self) -> str:
        """What the lease says of replicas that are not lent."""
        path = "--output=jsonpath={.items[*].status.conditions[?(@.type=='Granted')].message}"
        return self.node.kubectl("get", "rlease", "-A", path)

    def devices(self) -> Mapping[str, Mapping[str, Any]]:
        """By pod: its GPUs and their memory, as the guard knows them; empty while none answers."""
        where = ("daemonset/rose-agent", f"--namespace={SYSTEM}", "--container=guard")
        reported = self.node.kubectl("exec", *where, "--", "rose", "agent", "report", check=False)
        try:
            return {one["pod"]: one["devices"] for one in json.loads(reported)["replicas"]}
        except ValueError:
            return {}

    def words(self) -> dict[str, str]:
        """By pod: why its GPUs are not fit, as the guard knows them."""
        return {pod: reported["refusal"] for pod, reported in self.devices().items()}

    def message(self, pod: ServingPod) -> str:
        """Why a pod's GPUs are not fit, in words; empty while nothing is known."""
        return str(self.devices().get(pod.name, {}).get("message", ""))

    def condition(self, name: str) -> str:
        """Status and message of a condition of the pool."""
        path = f'{{range .status.conditions[?(@.type=="{name}")]}}{{.status}} {{.message}}{{end}}'
        return self.node.kubectl(
            "get", "servpool", "chat", "-n", SERVING, f"--output=jsonpath={path}"
        )

    def renew_lease(self, **changes: object) -> None:
        """Ask again, perhaps for something else.

        A lease of ten minutes without a turn asks for nothing once it has lost every slot.
        """
        where = ("grpo", f"--namespace={RESEARCH}", "--ignore-not-found")
        self.node.kubectl("delete", "rlease", *where, seconds=300)
        (lease,) = documents(HERE / "serving.yaml", "grpo")
        lease["spec"] |= changes
        apply(self.node, lease)
        self._asked = changes

    def ask_as_usual(self) -> None:
        """The lease is again what it was at first, whatever an earlier file has asked for."""
        if self._asked:
            self.renew_lease()

    def restart(self, component: str) -> None:
        """Have a DaemonSet's pods of the first node end and come again."""
        chosen = (f"--selector=app.kubernetes.io/name=rose-{component}", f"--namespace={SYSTEM}")
        self.node.kubectl("delete", "pods", *chosen, "--wait=true", seconds=300)

    def found(self, node_name: str = "rose-dev") -> str:
        """What the guard of a node has found of its GPUs; empty while it does not answer."""
        chosen = "--selector=app.kubernetes.io/name=rose-agent"
        listed = self.node.kubectl("get", "pods", chosen, f"--namespace={SYSTEM}", "--output=json")
        for item in json.loads(listed)["items"]:
            ends = "deletionTimestamp" in item["metadata"]
            if item["spec"].get("nodeName") == node_name and not ends:
                return _state_of(item["status"].get("podIP", ""))
        return ""


def documents(file: Path, name: str) -> list[dict[str, Any]]:
    """The objects of a file that have this name."""
    each = yaml.safe_load_all(file.read_text())
    return [one for one in each if one["metadata"]["name"] == name]


def _state_of(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}:9101/metrics", timeout=5) as page:
            text = page.read().decode()
    except (OSError, ValueError):
        return ""
    lines = [line for line in text.splitlines() if line.startswith("rose_guard_device_access{")]
    return lines[0].split('"')[1] if lines else ""


def installation(node: Node, folder: Path) -> Iterator[Lending]:
    """The default installation, which says nothing about GPUs, and serving beside it."""
    remove(node)
    wait_until(
        lambda: not {SYSTEM, SERVING} & set(namespaces(node)), "a clean cluster", seconds=SECONDS
    )
    folder.parent.chmod(0o755)
    with state_of(node) as state:
        for gpu in state.gpus:  # of an earlier session's pods, on a node that was left up
            for process in gpu.processes:
                gpu.end(process.pid)
        made = Lending(node, state, make_models(folder))
        try:
            made.notes = made.install()
            made.node.kubectl("apply", "--filename=-", stdin=(HERE / "serving.yaml").read_text())
            yield made
        finally:
            state.delay(0.0)
            node.kubectl("delete", "tenantpolicy", "gpu-research", check=False)
            remove(node)
