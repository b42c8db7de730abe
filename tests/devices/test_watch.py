"""What the guard learns of its GPUs, on the stand-in for NVML."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_agent.devices.fake_nvml import FakeGpu, FakeMemory, FakeNvml, FakeProcess
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.devices.owners import Owner, owner_of, parse
from rose_agent.devices.watch import STALE_SECONDS, DeviceWatch, Lent, Terms, View

GIB = 1 << 30
POD = "53099174-d551-433b-9350-adf44bee898e"
V1 = f"6:freezer:/kubepods/burstable/pod{POD}/79/rose-0a1b2c3d-slot-1\n0::/\n"
V2 = f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-79.scope\n"


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        (V1, Owner("slot-1", POD)),
        (V2, Owner("", POD)),
        ("0::/user.slice\n", Owner()),
        ("0::/rose-host\n", Owner()),
        ("", Owner()),
    ],
)
def test_a_process_belongs_to_its_engine_and_its_pod(text: str, owner: Owner) -> None:
    assert parse(text) == owner


def test_a_process_that_is_gone_is_unknown(tmp_path: Path) -> None:
    assert owner_of(5, tmp_path) is None
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "cgroup").write_text(V1)
    assert owner_of(5, tmp_path) == Owner("slot-1", POD)


class Node:
    """One GPU with a serving process, and whoever joins it."""

    def __init__(self) -> None:
        self.gpu = FakeGpu("GPU-a", FakeMemory(80 * GIB, 40 * GIB))
        self.gpu.processes = [FakeProcess(11, 40 * GIB)]
        self.library = FakeNvml([self.gpu])
        self.owners = {11: Owner(pod=POD)}
        self.now = 1000.0
        self.watch = DeviceWatch(NvmlDriver.open(self.library), lambda: self.now, self.owners.get)

    def engine(self, size: int, slot: str = "slot-1", pid: int = 22) -> None:
        self.gpu.processes.append(FakeProcess(pid, size))
        self.gpu.memory.used += size
        self.owners[pid] = Owner(slot, "host")

    def look(self, lent: Lent | None = None, terms: Terms | None = None) -> View:
        for uuid, reading in self.watch.read().items():
            self.watch.take(uuid, reading)
        return self.watch.look("pod", ("GPU-a",), terms or Terms(), lent or Lent(), None)


@pytest.fixture
def node() -> Node:
    return Node()


def test_what_an_engine_holds_is_not_servings_use(node: Node) -> None:
    assert node.look().lendable.bytes == 24 * GIB
    node.engine(20 * GIB)
    assert node.look(Lent(frozenset({"slot-1"}))).lendable.bytes == 24 * GIB


def test_the_residue_of_a_dormant_engine_is_charged(node: Node) -> None:
    node.engine(2 * GIB)
    lent = Lent(frozenset({"slot-1"}), residues=(2 * GIB,))
    assert node.look(lent).lendable.bytes == 22 * GIB


def test_without_process_lists_servings_use_is_learned_only_while_nothing_is_lent(
    node: Node,
) -> None:
    node.library.unsupported = {
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses",
    }
    lent = Lent(frozenset({"slot-1"}))
    assert node.look(lent).lendable.bytes is None
    assert node.look().lendable.bytes == 24 * GIB
    node.engine(20 * GIB)
    assert node.look(lent).lendable.bytes == 24 * GIB


def test_an_engine_that_should_be_gone_means_the_gpu_was_not_vacated(node: Node) -> None:
    node.engine(GIB)
    assert node.look(Lent(frozenset({"slot-1"}))).refusal == ""
    view = node.look()
    assert view.refusal == "NotVacated"
    assert "slot-1" in view.message


def test_an_unfit_gpu_is_refused_with_its_word(node: Node) -> None:
    node.gpu.mig = True
    assert node.look().refusal == "MigEnabled"


def test_a_gpu_that_draws_too_much_is_refused(node: Node) -> None:
    assert node.look(terms=Terms(max_power_watts=250)).refusal == "PowerLimit"
    assert Node().look(terms=Terms(max_power_watts=350)).refusal == ""


def test_figures_that_are_old_are_unknown(node: Node) -> None:
    assert node.look().refusal == ""
    node.now += STALE_SECONDS
    view = node.watch.look("pod", ("GPU-a",), Terms(), Lent(), None)
    assert (view.refusal, view.lendable.bytes) == ("DeviceUnknown", None)


def test_a_driver_that_fails_makes_everything_unknown(node: Node) -> None:
    node.look()
    node.library.fail["nvmlDeviceGetMemoryInfo"] = node.library.NVML_ERROR_GPU_IS_LOST
    node.now += STALE_SECONDS
    assert node.look().refusal == "DeviceUnknown"


def test_a_gpu_nobody_lists_is_unknown(node: Node) -> None:
    view = node.watch.look("pod", ("GPU-z",), Terms(), Lent(), None)
    assert (view.refusal, view.lendable.bytes) == ("DeviceUnknown", None)


def test_little_free_memory_is_pressure(node: Node) -> None:
    node.engine(38 * GIB)
    assert node.look(Lent(frozenset({"slot-1"}))).budget.pressure
    node.watch.forget("pod")
    node.gpu.memory.used = 40 * GIB
    assert not node.look(Lent(frozenset({"slot-1"}))).budget.pressure
