"""What a node lacks for a pool: unspoken is missing where an owner has to opt in."""

from __future__ import annotations

from rose_core.devices.capabilities import (
    Capability,
    MissingCapability,
    compute_needs,
    first_missing,
    memory_needs,
)

MPS = compute_needs("MPS")
GPUS = ("GPU-a", "GPU-b")


def test_time_slicing_of_reserved_memory_needs_nothing() -> None:
    assert compute_needs("TimeSlice") == ()
    assert memory_needs("Reserved", "None") == ()
    assert first_missing({}, (), GPUS) is None


def test_what_an_engine_host_does_not_speak_of_is_missing() -> None:
    missing = first_missing({}, MPS, GPUS)
    assert missing is not None
    assert (missing.capability, missing.reason) == (Capability.MPS, "MpsUnavailable")


def test_the_gpus_own_word_comes_before_the_nodes() -> None:
    found = {"MPS": "MpsUnavailable: none", "MPS/GPU-a": "", "MPS/GPU-b": "MpsFault: crashed"}
    assert first_missing(found, MPS, ("GPU-a",)) is None
    assert first_missing(found, MPS, GPUS) == MissingCapability(
        Capability.MPS, "MpsFault", "crashed"
    )
    assert first_missing(found, MPS, ("GPU-c",)) == MissingCapability(
        Capability.MPS, "MpsUnavailable", "none"
    )


def test_a_host_that_cannot_reach_its_gpus_lends_none() -> None:
    found = {"DeviceAccess": "DeviceAccess: no /dev/nvidia-uvm"}
    missing = first_missing(found, (), GPUS)
    assert missing == MissingCapability(
        Capability.DEVICE_ACCESS, "DeviceAccess", "no /dev/nvidia-uvm"
    )


def test_each_memory_choice_needs_its_own_capability() -> None:
    wanted = memory_needs("Elastic", "Driver")
    assert set(wanted) == {Capability.ELASTIC, Capability.DRIVER_LIMIT}
    found = {"ElasticMemory": "", "DriverMemoryLimit": "DriverLimitUnavailable: old driver"}
    missing = first_missing(found, wanted, GPUS)
    assert missing is not None
    assert missing.reason == "DriverLimitUnavailable"
