"""``make bench-bound``: exceedances of the bound under an adversary; what the certificate costs.

Virtual time: H100 costs of ``simulate``, production's guard. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial

from bench.record import Figure, figure, log, record
from bench.scenarios import scenario
from rose_core.guard.certificate import CertificateCount, LendingCost
from rose_core.guard.chunk import prefill_chunk
from rose_core.stats import mixture_sequence, quantile
from rose_simulate.files.reading import read_arrivals
from rose_simulate.model.fleets.curves import (
    USUAL_CONTEXT,
    WARM_S,
    Lender,
    ReplicaBench,
    ReplicaYield,
    Row,
    poisson,
)
from rose_simulate.model.gpus.batch import PREFILL_CHUNK
from rose_simulate.model.jobs.workload import Episode
from rose_simulate.model.scenarios.costs import costs, kv_tokens, pairs
from rose_simulate.model.scenarios.scenario import (
    Contexts,
    Delays,
    Interference,
    Regime,
    RolloutJob,
    Scenario,
    Service,
)
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.verbs.studies import SCENARIOS

TRACES = ("conv", "code")
LOADS = {"conv": (0.25, 0.5, 1.0, 2.0), "code": (1.0, 2.0, 4.0)}
"""Requests per second; above these a replica is never idle, and slack decides instead."""
FACTORS = (1.05, 1.25, 1.5)
"""The SLO's TTFT, as multiples of the 99th percentile alone."""
HARVEST = 0.9
_FOREVER_MS = 1e6
PROMPTS = (16, 200, 1500, 4000, 8191)
"""Tokens: from nothing to the longest that alone does not exceed a batch."""
OUTPUTS = (1, 2, 40, 200)
_TRAINS, _LENGTH = 40, 12
"""Trains: a schedule's minute of warm-up is shared by some 250 requests."""
_CHANGES = 10  # of a schedule at once, at most: a quarter of its trains
_GAPS_S = (0.0, 0.0005, 0.002, 0.006, 0.02, 0.05, 0.12, 0.3)
_IDLE_S = (0.06, 0.15, 0.4, 1.0)


def main() -> None:
    """Search, compare, record."""
    parser = argparse.ArgumentParser(prog="python -m bench.bound", description=__doc__)
    add = parser.add_argument
    add("--requests", type=_number, default=30_000, help="of the adversary, each sent twice: 1e7")
    add("--minutes", type=float, help="the adversary begins no schedule after that time")
    add("--seeds", type=int, default=3, help="searches, each from the beginning")
    add("--first-seed", type=int, default=1, help="what runs with other seeds count adds up")
    add("--processes", type=int, default=1, help="searches side by side")
    add("--only", choices=("adversary", "table"), help="leave the other part out")
    add("--seconds", type=float, default=600.0, help="of each load of the table")
    add("--derate", type=float, default=0.5)
    options = parser.parse_args()
    setup, material = scenario("tight")
    rows = [] if options.only == "table" else _adversary(setup, material, options)
    if options.only != "adversary":
        rows += _table(setup, material, options)
    record("bound", rows, notes=("virtual time, H100 costs of the simulator; no GPU took part",))


def _number(text: str) -> int:
    return int(float(text))


def _table(
    setup: Scenario, material: SimulationInputs, options: argparse.Namespace
) -> list[Figure]:
    rows: list[Figure] = []
    promised = CertificateCount()
    for name in TRACES:
        trace = read_arrivals(SCENARIOS / "traces" / f"azure2023_{name}_600s.csv")
        for load in LOADS[name]:
            draw = random.Random(f"{name}/{load:g}")  # a model's randomness
            asked = poisson(load, trace, draw, options.seconds)
            service, job = setup.services[0], setup.jobs[0]
            one = _Replica(service, job, asked, material, options.seconds, options.derate)
            rows += _near(f"{name} {load:g}/s", one, promised)
    share = mixture_sequence(promised.exceeded, promised.requests)
    allowed = promised.allowed / promised.requests
    rows.append(
        figure(
            f"promised ones beyond their ceiling, of {promised.requests}",
            *(share.value, "ratio"),
            at_most=round(allowed, 4),
            interval=(share.low, share.high),
        )
    )
    return rows


