"""``rose report``: rows, and the page with the statements that ``rose cost`` makes as well."""

from pathlib import Path
from typing import Any

import pytest

from rose_cli.ops import report
from rose_cli.ops.errors import NotFound
from rose_cli.ops.views import statements, summed, usage_rows
from rose_core.accounting.cost import Prices
from rose_core.accounting.leases import Beside, ledger_of
from rose_core.accounting.page import html
from rose_core.api import RolloutLease, ServingPool
from tests.api.objects import POOL, changed
from tests.cli.test_views import lease, pool


class Objects:
    """A cluster that holds a pool and a lease of eight hours, four of them open."""

    where = "anywhere"

    def __init__(self, *pools: ServingPool) -> None:
        self.pools = pools or (pool(),)

    def objects(self, kind: type[Any], *, everywhere: bool = False) -> list[Any]:
        return [lease("grpo", 8, 4000)] if kind is RolloutLease else list(self.pools)


def test_a_statement_is_priced_by_the_pool_and_by_what_the_trainer_knows() -> None:
    pools = {"default/chat": pool(price=500_000)}
    beside = {"default/grpo": Beside(2 * 3_600_000, accepted=100, correct=40)}
    (found,) = statements([lease("grpo", 8, 4000)], pools, Prices(2_000_000, 0), beside)
    assert found.cost.borrowed == 4 * 500_000
    assert found.cost.dedicated == 2 * 2_000_000
    assert found.per_accepted == pytest.approx(60_000)
    assert found.per_correct == pytest.approx(150_000)
    assert statements([lease("grpo", 8, 0)], {}, Prices(0, 0), {}) == []


def test_moved_weights_and_late_requests_are_priced_by_the_simulators_formula() -> None:
    pools = {"default/chat": pool(price=500_000)}
    asked = Prices(0, 0, violation=20_000, gigabyte=10_000)
    (found,) = statements([harmful()], pools, asked, {})
    assert found.cost.violations == found.opportunity == 3 * 20_000
    assert found.cost.network == 16 * 10_000
    (row,) = usage_rows([harmful()], pools, asked)
    assert (row["weight_gb"], row["requests"], row["slo_violations"]) == (16.0, 900, 3)
    assert row["charge"] == pytest.approx((4 * 500_000 + 60_000 + 160_000) / 1e6)
    (together,) = summed([row, row], "pool")
    assert (together["weight_gb"], together["slo_violations"]) == (32.0, 6)
    page = html([found])
    assert "<td>16</td><td>3 of 900</td>" in page


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
    told = ["--accepted", "default/grpo=100", "--correct", "default/grpo=40"]
    assert report.main(["--html", str(page), *told]) == 0
    assert "default/grpo" in capsys.readouterr().out
    assert page.read_text().count("<svg") == 2
    assert "<td>0.08</td><td>0.2</td>" in page.read_text()  # 4 h at 2, per 100 and per 40
    with pytest.raises(SystemExit):
        report.main(["--accepted", "grpo"])
    assert "'grpo' is no NAMESPACE/LEASE=NUMBER" in capsys.readouterr().err


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
