"""Live traffic for the demo: a window of a real trace, scaled to small models on one core.

Arrivals keep their timing and lengths their proportions; only a share of the requests is kept and
lengths are divided, so that the replica is busy about a third of the time (``calibrate``). Which
requests are kept is drawn with a fixed seed: the same schedule every time.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from rose_demo.errors import BadTrace

DEFAULT_TRACE = "azure2023_conv_600s.csv"
BUSY_SHARE = 0.33
"""Of its time that a replica works when it is alone: what the load is fitted to."""
QUIET_SHARE = 0.12
"""End of a window without arrivals, as a share of its length."""


@dataclass(frozen=True)
class Arrival:
    """One request of the trace, unscaled.

    Attributes:
        number: which request it is of the load planned; -1 before there is a plan.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    number: int = -1


@dataclass(frozen=True)
class Scale:
    """How a trace becomes load for a small model.

    Attributes:
        keep: share of requests kept, 0..1.
        length_divisor: prompt and output lengths are divided by this.
        longest_prompt, longest_output: then cut to these.
        shortest_output: of fewer tokens a single neighbour's prefill decides the time per token.
    """

    keep: float = 0.16
    length_divisor: float = 6.0
    longest_prompt: int = 700
    longest_output: int = 100
    shortest_output: int = 8

    def shorten(self, row: Arrival) -> Arrival:
        """The request with lengths for a small model."""
        prompt = min(max(round(row.prompt_tokens / self.length_divisor), 4), self.longest_prompt)
        output = round(row.output_tokens / self.length_divisor)
        output = min(max(output, self.shortest_output), self.longest_output)
        return replace(row, prompt_tokens=prompt, output_tokens=output)

    def shorter(self, factor: float) -> Scale:
        """The same proportions, all lengths shorter by this factor."""
        return replace(
            self,
            length_divisor=round(self.length_divisor * factor, 2),
            longest_prompt=max(round(self.longest_prompt / factor), 4),
            longest_output=max(round(self.longest_output / factor), self.shortest_output),
        )


def default_trace() -> Path:
    """The shipped slice; ``data/README.md`` names origin and licence."""
    return Path(str(files("rose_demo") / "data" / DEFAULT_TRACE))


def read_trace(path: Path) -> list[Arrival]:
    """Read ``t_s,in_tokens,out_tokens`` rows.

    Raises:
        BadTrace: the file is missing, has other columns or no rows.
    """
    try:
        with path.open(newline="") as file:
            rows = [
                Arrival(float(row["t_s"]), int(row["in_tokens"]), int(row["out_tokens"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        message = f"{path}: need columns t_s,in_tokens,out_tokens ({error})"
        raise BadTrace(message) from error
    if not rows:
        message = f"{path}: no rows"
        raise BadTrace(message)
    return sorted(rows, key=lambda row: row.at_s)


def busiest_window(arrivals: list[Arrival], seconds: float, burst_seconds: float = 10.0) -> float:
    """Start of the window that has the worst burst of prompt tokens in its middle."""
    first, last = arrivals[0].at_s, arrivals[-1].at_s

    def prompt_tokens(start: float) -> int:
        return sum(a.prompt_tokens for a in arrivals if start <= a.at_s < start + burst_seconds)

    starts = [first + step for step in range(max(int(last - first - burst_seconds), 1))]
    worst = max(starts, key=prompt_tokens)
    start = worst + burst_seconds / 2 - seconds / 2
    return min(max(start, first), max(last - seconds, first))


def schedule(
    arrivals: Iterable[Arrival], *, start_s: float, seconds: float, scale: Scale, seed: int
) -> list[Arrival]:
    """Requests to send, numbered: times from 0, lengths scaled, a seeded share kept.

    A window longer than the trace starts over at its beginning.
    """
    rows = sorted(arrivals, key=lambda row: row.at_s)
    period = rows[-1].at_s + 1.0
    source = random.Random(seed)  # noqa: S311  # load, nothing secret
    kept: list[Arrival] = []
    lap = 0
    while lap * period - start_s < seconds:
        for row in rows:
            at = row.at_s + lap * period - start_s
            if source.random() < scale.keep and 0 <= at < seconds:
                kept.append(scale.shorten(replace(row, at_s=at, number=len(kept))))
        lap += 1
    return kept


def twice(arrivals: Sequence[Arrival], *, window_s: float, seconds: float) -> list[Arrival]:
    """Every slice of the load in a lent and in a withheld window: all that differs is the lending.

    Windows alternate, the first is lent. Of four windows the outer two get one slice and the inner
    two another (ABBA, a counterbalanced design): one slice is lent first, the other withheld first.
    An engine takes longer over lengths that it meets for the first time, because its kernels are
    made for them, and whichever window came first would pay for that. Two windows that are left
    over get a slice of their own.

    A slice leaves the end of its window free, so that its requests finish inside.

    Args:
        arrivals: numbered load from time 0 on.
        window_s: length of a window; the first begins at time 0.
        seconds: length of the measurement; only whole pairs of windows get load.
    """
    slice_s = slice_seconds(window_s)
    pairs = int(seconds // (2 * window_s))
    planned = [
        replace(arrival, at_s=window * window_s + arrival.at_s % slice_s)
        for arrival in arrivals
        if arrival.at_s // slice_s < pairs
        for window in _windows(int(arrival.at_s // slice_s), pairs)
    ]
    return sorted(planned, key=lambda arrival: arrival.at_s)


def _windows(number: int, pairs: int) -> tuple[int, int]:
    """The two windows of a slice, by their numbers."""
    four, inner = divmod(number, 2)
    first = 4 * four
    if 2 * four + 1 == pairs:
        return first, first + 1
    return (first + 1, first + 2) if inner else (first, first + 3)


def slice_seconds(window_s: float) -> float:
    """How much of the trace fits into a window."""
    return window_s * (1 - QUIET_SHARE)