def _adversary(
    setup: Scenario, material: SimulationInputs, options: argparse.Namespace
) -> list[Figure]:
    # Without a TPOT slack is never measured, so the gate uses idle gaps alone, as the bound says.
    loose: dict[str, object] = {"ttft_ms": _FOREVER_MS, "tpot_ms": 0.0}
    service = setup.services[0].model_copy(update=loose)
    attack = Adversary(service, setup.jobs[0], material.episodes, options.derate)
    found, began = Findings(), time.monotonic()
    each = math.ceil(options.requests / options.seeds)
    rounds = math.ceil(options.seeds / options.processes)
    minutes = options.minutes / rounds if options.minutes else None
    search = partial(attack.findings, each, minutes)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    # Spawned, as the simulator's: a fork beside threads may wait for a lock forever.
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, fresh) as pool:
        for one in pool.map(search, seeds):
            found.join(one)
            log(f"adversary: {found.requests:,} requests, {found.exceeded} exceed the bound")
    cost, took_s = found.cost, time.monotonic() - began
    assert cost is not None  # noqa: S101  # a search tries one schedule at least
    share = mixture_sequence(found.exceeded, found.requests)
    figures = [
        figure("adversary: requests, each alone and lent", found.requests, "1"),
        figure("adversary: requests a second", found.requests / took_s, "1/s"),
        figure("adversary: schedules", found.schedules, "1"),
        figure("adversary: exceedances of D + S + C", found.exceeded, "1", at_most=0),
        figure("adversary: exceedances of 10^6, at most", 1e6 * share.high, "1"),
        figure("adversary: worst added / bound", found.share, "ratio", at_most=1),
        figure("adversary: worst added", 1e3 * found.most_s, "ms"),
        figure("adversary: schedules that exceed D alone", found.above_stop, "1"),
        figure("adversary: schedules that exceed D and one chunk", found.above_chunk, "1"),
    ]
    parts = zip("DSC", (cost.stop_s, cost.step_s, cost.batch_s), strict=True)
    return figures + [figure(f"adversary: {name} there", 1e3 * part, "ms") for name, part in parts]


@dataclass(frozen=True)
class _Replica:
    """One replica with one load."""

    service: Service
    job: RolloutJob
    rows: Sequence[tuple[int, int, int]]
    material: SimulationInputs
    seconds: float
    derate: float

    def run(self, ttft_ms: float, *, lends: bool, certifies: bool) -> ReplicaYield:
        service = self.service.model_copy(update={"ttft_ms": ttft_ms})
        regime = Regime.OURS if lends else Regime.FIXED
        lender = Lender(service, self.job, regime, self.derate)
        bench = ReplicaBench(lender, lends=lends, seconds=self.seconds, certifies=certifies)
        draw = random.Random("rollouts")  # a model's randomness
        return bench.run(self.rows, self.material.episodes if lends else (), draw)


def _near(name: str, one: _Replica, promised: CertificateCount) -> list[Figure]:
    """Harvest and harm at SLOs near what serving takes alone."""
    rows = one.rows
    alone = one.run(_FOREVER_MS, lends=False, certifies=False)
    usual_s = quantile([each.ttft_s for each in alone.requests if each.first_ns], 0.99)
    figures: list[Figure] = []
    for factor in FACTORS:
        slo_ms = 1e3 * usual_s * factor
        before = one.run(slo_ms, lends=True, certifies=False)
        now = one.run(slo_ms, lends=True, certifies=True)
        late = {each.number for each in alone.requests if each.ttft_s * 1e3 > slo_ms}
        head = f"{name}, SLO {factor:g} x p99 alone ({slo_ms:.0f} ms)"
        kept = now.tokens_per_s / before.tokens_per_s if before.tokens_per_s else 1.0
        promised.requests += now.certified.requests
        promised.exceeded += now.certified.exceeded
        promised.allowed += now.certified.allowed
        figures += [
            figure(f"{head}: tokens / without certificate", kept, "ratio", at_least=HARVEST),
            figure(f"{head}: added late without", _added(before, late, slo_ms), f"of {len(rows)}"),
            figure(f"{head}: added late", _added(now, late, slo_ms), f"of {len(rows)}"),
        ]
    return figures


def _added(found: ReplicaYield, late: set[int], slo_ms: float) -> int:
    """Requests above the TTFT that are not when serving is alone."""
    return len({one.number for one in found.requests if one.ttft_s * 1e3 > slo_ms} - late)


