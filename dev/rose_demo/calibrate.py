"""What this machine's replica can take and promise, by its own measured speed.

The demo's argument needs a serving replica that is busy for about a third of the time. A fixed
load is that on one machine only: on one of half the speed the same requests saturate the replica,
it misses its objective alone, and nothing can be lent or shown. ``fit`` and
``objective`` are pure; ``measure_speed`` asks the replica, one request at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import aiohttp

from rose_demo.errors import SetUpFailed
from rose_demo.load import send
from rose_demo.records import Request, Role
from rose_demo.trace import Arrival, Scale

# Two sizes give prefill per token and what every request costs whatever its size; the best of
# several is the machine's own speed, what is above it is somebody else's work.
_SHORT, _LONG = Arrival(0.25, 40, 3), Arrival(0.75, 440, 24)
_REPEATS = 4


@dataclass(frozen=True)
class ServingSpeed:
    """How fast one replica serves while it is alone on its GPU.

    Attributes:
        request_s: of every request, whatever its size.
        prefill_s: per prompt token.
        decode_s: per output token after the first.
    """

    request_s: float
    prefill_s: float
    decode_s: float

    def seconds(self, arrival: Arrival) -> float:
        """How long the replica works on it."""
        prefill = self.request_s + self.prefill_s * arrival.prompt_tokens
        return prefill + self.decode_s * max(arrival.output_tokens - 1, 0)


def speed_of(short: Sequence[Request], long: Sequence[Request]) -> ServingSpeed:
    """The speed that requests of ``_SHORT`` and ``_LONG`` show.

    Raises:
        SetUpFailed: the replica did not answer them.
    """
    small, large = (
        min((one.ttft_s for one in sent if one.ttft_s is not None), default=None)
        for sent in (short, long)
    )
    decode = min((one.tpot_s for one in long if one.tpot_s is not None), default=None)
    if small is None or large is None or decode is None:
        errors = {one.error for one in (*short, *long) if one.error}
        message = f"the serving replica did not answer: {', '.join(sorted(errors)) or 'no tokens'}"
        raise SetUpFailed(message)
    tokens = _LONG.prompt_tokens - _SHORT.prompt_tokens
    prefill = max(large - small, 0.0) / tokens
    return ServingSpeed(max(small - prefill * _SHORT.prompt_tokens, 0.0), prefill, decode)


def busy_share(load: Iterable[Arrival], speed: ServingSpeed, seconds: float) -> float:
    """Share of the time in which the replica works on the load, one request after the other."""
    return sum(speed.seconds(arrival) for arrival in load) / seconds


def fit(
    load: Sequence[Arrival], scale: Scale, speed: ServingSpeed, *, seconds: float, share: float
) -> Scale:
    """The scale at which the replica is busy for ``share`` of the time.

    A machine that is too slow by a factor gets requests shorter by its square root, and fewer of
    them by the rest: shorter ones alone would be all prefill and no tokens to time, fewer ones
    alone too few to compare. A faster one gets more of them.

    Args:
        load: the requests that ``scale`` keeps, with the trace's own lengths.
        scale: for a machine that is fast enough.
        speed: of the replica.
        seconds: the time the requests are sent in.
        share: as if requests came one after the other; batches make it less.
    """

    def busy(one: Scale) -> float:
        return busy_share(map(one.shorten, load), speed, seconds)

    fitted = scale.shorter(math.sqrt(max(busy(scale) / share, 1.0)))
    return replace(fitted, keep=round(min(scale.keep * share / busy(fitted), 1.0), 4))


@dataclass(frozen=True)
class Objective:
    """What the owner of the replicas promises, milliseconds."""

    ttft_ms: int
    tpot_ms: int


LEAST_OBJECTIVE = Objective(1000, 100)
"""What is promised on a machine that is fast enough for it."""
_CONTENTION = 1.5
"""What a core loses while its neighbour is busy: they share caches and memory."""


def objective(scale: Scale, speed: ServingSpeed) -> Objective:
    """What a replica of this speed can promise when it is alone.

    To the first token: the longest prompt behind another of its kind. Per token: decoding, with one
    longest prompt prefilled between the tokens of a shortest answer.
    """
    longest = speed.request_s + speed.prefill_s * scale.longest_prompt
    ttft_s = 2 * longest * _CONTENTION
    tpot_s = (2 * speed.decode_s + longest / (scale.shortest_output - 1)) * _CONTENTION
    return Objective(
        max(LEAST_OBJECTIVE.ttft_ms, round(ttft_s * 100) * 10),
        max(LEAST_OBJECTIVE.tpot_ms, round(tpot_s * 100) * 10),
    )


async def measure_speed(url: str) -> ServingSpeed:
    """Ask the replica, one request at a time.

    Raises:
        SetUpFailed: it did not answer.
    """
    sent: dict[Arrival, list[Request]] = {_SHORT: [], _LONG: []}
    async with aiohttp.ClientSession() as session:
        for number in range(_REPEATS):
            for kind, requests in sent.items():
                # Words are drawn by the time; of a known prompt the prefix cache spares prefill.
                other = replace(kind, at_s=kind.at_s + number)
                origin = time.monotonic() - other.at_s
                requests.append(await send(session, url, Role.LENT, other, origin))
    return speed_of(sent[_SHORT], sent[_LONG])
