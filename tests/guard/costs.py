"""Costs whose distribution stands still or moves, and how many of them may lie above a quantile."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

MOVING = ("still", "level jumps", "day and night", "keeps growing", "like the last", "spread jumps")


def moving(kind: str, count: int, *, sigma: float = 0.3, seed: int = 1) -> Iterator[float]:
    """Lognormal costs around 1 of which something moves, or nothing (``still``)."""
    draw, state, width = random.Random(seed), 0.0, sigma
    for number in range(count):
        if kind == "level jumps":  # by a factor of three, every 500
            state = math.log(3) * (number // 500 % 2)
        elif kind == "day and night":  # a factor of four over 2,000
            state = 0.7 * math.sin(2 * math.pi * number / 2000)
        elif kind == "keeps growing":  # a fifth in the time in which 200 are forgotten; then anew
            state = 0.2 * (number % 2000) / 200
        elif kind == "like the last":  # half of the variance is remembered for twenty
            state = 0.95 * state + draw.gauss(0, 0.31 * sigma)
        elif kind == "spread jumps" and draw.random() < 0.002:
            width = sigma * draw.choice((0.3, 1.0, 3.0))
        yield math.exp(state + draw.gauss(0, width))


def most_hits(tries: int, share: float) -> int:
    """The 99.9 % quantile of a binomial: more of so many would be no accident."""
    chance, below, hits = (1 - share) ** tries, 0.0, 0
    if chance == 0.0:
        return round(tries * share + 3.09 * math.sqrt(tries * share * (1 - share)))
    while below + chance < 0.999:
        below += chance
        chance *= (tries - hits) / (hits + 1) * share / (1 - share)
        hits += 1
    return hits
