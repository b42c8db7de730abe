"""What arrives: serving requests from traces or bursts, rollout episodes with environment gaps.

Rows come from the shell, already read; here they are cut, scaled and drawn by seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from rose_simulate.model.clock import SECOND
from rose_simulate.model.errors import TraceError
from rose_simulate.model.gpus.gates import ServingRequest

MOST_NEW, LONGEST_GAP_S = 8000, 120.0
# Probability that a sibling repeats its group's episode; gives an intra-class correlation of about
# 0.55, between the 0.53 (output tokens) and 0.59 (turns) of tau-bench.
ALIKE = 0.74


@dataclass(frozen=True, slots=True)
class ServingArrival:
    """One row of a serving trace."""

    at_s: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn: tokens added before it, tokens sampled, seconds of environment before it."""

    new: int
    output: int
    gap_s: float


Episode = tuple[PlannedTurn, ...]


@dataclass(frozen=True)
class ContextRange:
    """What contexts recorded episodes are brought to; new tokens, outputs and gaps are kept.

    Attributes:
        first: tokens of the first prompt; recorded ones exceed 100k.
        most: an episode ends before its context is longer.
    """

    first: int = 6000
    most: int = 32_000


USUAL_SPAN = ContextRange()
Shape = tuple[tuple[float, float], ...]
"""A slow trend of load: (seconds, any rate), ascending."""


