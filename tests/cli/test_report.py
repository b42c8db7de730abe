"""``rose report``: rows, and the page with the statements that ``rose cost`` makes as well."""

from pathlib import Path
from typing import Any

import pytest

from rose_cli.ops import report
from rose_cli.ops.views import statements
from rose_core.accounting.leases import Beside, ledger_of
from rose_core.api import RolloutLease
from tests.cli.test_views import lease, pool


class Objects:
    """A cluster that holds a pool and a lease of eight hours, four of them open."""

    where = "anywhere"

    def objects(self, kind: type[Any], *, everywhere: bool = False) -> list[Any]:
        return [lease("grpo", 8, 4000)] if kind is RolloutLease else [pool()]


def test_a_statement_is_priced_by_the_pool_and_by_what_the_trainer_knows() -> None:
    pools = {"default/chat": pool(price=500_000)}
    beside = {"default/grpo": Beside(2 * 3_600_000, accepted=100, correct=40)}
    (found,) = statements([lease("grpo", 8, 4000)], pools, 2_000_000, beside)
    assert found.cost.borrowed == 4 * 500_000
    assert found.cost.dedicated == 2 * 2_000_000
    assert found.per_accepted == pytest.approx(60_000)
    assert found.per_correct == pytest.approx(150_000)
    assert statements([lease("grpo", 8, 0)], {}, 0, {}) == []


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
