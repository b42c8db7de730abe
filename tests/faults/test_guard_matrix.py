"""A few lines of ``python -m bench.faults`` on real processes; the command runs all of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults.__main__ import CaseOutcome, figures, main, run
from bench.faults.cases import CASES, Case
from bench.faults.skewed import skewed
from rose_core.guard.reasons import GateReason
from tests.agent.node import tap_refusal

# What the promise names; a fault without a line here is one that nobody tries.
NAMED = {
    "guard killed",
    "guard stopped",
    "engine host killed",
    "engine host stopped",
    "guard and tap killed",
    "guard and engine host killed",
    "guard and engine host stopped",
    "tap killed",
    "tap stopped",
    "namespace gone",
    "interface down",
    "clock jumps ahead",
    "clock jumps back",
    "run directory full",
    "serving pod replaced in a burst",
    "engine ignores its permit",
    "fork bomb in the engine",
    "memory hog in the engine",
    "serving engine killed",
}
CHOSEN = ("engine host stopped", "interface down", "clock jumps ahead", "serving engine killed")


def by_name(name: str) -> Case:
    (found,) = (case for case in CASES if case.name == name)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))  # short: sockets lie below it
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_every_named_fault_has_a_line() -> None:
    assert {case.name for case in CASES} >= NAMED


def test_the_words_a_case_waits_for_are_words_that_exist() -> None:
    words = {word for case in CASES for word in case.reasons}
    assert words <= {reason.value for reason in GateReason}


def test_a_clock_is_off_by_what_the_file_says_now(tmp_path: Path) -> None:
    clock = skewed(tmp_path / "skew", lambda: 100.0)
    assert clock() == 100.0
    (tmp_path / "skew").write_text("-30")
    assert clock() == 70.0


def test_what_goes_on_has_no_time_of_stopping() -> None:
    went_on = CaseOutcome("clock", None, 0.5)
    stopped = CaseOutcome("guard", 120.0, None, ("HostStale",), "never came back")
    assert [one.name for one in figures([went_on, stopped])] == ["clock: back", "guard: last token"]
    assert "goes on" in went_on.line
    assert "WRONG: never came back" in stopped.line


def test_the_cases_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "tap"]) == 0
    assert set(capsys.readouterr().out.splitlines()) >= {"tap killed", "tap stopped"}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0 or bool(tap_refusal()), reason="needs root")
def test_rollouts_stop_and_come_back_by_themselves_with_a_reason(folder: Path) -> None:
    outcomes = run(folder, [by_name(name) for name in CHOSEN])
    assert [outcome.note for outcome in outcomes] == [""] * len(CHOSEN)
    assert all(outcome.recovered_s is not None for outcome in outcomes)
