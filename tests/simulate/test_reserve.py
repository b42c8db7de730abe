"""What memory that lending keeps back is worth to serving of sessions."""

import random
from pathlib import Path

import pytest

from rose_simulate.files.reading import read_scenario
from rose_simulate.main import main
from rose_simulate.model.jobs.workload import sessions
from rose_simulate.model.regimes import RULES
from rose_simulate.model.scenarios.scenario import Load, Regime, Scenario
from rose_simulate.model.simulation import Simulation
from rose_simulate.verbs.reserve import Felt, LoadLevel, admitted, table, worth
from rose_simulate.verbs.studies import SCENARIOS
from tests.simulate.worlds import EPISODES, MATERIAL, scenario


def of_sessions(rate: float) -> Scenario:
    plain = scenario(seconds=60)
    load = Load(sessions=True, requests_per_s=rate)
    services = (plain.services[0].model_copy(update={"load": load}),)
    return plain.model_copy(update={"services": services})


def test_a_session_asks_with_all_that_was_said_before_and_comes_at_the_rate() -> None:
    found = sessions(EPISODES, seconds=400, requests_per_s=4.0, token_s=0.01, draw=random.Random(1))
    assert len(found) == pytest.approx(1600, rel=0.15)
    assert [one.arrived_ns for one in found] == sorted(one.arrived_ns for one in found)
    assert [one.number for one in found] == list(range(len(found)))
    by_session: dict[str, list[int]] = {}
    for one in found:
        by_session.setdefault(one.session, []).append(one.prompt)
    assert [2000, 2420, 2720] in by_session.values()
    assert all(prompts == sorted(prompts) for prompts in by_session.values())
    assert min(one.arrived_ns for one in found) < 5e9, "some are in the middle when it begins"


def test_a_sessions_turns_go_where_its_keys_are_and_compute_only_what_is_new() -> None:
    world = Simulation(of_sessions(2.0), RULES[Regime.FIXED], 1, MATERIAL)
    world.clock.run(60_000_000_000)
    homes: dict[str, set[int]] = {}
    ended = [one for one in world.requests["chat"] if one.ended_ns]
    for one in ended:
        homes.setdefault(one.session, set()).add(one.replica)
    assert all(len(one) == 1 for one in homes.values())
    prompts = sum(one.prompt for one in ended)
    assert sum(one.serving.prefilled for one in world.replicas) < 0.75 * prompts


def level(rate: float, kept: int, full: int) -> LoadLevel:
    return LoadLevel(rate, Felt(1000, kept, 100.0, 200.0), Felt(1000, full, 90.0, 150.0))


def test_the_admitted_load_lies_where_the_objective_breaks() -> None:
    rates = [(8.0, 0.0), (12.0, 0.005), (16.0, 0.025)]
    assert admitted(rates, 0.01) == pytest.approx(13.0)
    assert admitted(rates[:2], 0.01) is None, "none of them breaks it"
    assert admitted([(8.0, 0.5)], 0.01) is None, "all do"


def test_memory_is_worth_what_it_admits_by_its_share() -> None:
    found = [level(8.0, 0, 0), level(12.0, 20, 0), level(16.0, 90, 20)]
    # 10 of 14 requests a second with half of the memory: 0.286 of the load, 0.57 for all of it.
    assert worth(found, 0.01, 0.5) == pytest.approx((14 - 10) / 14 / 0.5)
    assert worth(found[:2], 0.01, 0.5) is None
    setup = scenario()
    shown = table(found, setup)
    assert "Admitted load at 1% late: 10.0/s with 35% of the memory, 14.0/s with" in shown
    assert "worth 0.57 of a GPU's price" in shown
    assert "outside of what was tried" in table(found[:2], setup)


def test_the_command_says_what_the_memory_is_worth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (SCENARIOS / "sessions.yaml").read_text().replace("warmup_s: 300", "warmup_s: 5")
    text = text.replace("traces/", f"{SCENARIOS}/traces/").replace("replicas: 4", "replicas: 1")
    path = tmp_path / "small.yaml"
    path.write_text(text.replace("borrowed: 4", "borrowed: 1"))
    given = ["reserve", str(path), "--seconds", "30", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*given, "--rates", "1"]) == 0
    assert "| 1 | " in capsys.readouterr().out
    assert (tmp_path / "reserve-sessions.json").exists()


def test_its_own_scenario_and_rates_have_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reserve", "--seeds", "1", "--seconds", "60", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "of a GPU's price" in output, output
    assert "outside of what was tried" not in output


def test_it_wants_one_service_of_single_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reserve", str(SCENARIOS / "fleet.yaml")]) == 1
    assert "with one service" in capsys.readouterr().err


def test_its_scenario_serves_sessions() -> None:
    setup = read_scenario(SCENARIOS / "sessions.yaml")
    assert isinstance(setup, Scenario)
    assert [one.load.sessions for one in setup.services] == [True]
