"""The chart on a node with eight GPUs: found in every mode, lent in every mode, failing one by one.

One installation serves the whole file. A slot whose engine is up waits in the state Syncing, since
no run is published; that it does says that guard, operator and engine host saw the same GPUs.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_dev.errors import CommandFailed, StartFailed
from rose_dev.gpu.state import State
from rose_dev.gpu_node.driver_root import ROOT
from rose_dev.gpu_node.failures import act
from rose_dev.gpu_node.starting import state_of
from rose_dev.node import Node
from rose_dev.testing import NodeSession, with_gpus
from rose_dev.waiting import wait_until
from tests.chart.installation import CHART, SERVING, SYSTEM, make_models, namespaces, remove, seen
from tests.gpu_node.serving_pods import ServingPod, hold, serving_pods

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
SECONDS = 150.0
MODES = {
    "NRI": (),
    "CDI": ("--set=gpus.runtimeClassName=nvidia-cdi",),
    "HostPath": (f"--set=gpus.driverRoot={ROOT}",),
}


class Lending:
    """The installation, and what it says.

    Attributes:
        pods: serving's, each holding memory on its GPUs.
    """

    def __init__(self, node: Node, state: State, models: Path) -> None:
        self.node, self.state, self._models = node, state, models
        self.pods: list[ServingPod] = []

    def install(self, *values: str) -> str:
        """Install or upgrade, and wait until all is ready; what helm says to whoever did it."""
        given = (
            f"--values={HERE / 'values.yaml'}",
            f"--set=engineHost.modelsPath={self._models}",
            # The development node's kubelet keeps its root elsewhere.
            f"--set=agent.podResourcesPath={self.node.place.pod_resources}",
        )
        wait = ("--wait", "--timeout=150s")
        where = ("rose", str(CHART), f"--namespace={SYSTEM}", "--create-namespace")
        try:
            return self.node.helm("upgrade", "--install", *where, *given, *values, *wait)
        except CommandFailed as error:
            pytest.fail("\n\n".join([str(error), *seen(self.node)]))

    def serve(self, **replicas: int) -> None:
        """So many replicas of each width; their pods hold memory as a static pool takes it."""
        for pod in self.pods:
            for index in pod.gpus:
                self.state.gpus[index].end(pod.pid)
        for name, count in replicas.items():
            which = (f"deployment/{name.replace('_', '-')}", f"--namespace={SERVING}")
            self.node.kubectl("scale", *which, f"--replicas={count}")
        for name in replicas:
            which = (f"deployment/{name.replace('_', '-')}", f"--namespace={SERVING}")
            self.node.kubectl("rollout", "status", *which, "--timeout=60s", seconds=70)
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
        return {name for name, (state, _) in self.slots().items() if state == "Syncing"}

    def wait(self, condition: Any, what: str) -> None:  # noqa: ANN401  # a callable
        try:
            wait_until(condition, what, seconds=SECONDS, pause=1.0)
        except StartFailed as error:
            pytest.fail("\n\n".join([str(error), self.why(), *seen(self.node)]))

    def wait_for_all(self) -> None:
        names = {pod.name for pod in self.pods}
        self.wait(lambda: self.lent() == names, f"engines beside {', '.join(sorted(names))}")

    def why(self) -> str:
        """What the lease says of replicas that are not lent."""
        path = "--output=jsonpath={.items[*].status.conditions[?(@.type=='Granted')].message}"
        return self.node.kubectl("get", "rlease", "-A", path)

    def found(self, node_name: str = "rose-dev") -> str:
        """What the guard of a node has found of its GPUs; empty while it does not answer."""
        chosen = "--selector=app.kubernetes.io/name=rose-agent"
        listed = self.node.kubectl("get", "pods", chosen, f"--namespace={SYSTEM}", "--output=json")
        for item in json.loads(listed)["items"]:
            ends = "deletionTimestamp" in item["metadata"]
            if item["spec"].get("nodeName") == node_name and not ends:
                return _state_of(item["status"].get("podIP", ""))
        return ""


def _state_of(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}:9101/metrics", timeout=5) as page:
            text = page.read().decode()
    except (OSError, ValueError):
        return ""
    lines = [line for line in text.splitlines() if line.startswith("rose_guard_device_access{")]
    return lines[0].split('"')[1] if lines else ""


@pytest.fixture(scope="module")
def installed(
    node_session: NodeSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lending]:
    """The default installation, which says nothing about GPUs, and serving beside it."""
    node = with_gpus(node_session)
    remove(node)
    wait_until(
        lambda: not {SYSTEM, SERVING} & set(namespaces(node)), "a clean cluster", seconds=SECONDS
    )
    models = tmp_path_factory.mktemp("models")
    models.parent.chmod(0o755)
    with state_of(node) as state:
        made = Lending(node, state, make_models(models))
        try:
            yield made
        finally:
            node.kubectl("delete", "tenantpolicy", "gpu-research", check=False)
            remove(node)


def test_the_default_finds_the_gpus_and_lends_those_that_pods_were_given(
    installed: Lending,
) -> None:
    said = installed.install()
    assert "which found RuntimeClass" in said
    installed.wait(lambda: installed.found() == "Found", "the guard finds its GPUs")
    installed.node.kubectl("apply", "--filename=-", stdin=(HERE / "serving.yaml").read_text())
    installed.serve(chat_1=5, chat_2=1)
    installed.wait_for_all()
    seen_by_rose = {name: gpus for name, (_, gpus) in installed.slots().items()}
    assert seen_by_rose == {pod.name: pod.gpus for pod in installed.pods}
    assert sorted(len(gpus) for gpus in seen_by_rose.values()) == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_finds_the_gpus_and_lends(installed: Lending, mode: str) -> None:
    installed.install(f"--set=gpus.access={mode}", *MODES[mode])
    installed.wait(lambda: installed.found() == "Found", f"the guard finds its GPUs by {mode}")
    installed.wait_for_all()
    where = ("daemonset/rose-engine-host", f"--namespace={SYSTEM}", "--container=engine-host")
    listed = installed.node.kubectl("exec", *where, "--", "ls", "/dev").split()
    assert {f"nvidia{index}" for index in range(8)} <= set(listed)


FAILURES = {
    "lose": "DeviceUnknown",
    "ecc": "EccErrors",
    "thermal": "ThermalThrottling",
    "mig": "MigEnabled",
    "xid": "XidError",
}
MORE = {"xid": ("48",)}


@pytest.mark.parametrize(("number", "failure"), list(enumerate(FAILURES)))
def test_a_gpu_that_fails_is_taken_back_by_name_and_the_others_go_on(
    installed: Lending, number: int, failure: str
) -> None:
    hit = single(installed)[number]
    healthy = {pod.name for pod in installed.pods} - {
        pod.name for pod in single(installed)[: number + 1]
    }
    act(installed.state, failure, [str(hit.gpus[0]), *MORE.get(failure, ())])
    word = FAILURES[failure]
    installed.wait(lambda: word in installed.why(), f"the lease says {word}")
    installed.wait(lambda: hit.name not in installed.lent(), "its engine is ended")
    assert healthy <= installed.lent()


def single(installed: Lending) -> list[ServingPod]:
    """The pods of one GPU, by name."""
    return [pod for pod in installed.pods if len(pod.gpus) == 1]


def test_a_lost_gpu_that_is_back_is_lent_again(installed: Lending) -> None:
    lost = single(installed)[0]
    for pod in single(installed):
        act(installed.state, "restore", [str(pod.gpus[0])])
    installed.wait(lambda: lost.name in installed.lent(), "the GPU that is back is lent")
