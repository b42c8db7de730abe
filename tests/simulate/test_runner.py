"""Cases of studies: none is run twice in any process; what is kept lasts as long as the code."""

from pathlib import Path

import pytest

import rose_simulate.model
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.runs import runner
from rose_simulate.runs.runner import Case, Runner
from rose_simulate.runs.study import study
from tests.simulate.worlds import MATERIAL, scenario

SHORT = scenario(seeds=(1, 2), seconds=30, regimes=(Regime.FIXED, Regime.OURS))
CASES = [Case(SHORT, seed) for seed in SHORT.seeds]


def _done(made: Runner) -> list[tuple[int, str]]:
    done: list[tuple[int, str]] = []
    made.run(CASES, MATERIAL, lambda one: done.append((one.seed, one.regime)))
    return done


def test_a_case_that_another_study_has_run_is_not_run_again() -> None:
    made = Runner()
    assert _done(made) == [(1, "fixed"), (1, "ours"), (2, "fixed"), (2, "ours")]
    assert _done(made) == []


def test_several_processes_give_what_one_gives() -> None:
    side_by_side = Runner(2)
    try:
        there = study(SHORT, MATERIAL, [0.5], lambda _one: None, side_by_side)
    finally:
        side_by_side.close()
    assert there == study(SHORT, MATERIAL, [0.5], lambda _one: None)


def test_what_a_folder_keeps_is_used_until_the_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Runner(kept=tmp_path).run(CASES, MATERIAL, lambda _one: None)

    def never(*_arguments: object) -> None:
        pytest.fail("was run again")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", never)
        assert Runner(kept=tmp_path).run(CASES, MATERIAL, lambda _one: None) == first
    monkeypatch.setattr(runner, "_code", lambda: "another")
    Runner(kept=tmp_path).run(CASES, MATERIAL, lambda _one: None)
    assert len(list(tmp_path.iterdir())) == 8


def test_a_line_of_the_simulator_changes_what_is_kept_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = runner._code.__wrapped__
    before = digest()
    (tmp_path / "batch.py").write_text("FASTER = True")
    monkeypatch.setattr(rose_simulate.model, "__path__", [*rose_simulate.model.__path__, tmp_path])
    assert digest() != before
