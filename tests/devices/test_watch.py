"""What the guard learns of its GPUs, through NVML's C ABI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rose_agent.devices.driver import GpuProcess, Memory
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.devices.owners import Owner, owner_of, parse
from rose_agent.devices.watch import (
    STALE_SECONDS,
    DeviceWatch,
    LentState,
    PoolGpuTerms,
    ReplicaGpus,
)
from rose_core.devices.health import Vitals
from rose_core.devices.memory import Headroom
from rose_core.devices.ownership import Claim, GpuParty, Proof
from rose_core.identity import GpuUuid, PodUid, SlotUid
from rose_dev.gpu.state import DRIVER_NOT_LOADED, NOT_SUPPORTED, State
from rose_dev.waiting import until

SLOT = SlotUid("slot-1")

GIB = 1 << 30
FIFTH = PoolGpuTerms(headroom=Headroom(percent=20))
POD = PodUid("53099174-d551-433b-9350-adf44bee898e")
OTHER, HOST = PodUid(POD.replace("5", "6")), PodUid(POD.replace("5", "7"))
V1 = f"6:freezer:/kubepods/burstable/pod{POD}/79/rose-0a1b2c3d-slot-1\n0::/\n"
V2 = f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-79.scope\n"


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        (V1, Owner(SLOT, POD)),
        (V2, Owner(SlotUid(""), POD)),
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
    assert owner_of(5, tmp_path) == Owner(SLOT, POD)


class Node:
    """GPUs of 80 GiB, serving on the first of them, and whoever joins it."""

    def __init__(self, nvml: State) -> None:
        self.nvml, self.gpu = nvml, nvml.gpus[0]
        for gpu in nvml.gpus:
            gpu.raw.memory_total, gpu.raw.memory_used = 80 * GIB, 0
        self.gpu.start(11, 40 * GIB)
        self.owners = {11: Owner(pod=POD)}
        self.commands: dict[int, str] = {}
        self.names = {POD: "chat/serving", OTHER: "evil/bait", HOST: "rose-system/host"}
        self.now = 1000.0
        self.drive(NvmlDriver.open())

    def drive(self, driver: NvmlDriver, clock: Callable[[], float] | None = None) -> None:
        """Watch through this driver instead, by this clock."""
        self.watch = DeviceWatch(
            driver,
            clock or (lambda: self.now),
            self.owners.get,
            lambda pid: self.commands.get(pid, "python"),
        )

    def engine(self, size: int, slot: str = "slot-1", pid: int = 22) -> None:
        self.gpu.start(pid, size)
        self.owners[pid] = Owner(SlotUid(slot), HOST)

    def read(self) -> None:
        for uuid, reading in self.watch.read().items():
            self.watch.take(uuid, reading)

    def look(
        self, lent: LentState | None = None, terms: PoolGpuTerms | None = None, gpus: int = 1
    ) -> ReplicaGpus:
        self.read()
        return self.see(tuple(gpu.uuid for gpu in self.nvml.gpus[:gpus]), lent, terms)

    def see_alone(self, uuid: str) -> int:
        self.read()
        room = self.see((uuid,)).lendable.bytes
        assert room is not None
        return room

    def see(
        self,
        uuids: tuple[str, ...],
        lent: LentState | None = None,
        terms: PoolGpuTerms | None = None,
    ) -> ReplicaGpus:
        """Without reading anew."""
        claim = Claim(tuple(GpuUuid(uuid) for uuid in uuids), Proof.ALLOCATED)
        party = GpuParty(POD, names=self.names, platform=frozenset({HOST}), proof=claim.proof)
        return self.watch.view(claim, party, terms or FIFTH, lent or LentState(), None)


@pytest.fixture
def node(nvml: State) -> Node:
    return Node(nvml)


def test_what_an_engine_holds_is_not_servings_use(node: Node) -> None:
    assert node.look().lendable.bytes == 24 * GIB
    node.engine(20 * GIB)
    assert node.look(LentState(frozenset({SLOT}))).lendable.bytes == 24 * GIB


def test_the_residue_of_a_dormant_engine_is_charged(node: Node) -> None:
    node.engine(2 * GIB)
    lent = LentState(frozenset({SLOT}), residues=(2 * GIB,))
    assert node.look(lent).lendable.bytes == 22 * GIB


def test_without_process_lists_servings_use_is_learned_only_while_nothing_is_lent(
    node: Node,
) -> None:
    for kind in ("Compute", "MPSCompute"):
        node.nvml.fail(f"nvmlDeviceGet{kind}RunningProcesses_v3", NOT_SUPPORTED)
    lent = LentState(frozenset({SLOT}))
    assert node.look(lent).lendable.bytes is None
    assert node.look().lendable.bytes == 24 * GIB
    node.engine(20 * GIB)
    assert node.look(lent).lendable.bytes == 24 * GIB


def test_an_engine_that_should_be_gone_means_the_gpu_was_not_vacated(node: Node) -> None:
    node.engine(GIB)
    assert node.look(LentState(frozenset({SLOT}))).refusal == ""
    view = node.look()
    assert view.refusal == "NotVacated"
    assert "slot-1" in view.message


def test_a_reading_of_before_does_not_accuse_an_engine_that_has_gone_since(node: Node) -> None:
    """With 20 ms a call a reading is three seconds old when the next one comes."""
    node.engine(GIB)
    uuid = (node.gpu.uuid,)
    assert node.look(LentState(frozenset({SLOT}))).refusal == ""
    node.gpu.end(22)
    node.now += 2.0
    assert node.see(uuid, LentState()).refusal == "", "the reading is of when it was still there"
    node.now += 1.0
    node.engine(GIB)
    assert node.look().refusal == "NotVacated", "this reading began after it had gone"


class Between(NvmlDriver):
    """Something happens just after the processes of a GPU were listed."""

    happens: Callable[[], None] = staticmethod(lambda: None)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        found = super().processes(GpuUuid(uuid))
        self.happens()
        self.happens = lambda: None
        return found


@pytest.mark.parametrize("grows", [True, False])
def test_an_engine_that_takes_or_frees_memory_during_a_reading_is_not_servings_peak(
    node: Node, grows: bool
) -> None:
    """A peak counts for a day: one reading between two calls would end lending until tomorrow."""
    lent = LentState(frozenset({SLOT}))
    driver = Between.open()
    assert isinstance(driver, Between)
    node.drive(driver)
    assert node.look(lent).lendable.bytes == 24 * GIB
    if grows:
        driver.happens = lambda: node.engine(20 * GIB)
    else:
        node.engine(20 * GIB)
        before = driver.memory

        def freed(uuid: str) -> Memory:
            found = before(GpuUuid(uuid))
            node.gpu.end(22)
            driver.memory = before  # type: ignore[method-assign]
            return found

        driver.memory = freed  # type: ignore[method-assign]
    assert node.look(lent).lendable.bytes == 24 * GIB


def test_an_engine_that_nobody_lists_is_not_servings_peak_once_it_has_gone(node: Node) -> None:
    for kind in ("Compute", "MPSCompute"):
        node.nvml.fail(f"nvmlDeviceGet{kind}RunningProcesses_v3", NOT_SUPPORTED)
    uuid = (node.gpu.uuid,)
    assert node.look().lendable.bytes == 24 * GIB
    node.engine(20 * GIB)
    node.now += 1.0
    node.look(LentState(frozenset({SLOT})))
    node.gpu.end(22)
    node.now += 1.0
    assert node.see(uuid).lendable.bytes == 24 * GIB, "the reading is of when it was there"
    node.now += 1.0
    assert node.look().lendable.bytes == 24 * GIB


def test_an_unfit_gpu_is_refused_with_its_word(node: Node) -> None:
    node.gpu.raw.mig_current = 1
    assert node.look().refusal == "MigEnabled"


def test_a_gpu_that_draws_too_much_is_refused(node: Node) -> None:
    node.gpu.raw.power_milliwatts = 300_000
    assert node.look(terms=PoolGpuTerms(max_power_watts=350)).refusal == ""
    assert node.look(terms=PoolGpuTerms(max_power_watts=250)).refusal == "PowerLimit"


def test_figures_that_are_old_are_unknown(node: Node) -> None:
    assert node.look().refusal == ""
    node.now += STALE_SECONDS
    view = node.see((node.gpu.uuid,))
    assert (view.refusal, view.lendable.bytes) == ("DeviceUnknown", None)
    assert "older than 10 s" in view.message


def test_a_driver_that_fails_makes_everything_unknown(node: Node) -> None:
    node.look()
    node.nvml.fail("nvmlDeviceGetMemoryInfo", DRIVER_NOT_LOADED)
    view = node.look()
    assert view.refusal == "DeviceUnknown"
    assert "Driver Not Loaded" in view.message


def test_a_gpu_nobody_lists_is_unknown_with_the_number_of_those_that_are(node: Node) -> None:
    node.read()
    view = node.see(("GPU-z",))
    assert (view.refusal, view.lendable.bytes) == ("DeviceUnknown", None)
    assert "no GPU GPU-z among the 8" in view.message


def test_little_free_memory_is_pressure(node: Node) -> None:
    node.engine(38 * GIB)
    assert node.look(LentState(frozenset({SLOT}))).budget.pressure
    node.watch.forget(POD)
    node.gpu.raw.memory_used = 40 * GIB
    assert not node.look(LentState(frozenset({SLOT}))).budget.pressure


# --- several GPUs


def test_one_lost_gpu_takes_out_itself_and_nothing_else(node: Node) -> None:
    node.read()
    lost, uuids = node.nvml.gpus[3], [gpu.uuid for gpu in node.nvml.gpus]
    lost.lose()
    for _ in range(30):
        node.now += 1.0
        node.read()
    found = {uuid: node.see((uuid,)).refusal for uuid in uuids}
    assert found == {uuid: "DeviceUnknown" if uuid == lost.uuid else "" for uuid in uuids}
    assert "lost" in node.see((lost.uuid,)).message
    assert node.see(tuple(uuids)).refusal == "DeviceUnknown", "a replica of all eight is out"
    node.nvml.gpus[7].fault(48)
    node.read()
    assert node.see((uuids[7],)).refusal == "XidError", "the others' faults are still heard"
    lost.recover()
    for _ in range(31):
        node.now += 1.0
        node.read()
    assert node.see((lost.uuid,)).refusal == ""


def test_a_gpu_that_does_not_answer_is_asked_less_often(node: Node) -> None:
    node.nvml.fail("nvmlDeviceGetComputeRunningProcesses_v3", 999)
    node.nvml.forget_calls()
    for _ in range(100):
        node.now += 1.0
        node.read()
    asked = node.nvml.calls()["nvmlDeviceGetComputeRunningProcesses_v3"]
    assert asked <= 8 * 9, "after 1, 2, 4, 8, 16 and then every 30 seconds"


def test_a_gpu_that_answers_slowly_takes_out_itself_and_nothing_else(node: Node) -> None:
    """Each of its answers takes a second: ten of them would make all figures old."""
    slow, *rest = node.nvml.gpus
    others = [gpu.uuid for gpu in rest]

    class Slow(NvmlDriver):
        def memory(self, uuid: str) -> Memory:
            node.now += 1.0 if uuid == slow.uuid else 0.0
            return super().memory(GpuUuid(uuid))

        def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
            node.now += 2.0 if uuid == slow.uuid else 0.0
            return super().processes(GpuUuid(uuid))

        def vitals(self, uuid: str) -> Vitals:
            node.now += 8.0 if uuid == slow.uuid else 0.0
            return super().vitals(GpuUuid(uuid))

    node.drive(Slow.open())
    for _ in range(60):
        node.read()
        assert {node.see((uuid,)).refusal for uuid in others} == {""}
        node.now += 1.0
    view = node.see((slow.uuid,))
    assert view.refusal == "DeviceUnknown"
    assert "answers take long: 1.0 s so far, and 0.75 s are its share" in view.message


@pytest.mark.parametrize("milliseconds", [20, 50])
def test_gpus_that_all_answer_slowly_are_fit_while_a_reading_fits_into_its_time(
    nvml: State, milliseconds: int
) -> None:
    """Time passes with each call of NVML, of which there are twelve and more a GPU."""
    node = Node(nvml)
    uuids = [gpu.uuid for gpu in nvml.gpus]
    node.drive(NvmlDriver.open(), lambda: node.now + nvml.total_calls * milliseconds / 1000)
    found = set()
    for _ in range(30):
        node.read()
        found |= {node.see((uuid,)).refusal for uuid in uuids}
        node.now += 1.0
    assert found == {""}


def test_the_driver_may_be_loaded_anew_under_a_running_guard(node: Node) -> None:
    assert node.look().refusal == ""
    node.nvml.unload_driver()
    node.now += STALE_SECONDS
    assert node.look().refusal == "DeviceUnknown"
    node.nvml.load_driver()
    node.now += STALE_SECONDS
    assert node.look().refusal == ""


def test_of_several_gpus_the_tightest_says_what_may_be_lent(node: Node) -> None:
    """An engine takes its memory on one of them; the sum would give away that one's headroom."""
    for gpu, used in zip(node.nvml.gpus[1:], (60, 10, 10, 10, 10, 10, 10), strict=True):
        gpu.start(11, used * GIB)
    alone = {gpu.uuid: node.see_alone(gpu.uuid) for gpu in node.nvml.gpus}
    together = node.look(gpus=8)
    assert together.lendable.bytes == min(alone.values()) == alone[node.nvml.gpus[1].uuid]
    assert node.nvml.gpus[1].uuid in together.lendable.message


