"""Runs a world to its end and writes down what came of it; compares it with serving alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

import msgspec

from rose_core.accounting.ledger import (
    GpuTime,
    Ledger,
    OutputTokens,
    ServingImpact,
    Trajectories,
    allowed_hundredths,
)
from rose_core.stats import quantile
from rose_core.wire.routing import EngineKind
from rose_simulate.model.clock import SECOND
from rose_simulate.model.gpus.gates import ServingRequest
from rose_simulate.model.gpus.recomputed import Cause
from rose_simulate.model.outcome import JobOutcome, RunOutcome, ServingOutcome, percentile_ms
from rose_simulate.model.regimes import RULES
from rose_simulate.model.scenarios.scenario import Regime, Scenario, Service
from rose_simulate.model.simulation import Simulation, SimulationInputs

SHARE = 0.9


def recoveries(world: Simulation, scenario: Scenario) -> Iterator[float]:
    """Per burst: seconds from its second until ``SHARE`` of the gates are open again.

    So long the rollouts of a whole pool are gone, since a burst hits all its replicas at once.

    The next burst or the end bounds it; a burst that finds no open gate gives nothing.
    """
    periods = [
        (one.load.offset_s, one.load.burst_every_s)
        for one in scenario.services
        if one.load.burst_every_s
    ]
    if not periods:
        return
    first, every = periods[0]
    end = scenario.warmup_s + scenario.seconds
    times, levels = _levels(world)
    at = first
    while at < end:
        if at >= scenario.warmup_s:
            yield from _recovery(times, levels, at, min(at + every, end))
        at += every


def _levels(world: Simulation) -> tuple[list[float], list[int]]:
    """Number of open gates after each move."""
    times, levels, level = [0.0], [0], 0
    for time_s, change in world.gate_moves:
        level += change
        times.append(time_s)
        levels.append(level)
    return times, levels


def _recovery(times: list[float], levels: list[int], at: float, until: float) -> Iterator[float]:
    start = bisect_left(times, at)
    before = levels[start - 1] if start else 0
    if before <= 0:
        return
    fallen = False
    for index in range(start, len(times)):
        if times[index] >= until:
            break
        fallen = fallen or levels[index] < SHARE * before
        # Back for good: the burst lasts a second, and gates flicker inside it.
        if fallen and levels[index] >= SHARE * before and times[index] >= at + 1.0:
            yield times[index] - at
            return
    yield until - at if fallen else 0.0


class ServedRequests(msgspec.Struct, frozen=True):
    """A service's requests by number.

    Attributes:
        late: that violate the SLO.
        ttft_s: of those that have a first token.
    """

    late: frozenset[int]
    ttft_s: dict[int, float]


Alone = dict[str, ServedRequests]
"""By service, what became of its requests with nothing lent; empty when this is that run."""


def run(
    scenario: Scenario, regime: Regime, seed: int, material: SimulationInputs, alone: Alone
) -> tuple[RunOutcome, Alone]:
    """One run.

    Args:
        scenario: see there; its own seeds and regimes are not looked at.
        regime: who decides.
        seed: of requests and episodes.
        material: traces.
        alone: see there.

    Returns:
        The outcome, and what became of its own requests.
    """
    world = Simulation(scenario, RULES[regime], seed, material)
    events, before = 0, Counter[str]()
    if scenario.warmup_s:
        events = world.clock.run(round(scenario.warmup_s * SECOND))
        before = _counts(world)
    events += world.clock.run(round((scenario.warmup_s + scenario.seconds) * SECOND))
    counted = _counts(world) - before
    measured = {name: _measured(found, scenario) for name, found in world.requests.items()}
    now_ns = world.clock.now_ns
    served = {
        service.name: _served(measured[service.name], service, now_ns)
        for service in scenario.services
    }
    engines = [engine for router in world.routers.values() for engine in router.engines.values()]
    outcome = RunOutcome(
        regime=regime.value,
        seed=seed,
        derate=scenario.derate,
        seconds=scenario.seconds,
        services=tuple(
            _serving(
                world,
                service,
                measured[service.name],
                served[service.name],
                alone.get(service.name),
            )
            for service in scenario.services
        ),
        jobs=tuple(_job(job.name, counted, scenario.seconds) for job in scenario.jobs),
        dedicated_held_ms=round(
            sum(job.dedicated * job.gpus_per_engine + job.trainer_gpus for job in scenario.jobs)
            * scenario.seconds
            * 1000
        ),
        borrowed_held_ms=counted["held_ms"],
        borrowed_computing_ms=counted["computing_ms"],
        shared_ms=counted["shared_ms"],
        reclaims=sum(engine.reclaims for engine in engines),
        weight_bytes=counted["weight_bytes"],
        events=events,
        recoveries_s=tuple(recoveries(world, scenario)),
        node_failures=counted["node_failures"],
        restarted=counted["restarted"],
        slowdown=scenario.interference.serving_slowdown,
        serving_gpu_ms=round(
            sum(one.replicas * one.gpus_per_replica for one in scenario.services)
            * scenario.seconds
            * 1000
        ),
        reserved_ms=counted["reserved_ms"],
        unlent_reserved_ms=max(0, _kept_ms(world, scenario) - counted["reserved_ms"]),
    )
    return outcome, served


def _kept_ms(world: Simulation, scenario: Scenario) -> int:
    """GPU time of the services that lend, by the share of memory kept back, lent or not.

    None under regimes that lend nothing, or replicas that sleep. A node that is off counts.
    """
    if not world.rules.lends.keeps_memory_back:
        return 0
    lending = {job.borrows_from for job in scenario.jobs if job.borrowed}
    shares = (
        one.replicas * one.gpus_per_replica * one.rollout_memory_share
        for one in scenario.services
        if one.name in lending
    )
    return round(sum(shares) * scenario.seconds * 1000)


def _measured(requests: list[ServingRequest], scenario: Scenario) -> list[ServingRequest]:
    """Requests that came after the warm-up."""
    since = round(scenario.warmup_s * SECOND)
    return [one for one in requests if one.arrived_ns >= since]


def _gpu_ms(world: Simulation, *, shared: bool) -> int:
    return sum(
        (one.device.shared_ns if shared else one.device.computing_ns)
        * one.service.gpus_per_replica
        // 1_000_000
        for one in world.replicas
    )


def _served(requests: list[ServingRequest], service: Service, now_ns: int) -> ServedRequests:
    return ServedRequests(
        frozenset(one.number for one in requests if _is_late(one, service, now_ns)),
        {one.number: one.ttft_s for one in requests if one.first_ns},
    )


def _is_late(one: ServingRequest, service: Service, now_ns: int) -> bool:
    """Whether it violates the SLO; one that is not done, if it does so whatever comes next."""
    if not one.first_ns:
        return (now_ns - one.arrived_ns) / 1e6 > service.ttft_ms
    until = one.ended_ns or now_ns
    tpot_ms = (until - one.first_ns) / 1e6 / max(1, one.output - 1)
    return one.ttft_s * 1e3 > service.ttft_ms or tpot_ms > service.tpot_ms


def _serving(
    world: Simulation,
    service: Service,
    requests: list[ServingRequest],
    served: ServedRequests,
    alone: ServedRequests | None,
) -> ServingOutcome:
    ended = [one for one in requests if one.ended_ns]
    ttft = [one.ttft_s for one in requests if one.first_ns]
    ratios = [] if alone is None else _paired(served, alone)
    tpot = [one.tpot_s for one in ended if one.output > 1]
    mine = [one for one in world.replicas if one.service is service]
    return ServingOutcome(
        name=service.name,
        requests=len(requests),
        unfinished=len(requests) - len(ended),
        ttft_p50=percentile_ms(ttft, 0.5),
        ttft_p90=percentile_ms(ttft, 0.9),
        ttft_p99=percentile_ms(ttft, 0.99),
        tpot_p99=percentile_ms(tpot, 0.99),
        violations=len(served.late),
        added_violations=0 if alone is None else len(served.late - alone.late),
        busy_share=sum(one.serving.busy_ns for one in mine)
        / max(1, len(mine))
        / world.clock.now_ns,
        allowed_hundredths=allowed_hundredths(len(requests), service.percentile),
        ttft_paired=quantile(ratios, 0.5) if ratios else None,
        slower_5=_above(ratios, 1.05),
        slower_25=_above(ratios, 1.25),
        input_tokens=sum(one.prompt for one in requests),
        output_tokens=sum(one.output for one in requests),
    )


def _paired(served: ServedRequests, alone: ServedRequests) -> list[float]:
    """TTFT here / alone, of every request that has both."""
    both = served.ttft_s.keys() & alone.ttft_s.keys()
    return [served.ttft_s[n] / alone.ttft_s[n] for n in sorted(both) if alone.ttft_s[n] > 0]


def _above(ratios: list[float], limit: float) -> float | None:
    return sum(one > limit for one in ratios) / len(ratios) if ratios else None


def _counts(world: Simulation) -> Counter[str]:
    """Everything that only grows, so that a warm-up can be taken off."""
    world.settle()
    found = Counter(
        held_ms=world.held_ns // 1_000_000,
        reserved_ms=world.reserved_ns // 1_000_000,
        weight_bytes=world.weight_bytes,
        computing_ms=_gpu_ms(world, shared=False),
        shared_ms=_gpu_ms(world, shared=True),
        node_failures=world.nodes.failed,
        restarted=world.nodes.restarted,
    )
    for name, job in world.jobs.items():
        router = world.routers[name]
        live = [leg for engine in router.engines.values() for leg in engine.legs]
        counts, routed = job.counts, router.counts
        borrowed = sum(
            leg.sequence.produced for leg in live if leg.engine.kind is EngineKind.BORROWED
        )
        numbers = {
            "steps": counts.steps,
            "step_ms": round(1000 * sum(counts.step_s)),
            "started": counts.started,
            "finished": counts.finished,
            "accepted": counts.accepted,
            "dropped": counts.dropped,
            "discarded": counts.discarded_tokens,
            "tokens": routed.tokens + sum(leg.sequence.produced for leg in live),
            "borrowed": routed.borrowed_tokens + borrowed,
            "redone": routed.redone_tokens,
            "moves": routed.moves,
            "turns": routed.turns,
            "queue_ms": round(1000 * routed.queue_s),
            "prefilled": routed.again_prefilled,
            "warmed": router.warmer.tokens,
            "new": routed.new_tokens,
            "fetched": routed.fetched_tokens,
            "borrowed_prefilled": routed.borrowed_prefilled,
        }
        numbers |= {f"why/{cause}": number for cause, number in routed.causes.items()}
        found.update({f"{name}/{what}": number for what, number in numbers.items()})
    return found


def _job(name: str, counted: Counter[str], seconds: float) -> JobOutcome:
    def of(what: str) -> int:
        return counted[f"{name}/{what}"]

    useful = of("tokens") - of("redone") - of("discarded")
    return JobOutcome(
        name=name,
        steps=of("steps"),
        step_s=of("step_ms") / 1000 / max(1, of("steps")),
        started=of("started"),
        finished=of("finished"),
        accepted=of("accepted"),
        dropped=of("dropped"),
        tokens=of("tokens"),
        borrowed_tokens=of("borrowed"),
        redone_tokens=of("redone"),
        discarded_tokens=of("discarded"),
        useful_tokens_per_s=useful / seconds,
        moves=of("moves"),
        turns=of("turns"),
        queue_s_per_turn=of("queue_ms") / 1000 / max(1, of("turns")),
        prefilled_tokens=of("prefilled"),
        borrowed_prefilled_tokens=of("borrowed_prefilled"),
        warmed_tokens=of("warmed"),
        new_tokens=of("new"),
        fetched_tokens=of("fetched"),
        causes={cause.value: of(f"why/{cause}") for cause in Cause},
    )


def ledger(outcome: RunOutcome) -> Ledger:
    """The outcome in the terms of ``rose_core.accounting``; nothing is known of correct answers."""
    jobs = outcome.jobs
    return Ledger(
        dedicated=GpuTime(outcome.dedicated_held_ms, outcome.dedicated_held_ms),
        borrowed=GpuTime(
            outcome.borrowed_held_ms, min(outcome.borrowed_held_ms, outcome.borrowed_computing_ms)
        ),
        tokens=OutputTokens(
            sum(job.tokens for job in jobs),
            sum(job.redone_tokens for job in jobs),
            sum(job.discarded_tokens for job in jobs),
        ),
        trajectories=Trajectories(
            sum(job.started for job in jobs),
            sum(job.finished for job in jobs),
            sum(job.accepted for job in jobs),
        ),
        serving=ServingImpact(
            sum(service.requests for service in outcome.services),
            outcome.added_violations,
            sum(service.allowed_hundredths for service in outcome.services),
        ),
        weight_bytes=outcome.weight_bytes,
        reserved_milliseconds=outcome.reserved_ms,
        unlent_reserved_milliseconds=outcome.unlent_reserved_ms or 0,
    )
