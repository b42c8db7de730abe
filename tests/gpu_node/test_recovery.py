"""What a node comes back from by itself: two drivers, a GPU that is missing."""

from __future__ import annotations

from rose_dev.gpu_node.failures import act
from tests.gpu_node.lending import MARKS, USUAL, Lending

pytestmark = MARKS

ACCESS = "DeviceAccess"
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
    missing = max(installed.pods, key=lambda pod: pod.gpus[-1])
    installed.state.raw.gpu_count = count = missing.gpus[-1]
    installed.state.fail("nvmlInitWithFlags", 0)
    installed.wait(lambda: installed.found() == "Found", "the guard has started anew")
    installed.wait(
        lambda: f"among the {count} that" in installed.message(missing),
        "the GPU that the driver does not list",
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
