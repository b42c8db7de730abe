import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import msgspec
import pytest

from rose_demo.main import conclusion, write
from rose_demo.plots import Chart, cumulative, steps
from rose_demo.records import ClassFigures, Recording, Sample
from rose_demo.report import all_charts, busiest, opened, page, sequence, summary
from rose_demo.table import Screen, frame, gate_state
from rose_demo.verdicts import judge
from rose_demo.waterfall import MOST_ROWS, waterfall


@pytest.fixture(params=["full", "empty"])
def recording(request: pytest.FixtureRequest, synthetic: ModuleType) -> Recording:
    full: Recording = synthetic.recording()
    return full if request.param == "full" else Recording(settings=full.settings)


def test_every_chart_is_well_formed_and_stays_inside_its_frame(recording: Recording) -> None:
    for svg, _caption in all_charts(recording):
        root = ET.fromstring(svg)  # noqa: S314  # our own text
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for element in root.iter():
            for name in ("x", "cx", "x1", "x2"):
                assert -1 <= float(element.attrib.get(name, 0)) <= width + 1
            for name in ("y", "cy", "y1", "y2"):
                assert -1 <= float(element.attrib.get(name, 0)) <= height + 1


def test_the_page_stands_alone(recording: Recording) -> None:
    text = page(recording, judge(recording))
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", text)
    HTMLParser().feed(text)
    for promise in ("Serving first", "Exact and honest", "Useful"):
        assert promise in text


def test_the_page_shows_a_trajectory_where_spans_came_and_nothing_in_its_place_without(
    synthetic: ModuleType,
) -> None:
    full: Recording = synthetic.recording()
    text = page(full, judge(full))
    assert "One trajectory: task-7/3" in text
    assert text.count('data-event="rose.move"') == text.count('data-event="rl.sync"') == 1
    assert "slot-1 (borrowed), grpo@1.3, 18 tokens" in text
    none = msgspec.structs.replace(full, trajectory=())
    assert "One trajectory" not in page(none, judge(none))


def test_a_trajectory_of_many_spans_says_how_many_it_leaves_out(synthetic: ModuleType) -> None:
    spans = synthetic.trajectory()
    more = [
        msgspec.structs.replace(spans[2], span=f"more{n}", began_s=42.0 + n, ended_s=42.5 + n)
        for n in range(50)
    ]
    assert f"{len(spans) + 50 - MOST_ROWS} more spans are left out" in waterfall([*spans, *more])


def test_what_a_trajectorys_rows_tell_is_not_cut_however_long(synthetic: ModuleType) -> None:
    """The frame was of one width, beyond which names of real engines went."""
    long = {"rose.engine.name": "lent-chat-7d9c5f6b8-x2x9q-0", "rl.policy.version": "grpo@base.0"}
    spans = [
        msgspec.structs.replace(one, attributes={**one.attributes, **long})
        for one in synthetic.trajectory()
    ]
    letter = 6.2  # of such names in DejaVu Sans at 11 px, which Chromium draws 6.1 wide
    root = ET.fromstring(waterfall(spans))  # noqa: S314  # our own text
    right = float(root.attrib["viewBox"].split()[2])
    found = [one for one in root.iter("text") if one.attrib["class"] == "tick"]
    assert any(long["rose.engine.name"] in (one.text or "") for one in found)
    for one in found:
        assert float(one.attrib["x"]) + letter * len(one.text or "") <= right


def test_the_page_escapes_what_others_said(synthetic: ModuleType) -> None:
    recording = synthetic.recording(story="<b>rslot</b> & more")
    assert "&lt;b&gt;rslot&lt;/b&gt; &amp; more" in page(recording, judge(recording))


def test_device_classes_stand_side_by_side_and_unknown_ones_nowhere(
    synthetic: ModuleType,
) -> None:
    full: Recording = synthetic.recording()
    assert "By device class" not in page(full, judge(full))
    kinds = {"h200": ClassFigures(900, 40, 3, 0.02, 0.0001), "<l4>": ClassFigures(10, 800, 9)}
    last = msgspec.structs.replace(full.samples[-1], classes=kinds)
    reported = msgspec.structs.replace(full, samples=(*full.samples, last))
    text = page(reported, judge(reported))
    assert "<td>h200</td><td>3</td><td>900</td><td>40</td><td>20.0</td><td>0.100</td>" in text
    assert "<td>&lt;l4&gt;</td><td>9</td><td>10</td><td>800</td><td>unknown</td>" in text


def test_the_summary_is_json_and_names_verdicts_and_evidence(recording: Recording) -> None:
    result = json.loads(msgspec.json.encode(summary(recording, judge(recording))))
    assert set(result["verdicts"]) == set(result["evidence"])
    assert result["exit_code"] in {0, 1}


def test_write_and_conclusion(synthetic: ModuleType, tmp_path: Path) -> None:
    recording = synthetic.recording()
    findings = judge(recording)
    write(recording, findings, tmp_path)
    again = msgspec.json.decode((tmp_path / "recording.json").read_bytes(), type=Recording)
    assert judge(again) == findings
    assert any(line.startswith("KEPT") for line in conclusion(findings, tmp_path))


def test_the_table_fits_a_terminal(recording: Recording) -> None:
    lines = frame(
        recording.settings, 200.0, recording.requests, recording.samples, recording.training
    )
    assert max(map(len, lines)) <= 80
    assert any("reward" in line or "waiting" in line for line in lines)


def test_states_of_the_gate() -> None:
    assert gate_state(None) == gate_state(Sample(at_s=0)) == "unknown"
    assert gate_state(Sample(at_s=0, gate_open=True)) == "OPEN"
    assert gate_state(Sample(at_s=0, gate_open=False, withheld=True)) == "withheld"


def test_the_screen_redraws_in_place_and_logs_in_plain_mode() -> None:
    drawn, logged = io.StringIO(), io.StringIO()
    screen, log = Screen(drawn, plain=False), Screen(logged, plain=True, plain_seconds=1e9)
    for lines in (["a", "b", "c"], ["d"]):
        screen.show(lines)
        log.show(lines)
    assert "\x1b[3A" in drawn.getvalue()
    assert logged.getvalue() == "a\nb\nc\n\n"


def test_steps_and_cumulative() -> None:
    assert steps([(0, 1), (2, 3)], end=5) == [(0, 1), (2, 1), (2, 3), (5, 3)]
    assert cumulative([3.0, 1.0]) == [(1.0, 0.0), (1.0, 0.5), (3.0, 1.0)]
    assert cumulative([]) == []


def test_texts_in_charts_are_escaped() -> None:
    chart = ET.fromstring(Chart("a < b & c", (0, 1), (0, 1)).svg())  # noqa: S314  # our own text
    assert "a < b & c" in "".join(chart.itertext())


def test_opened_joins_samples_and_sequence_reads_labels(synthetic: ModuleType) -> None:
    assert all(a < b for a, b in opened(synthetic.samples()))
    assert sequence("grpo@1.17") == 17
    assert sequence("unknown") is None
    assert sequence("grpo@base.012345678901") is None
    start, end = busiest(synthetic.requests())
    assert end - start == 20.0
