"""What a simulation is told: services, jobs, links, failures. One YAML file, read by the shell.

``impossible`` refuses what no field is wrong in, but what cannot exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rose_core.rollouts.placement import Policy
from rose_core.simulate.costs import DEVICES, MODELS, costs, kv_tokens

Where = tuple[str | int, ...]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=4096)]


class Regime(StrEnum):
    """Who decides when rollouts may compute, and how turns are placed."""

    FIXED = "fixed"
    FIXED_LADDER = "fixed-ladder"
    UNGUARDED = "unguarded"
    STATIC_SPLIT = "static-split"
    ON_OFF = "on-off"
    WHOLE_REPLICA = "whole-replica"
    SPOT = "spot"
    POLLED = "polled"
    ROSE_PAPER = "rose-paper"
    ROSE_PAPER_TAP = "rose-paper-tap"
    ROSE_PAPER_KEEP = "rose-paper-keep"
    OURS_LADDER = "ours-ladder"
    OURS = "ours"
    CLAIRVOYANT = "clairvoyant"


USUAL = (Regime.FIXED, Regime.ROSE_PAPER, Regime.OURS)


class Strict(BaseModel):
    """Unknown fields are errors; nothing changes once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Load(Strict):
    """Load of a service: a replayed trace, or bursts; ``requests_per_s`` is over all replicas.

    Attributes:
        shape: a slow trend that the trace's rate follows, as a file; for fleets.
    """

    trace: str = ""
    requests_per_s: Positive | None = None
    shape: str = ""
    offset_s: Annotated[float, Field(ge=0)] = 0.0
    burst_every_s: Positive | None = None
    burst_size: Annotated[int, Field(ge=0)] = 0
    burst_prompt: Annotated[int, Field(ge=1)] = 1500
    burst_output: Annotated[int, Field(ge=1)] = 100


class Service(Strict):
    """One serving deployment; ``percentile`` of its requests keep the SLO."""

    name: Annotated[str, Field(min_length=1)]
    model: str
    device: str
    replicas: Count
    gpus_per_replica: Annotated[int, Field(ge=1, le=8)] = 1
    ttft_ms: Positive
    tpot_ms: Positive
    percentile: Annotated[int, Field(ge=50, le=99)] = 99
    load: Load
    max_replicas_percent: Annotated[int, Field(ge=0, le=100)] = 100
    min_unlent_replicas: Annotated[int, Field(ge=0)] = 0
    serving_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.35
    rollout_memory_share: Annotated[float, Field(ge=0, le=1)] = 0.5


class RolloutJob(Strict):
    """One RL job; every engine of it takes ``gpus_per_engine`` GPUs.

    Attributes:
        cap: most trajectories on a borrowed engine, less where its KV pool holds fewer of
            12,000 tokens; ``dedicated_cap`` likewise.
        gap_scale: environment gaps of the episodes times this; they are a coding agent's, whose
            tools take seconds; a game answers at once.
        surplus: tail batching (``rollouts.rounds``): prompts that a short round starts beyond its
            batch, as a share of it; None = off.
        oldest_first: the trainer takes the oldest groups and waits for those whose last chance it
            is (``rollouts.consumption``); otherwise those that finished first.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    model: str
    device: str = "H100"
    dedicated: Annotated[int, Field(ge=0, le=4096)]
    borrowed: Annotated[int, Field(ge=0, le=4096)]
    borrows_from: str = ""
    gpus_per_engine: Annotated[int, Field(ge=1, le=8)] = 1
    group: Count = 8
    batch_groups: Count = 8
    staleness: Annotated[int, Field(ge=0, le=64)] = 1
    train_s: Positive = 60.0
    cap: Count = 16
    dedicated_cap: Count = 32
    gap_scale: Annotated[float, Field(ge=0)] = 1.0
    surplus: Annotated[float, Field(ge=0, le=4)] | None = None
    oldest_first: bool = False


class Link(Strict):
    """Path of the weights to borrowed engines."""

    gbps: Positive = 20.0
    delta_share: Annotated[float, Field(gt=0, le=1)] = 0.06
    apply_s: Annotated[float, Field(ge=0)] = 1.0
    dedicated_s: Annotated[float, Field(ge=0)] = 2.0


class Interference(Strict):
    """Modelled cost of co-running; see ``device``."""

    serving_slowdown: Annotated[float, Field(ge=1)] = 2.0
    rollout_slowdown: Annotated[float, Field(ge=1)] = 2.0


class Placement(Strict):
    """Knobs of production's placement (``rollouts.placement.Policy``); its own defaults."""

    pause_seconds: Annotated[float, Field(ge=0)] = Policy().pause_seconds
    crowding_seconds: Annotated[float, Field(ge=0)] = Policy().crowding_seconds
    move_margin: Annotated[float, Field(ge=0)] = Policy().move_margin


