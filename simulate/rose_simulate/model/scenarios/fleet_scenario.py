"""What a fleet simulation is told: kinds of services and jobs, each with a count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rose_simulate.model.scenarios.possible import Where, impossible
from rose_simulate.model.scenarios.scenario import (
    Count,
    Regime,
    RolloutJob,
    Scenario,
    Service,
    Strict,
)


class FleetServices(Strict):
    """Services of one kind.

    Attributes:
        count: of them.
        service: each of them.
    """

    count: Count
    service: Service


class FleetJobs(Strict):
    """Jobs of one kind.

    Attributes:
        count: of them.
        pools: services that the lease of each borrows from, the next ones in turn; when there are
            not enough for all, jobs share them.
        job: each of them; its ``borrowed`` is per pool, and ``borrows_from`` is not looked at.
    """

    count: Count
    pools: Count = 1
    job: RolloutJob


class FleetScenario(Strict):
    """A fleet: services and jobs by kind, in bins of seconds in place of single events.

    Attributes:
        kind: tells it from a scenario of single events.
        name: of the scenario and its result.
        seconds: that are simulated, all counted.
        bin_s: length of a bin.
        plan_s: period of the planner; production plans every 5 s.
        start_s: from a loan to an engine with attested weights.
        derate: share of the kernels' speed that engines reach from 32 sequences on.
        seeds: of requests and episodes.
        regimes: who decides; no turn is placed, so gates, lending and ages in the queue differ.
        episodes: CSV of rollout episodes, relative to the scenario's folder.
        services: what serves, by kind.
        jobs: what borrows.
    """

    kind: Literal["fleet"]
    name: Annotated[str, Field(min_length=1)]
    seconds: Annotated[float, Field(gt=0, le=1_209_600)]
    bin_s: Annotated[float, Field(ge=1, le=60)] = 2.0
    plan_s: Annotated[float, Field(ge=5, le=600)] = 60.0
    start_s: Annotated[float, Field(ge=0)] = 60.0
    derate: Annotated[float, Field(gt=0, le=1)] = 0.5
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    regimes: Annotated[tuple[Regime, ...], Field(min_length=1)] = (Regime.FIXED, Regime.OURS)
    episodes: str
    services: Annotated[tuple[FleetServices, ...], Field(min_length=1)]
    jobs: FleetJobs


def impossible_fleet(scenario: FleetScenario) -> Iterator[tuple[Where, str]]:
    """Every contradiction: the field's place and the reason."""
    jobs, count = scenario.jobs, sum(one.count for one in scenario.services)
    if jobs.pools > count:
        yield ("jobs", "pools"), f"a lease of {jobs.pools} pools, but {count} services"
    if jobs.job.awaits_weights:
        yield ("jobs", "job", "awaits_weights"), "a fleet's bins know no time between versions"
    for index, one in enumerate(scenario.services):
        if not one.service.load.trace:
            yield ("services", index, "service", "load"), "a fleet's services need a trace"
        if one.service.load.prompt_spread:
            yield ("services", index, "service", "load"), "a fleet does not spread prompts"
        # The rules for one service and one job hold for each of their kind.
        single = Scenario(
            name=scenario.name,
            seconds=scenario.seconds,
            derate=scenario.derate,
            episodes=scenario.episodes,
            services=(one.service,),
            jobs=(jobs.job.model_copy(update={"borrows_from": one.service.name}),),
        )
        for where, reason in impossible(single):
            yield (*_fleet_place(where, index), *where[2:]), reason


def _fleet_place(where: Where, index: int) -> Where:
    return ("jobs", "job") if where[0] == "jobs" else ("services", index, "service")
