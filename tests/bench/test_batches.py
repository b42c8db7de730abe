"""What a batch beside serving is judged to be."""

from typing import Any

from bench.batches import CONDITIONS, TOKENS, figures, judged, line_file
from bench.guard.load import Answer, Arrival
from bench.guard.measured import Window


def line(name: str, tokens: int = TOKENS) -> dict[str, Any]:
    return {"custom_id": name, "response": {"body": {"usage": {"completion_tokens": tokens}}}}


def window(condition: str, number: int, ttft_s: float) -> Window:
    """Forty requests that all take as long."""
    answers = [
        Answer(Arrival(n / 10, 8, 4), n / 10, n / 10 + ttft_s, n / 10 + ttft_s + 0.3, 9.0, 4)
        for n in range(40)
    ]
    return Window("conv", condition, number, 8.0, 0.0, answers, 0, 800)


def test_a_line_that_is_lost_doubled_or_cut_is_counted() -> None:
    assert not judged([line("n0"), line("n1")], 2).wrong.total()
    found = judged([line("n0"), line("n0"), line("n1", TOKENS - 1)], 3).wrong
    assert found == {"lost": 1, "doubled": 1, "of another length": 1}


def test_no_two_lines_ask_the_same() -> None:
    lines = line_file(1000).splitlines()
    assert len({one.split(b'"body"')[1] for one in lines}) == 1000


def test_serving_beside_lines_is_held_against_the_guards_aims() -> None:
    took = {"alone": 0.2, "control": 0.2, "beside": 0.3}
    windows = [window(one, number, took[one]) for one in CONDITIONS for number in range(3)]
    found = {
        one.name: one for one in figures(windows, judged([line("n0")], 1), left=[9, 1], kills=1)
    }
    ratio = found["beside / alone: TTFT p99"]
    assert (round(ratio.value, 6), ratio.aim, ratio.met) == (1.5, "<= 1.05", False)
    assert found["control / alone: TTFT p99"].aim == ""
    assert found["lines: tokens beside serving"].value == 100.0
    assert found["lines: left after the last window"].met
    for one in windows:
        one.strangers = 0.5
    busy = figures(windows, judged([line("n0")], 1), left=[9, 1], kills=1)
    assert {one.aim for one in busy if one.name.startswith("beside / alone")} == {""}
    idle = figures(windows, judged([line("n0")], 1), left=[9, 0], kills=0)
    assert {one.name for one in idle if one.met is False} >= {
        "lines: left after the last window",
        "lines: lent engine killed",
    }
