"""Failures of several GPUs at once: each ends in its own word, the other GPUs go on lending."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rose_agent.os.freezers import HOST_LEAF
from rose_dev.cluster.gpu_node.failures import act
from rose_dev.waiting import wait_until
from tests.chart.installation import SERVING, SYSTEM
from tests.gpu_node.lending import MARKS, Lending
from tests.gpu_node.machine import apply, ready, sleeper
from tests.gpu_node.serving_pods import GIB, ServingPod

pytestmark = [*MARKS, pytest.mark.long]

DEVICES = Path("/sys/fs/cgroup/devices")
STRAYS = "strays"
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
    reported = lending.why()
    assert [reason for reason in FIRST.values() if reason not in reported] == []
    lending.wait(
        lambda: lending.condition("DevicesFit").startswith("False 4 of 6 replicas cannot be lent"),
        "the pool counts them; heat ends by itself",
    )
    fit = lending.condition("DevicesFit")
    assert [
        reason for reason in set(FIRST.values()) - {"ThermalThrottling"} if reason not in fit
    ] == []
    assert "(rose-dev: " in fit


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
        lambda: {pod: reason for pod, reason in lending.words().items() if reason} == words,
        "each replica has its own word",
    )
    reported = lending.devices()
    assert "answers take long" in reported[slow.name]["message"]
    assert "kubelet" in reported[shared.name]["message"]
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


def well_again(lending: Lending) -> None:
    """Without faults and strangers, each GPU held by its pod alone."""
    for pod in lending.pods:
        for index in pod.gpus:
            act(lending.state, "restore", [str(index)])
            gpu = lending.state.gpus[index]
            for process in gpu.processes:
                gpu.end(process.pid)
            gpu.start(pod.pid, 30 * GIB)
    lending.restart("agent")
    lending.wait_for_all()


def with_reason(lending: Lending, reason: str) -> set[str]:
    return {pod for pod, found in lending.words().items() if found == reason}


def test_power_above_the_pools_limit_is_a_reason_until_it_has_fallen(installed: Lending) -> None:
    well_again(installed)
    limit = {"spec": {"lending": {"maxPowerWatts": 600}}}
    patch_pool(installed, limit)
    hot, *_ = installed.single()
    act(installed.state, "power", [str(hot.gpus[0]), "690"])
    installed.wait(lambda: with_reason(installed, "PowerLimit") == {hot.name}, "the one word")
    assert "690" in installed.message(hot)
    installed.wait(lambda: hot.name not in installed.lent(), "its engine is ended")
    act(installed.state, "power", [str(hot.gpus[0]), "72"])
    patch_pool(installed, {"spec": {"lending": {"maxPowerWatts": None}}})
    installed.wait_for_all()


def patch_pool(lending: Lending, change: dict[str, Any]) -> None:
    which = ("servpool", "chat", f"--namespace={SERVING}", "--type=merge")
    lending.node.kubectl("patch", *which, f"--patch={json.dumps(change)}")


def test_an_engine_that_should_be_gone_is_named_and_keeps_the_gpu(lending: Lending) -> None:
    """A process of the engine host's pod, in the cgroup of a slot that nobody knows any more.

    In another pod the mark of an engine would count for nothing.
    """
    if not DEVICES.is_dir():
        pytest.skip(f"no {DEVICES}: the cgroup of the host is not to be had in this way")
    where = ("daemonset/rose-engine-host", f"--namespace={SYSTEM}", "--container=engine-host")
    begin = "sleep 100000 </dev/null >/dev/null 2>&1 &"
    lending.node.kubectl("exec", *where, "--", "sh", "-c", begin)
    outer, inner = only_sleeper()
    group = DEVICES / host_group(lending).lstrip("/") / "rose-00000000-gone"
    group.mkdir()
    left, *_ = lending.single()
    gpu = str(left.gpus[0])
    try:
        (group / "cgroup.procs").write_text(str(outer))
        act(lending.state, "hold", [gpu, str(inner), str(GIB)])
        lending.wait(lambda: with_reason(lending, "NotVacated") == {left.name}, "the one word")
        text = "engines that should be gone have processes on the GPU: gone"
        assert lending.message(left) == text
    finally:
        act(lending.state, "drop", [gpu, str(inner)])
        os.kill(outer, signal.SIGKILL)
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "its end", seconds=10)
        group.rmdir()
    lending.wait_for_all()


def only_sleeper() -> tuple[int, int]:
    """Pids of the process of ``sleeper``: here, and on the node."""
    found = [
        tuple(map(int, line.split()[1:3]))
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and fields_of(entry) == ["sleep", "100000"]
        for line in (entry / "status").read_text().splitlines()
        if line.startswith("NSpid:") and len(line.split()) == 4
    ]
    ((outer, inner),) = found
    return outer, inner


def fields_of(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def host_group(lending: Lending) -> str:
    """The cgroup below which the engine host has those of its engines."""
    for entry in (lending.node.root() / "proc").iterdir():
        if entry.name.isdigit() and "engine-host" in fields_of(entry):
            groups = (entry / "cgroup").read_text().splitlines()
            (path,) = (line.split(":", 2)[2] for line in groups if ":devices:" in line)
            return path.removesuffix(f"/{HOST_LEAF}")
    message = "no engine host runs on the node"
    raise AssertionError(message)


def test_gpus_that_another_team_has_claimed_as_well_are_shared_and_the_others_lent(
    lending: Lending,
) -> None:
    """A device plugin and a DRA driver on one node: neither knows what the other gave out."""
    node = lending.node
    twice = lending.single()[:2]
    names = {pod.name for pod in twice}
    uuids = [lending.state.gpus[index].uuid for pod in twice for index in pod.gpus]
    node.kubectl("create", "namespace", STRAYS, check=False)
    claim = {"name": "gpus", "resourceClaimTemplateName": "two"}
    container = {"resources": {"claims": [{"name": "gpus"}]}}
    pod = sleeper("trainer", STRAYS, container=container, spec={"resourceClaims": [claim]})
    apply(node, these_gpus("two", uuids))
    try:
        ready(node, pod)
        lending.wait(lambda: with_reason(lending, "SharedGpu") == names, "both are shared")
        assert f"{STRAYS}/trainer" in lending.message(twice[1])
        lending.wait(
            lambda: (
                "2 of 6 replicas cannot be lent; 2 SharedGpu" in lending.condition("DevicesFit")
            ),
            "the pool says so",
        )
        others = {one.name for one in lending.pods} - names
        lending.wait(lambda: lending.lent() == others, "the others go on, alone")
    finally:
        node.kubectl("delete", "namespace", STRAYS, "--wait=true", seconds=300)
    lending.wait_for_all()


def these_gpus(name: str, uuids: list[str]) -> dict[str, Any]:
    """A template of claims of exactly these."""
    chosen = f'device.attributes["gpu.nvidia.com"].uuid in {json.dumps(uuids)}'
    exactly = {
        "deviceClassName": "gpu.nvidia.com",
        "allocationMode": "ExactCount",
        "count": len(uuids),
        "selectors": [{"cel": {"expression": chosen}}],
    }
    devices = {"requests": [{"name": "gpus", "exactly": exactly}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": STRAYS},
        "spec": {"spec": {"devices": devices}},
    }


def test_gpus_without_a_driver_are_told_from_a_node_without_gpus(lending: Lending) -> None:
    """Two on the container's PCI bus, and a driver's root with nothing in it.

    Then the kernel module is loaded, and the container still sees no library: another word.
    """
    bus = lending.models.parent / "pci"
    for number in range(2):
        device = bus / f"0000:{number:02}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    (lending.models.parent / "no-driver").mkdir()
    lending.install(
        "--set=gpus.access=HostPath",
        f"--set=gpus.driverRoot={lending.models.parent / 'no-driver'}",
        "--set=agent.extraVolumes[0].name=bus",
        f"--set=agent.extraVolumes[0].hostPath.path={bus}",
        "--set=agent.extraVolumeMounts[0].name=bus",
        "--set=agent.extraVolumeMounts[0].mountPath=/sys/bus/pci/devices",
    )
    lending.wait(lambda: lending.found() == "NoDriver", "the guard says so, idle and Ready")
    lending.wait(
        lambda: "NoDriver: 2 NVIDIA devices on the PCI bus" in lending.condition("DeviceAccess"),
        "the pool says so",
    )
    assert "6 of 6 replicas cannot be lent; 6 DeviceAccess" in lending.condition("DevicesFit")
    load_kernel_module(lending)
    lending.wait(lambda: lending.found() == "NoAccess", "the guard says anew what is missing")
    lending.wait(
        lambda: "NoAccess: the node's driver is loaded" in lending.condition("DeviceAccess"),
        "the pool says so, too",
    )
    assert "gpus.access HostPath" in lending.condition("DeviceAccess")
    lending.install()
    lending.wait(lambda: lending.found() == "Found", "and comes back")
    lending.renew_lease()
    lending.wait_for_all()


MODULE = """
import ctypes, pathlib
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"none", b"/proc/driver", b"tmpfs", 0, None):
    raise OSError(ctypes.get_errno(), "/proc/driver")
said = pathlib.Path("/proc/driver/nvidia/version")
said.parent.mkdir()
said.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01\\n")
"""


def load_kernel_module(lending: Lending) -> None:
    """What the guard's container sees of a kernel module: its file below ``/proc``."""
    guards = {
        (entry / "ns/mnt").readlink(): (entry.name, (entry / "exe").readlink())
        for entry in (lending.node.root() / "proc").iterdir()
        if entry.name.isdigit() and "bin/rose agent" in " ".join(fields_of(entry))
    }
    assert guards, "no guard runs on the node"
    for pid, python in guards.values():
        enter = ("nsenter", f"--target={pid}", "--mount", "--")
        lending.node.namespaces.run([*enter, python, "-c", MODULE])
