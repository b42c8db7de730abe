"""What the kubelet has allocated: its answer as its own library encodes it, and its absence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_agent.pods import podresources
from rose_agent.pods.claims import ClaimingPod, KubeletClaims, WrittenClaims, own_namespace
from rose_agent.pods.podresources import MalformedAnswer, PodResources, read
from rose_core.devices.ownership import (
    DRA_DRIVER,
    AllocatedDevice,
    Allocation,
    Claim,
    DriverGpu,
    Proof,
)
from rose_core.identity import GpuUuid
from rose_dev.waiting import until
from tests.agent.kubelet import FakeKubelet, encode

# Encoded by k8s.io/kubelet v0.36.3: a pod with two GPUs, CPUs, memory and
# topology; one with a DRA claim of a share; one without devices.
RECORDED = bytes.fromhex(
    "0a9d010a0773657276696e671204636861741a8b010a06656e67696e65126a0a0e6e76696469612e636f6d2f6770"
    "7512284750552d33386534313065362d383935312d356333302d613632642d346363366632363839656138122847"
    "50552d34323733313963362d343961662d353665652d393539662d6339643233323633643236311a040a0208011a"
    "040001ac02220f0a066d656d6f7279108080808080200a770a07636c61696d6564120872657365617263681a620a"
    "06656e67696e652a581204677075731a08726573656172636822460a210a1f6b38732e6770752e6e76696469612e"
    "636f6d2f6465766963653d6770752d32120e6770752e6e76696469612e636f6d1a066e6f64652d3122056770752d"
    "322a0273310a1b0a05706c61696e120b6b7562652d73797374656d1a050a03646e73"
)
A = GpuUuid("GPU-38e410e6-8951-5c30-a62d-4cc6f2689ea8")
B = GpuUuid("GPU-427319c6-49af-56ee-959f-c9d23263d261")

GPUS = (DriverGpu(A, 0, 0), DriverGpu(B, 1, 1))
SERVING = Allocation("chat", "serving", (AllocatedDevice("nvidia.com/gpu", A),))


@pytest.fixture
async def kubelet(short_dir: Path) -> AsyncIterator[FakeKubelet]:
    made = FakeKubelet(short_dir / "kubelet.sock")
    yield made
    await made.stop()


@contextlib.asynccontextmanager
async def following(
    kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PodResources]:
    monkeypatch.setattr(podresources, "PERIOD_SECONDS", 0.01)
    resources = PodResources(kubelet.socket)
    task = asyncio.create_task(resources.run())
    yield resources
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_the_kubelets_own_encoding_is_read() -> None:
    assert read(RECORDED) == (
        Allocation(
            "chat",
            "serving",
            (AllocatedDevice("nvidia.com/gpu", A), AllocatedDevice("nvidia.com/gpu", B)),
        ),
        Allocation(
            "research",
            "claimed",
            (AllocatedDevice(DRA_DRIVER, "gpu-2", ("k8s.gpu.nvidia.com/device=gpu-2",)),),
        ),
    )


def test_the_fake_kubelet_encodes_what_is_read() -> None:
    allocations = read(RECORDED)
    assert read(encode(allocations)) == allocations


def by_uuid(number: int, uuid: GpuUuid) -> AllocatedDevice:
    """As a DRA driver prepares a GPU whose CDI device is named by its uuid."""
    return AllocatedDevice(DRA_DRIVER, f"gpu-{number}", (f"nvidia.com/gpu={uuid}",))


def test_each_device_of_a_claim_is_a_gpu_of_its_own() -> None:
    """The kubelet repeats at the second device the CDI device of the first."""
    claimed = Allocation("research", "trainer", (by_uuid(0, A), by_uuid(1, B)))
    assert read(encode([claimed])) == (claimed,)
    found = claims(read(encode([claimed])))
    assert found.of(ClaimingPod("research", "trainer")).gpus == (A, B)


def test_the_second_gpu_of_another_teams_claim_is_not_lent() -> None:
    claimed = Allocation("research", "trainer", (by_uuid(1, B), by_uuid(0, A)))
    found = claims(read(encode([SERVING, claimed]))).of(ClaimingPod("chat", "serving"))
    assert found.refusal == "SharedGpu"
    assert "research/trainer" in found.message


def test_an_answer_of_no_pods_is_none() -> None:
    assert read(b"") == ()


@pytest.mark.parametrize("cut", [1, 2, 3, 40, 161, len(RECORDED) - 1])
def test_an_answer_that_is_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(MalformedAnswer):
        read(RECORDED[:cut])


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    with contextlib.suppress(MalformedAnswer):
        read(data)


async def test_allocations_are_followed(
    kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet.allocations = [SERVING]
    await kubelet.start()
    async with following(kubelet, monkeypatch) as resources:
        await until(lambda: resources.allocations == (SERVING,))
        assert resources.problem == ""
        kubelet.allocations = []
        await until(lambda: resources.allocations == ())


async def test_a_kubelet_that_goes_away_changes_nothing_until_it_is_back(
    kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet.allocations = [SERVING]
    await kubelet.start()
    async with following(kubelet, monkeypatch) as resources:
        await until(lambda: resources.allocations == (SERVING,))
        await kubelet.stop()
        await until(lambda: bool(resources.problem))
        assert resources.allocations == (SERVING,)
        kubelet.allocations = []
        await kubelet.start()
        await until(lambda: resources.allocations == (), seconds=30)
        assert resources.problem == ""


async def test_without_a_socket_the_reason_is_said(
    kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(kubelet, monkeypatch) as resources:
        await until(lambda: resources.asked)
        assert resources.allocations is None
        assert str(kubelet.socket) in resources.problem


async def test_an_answer_that_cannot_be_read_is_none(
    kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet.broken = RECORDED[:-1]
    await kubelet.start()
    async with following(kubelet, monkeypatch) as resources:
        await until(lambda: kubelet.asked > 1 and resources.asked)
        assert (resources.allocations, bool(resources.problem)) == (None, True)


# --- claims


def claims(
    allocations: tuple[Allocation, ...] | None,
    used: tuple[GpuUuid, ...] = (),
    *,
    asked: bool = True,
) -> KubeletClaims:
    resources = PodResources()
    resources.allocations, resources.asked = allocations, asked
    resources.problem = "" if allocations is not None else "no socket"
    return KubeletClaims(resources, lambda: GPUS, lambda _: used, frozenset({"rose-system"}))


def test_the_annotation_counts_with_the_static_driver_alone() -> None:
    bait = ClaimingPod("evil", "bait", annotation=A, pids=(7,))
    assert WrittenClaims(lambda: (A, B)).of(bait) == Claim((A,), Proof.WRITTEN)
    for real in (claims((SERVING,)), claims(None), claims((SERVING,), (B,))):
        assert A not in real.of(bait).gpus


def test_a_pod_without_an_allocation_has_no_gpu_whatever_it_computes_on() -> None:
    found = claims((SERVING,), used=(B,)).of(ClaimingPod("evil", "bait", pids=(7,)))
    assert (found.gpus, found.refusal) == ((), "NoGPU")
    assert "no GPU to pod evil/bait" in found.message


def test_a_pods_gpus_are_known_before_it_runs() -> None:
    found = claims((SERVING,)).of(ClaimingPod("chat", "serving"))
    assert found == Claim((A,), Proof.ALLOCATED)


def test_without_the_kubelet_processes_tell_and_the_proof_is_called_weak() -> None:
    made = claims(None, used=(B,))
    assert made.of(ClaimingPod("chat", "serving", pids=(7,))) == Claim((B,), Proof.PROCESSES)
    assert "proves less" in made.weakness
    assert claims((SERVING,)).weakness == ""


def test_until_the_kubelet_was_asked_nothing_is_known() -> None:
    found = claims(None, used=(B,), asked=False).of(ClaimingPod("chat", "serving", pids=(7,)))
    assert (found.gpus, found.refusal) == ((), "DeviceUnknown")


def test_a_pod_that_has_ended_shares_no_gpu() -> None:
    done = Allocation("chat", "job", SERVING.devices)
    asked = ClaimingPod("chat", "serving", ended=frozenset({"chat/job"}))
    assert claims((SERVING, done)).of(asked).refusal == ""
    assert claims((SERVING, done)).of(ClaimingPod("chat", "serving")).refusal == "SharedGpu"


def test_the_static_driver_pairs_pods_by_age() -> None:
    made = WrittenClaims(lambda: (A, B))
    assert [made.of(ClaimingPod("n", "p", older=age)).gpus for age in range(3)] == [(A,), (B,), ()]


def test_the_own_namespace_is_the_service_accounts(tmp_path: Path) -> None:
    assert own_namespace(tmp_path / "missing") == frozenset()
    (tmp_path / "namespace").write_text("rose-system\n")
    assert own_namespace(tmp_path / "namespace") == {"rose-system"}
