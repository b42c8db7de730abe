"""``rose report``: rows, and the page with the statements that ``rose cost`` makes as well."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rose_cli.ops import report
from rose_cli.ops.errors import NotFound
from rose_cli.ops.usage import idle_reserves, statements, summed, usage_rows, usages
from rose_core.accounting.cost import Prices
from rose_core.accounting.late import LateSource
from rose_core.accounting.leases import OutsideLeases, ledger_of
from rose_core.api import RolloutLease, ServingPool
from rose_simulate.pages.statement_page import html
from tests.api.objects import POOL, changed
from tests.cli.test_rows import lease, pool


class Objects:
    """A cluster that holds a pool and a lease of eight hours, four of them open."""

    where = "anywhere"
    namespace: str | None = None

    def __init__(self, *pools: ServingPool) -> None:
        self.pools = pools or (pool(),)

    def objects(self, kind: type[Any], *, everywhere: bool = False) -> list[Any]:
        return [lease("grpo", 8, 4000)] if kind is RolloutLease else list(self.pools)


def test_a_statement_is_priced_by_the_pool_and_by_what_the_trainer_knows() -> None:
    pools = {"default/chat": pool(price=500_000)}
    beside = {"default/grpo": OutsideLeases(2 * 3_600_000, accepted=100, correct=40)}
    leases = [lease("grpo", 8, 4000)]
    (found,) = statements(usages(leases, pools, Prices(2_000_000, 0), beside))
    assert found.cost.borrowed == 4 * 500_000
    assert found.cost.dedicated == 2 * 2_000_000
    assert found.per_accepted == pytest.approx(60_000)
    assert found.per_correct == pytest.approx(150_000)
    assert statements(usages(leases, {})) == []


def test_moved_weights_and_late_requests_are_priced_by_the_simulators_formula() -> None:
    pools = {"default/chat": pool(price=500_000)}
    asked = Prices(0, 0, violation=20_000, gigabyte=10_000)
    used = usages([harmful()], pools, asked)
    (found,) = statements(used)
    assert found.cost.violations == found.opportunity == 3 * 20_000
    assert found.cost.network == 16 * 10_000
    (row,) = usage_rows(used)
    assert (row["weight_gb"], row["requests"], row["slo_violations"]) == (16.0, 900, 3)
    assert row["charge"] == pytest.approx((4 * 500_000 + 60_000 + 160_000) / 1e6)
    (together,) = summed([*used, *used], "pool")
    assert (together["weight_gb"], together["slo_violations"]) == (32.0, 6)
    page = html([found])
    assert "<td>16</td><td>3 of 900</td>" in page


def test_the_budget_of_an_slo_is_used_up_by_what_came_late() -> None:
    with_slo = {"spec.slo": {"ttftMilliseconds": 500, "percentile": 95}}
    strict = ServingPool.model_validate(changed(POOL, with_slo))
    used = usages([harmful()], {"default/chat": strict})
    (row,) = usage_rows(used)
    assert row["slo_budget_used"] == pytest.approx(3 / (900 * 0.05), abs=1e-4)
    (together,) = summed([*used, *used], "namespace")
    assert together["slo_budget_used"] == row["slo_budget_used"]
    unknown = usages([harmful()], {})
    assert usage_rows(unknown)[0]["slo_budget_used"] is None
    assert summed([*used, *unknown], "namespace")[0]["slo_budget_used"] is None


def test_a_lease_over_several_pools_is_booked_on_none_of_them_alone() -> None:
    """Its totals do not say which pool gave what, and neither does a price or a percentile."""
    written = harmful().model_dump(by_alias=True)
    written["spec"]["poolRefs"] = [{"namespace": "default", "name": "other"}]
    wide = RolloutLease.model_validate(written)

    def booked(percentile: int, price: int) -> Mapping[str, object]:
        spec = {"spec.lending": {"pricePerGPUHourMicros": price}}
        slo = {"spec.slo": {"ttftMilliseconds": 500, "percentile": percentile}}
        other = ServingPool.model_validate(changed(POOL, spec | slo))
        base = {"spec.lending": {"pricePerGPUHourMicros": 7}}
        first = ServingPool.model_validate(
            changed(POOL, base | {"spec.slo": {"ttftMilliseconds": 500, "percentile": 95}})
        )
        (row,) = summed(usages([wide], {"default/chat": first, "default/other": other}), "pool")
        return row

    alike, strict, dear = booked(95, 7), booked(99, 7), booked(95, 8)
    assert alike["pool"] == "default/chat, default/other"
    assert alike["slo_budget_used"] is not None
    assert (strict["slo_budget_used"], strict["charge"]) == (None, alike["charge"])
    assert (dear["slo_budget_used"], dear["charge"]) == (alike["slo_budget_used"], None)


def test_a_row_says_what_an_answer_cost_and_what_a_lent_hour_may() -> None:
    pools = {"default/chat": pool(price=500_000)}
    beside = {"default/grpo": OutsideLeases(2 * 3_600_000, 100, 40, alone_ms=216_000)}
    used = usages([lease("grpo", 8, 4000)], pools, Prices(2_000_000, 0), beside)
    (row,) = usage_rows(used, made=True)
    assert (row["cost"], row["charge"], row["dedicated_gpu_hours"]) == (6.0, 2.0, 2.0)
    assert (row["cost_per_accepted"], row["cost_per_correct"]) == (0.06, 0.15)
    # Alone: 0.06 h at 2 = 0.12 for each of 100; less 4 of dedicated hours leaves 8 for 4 lent ones.
    assert (row["saved"], row["break_even_lent_hour"]) == (0.5, 2.0)
    (together,) = summed([*used, *used], "pool", made=True)
    assert (together["cost"], together["cost_per_accepted"]) == (12.0, 0.06)
    (unreported,) = usage_rows(usages([lease("grpo", 8, 4000)], pools), made=True)
    assert (unreported["accepted"], unreported["cost_per_accepted"], unreported["saved"]) == (
        None,
        None,
        None,
    )


def harmful() -> RolloutLease:
    """A lease whose rollouts moved 16 GB of weights and met three late requests of 900."""
    counted = {"weightBytes": 16 * 10**9, "servingRequests": 900, "sloViolations": 3}
    plain = {"lentMilliseconds": 8 * 3_600_000, "openMilliseconds": 4 * 3_600_000}
    return lease("grpo", 8, 4000, status={"totals": plain | counted})


def test_open_time_beyond_the_granted_is_left_out() -> None:
    used = ledger_of(1000, 1400, 7)
    assert used.borrowed.computing_milliseconds == 1000
    assert used.tokens.produced == 7


def test_the_page_shows_cost_per_answer_with_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(Objects()))
    page = tmp_path / "page.html"
    found = ["--accepted", "default/grpo=100", "--correct", "default/grpo=40"]
    assert report.main(["--html", str(page), *found]) == 0
    assert "default/grpo" in capsys.readouterr().out
    assert page.read_text().count("<svg") == 2
    assert "<td>0.08</td><td>0.2</td>" in page.read_text()  # 4 h at 2, per 100 and per 40
    with pytest.raises(SystemExit):
        report.main(["--accepted", "grpo"])
    assert "'grpo' is no NAMESPACE/LEASE=NUMBER" in capsys.readouterr().err


def test_json_says_it_with_the_page_or_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(Objects()))
    found = ["--accepted", "default/grpo=100", "--alone-gpu-hours", "default/grpo=0.1"]
    assert report.main(["-o", "json", *found]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["accepted"], row["cost_per_accepted"], row["saved"]) == (100, 0.08, 0.2)
    assert report.main(["--by", "pool"]) == 0
    assert "COST_PER" not in capsys.readouterr().out
    assert report.main(["--by", "pool", *found]) == 0
    assert "COST_PER_ACCEPTED" in capsys.readouterr().out


class Reported(Objects):
    """The same, of which the trainer has told its router."""

    def objects(self, kind: type[Any], *, everywhere: bool = False) -> list[Any]:
        (found,) = super().objects(kind, everywhere=everywhere)
        if kind is not RolloutLease:
            return [found]
        listed = {"accepted_trajectories": 100, "correct_answers": 40}
        totals = found.status.totals.model_copy(update=listed)
        return [
            found.model_copy(update={"status": found.status.model_copy(update={"totals": totals})})
        ]


def test_nobody_types_a_count_that_the_trainer_has_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(Reported()))
    page = tmp_path / "page.html"
    assert report.main(["--html", str(page)]) == 0
    assert "COST_PER_ACCEPTED" in capsys.readouterr().out
    assert "<td>0.08</td><td>0.2</td>" in page.read_text()  # 4 h at 2, per 100 and per 40
    assert report.main(["--html", str(page), "--correct", "default/grpo=80"]) == 0
    assert "<td>0.08</td><td>0.1</td>" in page.read_text(), "what is typed counts before"


def test_a_lease_that_is_not_there_is_no_row_of_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(Objects()))
    with pytest.raises(NotFound, match="no lease default/gpro anywhere"):
        report.main(["--accepted", "default/gpro=100"])


def test_a_page_without_a_lease_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ServingPool.model_validate(changed(POOL, {"metadata.name": "other"}))
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(Objects(other)))
    assert report.main(["--html", str(tmp_path / "page.html")]) == 0
    assert "1 of the leases are not on the page" in capsys.readouterr().err


class Counted(Objects):
    """The same, whose router has counted tokens too; 900 requests, three of them late."""

    def objects(self, kind: type[Any], *, everywhere: bool = False) -> list[Any]:
        found = super().objects(kind, everywhere=everywhere)
        if kind is not RolloutLease:
            return found
        listed = {
            "acceptedTrajectories": 100,
            "correctAnswers": 40,
            "dedicatedTokens": 12_000,
            "harvestedTokens": 4_000,
            "trainedTokens": 8_000,
            "reasoningTokens": 6_000,
            "servingRequests": 900,
            "sloViolations": 3,
            "lentMilliseconds": 8 * 3_600_000,
            "openMilliseconds": 4 * 3_600_000,
            "reservedMilliseconds": 2 * 3_600_000,
        }
        return [lease("grpo", 8, 4000, status={"totals": listed})]


def _lines(text: str) -> dict[str, str]:
    """Figures of a lease's bill by what they are."""
    rows = [line.strip().split("  ") for line in text.split("default/grpo\n")[1].splitlines()]
    return {row[0]: next(cell.strip() for cell in row[1:] if cell.strip()) for row in rows}


