"""What one replica gives at each load: the bridge from single events to a fleet.

One replica is simulated event by event, with production's guard, at a few loads; the fleet model
interpolates between them. So the fleet holds no rule of the guard, only what the guard did.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from functools import partial

from rose_core.guard.certificate import CertificateCount
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.cluster.lent import LentReplica, ReplicaCallbacks
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.gpus.gates import ServingRequest
from rose_simulate.model.gpus.guarded import GuardedGate
from rose_simulate.model.jobs.workload import Episode, ServingArrival
from rose_simulate.model.regimes import RULES, LendingMode
from rose_simulate.model.scenarios.costs import costs_of, kv_tokens
from rose_simulate.model.scenarios.scenario import Load, Regime, RolloutJob, Scenario, Service

USUAL_CONTEXT = 12_000
WARM_S, _SECONDS = 60.0, 300.0

Row = tuple[int, int, int]  # when a request arrives (ns), tokens of its prompt and its answer


@dataclass(frozen=True)
class Curve:
    """Per load (requests per second and replica, ascending): what a lent replica gives.

    Attributes:
        tokens_per_s: rollout tokens with a full batch.
        open_share: share of the time in which rollouts may compute.
        late_alone: share of the serving requests that violate the SLO with nothing lent.
        late_added: share of them that do when the replica is lent, and not alone.
        late_spared: share of them that do alone, and not when it is lent: a batch that begins
            later takes other prompts, so some requests win what others lose.
    """

    loads: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    open_share: tuple[float, ...]
    late_alone: tuple[float, ...]
    late_added: tuple[float, ...]
    late_spared: tuple[float, ...]


@dataclass(frozen=True)
class ReplicaYield:
    """What one replica has given at one load.

    Attributes:
        late: numbers of the requests that violate the SLO.
        requests: all of them, as they were served.
        verdicts: how often the guard's gate said each word.
        certified: requests that met an open gate under one, and those beyond its ceiling.
    """

    tokens_per_s: float
    open_share: float
    late: frozenset[int]
    requests: tuple[ServingRequest, ...] = field(default=(), compare=False)
    verdicts: Mapping[str, int] = field(default_factory=dict)
    certified: CertificateCount = field(default_factory=CertificateCount)


Alone = Mapping[float, ReplicaYield]
"""What a replica does with nothing lent, by load."""


@dataclass(frozen=True)
class Lender:
    """One kind of lent replica."""

    service: Service
    job: RolloutJob
    regime: Regime
    derate: float


def curve(
    lender: Lender,
    *,
    loads: Rows[float],
    trace: Rows[ServingArrival],
    pool: Rows[Episode],
    seed: int = 1,
    alone: Alone | None = None,
) -> Curve:
    """Simulate one replica at each load, alone and lent, with the same requests.

    Arrivals are Poisson with the trace's lengths. Under a regime that lends nothing, nothing is.

    Args:
        lender: the replica.
        loads: requests per second, ascending.
        trace: lengths of requests.
        pool: episodes of the rollouts.
        seed: of arrivals and episodes.
        alone: what it does alone at those loads, which is the same under every regime; None =
            find out.
    """
    nothing = RULES[lender.regime].lends is LendingMode.NOTHING
    known = by_itself(lender, loads=loads, trace=trace, seed=seed) if alone is None else alone
    found: list[tuple[float, float, float, float, float]] = []
    for load in loads:
        requests, found_alone = _requests(load, trace, seed), known[load]
        draw = random.Random(f"{seed}/{load}")  # noqa: S311  # a model's randomness
        lent = (
            found_alone if nothing else ReplicaBench(lender, lends=True).run(requests, pool, draw)
        )
        count = max(1, len(requests))
        before, after = found_alone.late, lent.late
        late, added, spared = (len(o) / count for o in (before, after - before, before - after))
        found.append((lent.tokens_per_s, lent.open_share, late, added, spared))
    return Curve(tuple(loads), *zip(*found, strict=True))


def by_itself(
    lender: Lender, *, loads: Rows[float], trace: Rows[ServingArrival], seed: int = 1
) -> Alone:
    """What the replica does at each load with nothing lent; no regime has a say in it."""
    unlent = replace(lender, regime=Regime.FIXED)
    return {
        load: ReplicaBench(unlent, lends=False).run(_requests(load, trace, seed)) for load in loads
    }


def _requests(load: float, trace: Rows[ServingArrival], seed: int) -> list[Row]:
    return poisson(load, trace, random.Random(f"{seed}/{load}/requests"))  # noqa: S311


def dedicated_tokens_per_s(
    job: RolloutJob, derate: float, pool: Rows[Episode], seed: int = 1
) -> float:
    """Rollout tokens per second of one dedicated engine with a full batch, with the job's drafts.

    Prefill pays for no attention, as nowhere in a fleet but on lent replicas (``Scenario``).
    """
    clock = VirtualClock()
    room = kv_tokens(job.device, job.model, 0.9, job.gpus_per_engine)
    own = costs_of(job, job.device, job.gpus_per_engine, derate)
    engine = BatchEngine(clock, own, room, lambda: None)
    draw = random.Random(f"{seed}/dedicated")  # noqa: S311  # a model's randomness
    for number in range(max(1, min(job.dedicated_cap, room // USUAL_CONTEXT))):
        Endless(engine, pool, draw, str(number)).send_turn()
    clock.run(round(WARM_S * SECOND))
    engine.settle()
    before = engine.tokens
    clock.run(round((WARM_S + _SECONDS) * SECOND))
    engine.settle()
    return (engine.tokens - before) / _SECONDS


class Endless:
    """Trajectories one after the other on one engine, without environment gaps."""

    def __init__(
        self, engine: BatchEngine, pool: Rows[Episode], draw: random.Random, name: str
    ) -> None:
        self._engine, self._pool, self._draw, self._name = engine, pool, draw, name
        self._episode: Episode = ()
        self._index = self._context = self._count = 0

    def send_turn(self) -> None:
        """Send the next turn."""
        if self._index >= len(self._episode):
            self._episode = self._pool[self._draw.randrange(len(self._pool))]
            self._index = self._context = 0
            self._count += 1
        planned = self._episode[self._index]
        self._index += 1
        self._context += planned.new
        sequence = Sequence(
            f"{self._name}/{self._count}", self._context, planned.output, _nothing, self.send_turn
        )
        self._context += planned.output
        self._engine.submit(sequence)


class ReplicaBench:
    """One replica, event by event, from a minute before its first request.

    Args:
        lender: the replica.
        lends: rollouts compute beside it.
        seconds: how long requests are served; None = until each has its first token.
        certifies: production's gate asks for a certificate, as it does.
    """

    def __init__(
        self,
        lender: Lender,
        *,
        lends: bool,
        seconds: float | None = _SECONDS,
        certifies: bool = True,
    ) -> None:
        self._lender, self._lends, self._seconds = lender, lends, seconds
        self._certifies = certifies
        self._clock = VirtualClock()
        self._engines: list[BatchEngine] = []

    def run(
        self, rows: Rows[Row], pool: Rows[Episode] = (), draw: random.Random | None = None
    ) -> ReplicaYield:
        """Serve the requests; rollouts always fill the batch."""
        replica = self._replica(pool, draw)
        if isinstance(replica.gate, GuardedGate) and not self._certifies:
            replica.gate.certifies = False
        if self._lends:
            replica.lend(self._lender.job)
        self._clock.run(round(WARM_S * SECOND))
        replica.device.finish()
        tokens = sum(one.tokens for one in self._engines)
        open_ns = replica.device.computing_ns
        requests = [ServingRequest(number, *row) for number, row in enumerate(rows)]
        for request in requests:
            self._clock.at(request.arrived_ns, partial(replica.serve, request))
        self._serve(requests)
        replica.device.finish()
        seconds = self._clock.now_s - WARM_S
        gate = replica.gate if isinstance(replica.gate, GuardedGate) else None
        return ReplicaYield(
            (sum(one.tokens for one in self._engines) - tokens) / seconds,
            (replica.device.computing_ns - open_ns) / SECOND / seconds,
            frozenset(one.number for one in requests if self._late(one)),
            tuple(requests),
            *((gate.verdicts, gate.certified) if gate is not None else ()),
        )

    def _serve(self, requests: Rows[ServingRequest]) -> None:
        if self._seconds is not None:
            self._clock.run(round((WARM_S + self._seconds) * SECOND))
            return
        for request in requests:
            while not request.first_ns:
                self._clock.run(max(self._clock.now_ns + SECOND, request.arrived_ns))

    def _replica(self, pool: Rows[Episode], draw: random.Random | None) -> LentReplica:
        lender = self._lender

        def served(_replica: LentReplica, engine: BatchEngine) -> None:
            assert draw is not None  # noqa: S101  # only a lent replica serves rollouts
            self._engines.append(engine)
            for number in range(max(1, min(lender.job.cap, engine.kv_tokens // USUAL_CONTEXT))):
                Endless(engine, pool, draw, str(number)).send_turn()

        # Only services[0], delays and interference of it are read.
        scenario = Scenario(
            name="curve",
            seconds=WARM_S + (self._seconds or 0.0),
            derate=lender.derate,
            episodes="",
            services=(lender.service.model_copy(update={"load": Load()}),),
            jobs=(lender.job,),
        )
        ears = ReplicaCallbacks(lambda _replica, _open: None, lambda _replica, _lost: None, served)
        rules = RULES[lender.regime]
        return LentReplica(self._clock, 0, scenario.services[0], scenario, rules=rules, ears=ears)

    def _late(self, one: ServingRequest) -> bool:
        """Whether it violates the SLO; one that still waits at the end by how long it has."""
        service, now = self._lender.service, self._clock.now_ns
        if not one.first_ns:
            return (now - one.arrived_ns) / 1e6 > service.ttft_ms
        slow = one.ended_ns and one.tpot_s * 1e3 > service.tpot_ms
        return one.ttft_s * 1e3 > service.ttft_ms or bool(slow)


def poisson(
    load: float, trace: Rows[ServingArrival], draw: random.Random, seconds: float = _SECONDS
) -> list[Row]:
    """Arrivals at random after the first minute, with the trace's lengths."""
    found: list[Row] = []
    at = WARM_S
    while load > 0:
        at += draw.expovariate(load)
        if at >= WARM_S + seconds:
            break
        row = trace[draw.randrange(len(trace))]
        found.append((round(at * SECOND), row.prompt, row.output))
    return found


def _nothing() -> None:
    """A first token is of no interest here."""
