"""Fleets of three sizes for the simulator's benchmark: as large as they say, and as loaded."""

from pathlib import Path

import pytest

from bench import simulate
from bench.simulate import SIZES, Size, sized
from rose_simulate.files.reading import read_scenario
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario

FLEET = Path(__file__).parents[2] / "simulate" / "scenarios" / "fleet.yaml"


@pytest.fixture(scope="module")
def whole() -> FleetScenario:
    found = read_scenario(FLEET)
    assert isinstance(found, FleetScenario)
    return found


def gpus(scenario: FleetScenario) -> int:
    serving = sum(one.count * one.service.replicas for one in scenario.services)
    return serving + scenario.jobs.count * scenario.jobs.job.dedicated


@pytest.mark.parametrize("size", SIZES)
def test_a_sized_fleet_has_its_gpus_and_the_load_of_the_whole_one(
    whole: FleetScenario, size: Size
) -> None:
    reported = sized(whole, size)
    assert gpus(reported) == size.gpus
    for kind, same in zip(reported.services, whole.services, strict=True):
        rate, full = kind.service.load.requests_per_s, same.service.load.requests_per_s
        assert rate is not None
        assert full is not None
        assert rate / kind.service.replicas == pytest.approx(full / same.service.replicas)


def test_the_largest_is_the_scenario_itself(whole: FleetScenario) -> None:
    assert [size.gpus for size in SIZES] == [100, 1_000, 10_000]
    assert gpus(whole) == 10_000
    assert sized(whole, SIZES[-1]) == whole


def test_growth_is_judged_as_linear_and_the_largest_by_its_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spent = iter((1.0, 9.0, 95.0))
    monkeypatch.setattr(simulate, "alone_of", lambda *_arguments: [])
    monkeypatch.setattr(simulate, "curves_of", lambda *_arguments, **_named: ())
    monkeypatch.setattr(simulate, "_bins_s", lambda *_arguments: next(spent))
    rows = {one.name: one for one in simulate.growth(FLEET)}
    assert rows["fleet: bins of 1000 GPUs / of 100; linear"].met
    assert not rows["fleet: bins of 10000 GPUs / of 1000; linear"].met
    assert [one.aim for one in rows.values() if "peak memory" in one.name] == ["", "", "<= 2048"]
    hour = rows["fleet of 10000 GPUs, one hour"]
    assert hour.aim == "<= 120"
    assert hour.value == pytest.approx(95.0, abs=5.0)
