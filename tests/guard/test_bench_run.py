"""A benchmark of many windows: one that crashes costs only itself, and a cut run goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from bench.guard import run, run_record
from bench.guard.__main__ import notes, planned
from bench.guard.gates import Profile
from bench.guard.load import LOADS, Answer, Arrival, Load
from bench.guard.measured import Window
from bench.guard.pace import Cell, Pace, Plan, clock
from bench.guard.report import figures, table
from bench.guard.results import Crash, Results
from bench.guard.windows import Solo
from bench.record import Report

SOLO = Solo(100.0, 500.0, Profile(0.01, 0.0001, 0.01))
SMALL = ["--seconds", "2", "--loads", "conv", "steady-40", "--conditions", "alone", "ours"]


def plan(*more: str) -> Plan:
    return planned([*SMALL, "--no-oracle", *more])


def window(load: str, condition: str, number: int) -> Window:
    answers = [
        Answer(Arrival(at / 10, 40, 5), 1000 + at / 10, 1000.02 + at / 10, 1000.06 + at / 10)
        for at in range(15)
    ]
    for answer in answers:
        answer.tokens, answer.ended_s = 5, answer.last_s
    return Window(load, condition, number, 2.0, 1000.0, answers, 0, 50)


class Node:
    """Engines that need no time, and crash when they are told to."""

    def __init__(self, *crashing: tuple[str, str, int]) -> None:
        self.crashing = set(crashing)
        self.ran: list[tuple[str, str, int]] = []
        self.starts = 0

    @contextlib.asynccontextmanager
    async def started(self, _plan: Plan) -> AsyncIterator[Node]:
        self.starts += 1
        yield self

    @property
    def bench(self) -> Node:
        return self

    rollouts = property(lambda self: self)
    url = "engine"

    async def guarded(self, *, up: bool) -> None:
        assert not up

    async def solo(self, seconds: float) -> Solo:
        assert seconds > 0
        return SOLO

    async def page(self, name: str) -> dict[str, str]:
        return {"page": name}

    def last_output(self) -> str:
        return "== agent (ended)\nwhat it said last"

    def engine(self) -> Node:
        return self

    async def window(self, load: Load, condition: str, number: int, **_: object) -> Window:
        key = (load.name, condition, number)
        self.ran.append(key)
        if key in self.crashing:
            raise RuntimeError("the engine is gone")
        return window(*key)


def measured(
    node: Node,
    wanted: Plan,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: Results | None = None,
) -> Results:
    monkeypatch.setattr(run, "bench", node.started)
    monkeypatch.setattr(run, "FOLDER", folder)

    def keep(results: Results) -> None:
        run_record.keep(wanted, results, notes(wanted), folder)

    return asyncio.run(run.measure(wanted, before, keep))


def cells(wanted: Plan) -> list[tuple[str, str, int]]:
    return [cell.key for number in range(wanted.rounds) for cell in wanted.round(number)]


def test_a_crashed_window_is_recorded_and_every_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, broken = plan(), ("conv", "ours", 0)
    node = Node(broken)
    results = measured(node, wanted, tmp_path, monkeypatch)
    assert {(w.load, w.condition, w.round) for w in results.windows} == {*cells(wanted)} - {broken}
    assert [(c.load, c.condition, c.round) for c in results.crashes] == [broken]
    assert "the engine is gone" in results.crashes[0].why
    assert "what it said last" in (tmp_path / "guard-crash.log").read_text()
    assert node.starts == 2, "the engines were started anew"
    assert node.ran.count(broken) == 1, "what crashed is not tried for ever"
    rows = {row.name: row for row in figures(results)}
    assert (rows["windows that crashed"].value, rows["windows that crashed"].met) == (1.0, False)


def test_a_load_that_cannot_even_be_warmed_up_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = plan("--rounds", "1")
    node = Node(("steady-40", "alone", 1))
    results = measured(node, wanted, tmp_path, monkeypatch)
    assert len(results.windows) == len(cells(wanted))
    assert list(results.goals) == ["conv"]
    assert "steady-40" in table(results)


def test_figures_are_on_disk_after_each_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, seen = plan("--rounds", "1"), list[int]()
    whole = run_record.keep

    def keep(asked: Plan, results: Results, received: list[str], folder: Path) -> None:
        whole(asked, results, received, folder)
        report = msgspec.json.decode((folder / "guard.json").read_bytes(), type=Report)
        assert report.notes == tuple(received)
        seen.append(len(results.windows))

    monkeypatch.setattr(run_record, "keep", keep)
    measured(Node(), wanted, tmp_path, monkeypatch)
    assert seen == list(range(1, len(cells(wanted)) + 1))
    names = {"guard.json", "guard.svg", "guard.txt"}
    names |= {f"guard-{part}.json" for part in ("trace", "windows")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_cut_run_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(Node(("conv", "ours", 0)), plan("--rounds", "1"), tmp_path, monkeypatch)
    wanted = plan("--rounds", "2")
    before = run_record.again(wanted, tmp_path)
    assert before is not None
    assert [crash.why for crash in before.crashes] == ["RuntimeError('the engine is gone')"]
    node = Node()
    results = measured(node, wanted, tmp_path, monkeypatch, before)
    assert node.ran == [key for key in cells(wanted) if key[2] == 1], "and no warm-up again"
    assert len(results.windows) == 7
    assert results.solo == SOLO


def test_windows_of_other_knobs_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_record.again(plan(), tmp_path) is None
    measured(Node(), plan("--rounds", "1"), tmp_path, monkeypatch)
    with pytest.raises(run_record.NotTheSame, match=r"seconds 2: run without --resume"):
        run_record.again(planned(["--seconds", "3"]), tmp_path)


def test_a_budget_that_ends_inside_a_round_leaves_both_kinds_of_loads_their_windows() -> None:
    wanted = planned(["--no-oracle"])
    first, second = ([group[0].load.name for group in wanted.groups(n)] for n in (0, 1))
    assert first == ["conv", "code", "steady-40", "steady-60"]
    assert second == ["steady-40", "steady-60", "conv", "code"]


def test_a_load_that_does_not_fit_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = plan("--minutes", "0.2", "--rounds", "3")
    node = Node()
    monkeypatch.setattr(Pace, "needed_s", lambda _self, cells: 20.0 * bool(cells))
    measured(node, wanted, tmp_path, monkeypatch)
    warm_up = [("conv", "alone", 3), ("steady-40", "alone", 3)]
    assert node.ran == warm_up + cells(wanted)[:4], "the first round is always run"


def test_rounds_are_begun_while_they_fit_into_the_minutes() -> None:
    wanted = plan("--minutes", "1")
    first = wanted.round(0)  # two windows of 2 s, two of 2 + 6 s
    pace = Pace(wanted.seconds, 100.0, wanted.minutes)
    for cell in first:
        pace.took(cell, cell.load.lead_s + 4.0)
    assert pace.needed_s(first) == pytest.approx(2 * 4 + 2 * 10)
    assert pace.fits(first, 131.9)
    assert not pace.fits(first, 132.1)
    assert pace.left_s(wanted, 0, [], 104.0) == pytest.approx(56.0), "two more rounds"
    assert pace.left_s(plan("--rounds", "3"), 0, first[:1], 104.0) > 0
    assert Pace(2.0, 0.0).fits(first, 1e9), "no budget, no end"


def test_how_long_is_left_is_said_in_words() -> None:
    assert [clock(4.4), clock(75.0), clock(3600.0)] == ["4 s", "1 min 15 s", "60 min 00 s"]
    assert Cell(LOADS["conv"], "ours", 0).name == "round 1 conv ours"
    assert Results([], {}, SOLO).knows(("conv", "ours", 0)) is False
    results = Results([], {}, SOLO)
    results.crashes.append(Crash("conv", "ours", 0, "x"))
    assert results.knows(("conv", "ours", 0))
