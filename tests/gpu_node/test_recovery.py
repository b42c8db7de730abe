"""What a node comes back from by itself: two drivers, a GPU that is missing, lost device files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rose_dev.cluster.gpu_node import driver_root
from rose_dev.cluster.gpu_node.failures import act
from tests.chart.installation import SYSTEM
from tests.gpu_node.lending import MARKS, USUAL, Lending

pytestmark = [*MARKS, pytest.mark.long]

ACCESS, FIT = "DeviceAccess", "DevicesFit"
MISMATCH = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH: a kernel module and a library of two drivers


def test_two_drivers_are_said_and_a_missing_gpu_by_number(installed: Lending) -> None:
    """The guard is idle and Ready meanwhile, and starts anew once they are one driver again."""
    installed.serve(**USUAL)
    for gpu in installed.state.gpus:
        act(installed.state, "restore", [gpu.uuid])
    _forget_what_was_held(installed)
    installed.state.fail("nvmlInitWithFlags", MISMATCH)
    installed.restart("agent")
    installed.wait(lambda: installed.found() == "NvmlFails", "the guard says so")
    installed.wait(
        lambda: "two drivers on this node: the library is 550." in installed.condition(ACCESS),
        "the pool says so",
    )
    installed.wait(
        lambda: "6 of 6 replicas cannot be lent; 6 DeviceAccess" in installed.condition(FIT),
        "and how many GPUs that concerns",
    )
    missing = max(installed.pods, key=lambda pod: pod.gpus[-1])
    installed.state.raw.gpu_count = count = missing.gpus[-1]
    installed.state.fail("nvmlInitWithFlags", 0)
    installed.wait(lambda: installed.found() == "Found", "the guard has started anew")
    installed.wait(
        lambda: f"among the {count} that" in installed.message(missing),
        "the GPU that the driver does not list",
    )
    installed.wait(
        lambda: f"among the {count} that" in installed.condition(FIT), "the pool says so"
    )
    installed.state.raw.gpu_count = 8
    installed.wait_for_all()


def _forget_what_was_held(installed: Lending) -> None:
    for pod in installed.pods:
        for index in pod.gpus:
            gpu = installed.state.gpus[index]
            for process in gpu.processes:
                gpu.end(process.pid)
            gpu.start(pod.pid, 30 << 30)


def test_lost_device_files_are_said_and_come_back(lending: Lending) -> None:
    """As ``systemctl daemon-reload`` takes them from containers that a hook has given them."""
    if not DEVICES.is_dir():
        pytest.skip(f"no {DEVICES}: cgroup v2 keeps its list of devices in a program of the kernel")
    before = restarts(lending, "agent")
    forbid(lending, "bin/rose agent")
    lending.wait(lambda: restarts(lending, "agent") > before, "the guard starts anew")
    lending.wait(lambda: lending.found() == "Found", "with its devices")
    before = restarts(lending, "engine-host")
    forbid(lending, "bin/rose engine-host")
    lending.wait(
        lambda: "AccessLost" in lending.condition("DeviceAccess"),
        "the pool says what the host lost",
    )
    lending.wait(lambda: restarts(lending, "engine-host") > before, "the host starts anew")
    lending.renew_lease()
    lending.wait_for_all()


DEVICES = Path("/sys/fs/cgroup/devices")
NVIDIA_MAJORS = {str(driver_root.NVIDIA_MAJOR), str(driver_root.UVM_MAJOR)}


def forbid(lending: Lending, command: str) -> None:
    """Take NVIDIA's device files from the containers in which this command runs."""
    found = {
        _group(entry) for entry in (lending.node.root() / "proc").iterdir() if _runs(entry, command)
    }
    assert found, f"nothing on the node runs {command}"
    for group in found:
        folder = DEVICES / group.lstrip("/")
        # Taking back ``c 195:*`` would leave what was allowed file by file.
        for allowed in (folder / "devices.list").read_text().splitlines():
            if allowed.split()[1].partition(":")[0] in NVIDIA_MAJORS:
                (folder / "devices.deny").write_text(allowed)


def _runs(entry: Path, command: str) -> bool:
    try:
        words = (entry / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return False
    return entry.name.isdigit() and command in words and "kubelet" not in words


def _group(entry: Path) -> str:
    lines = (entry / "cgroup").read_text().splitlines()
    (path,) = (line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] == "devices")
    return path


def restarts(lending: Lending, component: str) -> int:
    """How often the containers of a DaemonSet's pods have been started again."""
    chosen = (f"--selector=app.kubernetes.io/name=rose-{component}", f"--namespace={SYSTEM}")
    listed: dict[str, Any] = json.loads(
        lending.node.kubectl("get", "pods", *chosen, "--output=json")
    )
    statuses = [
        one for item in listed["items"] for one in item["status"].get("containerStatuses", [])
    ]
    return sum(one["restartCount"] for one in statuses)