def arrivals(rows: Rows[dict[str, str]], source: str) -> tuple[ServingArrival, ...]:
    """Rows with ``t_s``, ``in_tokens``, ``out_tokens``, ascending.

    Raises:
        TraceError: a column is missing, a row is cut off or times go backwards.
    """
    found: list[ServingArrival] = []
    for line, row in enumerate(rows, start=2):
        try:
            one = ServingArrival(float(row["t_s"]), int(row["in_tokens"]), int(row["out_tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            message = f"{source}:{line}: no row of t_s, in_tokens, out_tokens, or cut off ({error})"
            raise TraceError(message) from error
        if found and one.at_s < found[-1].at_s:
            message = f"{source}:{line}: time goes back from {found[-1].at_s} to {one.at_s}"
            raise TraceError(message)
        found.append(one)
    if not found:
        message = f"{source}: no rows"
        raise TraceError(message)
    return tuple(found)


def shape(rows: Rows[dict[str, str]], source: str) -> Shape:
    """Rows with ``t_s``, ``req_per_s``, ascending.

    Raises:
        TraceError: a column is missing, a row is cut off, or times do not ascend.
    """
    found: list[tuple[float, float]] = []
    for line, row in enumerate(rows, start=2):
        try:
            one = (float(row["t_s"]), float(row["req_per_s"]))
        except (KeyError, TypeError, ValueError) as error:
            message = f"{source}:{line}: no row of t_s, req_per_s, or cut off ({error})"
            raise TraceError(message) from error
        if found and one[0] <= found[-1][0]:
            message = f"{source}:{line}: time does not go on from {found[-1][0]} to {one[0]}"
            raise TraceError(message)
        found.append(one)
    if len(found) < 2 or not sum(rate for _, rate in found) > 0:
        message = f"{source}: a shape needs two rows and some load"
        raise TraceError(message)
    return tuple(found)


def episodes(
    rows: Rows[dict[str, str]], source: str, span: ContextRange = USUAL_SPAN
) -> tuple[Episode, ...]:
    """Rows with ``episode``, ``turn``, ``new_prompt_tokens``, ``out_tokens``, ``env_gap_s``.

    Raises:
        TraceError: a column is missing or a row is cut off.
    """
    grouped: dict[str, list[PlannedTurn]] = {}
    for line, row in enumerate(rows, start=2):
        try:
            turn = PlannedTurn(
                int(row["new_prompt_tokens"]), int(row["out_tokens"]), float(row["env_gap_s"])
            )
            grouped.setdefault(row["episode"], []).append(turn)
        except (KeyError, TypeError, ValueError) as error:
            message = f"{source}:{line}: no episode row, or cut off ({error})"
            raise TraceError(message) from error
    rescaled = (_rescaled(turns, span) for turns in grouped.values())
    found = tuple(episode for episode in rescaled if episode)
    if not found:
        message = f"{source}: no rows"
        raise TraceError(message)
    return found


def _rescaled(turns: list[PlannedTurn], span: ContextRange) -> Episode:
    kept: list[PlannedTurn] = []
    context = 0
    for turn in turns:
        new = span.first if not kept else min(MOST_NEW, max(1, turn.new))
        output = max(2, turn.output)
        context += new + output
        if context > span.most:
            break
        kept.append(PlannedTurn(new, output, min(turn.gap_s, LONGEST_GAP_S)))
    return tuple(kept)


def replay(
    trace: Rows[ServingArrival],
    *,
    seconds: float,
    requests_per_s: float,
    offset_s: float,
    draw: random.Random,
) -> list[ServingRequest]:
    """Play a trace with its own gaps, thinned or overlaid to a mean rate, in a loop.

    A rate above the trace's own overlays shifted copies of it, one below keeps each request with a
    probability; so bursts stay what they are.
    """
    length = max(trace[-1].at_s, 1.0)
    own = len(trace) / length
    found: list[tuple[float, int, int]] = []
    wanted, copy = requests_per_s / own, 0
    while wanted > 1e-9:
        keep = min(1.0, wanted)
        shift = (offset_s + copy * length * 0.37) % length
        for lap in range(int((seconds + shift) // length) + 1):
            for row in trace:
                at = row.at_s + lap * length - shift
                if 0 <= at < seconds and (keep >= 1.0 or draw.random() < keep):
                    found.append((at, row.prompt, row.output))
        wanted, copy = wanted - keep, copy + 1
    found.sort()
    return [_request(number, *one) for number, one in enumerate(found)]


def spread(
    requests: Rows[ServingRequest], share: float, draw: random.Random
) -> list[ServingRequest]:
    """The same requests with prompts up to this share shorter or longer, each by its own draw."""
    return [
        replace(one, prompt=max(1, round(one.prompt * draw.uniform(1 - share, 1 + share))))
        for one in requests
    ]


def sessions(
    pool: Rows[Episode],
    *,
    seconds: float,
    requests_per_s: float,
    token_s: float,
    draw: random.Random,
) -> list[ServingRequest]:
    """Turns of sessions that begin at random, each with its whole session as its prompt.

    A turn comes when its gap has passed since the answer before it would have ended with
    ``token_s`` for each of its tokens: when it comes does not depend on the engine, so runs have
    the same requests. Sessions that began before the first second are in the middle by then.
    """
    turns = sum(map(len, pool)) / len(pool)
    longest = max(_length_s(one, token_s) for one in pool)
    found: list[tuple[float, int, int, str]] = []
    at, number = -longest, 0
    while (at := at + draw.expovariate(requests_per_s / turns)) < seconds:
        number += 1
        now, context = at, 0
        for turn in pool[draw.randrange(len(pool))]:
            now, context = now + turn.gap_s, context + turn.new
            if 0 <= now < seconds:
                found.append((now, context, turn.output, f"s{number}"))
            now, context = now + turn.output * token_s, context + turn.output
    found.sort()
    return [
        ServingRequest(n, round(at * SECOND), max(1, prompt), max(1, output), session)
        for n, (at, prompt, output, session) in enumerate(found)
    ]


def _length_s(episode: Episode, token_s: float) -> float:
    return sum(turn.gap_s + turn.output * token_s for turn in episode)


def bursts(
    *,
    seconds: float,
    period_s: float,
    first_s: float,
    size: int,
    prompt: int,
    output: int,
    draw: random.Random,
) -> list[ServingRequest]:
    """``size`` requests inside the same second, every ``period_s``."""
    found: list[tuple[float, int, int]] = []
    at = first_s
    while at < seconds:
        found += [
            (
                at + draw.random(),
                max(16, round(prompt * draw.uniform(0.5, 1.5))),
                max(2, round(output * draw.uniform(0.5, 1.5))),
            )
            for _ in range(size)
        ]
        at += period_s
    found.sort()
    return [_request(number, *one) for number, one in enumerate(found)]


def _request(number: int, at_s: float, prompt: int, output: int) -> ServingRequest:
    return ServingRequest(number, round(at_s * SECOND), max(1, prompt), max(1, output))


def group(pool: Rows[Episode], members: int, draw: random.Random) -> tuple[Episode, ...]:
    """Episodes of one group: siblings often resemble each other."""
    base = pool[draw.randrange(len(pool))]
    return tuple(
        base if draw.random() < ALIKE else pool[draw.randrange(len(pool))] for _ in range(members)
    )
