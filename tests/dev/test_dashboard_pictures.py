"""Dashboards as SVG: every panel is drawn from its own queries, and says when there was nothing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rose_dev import dashboards, main
from rose_dev.dashboards.model import (
    Dashboard,
    Panel,
    Row,
    Steps,
    high_is_bad,
    just,
    low_is_bad,
    stat,
    text,
)
from rose_dev.dashboards.render import STEP_COLOURS, Series, picture, written

SVG = "{http://www.w3.org/2000/svg}"
BOARD = Dashboard(
    "board",
    "A board",
    "With <angles>.",
    ("up",),
    (
        Row(
            "First",
            (
                stat("Now", "", "percentunit", "share{$here}"),
                Panel("Stack", "", "s", {"parts{$here}": "{{part}} of {{all}}"}, stacked=True),
                Panel("Never", "", "ops", {"never{$here}": "x"}),
            ),
        ),
    ),
)


def answers(query: str) -> list[Series]:
    name = query.partition("{")[0]
    assert query == f'{name}{{job=~"$job", instance=~"$instance"}}'
    rising = ((0.0, 0.25), (60.0, 0.5))
    return {
        "share": [Series({}, rising)],
        "parts": [
            Series({"part": "a", "all": "two"}, rising),
            Series({"part": "b", "all": "two"}, ((0.0, 0.25), (60.0, 0.4))),
        ],
        "never": [],
    }[name]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]  # noqa: S314


def heights(svg: str) -> list[list[float]]:
    """Heights of the points of each line, from above."""
    lines = ET.fromstring(svg).iter(f"{SVG}polyline")  # noqa: S314
    return [[float(p.split(",")[1]) for p in line.attrib["points"].split()] for line in lines]


def test_a_panel_shows_its_last_value_its_lines_or_that_there_was_nothing() -> None:
    reported = texts(picture(BOARD, answers))
    assert {"A board", "With <angles>.", "First", "Now", "50 %", "Stack", "Never"} < set(reported)
    assert {"a of two", "b of two", "-1.0 min", "0 s", "500 ms", "1 s"} < set(reported)
    assert [text for text in reported if text.startswith("No data")] == [
        "No data: it did not happen in this time"
    ]


@pytest.mark.parametrize(
    ("steps", "value", "colour"),
    [
        ((), 5.0, None),
        (high_is_bad(1, 2), 0.9, "green"),
        (high_is_bad(1, 2), 1.0, "orange"),
        (high_is_bad(1, 2), 2.0, "red"),
        (low_is_bad(0.95, 0.99), 0.9, "red"),
        (low_is_bad(0.95, 0.99), 0.98, "orange"),
        (low_is_bad(0.95, 0.99), 1.0, "green"),
        (just(1), 0.0, "red"),
        (just(1), 1.0, "green"),
        (just(1), 2.0, "red"),
    ],
)
def test_a_number_that_can_be_bad_shows_it_by_its_colour(
    steps: Steps, value: float, colour: str | None
) -> None:
    panel = stat("Now", "", "short", "share{$here}", steps=steps)
    board = Dashboard("board", "A board", "", ("up",), (Row("First", (panel,)),))
    drawn = picture(board, lambda _query: [Series({}, ((0.0, value),))])
    (style,) = re.findall(r'class="v"([^>]*)>', drawn)
    assert style == (f' style="fill:{STEP_COLOURS[colour]}"' if colour else "")
    answer = json.loads(text(board))["panels"][1]
    assert answer["options"]["colorMode"] == ("value" if steps else "none")


def test_all_panels_show_the_same_time_and_a_gap_stays_a_gap() -> None:
    panels = (
        Panel("All", "", "s", {"all{$here}": ""}),
        Panel("Part", "", "s", {"part{$here}": ""}),
    )
    board = Dashboard("board", "A board", "", ("up",), (Row("First", panels),))
    whole = tuple((60.0 * minute, 1.0) for minute in range(11))
    points = {"all": whole, "part": (*whole[:3], *whole[4:6])}
    drawn = picture(board, lambda query: [Series({}, points[query.partition("{")[0]])])
    assert texts(drawn).count("-10.0 min") == 2
    pieces = [
        [float(point.split(",")[0]) for point in line.attrib["points"].split()]
        for line in ET.fromstring(drawn).iter(f"{SVG}polyline")  # noqa: S314
    ]
    assert [len(piece) for piece in pieces] == [11, 3, 2]
    every, first, second = pieces
    assert first + second == [*every[:3], *every[4:6]], "later than that there was nothing"


def test_stacked_lines_lie_on_each_other() -> None:
    upper, lower = heights(picture(BOARD, answers))  # the sum is drawn first, behind
    zero, top = 178.0, 34.0
    assert lower == [pytest.approx(zero - (zero - top) * value) for value in (0.25, 0.5)]
    assert upper == [pytest.approx(zero - (zero - top) * value) for value in (0.5, 0.9)]


@pytest.mark.parametrize("board", dashboards.ALL, ids=lambda board: board.name)
def test_every_dashboard_can_be_drawn(board: Dashboard) -> None:
    wanted = {panel.title for row in board.rows for panel in row.panels}
    full = texts(picture(board, lambda _query: [Series({"lease": "a/b"}, ((0.0, 1.0),))]))
    assert wanted <= set(full)
    assert not any(text.startswith("No data") for text in full)
    empty = texts(picture(board, lambda _query: []))
    assert sum(text.startswith("No data") for text in empty) == sum(
        len(row.panels) for row in board.rows
    )


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0, "s", "0 s"),
        (0.0123, "s", "12.3 ms"),
        (2.5e-6, "s", "2.5 µs"),
        (119.0, "s", "119 s"),
        (150.0, "s", "2.5 min"),
        (7200.0, "s", "2 h"),
        (0.987, "percentunit", "98.7 %"),
        (12_800.0, "short", "12.8 k"),
        (3.0, "short", "3"),
        (4.5, "reqps", "4.5 req/s"),
        (2.5e6, "Bps", "2.5 MB/s"),
        (12.0, "Bps", "12 B/s"),
        (float("nan"), "s", "-"),
    ],
)
def test_numbers_are_written_as_people_read_them(value: float, unit: str, shown: str) -> None:
    assert written(value, unit) == shown


def test_without_a_prometheus_it_says_how_to_name_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["dashboards", "--prometheus", "http://127.0.0.1:9", "--out", str(tmp_path)]
    assert main.main(arguments) == 1
    assert "give its address with --prometheus" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
