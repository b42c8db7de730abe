"""Elastic parallelism: how wide a job's own engines are in the round to come. Pure.

``gpus`` GPUs run as ``gpus / width`` engines, each over ``width`` of them by tensor parallelism.
Narrow engines waste nothing on talking to each other, wide ones give a lone trajectory all GPUs and
hold its KV where one GPU cannot. A short round ends while many still write, a long one is mostly
its last ones, so no width is best for both (RollPacker, arXiv 2509.21009).

The rule replays what a round of the same kind was made of, on each width: trajectories are dealt
out evenly, each engine takes as many as its KV pool holds, and the round is over when as many have
ended as it keeps. It moves from the present width only to one that is faster by ``MARGIN``. Next
step: ``own_engines`` carries it out between two rounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose_simulate.model.scenarios.costs import ModelCosts, pairs

MARGIN = 0.05
"""An estimate leaves out turns and environments, so what differs by less decides nothing."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a round's trajectory was.

    Attributes:
        tokens: output.
        read: tokens of its prompts and environments.
        ended: nobody stopped it; of one that was stopped, more would have come.
    """

    tokens: int
    read: int
    ended: bool


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """A round that is over.

    Attributes:
        trajectories: all that it began, in their order.
        kept: how many had to end for it to be over.
    """

    trajectories: tuple[Written, ...]
    kept: int


@dataclass(frozen=True, slots=True)
class Width:
    """One way to use the GPUs.

    Attributes:
        gpus: of one engine.
        engines: of this width.
        kv_tokens: of one engine's pool.
        most: trajectories that one engine takes at most.
        times: of one engine.
    """

    gpus: int
    engines: int
    kv_tokens: int
    most: int
    times: ModelCosts


def decide(seen: RoundSeen | None, widths: Sequence[Width], present: int) -> int:
    """GPUs of an engine in the round to come.

    Args:
        seen: the last round of the kind that comes; None: there was none yet.
        widths: to choose from.
        present: GPUs of an engine now.

    Returns:
        The present width unless another one is faster by ``MARGIN``, or it holds nothing.
    """
    if seen is None:
        return present
    found: Mapping[int, float] = {
        one.gpus: lasts for one in widths if (lasts := seconds(seen, one)) is not None
    }
    if not found:
        return present
    best = min(found, key=lambda gpus: (found[gpus], gpus))
    return best if found[best] < found.get(present, float("inf")) * (1 - MARGIN) else present


def seconds(seen: RoundSeen, width: Width) -> float | None:
    """How long such a round takes on engines of this width; None: one of it does not fit."""
    whole = max(one.tokens for one in seen.trajectories if one.ended)
    longest = max(one.tokens + one.read for one in seen.trajectories)
    if longest > width.kv_tokens:
        return None
    # One that was stopped would have gone on for longer than the last that counted.
    lengths = [
        (one.tokens if one.ended else max(one.tokens, whole), one.read) for one in seen.trajectories
    ]
    ends: list[float] = []
    for number in range(width.engines):
        ends += _ends(lengths[number :: width.engines], width)
    return sorted(ends)[min(seen.kept, len(ends)) - 1]


def _ends(lengths: Sequence[tuple[int, int]], width: Width) -> list[float]:
    """When each of an engine's trajectories ends."""
    waiting, running, ends = list(reversed(lengths)), list[tuple[int, int, int]](), list[float]()
    now, steps, held = 0.0, 0, 0
    while waiting or running:
        fresh = 0
        while waiting and len(running) < width.most:
            tokens, read = waiting[-1]
            if running and held + tokens + read > width.kv_tokens:
                break
            waiting.pop()
            heapq.heappush(running, (steps + tokens, tokens, read))
            held, fresh = held + tokens + read, fresh + read
        if fresh:
            now += width.times.prefill(fresh, pairs(fresh // max(1, len(running))))
        last, tokens, read = heapq.heappop(running)
        # A trajectory is on average half-way.
        batch = len(running) + 1
        now += (last - steps) * width.times.step(batch, held // 2)[0]
        steps, held = last, held - tokens - read
        ends.append(now)
    return ends
