"""Whose GPUs are whose, wired as in production: NVML, kubelet, API server, pods on eight GPUs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_agent.devices.opening import open_driver
from rose_agent.guard import main
from rose_agent.guard.inspection.pages import describe
from rose_agent.guard.loop import Guard, Settings
from rose_agent.pods import podresources
from rose_agent.pods.claims import GPU_ANNOTATION
from rose_agent.signals.reader import DirectReaders
from rose_core.devices.ownership import AllocatedDevice, Allocation, Proof
from rose_core.identity import PodUid
from rose_core.wire.sync import PoolPolicy, ReplicaReport, SyncReply
from rose_dev.cluster.gpu_node.failures import act
from rose_dev.gpu.state import State
from rose_dev.waiting import until
from rose_engines.node.rundir import RunDir
from tests.agent.kubelet import FakeKubelet
from tests.agent.test_pods import FakeApi, pod

GIB = 1 << 30
POLICIES = (
    PoolPolicy("chat/pool", "Lend", {"app": "llm"}, 30000),
    PoolPolicy("evil/pool", "Lend", {"app": "bait"}, 30000),
)


def uid(number: int) -> str:
    return f"53099174-d551-433b-9350-adf44bee89{number:02}"


def bait(gpu: str) -> dict[str, Any]:
    """A tenant's pod of the CPU that names somebody's GPU."""
    meta = {"namespace": "evil", "labels": {"app": "bait"}, "annotations": {GPU_ANNOTATION: gpu}}
    return pod("bait", uid(99), metadata=meta)


@dataclass
class Node:
    """The guard and what is around it; the tests say who owns and who uses which GPU."""

    nvml: State
    api: FakeApi
    kubelet: FakeKubelet
    guard: Guard

    def give(self, name: str, *gpus: int, suffix: str = "", namespace: str = "chat") -> None:
        """The device plugin allocates GPUs to a pod."""
        names = [f"{self.nvml.gpus[gpu].uuid}{suffix}" for gpu in gpus]
        devices = tuple(AllocatedDevice("nvidia.com/gpu", one) for one in names)
        self.kubelet.allocations.append(Allocation(namespace, name, devices))

    def reports(self) -> dict[str, ReplicaReport]:
        """What the operator would hear, by the pod's name."""
        return {one.pod_name: one for one in self.guard.request().replicas}

    async def matched(self, proof: Proof = Proof.ALLOCATED) -> None:
        """The guard knows GPUs and owners of every pod that is there."""
        await until(lambda: len(self.guard.devices.gpus) == 8)
        self.guard.on_reply(SyncReply(1, True, (), POLICIES), 0.0)
        wanted = {one["metadata"]["name"] for one in self.api.pods}

        def known() -> bool:
            self.guard.match()
            found = self.reports()
            claims = [one.pod.claim for one in self.guard.replicas.values()]
            return found.keys() == wanted and all(claim.proof is proof for claim in claims)

        await until(known)
        for uuid, reading in self.guard.devices.read().items():
            self.guard.devices.take(uuid, reading)
        self.guard.match()


@pytest.fixture
async def node(
    nvml: State, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Node]:
    monkeypatch.setattr(podresources, "PERIOD_SECONDS", 0.02)
    api, kubelet = FakeApi(), FakeKubelet(short_dir / "kubelet.sock")
    api.pods = [pod(f"serving-{number}", uid(number)) for number in range(8)]
    app = web.Application()
    app.router.add_get("/api/v1/pods", api.answer)
    server = TestServer(app)
    await server.start_server()
    (short_dir / "token").write_text("secret\n")
    flags = ["--node=node-1", f"--kube-url={str(server.make_url('')).rstrip('/')}"]
    flags += [f"--kube-token-file={short_dir / 'token'}", f"--pod-resources={kubelet.socket}"]
    options = main.arguments().parse_args(flags)
    async with aiohttp.ClientSession() as session:
        rundir = RunDir(short_dir / "rose").create()
        guard = Guard(rundir, Settings("node-1", ""), open_driver("nvml"), DirectReaders(session))
        guard.pods = main._pods(options, guard)
        guard.devices.survey()  # the reader itself does not run: readings are taken by the test
        tasks = [asyncio.create_task(guard.pods.run())]
        made = Node(nvml, api, kubelet, guard)
        yield made
        guard.close()
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await api.events.put(None)
        await kubelet.stop()
        await server.close()


def owned_each(node: Node) -> None:
    for number in range(8):
        node.give(f"serving-{number}", number)


async def test_the_guards_loop_asks_nvml_nothing(node: Node) -> None:
    owned_each(node)
    await node.kubelet.start()
    await node.matched()
    node.nvml.forget_calls()
    for _ in range(50):
        node.guard.match()
        node.guard.step_all()
        node.guard.request()
    assert node.nvml.calls() == {}


