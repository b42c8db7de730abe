"""Delays of the control path read from the guard's benchmark, and what is refused."""

import json
from pathlib import Path

import pytest

from rose_simulate.files import timings
from rose_simulate.files.timings import measured
from rose_simulate.main import main
from rose_simulate.model.errors import ScenarioError
from rose_simulate.model.scenarios.scenario import Delays
from rose_simulate.verbs.studies import SCENARIOS


def _result(path: Path, others: float = 0.01, **changes: float | None) -> Path:
    values = {timings.CLOSED: 1.5, timings.STOPPED: 6.5, timings.OPENED: 12.0}
    values |= {getattr(timings, name): value for name, value in changes.items()}
    figures = [{"name": name, "value": value} for name, value in values.items() if value]
    figures.append({"name": timings.QUIET, "value": others, "met": others <= 0.05})
    path.write_text(json.dumps({"name": "guard", "figures": figures}))
    return path


def test_delays_are_taken_from_the_medians_and_the_rest_stays_assumed(tmp_path: Path) -> None:
    found = measured(_result(tmp_path / "guard.json"), Delays(poll_s=0.2, start_s=30))
    assert (found.tap_s, found.close_s, found.freeze_s, found.open_s) == pytest.approx(
        (0.0015, 0.0, 0.005, 0.012)
    )
    assert (found.poll_s, found.start_s) == (0.2, 30)


def test_a_busy_machine_is_refused_with_how_busy_it_was(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"others used 61% of the machine.*bench-guard"):
        measured(_result(tmp_path / "guard.json", others=0.61), Delays())


def test_what_is_no_such_result_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="no figure 'ours: open gate"):
        measured(_result(tmp_path / "guard.json", OPENED=None), Delays())
    with pytest.raises(ScenarioError, match=r"absent\.json: cannot be read"):
        measured(tmp_path / "absent.json", Delays())
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ScenarioError, match="is no result of a benchmark"):
        measured(tmp_path / "other.json", Delays())


def test_the_command_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy = str(_result(tmp_path / "guard.json", others=0.5))
    assert main([str(SCENARIOS / "normal.yaml"), "--check", "--timings", busy]) == 1
    assert "others used 50%" in capsys.readouterr().err
    quiet = str(_result(tmp_path / "guard.json"))
    assert main([str(SCENARIOS / "normal.yaml"), "--check", "--timings", quiet]) == 0