class Failure(Strict):
    """Something breaks.

    Attributes:
        kind: ``engine`` dies and is started anew, ``gone`` it never comes back, ``guard`` decides
            nothing for ``seconds``, the ``link`` of the weights is down for ``seconds``.
        target: number of the replica, except for the link.
        every_s: again and again, until the end.
    """

    kind: Literal["engine", "gone", "guard", "link"]
    at_s: Annotated[float, Field(ge=0)]
    seconds: Annotated[float, Field(ge=0)] = 10.0
    target: Annotated[int, Field(ge=0)] = 0
    every_s: Positive | None = None


class Delays(Strict):
    """Delays of the control path, seconds; see ``gates.Timings``."""

    tap_s: Annotated[float, Field(ge=0)] = 0.001
    close_s: Annotated[float, Field(ge=0)] = 0.005
    open_s: Annotated[float, Field(ge=0)] = 0.010
    poll_s: Positive = 0.050
    start_s: Annotated[float, Field(ge=0)] = 45.0


class Scenario(Strict):
    """A whole scenario; counted are the ``seconds`` after ``warmup_s``."""

    name: Annotated[str, Field(min_length=1)]
    seconds: Annotated[float, Field(gt=0, le=1_209_600)]
    warmup_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    derate: Annotated[float, Field(gt=0, le=1)] = 0.5
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1, 2, 3)
    regimes: Annotated[tuple[Regime, ...], Field(min_length=1)] = USUAL
    episodes: str
    services: Annotated[tuple[Service, ...], Field(min_length=1)]
    jobs: Annotated[tuple[RolloutJob, ...], Field(min_length=1)]
    link: Link = Link()
    interference: Interference = Interference()
    delays: Delays = Delays()
    placement: Placement = Placement()
    failures: tuple[Failure, ...] = ()


def impossible(scenario: Scenario) -> Iterator[tuple[Where, str]]:
    """Every contradiction: the field's place and the reason."""
    names = {service.name: service for service in scenario.services}
    if len(names) < len(scenario.services):
        yield ("services",), "two services have the same name"
    if len({job.name for job in scenario.jobs}) < len(scenario.jobs):
        yield ("jobs",), "two jobs have the same name"
    for index, service in enumerate(scenario.services):
        for field, reason in _service(service, scenario.derate):
            yield ("services", index, field), reason
    for index, job in enumerate(scenario.jobs):
        for field, reason in _job(job, scenario, names):
            yield ("jobs", index, field), reason
    yield from _lent_twice(scenario)
    replicas = sum(service.replicas for service in scenario.services)
    for index, failure in enumerate(scenario.failures):
        end = scenario.warmup_s + scenario.seconds
        if failure.at_s >= end:
            yield ("failures", index, "at_s"), f"is after the end at {end:g} s"
        if failure.kind != "link" and failure.target >= replicas:
            yield ("failures", index, "target"), f"there are {replicas} replicas, counted from 0"


