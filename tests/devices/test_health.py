"""Whether a GPU is fit to be lent."""

import pytest

from rose_core.api.reasons import REPLICA_REFUSALS
from rose_core.devices.health import (
    RESUME_SECONDS,
    DeviceRefusal,
    Fitness,
    FitnessLimits,
    Vitals,
    assess,
)

WATTS = FitnessLimits(max_power_watts=500)


def test_a_driver_that_does_not_answer_makes_the_gpu_unknown() -> None:
    assert assess(Fitness(), None, WATTS, 0.0).refusal is DeviceRefusal.UNKNOWN


def test_a_healthy_gpu_is_fit() -> None:
    assert assess(Fitness(), Vitals(power_milliwatts=400_000), WATTS, 0.0).fit


@pytest.mark.parametrize(("xid", "refused"), [(31, False), (43, False), (48, True), (79, True)])
def test_a_programs_own_fault_is_no_fault_of_the_gpu(xid: int, refused: bool) -> None:
    found = assess(Fitness(), Vitals(xids=(xid,)), FitnessLimits(), 0.0)
    assert (found.refusal is DeviceRefusal.XID) is refused


def test_clients_of_one_mps_server_share_every_fault() -> None:
    shared = FitnessLimits(shared_faults=True)
    found = assess(Fitness(), Vitals(xids=(31, 31)), shared, 0.0)
    assert found.message == "the driver reported Xid 31; reset the GPU"


def test_power_above_the_limit_suspends_until_it_is_well_below_for_a_minute() -> None:
    high = assess(Fitness(), Vitals(power_milliwatts=510_000), WATTS, 0.0)
    assert high.refusal is DeviceRefusal.POWER
    assert high.message == "the GPU draws 510 W, the pool allows 500 W"
    near = assess(high, Vitals(power_milliwatts=490_000), WATTS, 10.0)
    assert near.refusal is DeviceRefusal.POWER, "not below 95 %"
    low = Vitals(power_milliwatts=300_000)
    resting = assess(near, low, WATTS, 9.0 + RESUME_SECONDS)
    assert resting.refusal is DeviceRefusal.POWER
    assert assess(resting, low, WATTS, 10.0 + RESUME_SECONDS).fit


def test_a_limit_without_a_reading_is_not_kept() -> None:
    found = assess(Fitness(), Vitals(), WATTS, 0.0)
    assert found.refusal is DeviceRefusal.POWER
    assert "does not say" in found.message
    assert assess(Fitness(), Vitals(), FitnessLimits(), 0.0).fit


def test_heat_suspends_and_says_how_hot() -> None:
    hot = assess(Fitness(), Vitals(thermal=True, temperature_celsius=91), FitnessLimits(), 0.0)
    assert (hot.refusal, "91 C" in hot.message) == (DeviceRefusal.THERMAL, True)
    assert not assess(hot, Vitals(thermal=False), FitnessLimits(), 59.0).fit
    assert assess(hot, Vitals(thermal=False), FitnessLimits(), 60.0).fit


def test_every_word_is_one_that_people_can_read_about() -> None:
    words = {word.value for word in DeviceRefusal if word}
    assert words <= {reason.value for reason in REPLICA_REFUSALS}
