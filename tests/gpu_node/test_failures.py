"""Failures of several GPUs at once: each ends in its own word, the other GPUs go on lending."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_dev.gpu_node.failures import act
from tests.gpu_node.lending import MARKS, Lending
from tests.gpu_node.serving_pods import GIB, ServingPod

pytestmark = [*MARKS, pytest.mark.long]

FIRST = {
    "lose": "DeviceUnknown",
    "ecc": "EccErrors",
    "thermal": "ThermalThrottling",
    "mig": "MigEnabled",
    "vgpu": "VirtualGpu",
}


def test_five_gpus_fail_in_five_ways(lending: Lending) -> None:
    hit = dict(zip(FIRST, lending.single(), strict=True))
    (pair,) = (pod for pod in lending.pods if len(pod.gpus) == 2)
    for action, pod in hit.items():
        act(lending.state, action, [str(pod.gpus[0])])
    expected = {pod.name: FIRST[action] for action, pod in hit.items()} | {pair.name: ""}
    lending.wait(lambda: lending.words() == expected, "each replica has its own word")
    lending.wait(lambda: lending.lent() == {pair.name}, "the pair goes on, alone")
    said = lending.why()
    assert [word for word in FIRST.values() if word not in said] == []


def test_gpus_that_are_well_again_are_lent_again(installed: Lending) -> None:
    """Faults that only a reset ends are forgotten with the agent (docs/devices.md)."""
    for pod in installed.single():
        act(installed.state, "restore", [str(pod.gpus[0])])
    installed.restart("agent")
    installed.wait_for_all()


def test_a_fault_a_slow_gpu_a_stranger_and_growing_memory(lending: Lending) -> None:
    faulty, slow, shared, full, well = lending.single()
    act(lending.state, "xid", [str(faulty.gpus[0]), "48"])
    act(lending.state, "slow", [str(slow.gpus[0]), "1.0"])
    act(lending.state, "hold", [str(shared.gpus[0]), str(stranger(lending)), str(GIB)])
    crowd(lending, well)
    raw = lending.state.gpus[full.gpus[0]].raw
    grown = raw.memory_total - raw.memory_used - GIB // 2  # a quarter of the headroom is 0.75 GiB
    act(lending.state, "hold", [str(full.gpus[0]), str(full.pid), str(grown)])
    words = {faulty.name: "XidError", slow.name: "DeviceUnknown", shared.name: "ForeignProcess"}
    lending.wait(
        lambda: {pod: word for pod, word in lending.words().items() if word} == words,
        "each replica has its own word",
    )
    said = lending.devices()
    assert "answers take long" in said[slow.name]["message"]
    assert "kubelet" in said[shared.name]["message"]
    lending.wait(
        lambda: lending.devices().get(full.name, {}).get("pressure") is True, "the GPU is full"
    )
    lending.wait(
        lambda: not lending.lent() & {*words, full.name}, "the engines of the four are ended"
    )
    assert {pod.name for pod in lending.pods} - {*words, full.name} <= lending.lent()


def stranger(lending: Lending) -> int:
    """A process of the node that belongs to no pod, by its pid there."""
    for entry in (lending.node.root() / "proc").iterdir():
        if entry.name.isdigit() and _name(entry) == "kubelet":
            return int(entry.name)
    message = "the node has no kubelet"
    raise AssertionError(message)


def _name(entry: Path) -> str:
    try:
        return (entry / "comm").read_text().strip()
    except OSError:
        return ""


def crowd(lending: Lending, pod: ServingPod) -> None:
    """The pod's list of processes becomes longer than what the driver's callers begin with."""
    gpu = lending.state.gpus[pod.gpus[0]]
    for _ in range(100):
        gpu.start(pod.pid, 1 << 20)