@dataclass(frozen=True)
class Train:
    """Requests after an idle time: seconds before each, tokens of its prompt and its answer."""

    idle_s: float
    requests: tuple[tuple[float, int, int], ...]


Schedule = tuple[Train, ...]


@dataclass(frozen=True)
class TriedSchedule:
    """What one schedule has shown; seconds.

    Attributes:
        worst_s: most that lending added to a TTFT.
        share: of the bound, the largest over its requests.
        chunk_s: prefill of one chunk of one prompt, which an earlier candidate took for C.
    """

    schedule: Schedule
    requests: int
    exceeded: int
    worst_s: float
    share: float
    cost: LendingCost
    chunk_s: float
    lent: ReplicaYield


@dataclass
class Findings:
    """What searches have found so far; seconds.

    Attributes:
        above_stop: schedules that exceed D alone; ``above_chunk``: D and one chunk.
        share: the largest of the bound; ``cost``: D, S and C there.
    """

    requests: int = 0
    exceeded: int = 0
    schedules: int = 0
    above_stop: int = 0
    above_chunk: int = 0
    most_s: float = 0.0
    share: float = 0.0
    cost: LendingCost | None = None

    def add(self, one: TriedSchedule) -> None:
        """Count one schedule."""
        self.requests += one.requests
        self.exceeded += one.exceeded
        self.schedules += 1
        self.above_stop += one.worst_s > one.cost.stop_s
        self.above_chunk += one.worst_s > one.cost.stop_s + one.chunk_s
        self.most_s = max(self.most_s, one.worst_s)
        if self.cost is None or one.share > self.share:
            self.share, self.cost = one.share, one.cost

    def join(self, other: Findings) -> None:
        """Add what another search has found."""
        self.requests += other.requests
        self.exceeded += other.exceeded
        self.schedules += other.schedules
        self.above_stop += other.above_stop
        self.above_chunk += other.above_chunk
        self.most_s = max(self.most_s, other.most_s)
        if self.cost is None or other.share > self.share:
            self.share, self.cost = other.share, other.cost


def rows(schedule: Schedule) -> list[Row]:
    """The requests, each train after the last one's usual end."""
    at, found = WARM_S, []
    for train in schedule:
        at += train.idle_s + 1.0
        for gap, prompt, output in train.requests:
            at += gap
            found.append((round(at * 1e9), prompt, output))
    return found


