"""Bursts that grow, and slots lent one after another."""

from pathlib import Path

import pytest

from rose_core.stats import mean_of
from rose_simulate.main import main
from rose_simulate.model.outcome import RunOutcome
from rose_simulate.model.scenarios.scenario import Load, Regime
from rose_simulate.runs.runner import Runner
from rose_simulate.verbs.studies import SCENARIOS
from rose_simulate.verbs.sweeps import bursts, frontier_table, loans, slots_table
from tests.simulate.worlds import MATERIAL, scenario


def quiet(_one: RunOutcome) -> None:
    """Progress is of no interest here."""


def test_larger_bursts_are_late_alone_and_the_frontier_says_so() -> None:
    plain = scenario(seconds=40, regimes=(Regime.FIXED, Regime.OURS, Regime.UNGUARDED))
    load = Load(burst_every_s=20, burst_size=1)
    reported = plain.model_copy(
        update={"services": (plain.services[0].model_copy(update={"load": load}),)}
    )
    small, large = bursts(reported, MATERIAL, [(3, 500), (240, 4000)], Runner(), quiet)
    assert (small.late, small.added["ours"]) == (0, 0)
    assert large.late > 0
    assert large.requests == 80 * small.requests
    assert large.worst_ms["fixed"][-1] > small.worst_ms["fixed"][-1]
    assert f"| 240 x 4000 | {large.late} of {large.requests} (" in frontier_table([small, large])


def test_each_slot_more_is_told_what_it_brings_in_dedicated_engines() -> None:
    found = loans(scenario(), MATERIAL, [0, 1, 2], Runner(), quiet)
    assert [one.slots for one in found] == [0, 1, 2]
    assert (found[0].engines.mean, found[0].marginal, found[0].open_hours) == (0.0, None, 0.0)
    more = [one.marginal.mean for one in found if one.marginal is not None]
    assert sum(more) == pytest.approx(found[2].engines.mean)
    assert found[1].open_hours < found[2].open_hours
    assert (found[0].ttft_paired, found[0].slower_5) == (None, None)
    paired = [one.ttft_paired for one in found[1:]]
    assert all(one is not None and one.mean >= 1 for one in paired)
    assert all(one.slower_5 is not None for one in found[1:])
    assert "| 2 | " in slots_table(found)


def test_several_seeds_have_an_interval_of_what_is_paired_by_seed() -> None:
    seeds = (1, 2)
    found = loans(scenario(seeds=seeds, seconds=40), MATERIAL, [0, 2], Runner(), quiet)
    alone = [
        loans(scenario(seeds=(seed,), seconds=40), MATERIAL, [0, 2], Runner(), quiet)[1]
        for seed in seeds
    ]
    won = mean_of([one.engines.mean for one in alone])
    assert found[1].engines == won
    assert won.low is not None
    assert f"| {won.mean:.2f} [{won.low:.2f}, " in slots_table(found)
    assert [one.engines.low for one in alone] == [None, None]


def test_a_fleet_has_no_frontier(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", str(SCENARIOS / "fleet.yaml")]) == 2
    assert "is a fleet" in capsys.readouterr().err


def test_the_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (SCENARIOS / "correlated.yaml").read_text().replace("warmup_s: 300", "warmup_s: 5")
    text = text.replace("traces/", f"{SCENARIOS}/traces/").replace("replicas: 8", "replicas: 2")
    text = text.replace("borrowed: 8", "borrowed: 2").replace("dedicated: 4", "dedicated: 1")
    path = tmp_path / "small.yaml"
    path.write_text(text)
    arguments = ["frontier", str(path), "--seconds", "40", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*arguments, "--sizes", "4", "--prompts", "300"]) == 0
    assert "| 4 x 300 | 0 of " in capsys.readouterr().out
    assert (tmp_path / "frontier-correlated.json").exists()
