"""``rose cost``: statements of simulations and of leases, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from rose_simulate.main import write
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.runs.study import study
from rose_simulate.verbs.cost import main
from tests.simulate.worlds import MATERIAL, scenario

LEASE: dict[str, Any] = {
    "kind": "RolloutLease",
    "metadata": {"namespace": "rl", "name": "grpo"},
    "status": {"totals": {"lentMilliseconds": 7_200_000, "harvestedTokens": 5_000}},
}


def test_every_regime_of_a_result_becomes_a_statement_with_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = scenario(seeds=(1,), regimes=(Regime.FIXED, Regime.OURS))
    path = write(study(setup, MATERIAL, [0.5], lambda _one: None), tmp_path)
    page, found = tmp_path / "page.html", tmp_path / "found.json"
    assert main([str(path), "--html", str(page), "--json", str(found)]) == 0
    shown = capsys.readouterr().out
    assert "small, ours, derate 0.5, x2" in shown
    assert page.read_text().count("<svg") == 2
    names = [one["name"] for one in json.loads(found.read_bytes())]
    assert names == ["small, fixed, derate 0.5, x2", "small, ours, derate 0.5, x2"]
    answer = json.loads(found.read_bytes())
    serving = [one["ledger"]["serving"] for one in answer]
    assert all(one["allowed_hundredths"] == one["requests"] > 0 for one in serving)  # the 99th
    gpus = sum(one.replicas * one.gpus_per_replica for one in setup.services)
    for one in answer:
        # A late request is worth what serving's GPUs cost by the requests that they served.
        worth = gpus * setup.seconds / 3600 / one["ledger"]["serving"]["requests"]
        assert one["violation"] == pytest.approx(1e6 * worth, abs=1)
        parts = sum(one["cost"].values())
        assert parts == pytest.approx(
            one["per_accepted"] * one["ledger"]["trajectories"]["accepted"]
        )
    fixed, ours = (one["cost"]["reserve"] for one in answer)
    assert fixed == 0
    share = setup.services[0].rollout_memory_share
    held = answer[1]["ledger"]["borrowed"]["held_milliseconds"] / 3.6e6
    assert ours == pytest.approx(1e6 * held * share, rel=1e-3)
    # Lent or not, serving does without that share all the time.
    unlent = [one["cost"]["unlent_reserve"] for one in answer]
    assert unlent[0] == 0
    assert unlent[1] > 0
    assert ours + unlent[1] == pytest.approx(1e6 * gpus * share * setup.seconds / 3600, rel=0.01)


def test_leases_are_priced_with_what_the_trainer_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "leases.json"
    path.write_text(json.dumps({"items": [LEASE]}))
    assert main([str(path), "--lent-hour", "0.5"]) == 0
    assert "unknown" in capsys.readouterr().out
    totals = LEASE["status"]["totals"] | {"acceptedTrajectories": 20, "correctAnswers": 5}
    reported = tmp_path / "reported.json"
    reported.write_text(json.dumps({"items": [LEASE | {"status": {"totals": totals}}]}))
    assert main([str(reported), "--lent-hour", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert " 0.05 " in shown, "2 hours at 0.5 for the 20 trajectories that the trainer reported"
    assert " 0.2 " in shown, "and for 5 correct answers"
    assert main([str(path), "--lent-hour", "0.5", "--accepted", "10"]) == 0
    assert " 0.1 " in capsys.readouterr().out  # 2 hours at 0.5 for 10 trajectories


def test_what_a_lease_did_to_serving_and_moved_is_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = {
        "weightBytes": 30 * 10**9,
        "servingRequests": 800,
        "sloViolations": 4,
        "reservedMilliseconds": 900_000,
    }
    totals = LEASE["status"]["totals"] | counted
    path, found = tmp_path / "leases.json", tmp_path / "found.json"
    path.write_text(json.dumps({"items": [LEASE | {"status": {"totals": totals}}]}))
    prices = ["--violation", "0.25", "--gigabyte", "0.01", "--reserve", "2"]
    assert main([str(path), *prices, "--percentile", "99", "--json", str(found)]) == 0
    (one,) = json.loads(found.read_bytes())
    assert (one["cost"]["violations"], one["cost"]["network"]) == (1_000_000, 300_000)
    assert one["cost"]["reserve"] == 500_000
    assert one["opportunity"] == 1_500_000
    serving = {"requests": 800, "added_violations": 4, "allowed_hundredths": 800}
    assert one["ledger"]["serving"] == serving
    shown = capsys.readouterr().out
    assert " 30 " in shown
    assert main([str(path), "--json", str(found)]) == 0
    (one,) = json.loads(found.read_bytes())
    # 2 lent hours at 1 by 800 requests, and a quarter of an hour's memory at a GPU-hour's price.
    assert (one["violation"], one["opportunity"]) == (2500, 4 * 2500 + 250_000)
    assert " 50.0% " in shown  # 4 of the 8 that an SLO at the 99th percentile allows


def test_a_late_request_costs_what_serving_earns_by_one_where_somebody_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = {
        "kind": "ServingPool",
        "metadata": {"namespace": "serving", "name": "chat"},
        "spec": {"revenue": {"perMillionOutputTokensMicros": 2_000_000}},
    }
    totals = LEASE["status"]["totals"] | {
        "servingRequests": 800,
        "servingRequestsWithTokens": 400,
        "sloViolations": 4,
        "servingInputTokens": 800_000,
        "servingOutputTokens": 200_000,
    }
    lease = LEASE | {
        "spec": {"poolRef": {"namespace": "serving", "name": "chat"}},
        "status": {"totals": totals},
    }
    path, found = tmp_path / "both.json", tmp_path / "found.json"
    path.write_text(json.dumps({"items": [lease, pool]}))

    def priced(*flags: str) -> tuple[int, str]:
        assert main([str(path), *flags, "--json", str(found)]) == 0
        one = next(one for one in json.loads(found.read_bytes()) if one["name"] == "rl/grpo")
        assert one["late_source"] in capsys.readouterr().out
        return one["violation"], one["late_source"]

    assert priced() == (1000, "what the pool earns by a request")
    assert priced("--input-million", "0.5") == (1000, "what the pool earns by a request")
    assert priced("--output-million", "6") == (3000, "what the pool earns by a request")
    assert priced("--violation", "0.25") == (250_000, "as asked")
    path.write_text(json.dumps({"items": [lease]}))
    assert priced() == (2500, "the pool's GPUs by its requests")
    broken = pool | {"spec": {"revenue": {"perMillionOutputTokensMicros": "much"}}}
    path.write_text(json.dumps({"items": [lease, broken]}))
    assert main([str(path)]) == 1
    assert "items[1]" in capsys.readouterr().err


def test_a_simulations_late_requests_are_priced_by_the_tokens_that_it_served(
    tmp_path: Path,
) -> None:
    setup = scenario(seeds=(1,), regimes=(Regime.OURS,))
    path = write(study(setup, MATERIAL, [0.5], lambda _one: None), tmp_path)
    found = tmp_path / "found.json"
    assert main([str(path), "--input-million", "1", "--json", str(found)]) == 0
    one = json.loads(found.read_bytes())[-1]
    outcomes = json.loads(path.read_bytes())["outcomes"]
    served = [service for one in outcomes if one["regime"] == "ours" for service in one["services"]]
    read = sum(one["input_tokens"] for one in served)
    assert read > sum(one["requests"] for one in served) > 0
    requests = one["ledger"]["serving"]["requests"]
    assert one["violation"] == pytest.approx(read / requests, abs=1)
    assert one["late_source"] == "what the pool earns by a request"


def test_a_result_that_is_silent_about_tokens_is_not_priced_by_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = scenario(seeds=(1,), regimes=(Regime.OURS,))
    path = write(study(setup, MATERIAL, [0.5], lambda _one: None), tmp_path)
    old = json.loads(path.read_bytes())
    for one in old["outcomes"]:
        for service in one["services"]:
            del service["input_tokens"], service["output_tokens"]
    path.write_text(json.dumps(old))
    for flag in ("--input-million", "--output-million"):
        assert main([str(path), flag, "1"]) == 1
        assert "says nothing of tokens" in capsys.readouterr().err
    assert main([str(path), "--input-million", "1", "--violation", "0"]) == 0
    assert main([str(path)]) == 0


def test_pools_of_the_file_have_what_no_lease_is_charged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = {
        "kind": "ServingPool",
        "metadata": {"namespace": "serving", "name": "chat"},
        "status": {"totals": {"unlentReservedMilliseconds": 5_400_000}},
    }
    unreported = pool | {"metadata": {"namespace": "serving", "name": "new"}, "status": {}}
    totals = LEASE["status"]["totals"] | {"reservedMilliseconds": 900_000}
    lease = LEASE | {"status": {"totals": totals}}
    path, found = tmp_path / "both.json", tmp_path / "found.json"
    path.write_text(json.dumps({"items": [lease, pool, unreported]}))
    assert main([str(path), "--lent-hour", "0.5", "--reserve", "2", "--json", str(found)]) == 0
    answer = {one["name"]: one["cost"] for one in json.loads(found.read_bytes())}
    assert answer["rl/grpo"]["unlent_reserve"] == 0
    assert answer["serving/chat (not lent)"]["unlent_reserve"] == 3_000_000
    assert answer["serving/new (not lent)"]["unlent_reserve"] == 0
    bill = sum(sum(one.values()) for one in answer.values())
    assert bill == pytest.approx(1_000_000 + 500_000 + 3_000_000, rel=0.01)
    assert " 3 " in capsys.readouterr().out


def test_a_result_that_is_silent_about_unlent_memory_is_priced_only_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = scenario(seeds=(1,), regimes=(Regime.FIXED, Regime.OURS))
    path = write(study(setup, MATERIAL, [0.5], lambda _one: None), tmp_path)
    old = json.loads(path.read_bytes())
    for one in old["outcomes"]:
        del one["unlent_reserved_ms"]
    path.write_text(json.dumps(old))
    assert main([str(path)]) == 1
    assert "say --reserve 0" in capsys.readouterr().err
    assert main([str(path), "--reserve", "0"]) == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON, or cut off"),
        ("{}", "neither a result of rose simulate nor RolloutLeases"),
        ('{"outcomes": []}', "no result of this version"),
        ('{"items": [{"metadata": {}}]}', "items[0]: no RolloutLease"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    assert main([str(path)]) == 1
    assert reason in capsys.readouterr().err