async def test_each_pod_has_the_gpu_that_the_kubelet_gave_it_before_it_runs(node: Node) -> None:
    node.give("serving-0", *range(8))
    node.give("serving-1", 3, 2)
    node.kubelet.allocations.pop(0)
    await node.kubelet.start()
    await node.matched()
    found = node.reports()
    uuids = [gpu.uuid for gpu in node.nvml.gpus]
    assert found["serving-1"].gpu_uuids == (uuids[3], uuids[2])
    assert (found["serving-1"].gpu_proof, found["serving-0"].gpu_uuids) == ("Allocated", ())


async def test_an_annotation_takes_nobodys_gpu(node: Node) -> None:
    owned_each(node)
    victim = node.nvml.gpus[0].uuid
    node.api.pods.append(bait(victim))
    await node.kubelet.start()
    await node.matched()
    found = node.reports()
    assert (found["bait"].gpu_uuids, found["serving-0"].gpu_uuids) == ((), (victim,))
    view = node.guard.replicas[PodUid(uid(99))].view
    assert view is not None
    assert (view.refusal, view.lendable.bytes) == ("NoGPU", None)
    assert "evil/bait" in view.message


async def test_an_annotation_takes_nobodys_gpu_without_the_kubelet_either(node: Node) -> None:
    node.api.pods = [bait(node.nvml.gpus[0].uuid)]
    await node.matched(Proof.PROCESSES)
    assert node.reports()["bait"].gpu_uuids == ()
    assert "proves less" in node.guard.request().capabilities["GpuOwnership"]


async def test_shares_of_a_gpu_are_not_lent_and_the_others_are_named(node: Node) -> None:
    node.give("serving-0", 0, suffix="::0")
    node.give("serving-1", 0, suffix="::1")
    await node.kubelet.start()
    await node.matched()
    view = node.guard.replicas[PodUid(uid(0))].view
    assert view is not None
    assert view.refusal == "SharedGpu"
    assert "chat/serving-1" in view.message


async def test_the_kubelets_word_survives_its_restart(node: Node) -> None:
    owned_each(node)
    await node.kubelet.start()
    await node.matched()
    before = {name: one.gpu_uuids for name, one in node.reports().items()}
    await node.kubelet.stop()
    node.guard.match()
    assert {name: one.gpu_uuids for name, one in node.reports().items()} == before


# --- what the operator hears of replicas of several widths, and of GPUs that fail


@pytest.mark.parametrize("widths", [(1, 2, 5), (8,)])
async def test_a_replica_of_each_width_has_its_gpus_and_the_memory_of_the_tightest(
    node: Node, widths: tuple[int, ...]
) -> None:
    node.api.pods = node.api.pods[: len(widths)]
    gpus = iter(range(8))
    given = {f"serving-{n}": [next(gpus) for _ in range(width)] for n, width in enumerate(widths)}
    for name, indices in given.items():
        node.give(name, *indices)
    for index, gpu in enumerate(node.nvml.gpus):
        gpu.raw.memory_used = (30 + index) * GIB
    await node.kubelet.start()
    await node.matched()
    found, shown = node.reports(), described(node)
    for name, indices in given.items():
        tightest = node.nvml.gpus[max(indices)]
        room = tightest.raw.memory_total - tightest.raw.memory_used - 6 * GIB
        uuids = tuple(node.nvml.gpus[index].uuid for index in indices)
        assert (found[name].gpu_uuids, found[name].lendable_bytes) == (uuids, room)
        assert (tightest.uuid in found[name].lendable_text) == (len(indices) > 1)
        assert (shown[name]["gpus"], shown[name]["lendableBytes"]) == (uuids, room)
        assert shown[name]["class"] == "h100-80gb-hbm3"


FAILURES = {
    "lose": ("DeviceUnknown", "GPU is lost"),
    "ecc": ("EccErrors", "1 uncorrected"),
    "thermal": ("ThermalThrottling", "92"),
    "mig": ("MigEnabled", "only whole GPUs"),
    "vgpu": ("VirtualGpu", "vGPU"),
    "xid": ("XidError", "48"),
    "hold": ("ForeignProcess", "process"),
}
MORE = {"xid": ["48"], "hold": ["1", str(GIB)]}


async def test_each_failure_has_its_word_and_its_figures_and_the_last_gpu_goes_on(
    node: Node,
) -> None:
    owned_each(node)
    await node.kubelet.start()
    await node.matched()
    for index, action in enumerate(FAILURES):
        act(node.nvml, action, [str(index), *MORE.get(action, ())])
    for _ in range(2):  # whose a process is, is believed when it stays
        for uuid, reading in node.guard.devices.read().items():
            node.guard.devices.take(uuid, reading)
    node.guard.match()
    shown = described(node)
    assert [shown[f"serving-{n}"]["refusal"] for n in range(8)] == [
        *(word for word, _ in FAILURES.values()),
        "",
    ]
    for number, (_, text) in enumerate(FAILURES.values()):
        assert text in shown[f"serving-{number}"]["message"]


def described(node: Node) -> dict[str, dict[str, Any]]:
    """What ``rose agent report`` shows of each pod's GPUs."""
    return {one["pod"]: one["devices"] for one in describe(node.guard)["replicas"]}
