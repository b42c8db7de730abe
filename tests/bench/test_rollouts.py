"""What the benchmark of rollouts says of drafts, and what it refuses to record."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.rollouts import __main__ as rollouts
from rose_simulate.model.scenarios.scenario import Scenario


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((), "give --tokens-per-step"),
        (("--tokens-per-step", "0.5"), "1 or more"),
        (("--tokens-per-step", "2", "--draft-nodes", "0"), "1 or more"),
    ],
)
def test_drafts_without_what_they_give_are_refused_and_nothing_is_recorded(
    given: tuple[str, ...],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rollouts, "record", lambda *_, **__: pytest.fail("recorded"))
    with pytest.raises(SystemExit):
        rollouts.main(["--only", "drafts", *given])
    assert text in capsys.readouterr().err


def test_a_sweep_of_drafts_has_no_aim_and_one_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[float] = []

    def simulate(scenario: Scenario, *_: object) -> SimpleNamespace:
        job = scenario.jobs[0]
        ran.append(job.tokens_per_step if job.draft_nodes else 0.0)
        return SimpleNamespace(makespans=[90.0 / job.tokens_per_step] * 3)

    monkeypatch.setattr(rollouts, "simulate", simulate)
    rows = rollouts.drafts([1], 3, 8, [1.0, 1.5])
    assert ran == [0.0, 1.0, 1.5]
    assert all(row.aim == "" for row in rows)
    assert [row.value for row in rows] == [90.0, 90.0, 1.0, 60.0, pytest.approx(2 / 3)]
