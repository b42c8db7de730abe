"""One load level of the guard's benchmark held out: predicted from the others, and compared."""

import json
from pathlib import Path

import pytest

from rose_simulate.files.timings import MEDIANS, QUIET
from rose_simulate.main import main
from rose_simulate.model.errors import ScenarioError
from rose_simulate.verbs.calibrate import calibrate, chosen, levels
from rose_simulate.verbs.studies import SCENARIOS

# Medians (permit closed, every thread stopped, first token), milliseconds, and their samples.
CONV = (0.93, 4.8, 13.9)
CODE = (0.98, 5.2, 12.8)
FAR = (0.93, 4.8, 30.0)

RECORDING = SCENARIOS.parent / "recordings" / "guard-2026-11-23.json"
SAID = ((23, -1, 45), (-5, -18, 22), (5, -46, 62))
"""How far the conversation load is off as a prediction of the code load, and its ends, percent."""

Levels = dict[str, tuple[float, float, float]]


def recorded(path: Path, loads: Levels, *, samples: int = 40, apart: bool = False) -> Path:
    """A result as ``bench.guard`` writes it; ``apart``: each load's figures under its name."""
    figures: list[dict[str, object]] = [{"name": QUIET, "value": 0.01, "met": True}]
    for load, medians in loads.items():
        figures.append({"name": f"{load}, alone: time without a request", "value": 0.7})
        prefix = f"{load}, " if apart else ""
        for name, value in zip(MEDIANS, medians, strict=True):
            figures.append({"name": prefix + name, "value": value})
            count = name.removesuffix(", p50") + ", samples"
            figures.append({"name": prefix + count, "value": samples})
    path.write_text(json.dumps({"name": "guard", "figures": figures}))
    return path


def test_a_level_is_predicted_from_the_others_weighted_by_samples(tmp_path: Path) -> None:
    files = [
        recorded(tmp_path / "conv.json", {"conv": CONV}, samples=30),
        recorded(tmp_path / "code.json", {"code": CODE}, samples=90),
        recorded(tmp_path / "third.json", {"steady-40": FAR}),
    ]
    found = calibrate(levels(files), "steady-40")
    assert found.fitted_on == ("conv", "code")
    closed, _, opened = found.delays
    assert closed.predicted == pytest.approx((30 * 0.93 + 90 * 0.98) / 120)
    assert closed.holds
    assert opened.off == pytest.approx((30 * 13.9 + 90 * 12.8) / 120 / 30.0 - 1)
    assert not opened.holds


def test_one_file_with_figures_of_each_load_says_the_same(tmp_path: Path) -> None:
    both = recorded(tmp_path / "both.json", {"conv": CONV, "code": CODE}, apart=True)
    one = recorded(tmp_path / "one.json", {"conv": CONV})
    other = recorded(tmp_path / "other.json", {"code": CODE})
    assert calibrate(levels([both]), "code") == calibrate(levels([one, other]), "code")


def test_the_command_says_each_level_and_fails_outside_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conv = str(recorded(tmp_path / "conv.json", {"conv": CONV}))
    code = str(recorded(tmp_path / "code.json", {"code": CODE}))
    result = tmp_path / "result.json"
    assert main(["calibrate", conv, code, "--json", str(result)]) == 0
    output = capsys.readouterr().out
    assert "held out: conv" in output
    assert "held out: code" in output
    assert "outside" not in output
    assert [one["held_out"] for one in json.loads(result.read_text())] == ["conv", "code"]
    far = str(recorded(tmp_path / "far.json", {"far": FAR}))
    assert main(["calibrate", conv, far, "--hold-out", "far"]) == 1
    assert "outside" in capsys.readouterr().out


def windows(path: Path, loads: dict[str, float], *, strangers: float = 0.01) -> Path:
    """A recording as ``bench.guard`` keeps it, two windows of each load; values in ms."""
    kept = [
        {
            "load": load,
            "condition": condition,
            "strangers": strangers,
            "closed_s": [value / 1e3] * 20,
            "stopped_s": [4 * value / 1e3] * 20,
            "released_s": [12 * value / 1e3] * 20,
        }
        for load, value in loads.items()
        # What was polled must not count: it is ten times slower here.
        for condition, value in (("ours", value), ("ours", value), ("polled", 10 * value))
    ]
    path.write_text(json.dumps({"of": {}, "windows": kept}))
    return path


def test_one_recording_of_several_loads_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = windows(tmp_path / "guard-windows.json", {"conv": 1.0, "code": 1.1})
    found = calibrate(levels([path]), "code")
    assert [one.predicted for one in found.delays] == pytest.approx([1.0, 4.0, 12.0])
    assert [one.samples for one in found.delays] == [40, 40, 40]
    assert main(["calibrate", str(path)]) == 0
    far = windows(tmp_path / "far.json", {"conv": 1.0, "code": 1.3})
    assert main(["calibrate", str(far)]) == 1
    assert "outside" in capsys.readouterr().out


