"""Refuses what no field of a scenario is wrong in, but what cannot exist."""

from __future__ import annotations

from collections.abc import Iterator

from rose_simulate.model.scenarios.costs import DEVICES, MODELS, costs, kv_tokens, pairs
from rose_simulate.model.scenarios.machines import fill, sizes
from rose_simulate.model.scenarios.scenario import Load, Regime, RolloutJob, Scenario, Service

Where = tuple[str | int, ...]


def impossible(scenario: Scenario) -> Iterator[tuple[Where, str]]:
    """Every contradiction: the field's place and the reason."""
    names = {service.name: service for service in scenario.services}
    if len(names) < len(scenario.services):
        yield ("services",), "two services have the same name"
    if len({job.name for job in scenario.jobs}) < len(scenario.jobs):
        yield ("jobs",), "two jobs have the same name"
    for index, service in enumerate(scenario.services):
        for field, reason in _service(service, scenario):
            yield ("services", index, field), reason
    for index, job in enumerate(scenario.jobs):
        for field, reason in _job(job, scenario, names):
            yield ("jobs", index, field), reason
    if scenario.contexts.first >= scenario.contexts.most:
        yield ("contexts", "first"), f"no turn fits below most, {scenario.contexts.most} tokens"
    yield from _more_than_lent(scenario)
    yield from _too_wide(scenario)
    yield from _failures(scenario)


def _too_wide(scenario: Scenario) -> Iterator[tuple[Where, str]]:
    most = scenario.nodes.gpus
    for index, service in enumerate(scenario.services):
        if service.gpus_per_replica > most:
            yield ("services", index, "gpus_per_replica"), f"a node has {most} GPUs"
    for index, job in enumerate(scenario.jobs):
        if job.gpus_per_engine > most:
            yield ("jobs", index, "gpus_per_engine"), f"a node has {most} GPUs"


def _failures(scenario: Scenario) -> Iterator[tuple[Where, str]]:
    end = scenario.warmup_s + scenario.seconds
    replicas = sum(service.replicas for service in scenario.services)
    serving, dedicated = sizes(scenario)
    nodes = len(fill(serving, scenario.nodes.gpus)) + len(fill(dedicated, scenario.nodes.gpus))
    for index, failure in enumerate(scenario.failures):
        if failure.at_s >= end:
            yield ("failures", index, "at_s"), f"is after the end at {end:g} s"
        if failure.kind == "link":
            continue
        what, count = ("nodes", nodes) if failure.kind == "node" else ("replicas", replicas)
        if failure.target >= count:
            yield ("failures", index, "target"), f"there are {count} {what}, counted from 0"


def _service(service: Service, scenario: Scenario) -> Iterator[tuple[str, str]]:
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
    pays = scenario.prefill_attention
    alone = costs(service.device, service.model, scenario.derate, gpus, attention=pays)
    step, prefill = 1e3 * alone.step(1, 1000)[0], 1e3 * alone.prefill(1000, pairs(1000))
    if service.tpot_ms <= step:
        yield "tpot_ms", f"is not above the solo latency: one step alone takes {step:.1f} ms"
    if service.ttft_ms <= prefill:
        yield "ttft_ms", f"is not above the solo latency: 1000 tokens alone take {prefill:.1f} ms"
    if service.min_unlent_replicas > service.replicas:
        yield "min_unlent_replicas", f"there are only {service.replicas} replicas"


def _load(load: Load) -> Iterator[tuple[str, str]]:
    if sum(map(bool, (load.trace, load.sessions, load.burst_every_s))) != 1:
        yield "load", "give one of trace, sessions and burst_every_s"
    if load.shape and not load.trace:
        yield "load", "a shape needs a trace to bend"
    if load.prompt_spread and not load.trace:
        yield "load", "prompt_spread needs a trace whose prompts it spreads"
    if (load.trace or load.sessions) and load.requests_per_s is None:
        yield "load", "a trace needs requests_per_s, and so do sessions"


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
    yield from _rounds(job)
    yield from _widths(job, scenario)
    if job.awaits_weights and not job.dedicated:
        yield "awaits_weights", "there are no dedicated engines to wait for"
    if job.borrowed:
        yield from _borrowing(job, services)


def _rounds(job: RolloutJob) -> Iterator[tuple[str, str]]:
    if job.surplus is not None and job.staleness:
        yield "surplus", "tail batching is for synchronous steps: staleness must be 0"
    if job.member_surplus and job.surplus is None:
        yield "member_surplus", "only tail batching has short rounds: give a surplus too, 0 or more"
    if job.streams and job.surplus is None:
        yield "streams", "only rounds come in parts: give a surplus too, 0 or more"
    if job.surplus is not None and job.oldest_first:
        yield (
            "oldest_first",
            "tail batching has an order of its own: leave one of them out",
        )


def _widths(job: RolloutJob, scenario: Scenario) -> Iterator[tuple[str, str]]:
    if not job.widths:
        return
    gpus = job.dedicated * job.gpus_per_engine
    if job.surplus is None:
        yield "widths", "engines change between rounds: give a surplus too, 0 or more"
    odd = [one for one in job.widths if gpus % one]
    if odd:
        yield "widths", f"{odd[0]} GPUs for an engine do not divide the job's {gpus}"
    if max(job.widths) > scenario.nodes.gpus:
        yield "widths", f"a node has {scenario.nodes.gpus} GPUs"
    if scenario.nodes.fail_every_s or any(one.kind == "node" for one in scenario.failures):
        yield "widths", "which engines a failing node takes along is not modelled for them"


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


def _more_than_lent(scenario: Scenario) -> Iterator[tuple[Where, str]]:
    """A job alone; several may ask for more together than there is, and share it."""
    lends = {
        service.name: min(
            service.replicas * service.max_replicas_percent // 100,
            service.replicas - service.min_unlent_replicas,
        )
        for service in scenario.services
    }
    for index, job in enumerate(scenario.jobs):
        most = lends.get(job.borrows_from)
        if most is not None and job.borrowed > most:
            reason = f"borrows {job.borrowed} replicas of {job.borrows_from}, which lends {most}"
            yield ("jobs", index, "borrowed"), reason