def test_the_report_takes_a_correct_answers_cost_apart_and_the_parts_give_the_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(Counted()))
    found = ["--dedicated-gpu-hours", "default/grpo=6", "--dedicated-hour", "2"]
    page = tmp_path / "page.html"
    assert report.main([*found, "--html", str(page)]) == 0
    output = _lines(capsys.readouterr().out)
    # A late request is worth 8 lent hours at 2, by 900 requests: 0.01778.
    assert output["price of a late request"] == "0.01778"
    assert output["requests made late"] == "0.05333"
    assert output["memory kept back"] == "4", "a quarter of 8 lent hours, at 2"
    # 6 h at 2, 4 open h at the pool's 2, the memory and the late ones.
    assert output["bill"] == "24.05"
    parts = (
        "dedicated GPUs",
        "lent time",
        "requests made late",
        "memory kept back",
        "weights over the network",
    )
    assert sum(float(output[part]) for part in parts) == pytest.approx(24.05, rel=0.01)
    assert output["a million dedicated tokens"] == "1000"
    assert output["a million borrowed tokens"] == "3013"
    assert output["taken from serving, for a million borrowed tokens"] == "1013"
    assert (output["answer"], output["reasoning multiplier"]) == ("20.0 tokens", "4.00")
    assert (output["rollout ratio"], output["accept rate"]) == ("2.00", "40.0%")
    product = float(output["a million tokens"]) / 1e6 * 20.0 * 4.0 * 2.0 / 0.4
    assert product == pytest.approx(float(output["cost of a correct answer"]), rel=0.01)
    assert product * 40 == pytest.approx(24.05, rel=0.01), "the bill, within 1 %"
    assert output["borrowing pays up to"] == "1000"
    # 4,000 borrowed tokens stand for two of the six hours that 12,000 dedicated ones took.
    assert output["a lent GPU-hour brings"] == "0.5 GPU-hours"
    assert output["won for each late request"] == "0.667 GPU-hours"
    assert output["price of the reserve"] == "2"
    assert "What a correct answer cost default/grpo" in page.read_text()
    assert report.main([*found, "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    parts = row["cost_correct"]
    assert parts["cost_per_correct"] * 40 == pytest.approx(parts["bill"], rel=1e-9)
    assert parts["cost_per_correct"] == pytest.approx(row["cost_per_correct"], abs=1e-6)


def test_tokens_of_gpus_that_nobody_told_of_are_not_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(Counted()))
    assert report.main([]) == 0
    output = _lines(capsys.readouterr().out)
    assert output["dedicated GPUs"] == output["a million dedicated tokens"] == "unknown"
    assert output["borrowing pays up to"] == output["a lent GPU-hour brings"] == "unknown"
    assert report.main(["--violation", "0", "--reserve", "0.5"]) == 0
    output = _lines(capsys.readouterr().out)
    assert output["requests made late"] == output["price of a late request"] == "0", "as asked"
    assert (output["memory kept back"], output["price of the reserve"]) == ("1", "0.5")


class Earning(Counted):
    """The same beside serving that read and wrote tokens, in pools that say what these earn."""

    def objects(self, kind: type[Any], *, everywhere: bool = False) -> list[Any]:
        found = super().objects(kind, everywhere=everywhere)
        if kind is not RolloutLease:
            return found
        counted = found[0].model_dump(by_alias=True)
        counted["status"]["totals"] |= {
            "servingInputTokens": 600_000,
            "servingOutputTokens": 150_000,
            "servingRequestsWithTokens": 300,
        }
        return [RolloutLease.model_validate(counted)]


def earning(written: int) -> ServingPool:
    """A pool that earns 0.5 by a million tokens that it reads, and so much by one it writes."""
    revenue = {
        "perMillionInputTokensMicros": 500_000,
        "perMillionOutputTokensMicros": written,
    }
    spec = {"spec.lending": {"pricePerGPUHourMicros": 2_000_000}, "spec.revenue": revenue}
    return ServingPool.model_validate(changed(POOL, spec))


def test_a_late_request_costs_what_its_pool_earns_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        report, "run", lambda _verb, _given, does: does(Earning(earning(4_000_000)))
    )
    page = tmp_path / "page.html"
    assert report.main(["--html", str(page)]) == 0
    output = capsys.readouterr().out
    # 0.6 millions at 0.5 and 0.15 at 4 are 0.9, by the 300 of 900 requests that had them.
    assert _lines(output)["price of a late request"] == "0.003"
    assert _lines(output)["requests made late"] == "0.009"
    assert "what the pool earns by a request" in output
    assert "<td>0.003</td><td>what the pool earns by a request</td>" in page.read_text()
    assert report.main(["-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["late_request"], row["late_request_is"]) == (
        0.003,
        "what the pool earns by a request",
    )
    assert report.main(["--violation", "1", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["late_request"], row["late_request_is"]) == (1.0, "as asked")


@pytest.mark.parametrize("pools", [{"default/chat": pool()}, {}], ids=["says nothing", "is gone"])
def test_where_a_pool_says_no_revenue_its_gpus_price_a_late_request(
    pools: dict[str, ServingPool],
) -> None:
    (counted,) = Earning().objects(RolloutLease)
    asked = Prices(2_000_000, 0)
    (found,) = usages([counted], pools, asked, price_violations=True)
    assert found.late.source is LateSource.BREAK_EVEN
    assert found.late.micros == pytest.approx(8 * 2_000_000 / 900)


def test_pools_that_earn_different_things_say_no_revenue_of_a_lease_over_both() -> None:
    (counted,) = Earning().objects(RolloutLease)
    written = counted.model_dump(by_alias=True)
    written["spec"]["poolRefs"] = [{"namespace": "default", "name": "other"}]
    wide = RolloutLease.model_validate(written)

    def source(other: int) -> LateSource:
        pools = {"default/chat": earning(4_000_000), "default/other": earning(other)}
        (found,) = usages([wide], pools, Prices(2_000_000, 0), price_violations=True)
        return found.late.source

    assert (source(4_000_000), source(1)) == (LateSource.REVENUE, LateSource.BREAK_EVEN)


def test_a_lease_without_counted_tokens_has_no_such_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(Reported()))
    assert report.main([]) == 0
    assert "accept rate" not in capsys.readouterr().out


def keeping(unlent_hours: float) -> ServingPool:
    """A pool that kept so much back while nobody borrowed."""
    counted = {"totals": {"unlentReservedMilliseconds": round(unlent_hours * 3_600_000)}}
    lending = {"pricePerGPUHourMicros": 500_000}
    return ServingPool.model_validate(changed(POOL, {"spec.lending": lending, "status": counted}))


def test_lines_of_leases_and_pools_are_the_whole_bill() -> None:
    """Of a GPU-day, of which a quarter's memory is kept back: 8 h lent, 16 h not."""
    kept = {
        "status": {"totals": {"lentMilliseconds": 8 * 3_600_000, "openMilliseconds": 3_600_000}}
    }
    kept["status"]["totals"]["reservedMilliseconds"] = 2 * 3_600_000
    pools = {"default/chat": keeping(4.0)}
    asked = Prices(2_000_000, 0, reserve_hour=2_000_000)
    used, idle = usages([lease("grpo", 8, 0, **kept)], pools, asked), idle_reserves(pools, asked)
    rows = usage_rows(used, idle)
    assert [(row["lease"], row["charge"], row["left_with_pool"]) for row in rows] == [
        ("default/grpo", 0.5 + 4.0, 0.0),
        ("not lent", 0.0, 8.0),
    ]
    bill = sum(row["charge"] + row["left_with_pool"] for row in rows)  # type: ignore[operator]
    assert bill == pytest.approx(0.5 + 24 / 4 * 2, rel=0.01), "a day's memory and the open hour"
    hours = sum(row["reserved_gpu_hours"] + row["unlent_reserved_gpu_hours"] for row in rows)  # type: ignore[operator]
    assert hours == pytest.approx(24 / 4, rel=0.01)
    for by in ("pool", "namespace"):
        (together,) = summed(used, by, idle)
        assert together["charge"] + together["left_with_pool"] == pytest.approx(bill)  # type: ignore[operator]
    assert "left_with_pool" not in usage_rows(used)[0], "not asked for"


def test_a_pool_that_nobody_borrows_from_has_a_row_and_a_place_on_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lonely = keeping(3.0).model_dump(by_alias=True)
    lonely["metadata"]["name"] = "lonely"
    cluster = Objects(pool(), ServingPool.model_validate(lonely))
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(cluster))
    page = tmp_path / "page.html"
    assert report.main(["--reserve", "2", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "not lent" in shown
    assert " 6.0" in shown, "3 hours at 2"
    assert "default/lonely (not lent)" in page.read_text()
    assert report.main(["--by", "pool", "-o", "json"]) == 0
    rows = {row["pool"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["default/lonely"]["leases"], rows["default/lonely"]["left_with_pool"]) == (0, 3.0)


def test_a_team_sees_no_rows_of_pools_of_other_namespaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = keeping(3.0).model_dump(by_alias=True)
    elsewhere["metadata"] |= {"namespace": "serving", "name": "code"}
    cluster = Objects(keeping(4.0), ServingPool.model_validate(elsewhere))
    monkeypatch.setattr(report, "run", lambda _verb, _given, does: does(cluster))

    def left() -> dict[str, float]:
        assert report.main(["--by", "namespace", "-o", "json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        return {row["namespace"]: row["left_with_pool"] for row in rows}

    assert left() == {"default": 4.0, "serving": 3.0}
    cluster.namespace = "default"
    assert left() == {"default": 4.0}