def test_an_engine_is_held_to_its_size_on_each_gpu(node: Node) -> None:
    node.engine(10 * GIB)
    node.nvml.gpus[1].start(22, 2 * GIB)
    view = node.look(LentState(frozenset({SLOT})), gpus=2)
    assert view.held == {"slot-1": 10 * GIB}


# --- whose the GPU is


def test_a_process_of_another_pod_refuses_the_loan_by_the_pods_name(node: Node) -> None:
    node.gpu.start(33, GIB)
    node.owners[33] = Owner(pod=OTHER)
    view = node.look()
    assert view.refusal == "ForeignProcess"
    assert "pod evil/bait (process 33)" in view.message
    node.gpu.end(33)
    assert node.look().refusal == ""


def test_a_gpu_that_only_somebody_else_uses_is_not_its_owners_to_lend(node: Node) -> None:
    node.gpu.end(11)
    node.gpu.start(33, GIB)
    node.owners[33] = Owner(pod=OTHER)
    assert node.look().refusal == "ForeignProcess"


def test_the_platforms_own_processes_are_no_strangers(node: Node) -> None:
    node.gpu.start(33, GIB)
    node.owners[33] = Owner(pod=HOST)
    assert node.look().refusal == ""


def test_a_process_of_no_pod_is_named_by_its_command(node: Node) -> None:
    node.gpu.start(33, GIB)
    node.owners[33], node.commands[33] = Owner(), "miner"
    assert "process 33 (miner)" in node.look().message
    node.commands[33] = "nvidia-cuda-mps"
    assert node.look().refusal == "ForeignProcess"


