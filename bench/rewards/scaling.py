"""Workers that follow the wish beside a pool of a fixed size, on virtual time.

Trajectories end when those of a simulated job did, each with a reward of random length. Every
``look_s`` the pool asks ``rose_core.rewards.scale.wish``, as an autoscaler would; the first worker
is asked for at once, as KEDA's push scaler does. A new worker is ready after its cold start, and
one that is idle and not wished for ends. A worker counts from the moment it is asked for.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rose_core.rewards.scale import wish

_STEP_S = 1.0


@dataclass(frozen=True)
class Pool:
    """What came of one pool.

    Attributes:
        busy_share: of the time for which workers were held.
        wait_p99_s: from a trajectory's end to the start of its reward.
        most: workers at a time.
    """

    busy_share: float
    wait_p99_s: float
    most: int


def lengths(count: int, mean_s: float, seed: int) -> list[float]:
    """Lengths of rewards: most are short, few take several times the mean."""
    draw = random.Random(seed)
    return [draw.expovariate(1 / mean_s) for _ in range(count)]


def fixed(ends: Sequence[float], takes: Sequence[float], size: int) -> Pool:
    """A pool that is always there, from the first end to the last result."""
    free = [ends[0]] * size
    waits, last = [], ends[0]
    for end, take in zip(ends, takes, strict=True):
        start = max(end, heapq.heappop(free))
        heapq.heappush(free, start + take)
        waits.append(start - end)
        last = max(last, start + take)
    held = size * (last - ends[0])
    return Pool(sum(takes) / held, _p99(waits), size)


def followed(
    ends: Sequence[float],
    takes: Sequence[float],
    *,
    target_s: float,
    cold_s: float,
    most: int,
    look_s: float = _STEP_S,
) -> Pool:
    """A pool that follows the wish.

    Args:
        ends: when trajectories end, in order.
        takes: seconds of each one's reward.
        target_s: within which a reward shall have its result.
        cold_s: until a new worker is ready.
        most: workers at a time.
        look_s: between two looks of the autoscaler; KEDA's looks every 15 s by default.
    """
    workers: list[float] = []  # when each is free, or ready
    running: list[tuple[float, float]] = []  # when each ends, and when its trajectory did
    waiting: deque[tuple[float, float]] = deque()
    coming = deque(zip(ends, takes, strict=True))
    held, waits, peak, now, look_at = 0.0, list[float](), 0, ends[0], ends[0]
    p50 = statistics.median(takes)
    while coming or waiting or workers:
        while coming and coming[0][0] <= now:
            waiting.append(coming.popleft())
        running = [one for one in running if one[0] > now]
        taken = [end for end, _ in waiting] + [end for _, end in running]
        if now >= look_at or (taken and not workers):
            wanted = wish([now - end for end in taken], p50, target_s, most)
            if now >= look_at:
                look_at = now + look_s
            else:
                wanted = min(wanted, 1)
            idle = sorted(one for one in workers if one <= now)
            for one in idle[: max(0, len(workers) - wanted)]:
                workers.remove(one)
            workers += [now + cold_s] * (wanted - len(workers))
        peak = max(peak, len(workers))
        held += len(workers) * _STEP_S
        now += _STEP_S
        heapq.heapify(workers)
        # Whoever comes free within the second takes the next; later ends wait for the next step.
        while waiting and workers and workers[0] < now:
            free = heapq.heappop(workers)
            end, take = waiting.popleft()
            start = max(free, end, now - _STEP_S)
            heapq.heappush(workers, start + take)
            running.append((start + take, end))
            waits.append(start - end)
    return Pool(sum(takes) / held, _p99(waits), peak)


def smallest(ends: Sequence[float], takes: Sequence[float], wait_s: float) -> Pool:
    """The smallest fixed pool in which 99 of 100 rewards wait no longer than that."""
    size = 1
    while (found := fixed(ends, takes, size)).wait_p99_s > wait_s:
        size += 1
    return found


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