def cost_of(
    lender: Lender,
    asked: Sequence[Row],
    context: int,
    delays: Delays,
    slow: Interference,
) -> LendingCost:
    """D, S and C of these requests by the simulator's own costs; ``docs/bound.md``.

    Args:
        lender: the replica.
        asked: the requests.
        context: tokens of the longest rollout.
        delays: of the control path.
        slow: what co-running costs.
    """
    service, job = lender.service, lender.job
    rolls = costs(service.device, job.model, lender.derate, attention=True)
    serves = costs(service.device, service.model, lender.derate, attention=True)
    # 1. The longest quantum: a chunk at the end of the longest context, or a step of a full batch.
    room = kv_tokens(service.device, job.model, service.rollout_memory_share)
    batch = max(1, min(job.cap, room // USUAL_CONTEXT))
    tokens = prefill_chunk(Contexts().most)
    chunk = rolls.prefill(tokens, pairs(tokens, context))
    quantum = max(chunk, rolls.step(batch, min(room, batch * context))[0]) * slow.rollout_slowdown
    # 2. One step with every request at its longest.
    step = serves.step(len(asked), sum(prompt + output for _, prompt, output in asked))[0]
    # 3. A batch takes requests until it has a chunk of tokens, so the last may be a whole prompt.
    longest = max(prompt for _, prompt, _ in asked)
    tokens = min(PREFILL_CHUNK - 1 + longest, sum(prompt for _, prompt, _ in asked))
    whole = serves.prefill(tokens, tokens / longest * pairs(longest))
    return LendingCost(delays.tap_s + delays.close_s + quantum, step, whole)


@dataclass(frozen=True)
class Adversary:
    """Searches for the arrivals that lending slows most, on one replica in virtual time.

    A schedule is trains of requests with idle time between, because a gate that is never opened
    adds nothing. The search keeps the worst schedules found, changes them at random, and keeps what
    has become worse (an evolution strategy, (mu + lambda)). Equal seeds give equal schedules.
    Nothing is kept of the others, so a search may go on for as long as one likes.

    Serving's memory never binds here: the bound says nothing of requests that wait for memory.
    """

    service: Service
    job: RolloutJob
    pool: Sequence[Episode]
    derate: float = 0.5
    delays: Delays = Delays()  # noqa: RUF009  # frozen
    slow: Interference = Interference()  # noqa: RUF009  # frozen

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest rollout."""
        return max(sum(turn.new + turn.output for turn in one) for one in self.pool)

    def try_out(self, schedule: Schedule, seed: int) -> TriedSchedule:
        """Serve the schedule alone and lent, and compare request by request."""
        asked = rows(schedule)
        lender = Lender(self.service, self.job, Regime.OURS, self.derate)
        by_itself = replace(lender, regime=Regime.FIXED)
        alone = ReplicaBench(by_itself, lends=False, seconds=None).run(asked)
        draw = random.Random(seed)  # a model's randomness
        lent = ReplicaBench(lender, lends=True, seconds=None).run(asked, self.pool, draw)
        cost = cost_of(lender, asked, self.longest, self.delays, self.slow)
        bound = cost.added_s
        both = zip(lent.requests, alone.requests, strict=True)
        added = [one.ttft_s - other.ttft_s for one, other in both]
        exceeded = sum(value > bound for value in added)
        worst = max(added)
        serves = costs(self.service.device, self.service.model, self.derate, attention=True)
        chunk = serves.prefill(PREFILL_CHUNK, pairs(PREFILL_CHUNK))
        share = worst / bound
        return TriedSchedule(schedule, len(added), exceeded, worst, share, cost, chunk, lent)

    def search(self, requests: int, seed: int, keep: int = 4) -> Iterator[TriedSchedule]:
        """Every schedule that is tried, until so many requests were served twice."""
        draw = random.Random(seed)  # a search's randomness
        best: list[TriedSchedule] = []
        schedules = served = 0
        while served < requests:
            fresh = schedules < 2 * keep or draw.random() < 0.2
            schedule = _drawn(draw) if fresh else _changed(draw.choice(best).schedule, draw)
            found = self.try_out(schedule, draw.randrange(2**31))
            schedules, served = schedules + 1, served + found.requests
            best = sorted([*best, found], key=lambda one: -one.share)[:keep]
            yield found

    def findings(self, requests: int, minutes: float | None, seed: int) -> Findings:
        """A whole search, or until the first schedule that ends after so many minutes."""
        found, began = Findings(), time.monotonic()
        for one in self.search(requests, seed):
            found.add(one)
            if minutes is not None and time.monotonic() > began + 60 * minutes:
                break
        return found


def _drawn(draw: random.Random) -> Schedule:
    return tuple(_train(draw) for _ in range(_TRAINS))


def _train(draw: random.Random) -> Train:
    length = draw.randint(1, _LENGTH)
    return Train(draw.choice(_IDLE_S) + draw.uniform(0, 0.05), _requests(length, draw))


def _requests(length: int, draw: random.Random) -> tuple[tuple[float, int, int], ...]:
    return tuple(
        (draw.choice(_GAPS_S) * draw.uniform(0.5, 1.5), draw.choice(PROMPTS), draw.choice(OUTPUTS))
        for _ in range(length)
    )


def _changed(schedule: Schedule, draw: random.Random) -> Schedule:
    trains = list(schedule)
    for _ in range(draw.randint(1, _CHANGES)):
        place = draw.randrange(len(trains))
        train, kind = trains[place], draw.randrange(4)
        if kind == 0:
            trains[place] = replace(train, idle_s=draw.choice(_IDLE_S) + draw.uniform(0, 0.05))
        elif kind == 1:
            trains[place] = trains[draw.randrange(len(trains))]
        else:
            requests = list(train.requests)
            number = draw.randrange(len(requests))
            gap, prompt, output = requests[number]
            if kind == 2:
                gap = max(0.0, gap + draw.gauss(0, 0.004))
                requests[number] = gap, prompt, output
            else:
                requests[number : number + 1] = _requests(draw.randint(1, 2), draw)
            trains[place] = replace(train, requests=tuple(requests[: 2 * _LENGTH]))
    return tuple(trains)


if __name__ == "__main__":
    main()
