"""One load level of the guard's benchmark held out: predicted from the others, and compared."""

import json
from pathlib import Path

import pytest

from rose_core.simulate.errors import ScenarioError
from rose_simulate.calibrate import calibrate, levels
from rose_simulate.main import main
from rose_simulate.timings import MEDIANS, QUIET

# Medians (permit closed, every thread stopped, first token), milliseconds, and their samples.
CONV = (0.93, 4.8, 13.9)
CODE = (0.98, 5.2, 12.8)
FAR = (0.93, 4.8, 30.0)

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
    said = capsys.readouterr().out
    assert "held out: conv" in said
    assert "held out: code" in said
    assert "outside" not in said
    assert [one["held_out"] for one in json.loads(result.read_text())] == ["conv", "code"]
    far = str(recorded(tmp_path / "far.json", {"far": FAR}))
    assert main(["calibrate", conv, far, "--hold-out", "far"]) == 1
    assert "outside" in capsys.readouterr().out


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
