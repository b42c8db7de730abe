"""The GPU node itself: NVIDIA's programs, runtime and NRI plugin around GPUs that are not there.

Which part is NVIDIA's and which is ours stands in docs/development-cluster.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rose_dev.cluster.gpu_node.failures import act
from rose_dev.cluster.gpu_node.starting import ask_smi, state_of
from rose_dev.cluster.node import Node
from rose_dev.waiting import wait_until
from tests.gpu_node.machine import (
    COUNT,
    allocatable,
    device_files,
    inside,
    ready,
    sleeper,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

ALL = {f"nvidia{index}" for index in range(8)}
EVERYBODYS = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"}
MANAGED, OTHER = "gpu-managed", "gpu-tests"
VISIBLE = {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
INJECTED = {"nvidia.cdi.k8s.io/container.main": "management.nvidia.com/gpu=all"}


@pytest.fixture
def machine(gpu_node: Node) -> Iterator[Node]:
    for name in (MANAGED, OTHER):
        gpu_node.kubectl("create", "namespace", name, check=False)
    yield gpu_node
    for name in (MANAGED, OTHER):
        gpu_node.kubectl("delete", "pods", "--all", f"--namespace={name}", "--now")


def test_nvidias_own_programs_list_the_gpus(gpu_node: Node) -> None:
    listed = ask_smi(gpu_node, "--query-gpu=name,memory.total", "--format=csv,noheader")
    assert listed.splitlines() == ["NVIDIA H100 80GB HBM3, 81559 MiB"] * 8


def test_a_pod_gets_the_gpus_it_asks_for_and_no_others(machine: Node) -> None:
    two = sleeper("two", OTHER, container={"resources": {"limits": {"nvidia.com/gpu": 2}}})
    ready(machine, two)
    assert len(device_files(machine, two) & ALL) == 2


@pytest.mark.parametrize("handler", ["nvidia", "nvidia-cdi"])
def test_nvidias_runtime_shows_all_gpus_to_a_manager(machine: Node, handler: str) -> None:
    spec = {"runtimeClassName": handler}
    manager = sleeper(handler, OTHER, container=VISIBLE, spec=spec)
    ready(machine, manager)
    assert device_files(machine, manager) == ALL | EVERYBODYS
    assert inside(machine, manager, "python", "-c", COUNT) == "8\n"


def test_nvidias_nri_plugin_serves_the_namespaces_it_was_told_to(machine: Node) -> None:
    allowed = sleeper("allowed", MANAGED, annotations=INJECTED)
    refused = sleeper("refused", OTHER, annotations=INJECTED)
    ready(machine, allowed, refused)
    assert device_files(machine, allowed) == ALL | EVERYBODYS
    assert device_files(machine, refused) == set()


def test_a_lost_gpu_is_not_offered_until_it_is_back(gpu_node: Node) -> None:
    with state_of(gpu_node) as state:
        act(state, "lose", ["3"])
        wait_until(lambda: allocatable(gpu_node) == "7", "seven GPUs are offered", seconds=180)
        act(state, "restore", ["3"])
        wait_until(lambda: allocatable(gpu_node) == "8", "eight are", seconds=180)
