"""Runs a world to its end and writes down what came of it; compares it with serving alone."""

from __future__ import annotations

from rose_core.accounting.ledger import GpuTime, Ledger, ServingImpact, Tokens, Trajectories
from rose_core.simulate.clock import SECOND
from rose_core.simulate.gates import ServingRequest
from rose_core.simulate.job import Job
from rose_core.simulate.outcome import JobOutcome, Outcome, ServingOutcome, percentile_ms
from rose_core.simulate.router import Router
from rose_core.simulate.scenario import Regime, Scenario, Service
from rose_core.simulate.world import Material, World

Violations = dict[str, frozenset[int]]


def run(
    scenario: Scenario, regime: Regime, seed: int, material: Material, alone: Violations
) -> tuple[Outcome, Violations]:
    """One run.

    Args:
        scenario: see there; its own seeds and regimes are not looked at.
        regime: who decides.
        seed: of requests and episodes.
        material: traces.
        alone: service -> requests that violate when nothing is lent; empty when this is that run.

    Returns:
        The outcome, and its own violations.
    """
    world = World(scenario, regime, seed, material)
    events = world.clock.run(round(scenario.seconds * SECOND))
    world.settle()
    violations = {
        service.name: _violations(world.requests[service.name], service)
        for service in scenario.services
    }
    outcome = Outcome(
        regime=regime.value,
        seed=seed,
        derate=scenario.derate,
        seconds=scenario.seconds,
        services=tuple(
            _serving(world, service, violations[service.name], alone.get(service.name))
            for service in scenario.services
        ),
        jobs=tuple(
            _job(job.name, world.jobs[job.name], world.routers[job.name], world)
            for job in scenario.jobs
        ),
        dedicated_held_ms=round(
            sum(job.dedicated * job.gpus_per_engine for job in scenario.jobs)
            * scenario.seconds
            * 1000
        ),
        borrowed_held_ms=world.held_ns // 1_000_000,
        borrowed_computing_ms=_gpu_ms(world, shared=False),
        shared_ms=_gpu_ms(world, shared=True),
        reclaims=sum(
            engine.reclaims
            for router in world.routers.values()
            for engine in router.engines.values()
        ),
        weight_bytes=world.weight_bytes,
        events=events,
    )
    return outcome, violations


def _gpu_ms(world: World, *, shared: bool) -> int:
    return sum(
        (one.device.shared_ns if shared else one.device.computing_ns)
        * one.service.gpus_per_replica
        // 1_000_000
        for one in world.replicas
    )


def _violations(requests: list[ServingRequest], service: Service) -> frozenset[int]:
    return frozenset(
        one.number
        for one in requests
        if one.ended_ns
        and (one.ttft_s * 1e3 > service.ttft_ms or one.tpot_s * 1e3 > service.tpot_ms)
    )


def _serving(
    world: World, service: Service, violations: frozenset[int], alone: frozenset[int] | None
) -> ServingOutcome:
    requests = world.requests[service.name]
    ended = [one for one in requests if one.ended_ns]
    ttft = [one.ttft_s for one in ended]
    tpot = [one.tpot_s for one in ended if one.output > 1]
    mine = [one for one in world.replicas if one.service is service]
    return ServingOutcome(
        name=service.name,
        requests=len(requests),
        unfinished=len(requests) - len(ended),
        ttft_p50=percentile_ms(ttft, 0.5),
        ttft_p99=percentile_ms(ttft, 0.99),
        tpot_p99=percentile_ms(tpot, 0.99),
        violations=len(violations),
        added_violations=0 if alone is None else len(violations - alone),
        busy_share=sum(one.serving.busy_ns for one in mine)
        / max(1, len(mine))
        / SECOND
        / world.scenario.seconds,
    )


def _job(name: str, job: Job, router: Router, world: World) -> JobOutcome:
    counts, routed = job.counts, router.counts
    live = sum(leg.sequence.produced for one in router.engines.values() for leg in one.legs)
    tokens = routed.tokens + live
    useful = tokens - routed.redone_tokens - counts.discarded_tokens
    return JobOutcome(
        name=name,
        steps=counts.steps,
        step_s=sum(counts.step_s) / max(1, len(counts.step_s)),
        started=counts.started,
        finished=counts.finished,
        accepted=counts.accepted,
        dropped=counts.dropped,
        tokens=tokens,
        borrowed_tokens=routed.borrowed_tokens,
        redone_tokens=routed.redone_tokens,
        discarded_tokens=counts.discarded_tokens,
        useful_tokens_per_s=useful / world.scenario.seconds,
        moves=routed.moves,
        turns=routed.turns,
        queue_s_per_turn=routed.queue_s / max(1, routed.turns),
        prefilled_tokens=routed.again_prefilled,
    )


def ledger(outcome: Outcome) -> Ledger:
    """The outcome in the terms of ``rose_core.accounting``; nothing is known of correct answers."""
    jobs = outcome.jobs
    return Ledger(
        dedicated=GpuTime(outcome.dedicated_held_ms, outcome.dedicated_held_ms),
        borrowed=GpuTime(
            outcome.borrowed_held_ms, min(outcome.borrowed_held_ms, outcome.borrowed_computing_ms)
        ),
        tokens=Tokens(
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
            sum(service.requests for service in outcome.services), outcome.added_violations
        ),
        weight_bytes=outcome.weight_bytes,
    )
