"""What one replica gives at each load: the bridge from single events to a fleet.

One replica is simulated event by event, with production's guard, at a few loads; the fleet model
interpolates between them. So the fleet holds no rule of the guard, only what the guard did.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial

from rose_core.simulate.batch import BatchEngine, Sequence
from rose_core.simulate.clock import SECOND, Clock
from rose_core.simulate.costs import costs, kv_tokens
from rose_core.simulate.gates import ServingRequest
from rose_core.simulate.lent import Ears, Replica
from rose_core.simulate.regimes import RULES
from rose_core.simulate.scenario import Load, Regime, RolloutJob, Scenario, Service
from rose_core.simulate.workload import Arrival, Episode

USUAL_CONTEXT = 12_000
_WARM_S, _SECONDS = 60.0, 300.0


@dataclass(frozen=True)
class Curve:
    """Per load (requests per second and replica, ascending): what a lent replica gives.

    Attributes:
        tokens_per_s: rollout tokens with a full batch.
        open_share: share of the time in which rollouts may compute.
        violations: share of serving requests that violate the SLO.
    """

    loads: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    open_share: tuple[float, ...]
    violations: tuple[float, ...]


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
    trace: Rows[Arrival],
    pool: Rows[Episode],
    seed: int = 1,
) -> Curve:
    """Simulate one lent replica at each load, arrivals Poisson with the trace's lengths."""
    found: list[tuple[float, float, float]] = []
    for load in loads:
        draw = random.Random(f"{seed}/{load}")  # noqa: S311  # a model's randomness
        found.append(_one(lender, load, trace, pool, draw))
    tokens, share, violations = zip(*found, strict=True)
    return Curve(tuple(loads), tokens, share, violations)


def dedicated_tokens_per_s(
    job: RolloutJob, derate: float, pool: Rows[Episode], seed: int = 1
) -> float:
    """Rollout tokens per second of one dedicated engine with a full batch."""
    clock = Clock()
    room = kv_tokens(job.device, job.model, 0.9, job.gpus_per_engine)
    own = costs(job.device, job.model, derate, job.gpus_per_engine)
    engine = BatchEngine(clock, own, room, lambda: None)
    draw = random.Random(f"{seed}/dedicated")  # noqa: S311  # a model's randomness
    for number in range(max(1, min(job.dedicated_cap, room // USUAL_CONTEXT))):
        Endless(engine, pool, draw, str(number)).turn()
    clock.run(round(_WARM_S * SECOND))
    engine.settle()
    before = engine.tokens
    clock.run(round((_WARM_S + _SECONDS) * SECOND))
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

    def turn(self) -> None:
        """Send the next turn."""
        if self._index >= len(self._episode):
            self._episode = self._pool[self._draw.randrange(len(self._pool))]
            self._index = self._context = 0
            self._count += 1
        planned = self._episode[self._index]
        self._index += 1
        self._context += planned.new
        sequence = Sequence(
            f"{self._name}/{self._count}", self._context, planned.output, _nothing, self.turn
        )
        self._context += planned.output
        self._engine.submit(sequence)


def _one(
    lender: Lender,
    load: float,
    trace: Rows[Arrival],
    pool: Rows[Episode],
    draw: random.Random,
) -> tuple[float, float, float]:
    service, job = lender.service, lender.job
    clock = Clock()
    # Only services[0], delays and interference of it are read.
    told = Scenario(
        name="curve",
        seconds=_WARM_S + _SECONDS,
        derate=lender.derate,
        episodes="",
        services=(service.model_copy(update={"load": Load()}),),
        jobs=(job,),
    )
    engines: list[BatchEngine] = []

    def served(_replica: Replica, engine: BatchEngine) -> None:
        engines.append(engine)
        for number in range(max(1, min(job.cap, engine.kv_tokens // USUAL_CONTEXT))):
            Endless(engine, pool, draw, str(number)).turn()

    ears = Ears(lambda _replica, _open: None, lambda _replica, _lost: None, served)
    replica = Replica(clock, 0, told.services[0], told, rules=RULES[lender.regime], ears=ears)
    replica.lend(job)
    clock.run(round(_WARM_S * SECOND))
    replica.device.finish()
    tokens, open_ns = sum(one.tokens for one in engines), replica.device.computing_ns
    requests = _poisson(load, trace, draw)
    for request in requests:
        clock.at(request.arrived_ns, partial(replica.serve, request))
    clock.run(round((_WARM_S + _SECONDS) * SECOND))
    replica.device.finish()
    late = [
        one
        for one in requests
        if one.ended_ns
        and (one.ttft_s * 1e3 > service.ttft_ms or one.tpot_s * 1e3 > service.tpot_ms)
    ]
    return (
        (sum(one.tokens for one in engines) - tokens) / _SECONDS,
        (replica.device.computing_ns - open_ns) / SECOND / _SECONDS,
        len(late) / max(1, len(requests)),
    )


def _poisson(load: float, trace: Rows[Arrival], draw: random.Random) -> list[ServingRequest]:
    found: list[ServingRequest] = []
    at = _WARM_S
    while load > 0:
        at += draw.expovariate(load)
        if at >= _WARM_S + _SECONDS:
            break
        row = trace[draw.randrange(len(trace))]
        found.append(ServingRequest(len(found), round(at * SECOND), row.prompt, row.output))
    return found


def _nothing() -> None:
    """A first token is of no interest here."""
