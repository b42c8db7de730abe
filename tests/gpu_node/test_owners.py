"""Whose GPUs are whose, as a real kubelet says it that a device plugin has given GPUs to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from rose_agent.pods.claims import ClaimingPod, KubeletClaims
from rose_agent.pods.podresources import PodResources
from rose_core.devices.ownership import Claim, DriverGpu, Proof
from rose_core.identity import GpuUuid
from rose_dev.cluster.gpu_node.starting import state_of
from rose_dev.cluster.node import Node
from rose_dev.waiting import until
from tests.gpu_node.machine import ready, sleeper

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

SPACE = "gpu-owners"


@pytest.fixture
def machine(gpu_node: Node) -> Iterator[Node]:
    gpu_node.kubectl("create", "namespace", SPACE, check=False)
    yield gpu_node
    gpu_node.kubectl("delete", "pods", "--all", f"--namespace={SPACE}", "--now")


@contextlib.asynccontextmanager
async def asking(node: Node) -> AsyncIterator[tuple[KubeletClaims, tuple[DriverGpu, ...]]]:
    kubelet = PodResources(node.place.pod_resources / "kubelet.sock")
    with state_of(node) as state:
        gpus = tuple(DriverGpu(GpuUuid(gpu.uuid), i, i) for i, gpu in enumerate(state.gpus))
    task = asyncio.create_task(kubelet.run())
    try:
        yield KubeletClaims(kubelet, lambda: gpus, lambda _: ()), gpus
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_pods_gpus_are_those_that_the_device_plugin_gave_it(machine: Node) -> None:
    two = sleeper("two", SPACE, container={"resources": {"limits": {"nvidia.com/gpu": 2}}})
    none = sleeper("none", SPACE)
    ready(machine, two, none)
    async with asking(machine) as (claims, gpus):
        await until(lambda: claims.of(ClaimingPod(SPACE, "two")).proof is Proof.ALLOCATED)
        found: Claim = claims.of(ClaimingPod(SPACE, "two"))
        assert len(found.gpus) == 2
        assert set(found.gpus) <= {gpu.uuid for gpu in gpus}
        assert (found.refusal, claims.weakness) == ("", "")
        without = claims.of(ClaimingPod(SPACE, "none", annotation=found.gpus[0]))
        assert (without.gpus, without.refusal) == ((), "NoGPU")