def test_windows_that_differ_among_themselves_leave_a_delay_undecided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = windows(tmp_path / "guard-windows.json", {"conv": 1.0, "code": 1.1})
    content = json.loads(path.read_text())
    ours = [one for one in content["windows"] if one["condition"] == "ours"]
    ours[0]["closed_s"] = [0.0006] * 9 + [0.001] * 11
    path.write_text(json.dumps(content))
    closed, stopped, _ = calibrate(levels([path]), "code").delays
    assert closed.low is not None
    assert closed.low < -0.15 < closed.off
    assert closed.holds is None
    assert (stopped.low, stopped.high) == pytest.approx((stopped.off, stopped.off))
    assert stopped.holds
    assert main(["calibrate", str(path), "--hold-out", "code"]) == 1
    assert "undecided" in capsys.readouterr().out


def test_a_delay_that_is_off_whatever_chance_does_is_outside(tmp_path: Path) -> None:
    path = windows(tmp_path / "guard-windows.json", {"conv": 1.0, "code": 1.3})
    assert [one.holds for one in calibrate(levels([path]), "code").delays] == [False] * 3


def test_a_single_window_says_nothing_of_chance(tmp_path: Path) -> None:
    path = windows(tmp_path / "guard-windows.json", {"conv": 1.0, "code": 1.1})
    content = json.loads(path.read_text())
    content["windows"] = content["windows"][1:]
    path.write_text(json.dumps(content))
    assert {one.low for one in calibrate(levels([path]), "code").delays} == {None}


def test_a_recording_of_a_shared_machine_never_counts_as_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = windows(tmp_path / "busy.json", {"conv": 1.0, "code": 1.0}, strangers=0.4)
    assert main(["calibrate", str(path)]) == 1
    assert "others used 40% of the machine" in capsys.readouterr().err
    assert main(["calibrate", str(path), "--busy"]) == 1
    output = capsys.readouterr().out
    assert "NOT A CALIBRATION: others used 40%" in output
    assert "outside" not in output


def test_a_load_with_too_few_reactions_is_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = windows(tmp_path / "guard-windows.json", {"conv": 1.0, "code": 1.1, "steady": 3.0})
    content = json.loads(path.read_text())
    for one in content["windows"]:
        if one["load"] == "steady":
            one["released_s"] = one["released_s"][:9]
            one["closed_s"] = [0.00105] * 20
            one["stopped_s"] = [0.0042] * 20
    path.write_text(json.dumps(content))
    assert main(["calibrate", str(path)]) == 0
    output = capsys.readouterr().out
    assert "left out: ours: open gate to first rollout token, p50: 18 samples; 20 are" in output
    found = calibrate(levels([path]), "conv")
    assert [one.predicted for one in found.delays] == pytest.approx([1.075, 4.3, 13.2])
    few = windows(tmp_path / "few.json", {"conv": 1.0})
    with pytest.raises(ScenarioError, match="cannot hold out 'conv'"):
        calibrate(levels([few]), "conv")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"windows": [{"load": "conv"}]}', "no recording of the guard's benchmark"),
        ('{"windows": []}', "no window of the condition 'ours'"),
    ],
)
def test_a_recording_without_reactions_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "guard-windows.json"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=reason):
        levels([path])


def test_the_recording_that_is_shipped_says_what_the_documentation_says() -> None:
    """A quiet machine, but too few windows to say of any delay that it lies within the limit."""
    found = levels([RECORDING])
    paused = calibrate(chosen(found, ["conv", "code"]), "code")
    listed = [(one.off, one.low or 0.0, one.high or 0.0) for one in paused.delays]
    assert tuple(tuple(round(100 * share) for share in one) for one in listed) == SAID
    assert [one.holds for one in paused.delays] == [None, None, None]
    assert paused.quiet
    assert not paused.holds
    with pytest.raises(ScenarioError, match="no load 'cove' in the files"):
        chosen(found, ["cove"])


def test_what_cannot_be_compared_is_refused_by_name(tmp_path: Path) -> None:
    pooled = recorded(tmp_path / "pooled.json", {"conv": CONV, "code": CODE})
    with pytest.raises(ScenarioError, match=r"no figure 'conv, ours: arrival to permit closed"):
        levels([pooled])
    conv = recorded(tmp_path / "conv.json", {"conv": CONV})
    with pytest.raises(ScenarioError, match="is in another file too"):
        levels([conv, conv])
    with pytest.raises(ScenarioError, match="cannot hold out 'conv'"):
        calibrate(levels([conv]), "conv")
    with pytest.raises(ScenarioError, match=r"permit closed, p50: 3 samples; 20 are needed"):
        levels([recorded(tmp_path / "few.json", {"code": CODE}, samples=3)])
    (tmp_path / "none.json").write_text(json.dumps({"figures": [{"name": QUIET, "met": True}]}))
    with pytest.raises(ScenarioError, match="no load was served alone"):
        levels([tmp_path / "none.json"])
