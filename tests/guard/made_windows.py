"""Windows of the guard's benchmark, made up."""

from __future__ import annotations

import random

from bench.guard import gates
from bench.guard.load import Answer, Arrival
from bench.guard.measured import Window
from bench.guard.windows import Solo

SOLO = Solo(300.0, 800.0, gates.Profile(0.01, 0.0002, 0.01))


def window(
    condition: str, *, load: str = "conv", number: int = 0, factor: float = 1.0, harvested: int = 0
) -> Window:
    """Ten seconds of forty requests, a tenth of a second each when ``factor`` is 1."""
    draw = random.Random(number)
    answers = []
    for index in range(40):
        at = index * 0.25
        sent = 1000.0 + at
        first = sent + factor * draw.uniform(0.04, 0.06)
        last = first + factor * 0.05
        answers.append(Answer(Arrival(at, 50, 6), sent, first, last, last, 6))
    return Window(load, condition, number, 10.0, 1000.0, answers, 0, harvested)
