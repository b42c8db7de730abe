"""The flight recorder: kept after a breach, bounded, and shown in three forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from rose_agent.guard import metrics
from rose_agent.guard.flight import recorder
from rose_agent.guard.flight.perfetto import perfetto
from rose_agent.guard.flight.recorder import BlackBox, Recorder, dumps
from rose_agent.guard.flight.timeline import timeline
from rose_agent.guard.inspection.node_verbs import recent
from rose_agent.guard.main import main
from rose_core.guard.reasons import GateReason

MS = 1_000_000
T0 = 5_000 * MS


def recorded() -> Recorder:
    """An open gate, a request of 30 ms that closes it, the gate open again."""
    recorder = Recorder()
    note = recorder.note
    note(T0, "slot", "gate", open=True, reason=GateReason.IDLE, duty=1.0)
    note(T0 + 11 * MS, "slot", "gate", open=False, reason=GateReason.SERVING_BUSY, duty=0.0)
    note(T0 + 11 * MS, "slot", "closed", arrival=T0 + 10 * MS, after_ns=MS)
    note(T0 + 10 * MS, "pod", "arrived", request=7)
    outcome = {"ttft": 0.012, "tpot": 0.001, "tokens": 9, "window": "lent"}
    note(T0 + 40 * MS, "pod", "finished", request=7, arrived=T0 + 10 * MS, **outcome)
    note(T0 + 90 * MS, "slot", "gate", open=True, reason=GateReason.IDLE, duty=1.0)
    return recorder


def events(phase: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = perfetto(recorded().dump())["traceEvents"]
    return [event for event in found if event["ph"] == phase]


def test_gates_are_spans_named_after_their_reason() -> None:
    spans = [(e["name"], e["ts"], e["dur"]) for e in events("X")]
    assert spans == [
        ("open: Idle", 5_000_000, 11_000),
        ("closed: ServingBusy", 5_011_000, 79_000),
        ("open: Idle", 5_090_000, 0),
    ]


def test_a_request_is_a_span_with_its_first_token() -> None:
    (begin,), (token,), (end,) = events("b"), events("n"), events("e")
    assert begin["id"] == token["id"] == end["id"]
    assert [e["ts"] for e in (begin, token, end)] == [5_010_000, 5_022_000, 5_040_000]
    assert [e["args"] for e in events("C")] == [{"under way": 1}, {"under way": 0}]


def test_every_track_has_its_name_and_everything_else_is_an_instant() -> None:
    assert {e["args"]["name"] for e in events("M")} == {"slot", "pod"}
    assert [e["name"] for e in events("i")] == ["closed"]
    json.dumps(perfetto(recorded().dump()))


def test_a_request_whose_arrival_was_forgotten_is_left_out() -> None:
    recorder = Recorder(kept=3)
    for entry in recorded().entries():
        recorder.note(entry[0], entry[1], entry[2], **entry[3])
    kept = perfetto(recorder.dump(since_ns=T0 + 20 * MS))["traceEvents"]
    assert not [e for e in kept if e["ph"] in {"b", "e"}]


def test_the_picture_shows_requests_gates_and_closings() -> None:
    root = ET.fromstring(timeline(recorded().dump()))  # noqa: S314  # our own
    titles = {title.text for title in root.iter("{http://www.w3.org/2000/svg}title")}
    assert "request 7: 9 tokens, lent, TTFT 12.0 ms, TPOT 1.00 ms" in titles
    assert {"open: Idle", "closed: ServingBusy"} <= titles
    assert "closed 1.00 ms after an arrival" in titles
    assert ET.fromstring(timeline(Recorder().dump())) is not None  # noqa: S314  # our own


def test_the_ring_is_bounded() -> None:
    recorder = Recorder(kept=3)
    for number in range(5):
        recorder.note(number, "pod", "arrived", request=number)
    assert [entry["request"] for entry in recorder.dump()["entries"]] == [2, 3, 4]


def test_only_the_last_seconds() -> None:
    assert len(recent(recorded().dump(), 0.055)["entries"]) == 2
    assert len(recent(recorded().dump(), 0.0)["entries"]) == 6


async def test_a_breach_keeps_what_led_to_it_once_a_minute(tmp_path: Path) -> None:
    recorder = Recorder()
    box = BlackBox(tmp_path / "flight", recorder, after_seconds=0.0)
    recorder.note(1, "pod", "long ago")
    recorder.note(10**30, "pod", "arrived", request=1)
    box.breach("slow-request")
    box.breach("error-budget")
    await box.settle()
    (path,) = dumps(tmp_path / "flight")
    dump = json.loads(path.read_bytes())
    assert path.name.endswith("-slow-request.json")
    assert dump["breach"]["reason"] == "slow-request"
    assert [e["what"] for e in dump["entries"]] == ["arrived"]


async def test_only_the_newest_dumps_stay(tmp_path: Path) -> None:
    folder = tmp_path / "flight"
    folder.mkdir()
    for number in range(20):
        (folder / f"20200101T0000{number:02d}Z-x.json").write_text("{}")
    box = BlackBox(folder, Recorder(), after_seconds=0.0)
    box.breach("slow-request")
    await box.settle()
    assert len(dumps(folder)) == recorder.KEPT_DUMPS
    assert dumps(folder)[-1].name.endswith("slow-request.json")


async def test_a_full_disk_does_not_stop_the_guard(tmp_path: Path) -> None:
    (tmp_path / "flight").write_text("not a folder")
    failed = metrics.BREACH_DUMPS.labels("failed")._value
    before = failed.get()
    box = BlackBox(tmp_path / "flight", Recorder(), after_seconds=0.0)
    box.breach("slow-request")
    await box.settle()
    assert failed.get() == before + 1


@pytest.mark.parametrize("form", ["json", "perfetto", "svg"])
def test_a_dump_can_be_shown_without_a_guard(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flight").mkdir()
    path = tmp_path / "flight" / "20200101T000000Z-x.json"
    path.write_text(json.dumps(recorded().dump()))
    flags = ["trace", "--rundir", str(tmp_path)]
    assert main([*flags, "--list"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert main([*flags, "--file", str(path), "--format", form, "--last", "60"]) == 0
    assert "ServingBusy" in capsys.readouterr().out


def test_what_is_no_dump_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{")
    assert main(["trace", "--file", str(tmp_path / "x.json")]) == 1
    assert "x.json is no dump" in capsys.readouterr().err
    assert main(["trace", "--file", str(tmp_path / "y.json")]) == 1
    assert "y.json cannot be read" in capsys.readouterr().err
