"""Whose a GPU is: what kubelets call devices, who shares them, who trespasses."""

from __future__ import annotations

import pytest

from rose_core.devices.ownership import (
    DRA_DRIVER,
    AllocatedDevice,
    AllocatedShare,
    Allocation,
    Claim,
    DriverGpu,
    GpuParty,
    OnGpu,
    Proof,
    claim,
    find,
    stranger,
)
from rose_core.identity import GpuUuid, PodUid, SlotUid

POD_EVIL = PodUid("evil")
POD_HOST = PodUid("host")
POD_OWN = PodUid("own")
SLOT = SlotUid("slot-1")

A = GpuUuid("GPU-38e410e6-8951-5c30-a62d-4cc6f2689ea8")
B = GpuUuid("GPU-427319c6-49af-56ee-959f-c9d23263d261")

# The second GPU's device file has another number than its index.
GPUS = (DriverGpu(A, 0, 0), DriverGpu(B, 1, 5))
GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("device", "uuid", "part"),
    [
        (AllocatedDevice(GPU, A), A, AllocatedShare.WHOLE),
        (AllocatedDevice("acme.example/h100", A), A, AllocatedShare.WHOLE),
        (AllocatedDevice(GPU, "1"), B, AllocatedShare.WHOLE),
        (AllocatedDevice(GPU, "nvidia5"), B, AllocatedShare.WHOLE),
        (AllocatedDevice(DRA_DRIVER, "gpu-5"), B, AllocatedShare.WHOLE),
        (
            AllocatedDevice("dra.acme.example", "dev7", (f"acme.example/gpu={A}",)),
            A,
            AllocatedShare.WHOLE,
        ),
        (AllocatedDevice(GPU, "GPU-a"), "GPU-a", AllocatedShare.WHOLE),
        (AllocatedDevice(f"{GPU}.shared", f"{A}::3"), A, AllocatedShare.SHARE),
        (AllocatedDevice(GPU, "1::0"), B, AllocatedShare.SHARE),
        (AllocatedDevice(GPU, "nvidia5/vgpu1"), B, AllocatedShare.SHARE),
        (AllocatedDevice("nvidia.com/mig-1g.10gb", f"MIG-{A}"), "", AllocatedShare.SLICE),
        (AllocatedDevice(GPU, "nvidia0/gi3"), "", AllocatedShare.SLICE),
        (AllocatedDevice(DRA_DRIVER, "gpu-0-mig-1g.10gb-19-0"), "", AllocatedShare.SLICE),
        (AllocatedDevice(GPU, "nvidia9"), "", AllocatedShare.WHOLE),
        (AllocatedDevice(GPU, "9"), "", AllocatedShare.WHOLE),
    ],
)
def test_a_device_is_found_by_what_its_plugin_calls_it(
    device: AllocatedDevice, uuid: str, part: AllocatedShare
) -> None:
    found = find(device, GPUS)
    assert found is not None
    assert (found.uuid, found.part) == (uuid, part)


@pytest.mark.parametrize(
    "device",
    [
        AllocatedDevice("rdma.example/hca", "1"),
        AllocatedDevice("rdma.example/hca", "nvidia0"),
        AllocatedDevice("dra.net.example", "gpu-0"),
        AllocatedDevice("nvidia.com/nvswitch", "nvidia-nvswitch0"),
    ],
)
def test_other_devices_are_no_gpus(device: AllocatedDevice) -> None:
    assert find(device, GPUS) is None


def pod(name: str, *devices: AllocatedDevice, namespace: str = "chat") -> Allocation:
    return Allocation(namespace, name, devices)


def test_several_gpus_of_a_pod_are_its_own() -> None:
    serving = pod(
        "serving",
        AllocatedDevice(GPU, A),
        AllocatedDevice("rdma.example/hca", "1"),
        AllocatedDevice(GPU, B),
    )
    assert claim("chat", "serving", [serving], GPUS) == Claim((A, B), Proof.ALLOCATED)