def _service(service: Service, derate: float) -> Iterator[tuple[str, str]]:
    if service.model not in MODELS:
        yield "model", f"no measured costs of {service.model}; known: {', '.join(MODELS)}"
        return
    if service.device not in DEVICES:
        yield "device", f"no measured costs on {service.device}; known: {', '.join(DEVICES)}"
        return
    yield from _load(service.load)
    if service.serving_memory_share + service.rollout_memory_share > 1:
        yield "rollout_memory_share", "together with serving_memory_share more than the device has"
    gpus, share = service.gpus_per_replica, service.serving_memory_share
    if kv_tokens(service.device, service.model, share, gpus) <= 0:
        yield "serving_memory_share", f"{service.model} does not fit into it"
    alone = costs(service.device, service.model, derate, gpus)
    step, prefill = 1e3 * alone.step(1, 1000)[0], 1e3 * alone.prefill(1000)
    if service.tpot_ms <= step:
        yield "tpot_ms", f"is not above the solo latency: one step alone takes {step:.1f} ms"
    if service.ttft_ms <= prefill:
        yield "ttft_ms", f"is not above the solo latency: 1000 tokens alone take {prefill:.1f} ms"
    if service.min_unlent_replicas > service.replicas:
        yield "min_unlent_replicas", f"there are only {service.replicas} replicas"


def _load(load: Load) -> Iterator[tuple[str, str]]:
    if bool(load.trace) == bool(load.burst_every_s):
        yield "load", "give either a trace or burst_every_s"
    if load.shape and not load.trace:
        yield "load", "a shape needs a trace to bend"
    if load.trace and load.requests_per_s is None:
        yield "load", "a trace needs requests_per_s"


def _job(
    job: RolloutJob, scenario: Scenario, services: dict[str, Service]
) -> Iterator[tuple[str, str]]:
    if job.model not in MODELS:
        yield "model", f"no measured costs of {job.model}; known: {', '.join(MODELS)}"
        return
    if job.device not in DEVICES:
        yield "device", f"no measured costs on {job.device}; known: {', '.join(DEVICES)}"
        return
    if job.dedicated and kv_tokens(job.device, job.model, 0.9, job.gpus_per_engine) <= 0:
        yield "gpus_per_engine", f"{job.model} does not fit on them"
    fixed = {Regime.FIXED} & set(scenario.regimes)
    if job.dedicated == 0 and (fixed or job.borrowed == 0):
        yield "dedicated", "nothing would ever compute in the fixed pool"
    if job.surplus is not None and job.staleness:
        yield "surplus", "tail batching is for synchronous steps: staleness must be 0"
    if job.surplus is not None and job.oldest_first:
        yield (
            "oldest_first",
            "tail batching has an order of its own: leave one of them out",
        )
    if job.borrowed:
        yield from _borrowing(job, services)


def _borrowing(job: RolloutJob, services: dict[str, Service]) -> Iterator[tuple[str, str]]:
    lender = services.get(job.borrows_from)
    if lender is None:
        yield "borrows_from", f"no service {job.borrows_from!r}; known: {', '.join(services)}"
        return
    if lender.model not in MODELS or lender.device not in DEVICES:
        return
    if lender.gpus_per_replica != job.gpus_per_engine:
        yield "gpus_per_engine", f"a replica of {lender.name} has {lender.gpus_per_replica} GPUs"
    room = kv_tokens(lender.device, job.model, lender.rollout_memory_share, lender.gpus_per_replica)
    if room < 32_000:
        yield (
            "model",
            f"{job.model} and one trajectory of 32000 tokens do not fit into "
            f"rollout_memory_share {lender.rollout_memory_share:g} of {lender.name}",
        )


def _lent_twice(scenario: Scenario) -> Iterator[tuple[Where, str]]:
    for service in scenario.services:
        wanted = [
            (index, job)
            for index, job in enumerate(scenario.jobs)
            if job.borrows_from == service.name
        ]
        most = min(
            service.replicas * service.max_replicas_percent // 100,
            service.replicas - service.min_unlent_replicas,
        )
        total = sum(job.borrowed for _, job in wanted)
        if total > most:
            index = wanted[-1][0]
            reason = f"jobs borrow {total} replicas of {service.name}, which lends at most {most}"
            yield ("jobs", index, "borrowed"), reason