def test_a_process_that_cannot_be_seen_refuses_once_it_stays(node: Node) -> None:
    node.gpu.start(33, GIB)
    assert node.look().refusal == "", "it may have ended just now"
    view = node.look()
    assert view.refusal == "ForeignProcess"
    assert "cannot be seen" in view.message


def test_a_claim_that_is_refused_closes_the_gate(node: Node) -> None:
    node.read()
    claim = Claim((GpuUuid(node.gpu.uuid),), Proof.ALLOCATED, "SharedGpu", "also allocated to a/b")
    view = node.watch.view(claim, GpuParty(POD), PoolGpuTerms(), LentState(), None)
    assert (view.refusal, view.message) == ("SharedGpu", "also allocated to a/b")


# --- who asks the driver, and who waits for it


async def test_only_the_reader_asks_the_driver(node: Node) -> None:
    uuids = tuple(gpu.uuid for gpu in node.nvml.gpus)
    node.read()
    node.nvml.forget_calls()
    for _ in range(100):
        for uuid in uuids:
            node.see((uuid,))
        node.see(uuids)
        node.watch.used_by((11, 22))
        assert node.watch.gpus
    assert node.nvml.calls() == {}


async def test_nobody_waits_for_a_driver_that_answers_slowly(node: Node) -> None:
    """If a look asked the driver, there would be fewer looks than calls."""
    uuids = tuple(gpu.uuid for gpu in node.nvml.gpus)
    node.nvml.delay(0.03)
    node.nvml.forget_calls()
    reader = asyncio.create_task(node.watch.run())
    await until(lambda: node.nvml.total_calls > 0)
    looks = 0
    while not node.watch.used_by((11,)):  # until the first GPU has been read
        for uuid in uuids:
            node.see((uuid,))
            looks += 1
        await asyncio.sleep(0.005)
    assert looks > node.nvml.total_calls
    assert node.see((uuids[0],)).refusal == ""
    assert node.see((uuids[7],)).refusal == "DeviceUnknown", "the last one is still to be read"
    node.nvml.delay(0.0)
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader


def test_a_pods_gpus_are_those_that_its_processes_are_on(node: Node) -> None:
    node.nvml.gpus[5].start(12, GIB)
    node.read()
    assert node.watch.used_by((11, 12)) == (node.gpu.uuid, node.nvml.gpus[5].uuid)
    assert node.watch.used_by((99,)) == ()