def test_a_gpu_given_out_in_shares_is_refused_by_name() -> None:
    each = [pod("a", AllocatedDevice(GPU, f"{A}::0")), pod("b", AllocatedDevice(GPU, f"{A}::1"))]
    found = claim("chat", "a", each, GPUS)
    assert found.refusal == "SharedGpu"
    assert "chat/b" in found.message
    alone = claim("chat", "a", each[:1], GPUS)
    assert alone.refusal == "SharedGpu", "the other shares may be given out at any moment"


def test_a_gpu_of_two_pods_is_refused_for_both_by_name() -> None:
    each = [pod("a", AllocatedDevice(DRA_DRIVER, "gpu-0")), pod("b", AllocatedDevice(GPU, A))]
    for name, other in (("a", "chat/b"), ("b", "chat/a")):
        found = claim("chat", name, each, GPUS)
        assert (found.gpus, found.refusal) == ((A,), "SharedGpu")
        assert other in found.message


def test_the_platforms_administrative_claims_share_nothing() -> None:
    """Those of DRA's admin access look like any other to the kubelet."""
    guard = pod("rose-agent", AllocatedDevice(DRA_DRIVER, "gpu-0"), namespace="rose-system")
    each = [pod("a", AllocatedDevice(GPU, A)), guard]
    assert claim("chat", "a", each, GPUS, frozenset({"rose-system"})).refusal == ""
    assert claim("chat", "a", each, GPUS).refusal == "SharedGpu"


def test_a_slice_is_refused_with_its_name() -> None:
    found = claim("chat", "a", [pod("a", AllocatedDevice("nvidia.com/mig-1g.10gb", "MIG-1"))], GPUS)
    assert found.refusal == "MigEnabled"
    assert "MIG-1" in found.message


def test_a_gpu_that_the_driver_does_not_list_is_unknown_with_numbers() -> None:
    found = claim("chat", "a", [pod("a", AllocatedDevice(GPU, "nvidia7"))], GPUS)
    assert (found.gpus, found.refusal) == ((), "DeviceUnknown")
    assert "nvidia7" in found.message
    assert "2 GPUs" in found.message


# --- strangers

PARTY = GpuParty(
    pod=POD_OWN,
    pids=frozenset({4}),
    names={POD_OWN: "chat/a", POD_EVIL: "evil/bait", POD_HOST: "rose-system/engine-host"},
    platform=frozenset({POD_HOST}),
    proof=Proof.ALLOCATED,
)


@pytest.mark.parametrize(
    "process",
    [
        OnGpu(4),
        OnGpu(9, pod=POD_OWN),
        OnGpu(9, pod=POD_HOST),
        OnGpu(9, slot=SLOT, pod=POD_HOST),
        OnGpu(9, slot=SLOT),
    ],
)
def test_the_replica_the_platform_and_our_engines_are_no_strangers(process: OnGpu) -> None:
    assert stranger(process, PARTY) == ""


@pytest.mark.parametrize(
    ("process", "named"),
    [
        (OnGpu(9, pod=POD_EVIL), "pod evil/bait (process 9)"),
        (OnGpu(9, pod=PodUid("gone")), "pod gone (process 9)"),
        (OnGpu(9, slot=SLOT, pod=POD_EVIL), "pod evil/bait"),
        (OnGpu(9, command="miner"), "process 9 (miner)"),
        (OnGpu(9, seen=False), "cannot be seen"),
        (OnGpu(9, command="nvidia-cuda-mps-server"), "belongs to no pod"),
    ],
)
def test_everybody_else_is_named(process: OnGpu, named: str) -> None:
    assert named in stranger(process, PARTY)


def test_the_mps_server_of_a_node_serves_pools_that_share_by_it() -> None:
    server = OnGpu(9, command="nvidia-cuda-mps-server")
    assert stranger(server, GpuParty(POD_OWN, mps=True)) == ""
    pretender = OnGpu(9, pod=POD_EVIL, command="nvidia-cuda-mps-server")
    assert stranger(pretender, GpuParty(POD_OWN, names=PARTY.names, mps=True)) != ""


def test_a_replica_from_a_file_may_share_its_gpu_with_processes_of_no_pod() -> None:
    assert stranger(OnGpu(9), GpuParty(POD_OWN, proof=Proof.WRITTEN)) == ""
    assert stranger(OnGpu(9, pod=POD_EVIL), GpuParty(POD_OWN, proof=Proof.WRITTEN)) != ""
