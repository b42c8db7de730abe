"""One run: a scenario under one regime and seed, from the first request to the outcome.

Read ``run`` first. Randomness: one generator per service and per job, named by the seed, so every
regime sees the same requests and the same episodes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from functools import partial

from rose_core.lending import PlannerPolicy as LendingPolicy
from rose_core.rollouts.placement.selection import Policy
from rose_core.rollouts.placement.watch import LegPatience
from rose_core.rollouts.terms import LeaseTerms, Policies, policies_of
from rose_core.wire.routing import EngineKind
from rose_core.wire.sync import SignalSource
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.cluster.lent import LentReplica, ReplicaCallbacks
from rose_simulate.model.cluster.nodes import WorldNodes
from rose_simulate.model.cluster.own_engines import USUAL_CONTEXT, OwnEngines
from rose_simulate.model.cluster.planner import PlannerInputs, SimulatedPlanner, lend_once
from rose_simulate.model.cluster.whole import WholeLender
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.gpus.gates import ServingRequest
from rose_simulate.model.gpus.kept import JobKeys, KeptKeys
from rose_simulate.model.gpus.paper import PaperGate
from rose_simulate.model.jobs.job import Job, JobFacts
from rose_simulate.model.jobs.workload import (
    Episode,
    ServingArrival,
    Shape,
    bursts,
    replay,
    sessions,
    spread,
)
from rose_simulate.model.regimes import GateKind, KeysKept, LendingMode, RegimeRules
from rose_simulate.model.routing.demand import SimulatedDemands
from rose_simulate.model.routing.router import Router, RouterOptions
from rose_simulate.model.routing.turns import AttachedEngine
from rose_simulate.model.scenarios.costs import costs
from rose_simulate.model.scenarios.scenario import Failure, RolloutJob, Scenario, Service

_LOOK_S = 10.0  # the paper's choice of GPUs needs some recent KV use

MakeRouter = Callable[[VirtualClock, str, Policies, RouterOptions, random.Random], Router]


class Balancer:
    """Serving's balancer: fewest requests under way, over the replicas that are on; else they wait.

    A session goes on where its keys are, as behind a gateway that knows of prefix caches.

    Args:
        serving: which replicas of a service take requests, whether on or off.
        any_off: whether some node is off.
    """

    def __init__(
        self, serving: Callable[[str], Rows[LentReplica]], any_off: Callable[[], bool]
    ) -> None:
        self._serving, self._any_off = serving, any_off
        self._turn = 0
        self._homes: dict[str, LentReplica] = {}
        self._stranded: list[tuple[ServingRequest, str]] = []

    def take(self, request: ServingRequest, service: str) -> None:
        """A request has come."""
        self._turn += 1
        among = self._serving(service)
        if self._any_off():
            among = [one for one in among if one.machine.up]
        if not among:
            self._stranded.append((request, service))
            return
        home = self._homes.get(request.session)
        if home is None or home not in among:
            turn, size = self._turn, len(among)
            best = min(range(size), key=lambda n: (among[n].serving.live, (n - turn) % size))
            home = among[best]
        if request.session:
            self._homes[request.session] = home
        home.serve(request)

    def retry(self, request: ServingRequest, service: str) -> None:
        """Begin a request anew whose replica is gone; its client has waited since it first came."""
        request.first_ns, request.sequence = 0, None
        self.take(request, service)

    def retry_stranded(self) -> None:
        """Take what found no replica, now that there are some."""
        waiting, self._stranded = self._stranded, []
        for request, service in waiting:
            self.take(request, service)


@dataclass(frozen=True)
class SimulationInputs:
    """Traces and shapes as read by the shell: name in the scenario -> rows."""

    episodes: tuple[Episode, ...]
    traces: Mapping[str, tuple[ServingArrival, ...]] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)


class Simulation:
    """Everything of one run.

    Args:
        scenario: see there.
        rules: of the regime.
        seed: of requests and episodes.
        material: traces.
        make_router: of a job; whoever wants to watch one gives a router that keeps a record.
    """

    def __init__(
        self,
        scenario: Scenario,
        rules: RegimeRules,
        seed: int,
        material: SimulationInputs,
        make_router: MakeRouter = Router,
    ) -> None:
        self.scenario, self.seed, self.material = scenario, seed, material
        self.rules, self._make_router = rules, make_router
        self.clock = VirtualClock()
        self.replicas: list[LentReplica] = []
        self._by_service: dict[str, list[LentReplica]] = {}
        self.requests: dict[str, list[ServingRequest]] = {}
        self.routers: dict[str, Router] = {}
        self.jobs: dict[str, Job] = {}
        self.own: dict[str, OwnEngines] = {}
        self._lent_ns: dict[str, int] = {}
        self.held_ns = self.reserved_ns = 0
        self.gate_moves: list[tuple[float, int]] = []
        self._link_up_ns = 0
        self.weight_bytes = 0
        self._whole: WholeLender | None = None
        self.planner: SimulatedPlanner | None = None
        self._keys = {job.name: self._keys_of(job) for job in scenario.jobs}
        self.nodes = WorldNodes(self.clock, scenario, seed, self._again, self._retry)
        self._balancer = Balancer(self._serving, lambda: self.nodes.down > 0)
        self._build()

    # --- building

    def _keys_of(self, job: RolloutJob) -> JobKeys:
        """Where the job's engines keep keys; nowhere under most regimes."""
        where, tier = self.rules.keeps_keys, self.scenario.kv_tier
        if where is KeysKept.NOWHERE:
            return JobKeys(None)
        near = where is KeysKept.NODE
        size = costs(job.device, job.model, 1.0).fit.kv_bytes_per_token
        room = round((tier.node_gigabytes if near else tier.gigabytes) * 1e9 / size)
        rate = (tier.node_gbps if near else tier.gbps) * 1e9 / 8
        setup = 0.0 if near else tier.setup_s
        return JobKeys(partial(KeptKeys, room, size, rate, setup, is_near=near), by_node=near)

    def _build(self) -> None:
        ears = ReplicaCallbacks(self._gate, self._lost, self._served)
        for service in self.scenario.services:
            mine = [
                LentReplica(
                    self.clock,
                    len(self.replicas) + n,
                    service,
                    self.scenario,
                    rules=self.rules,
                    ears=ears,
                    machine=self.nodes.under(len(self.replicas) + n),
                    keys=self._keys,
                )
                for n in range(service.replicas)
            ]
            self.replicas += mine
            self._by_service[service.name] = mine
            for one in mine:
                self.nodes.put(one)
            self._load(service)
        for job in self.scenario.jobs:
            self._job(job)
        self._lender()
        self.nodes.start()
        for failure in self.scenario.failures:
            self.clock.after(failure.at_s, partial(self._fail, failure))

    def _lender(self) -> None:
        rules = self.rules
        if rules.lends is LendingMode.ONCE:
            self.clock.after(_LOOK_S, lambda: lend_once(self.scenario, self.replicas, self._lend))
        elif rules.lends is LendingMode.WHOLE:
            self._whole = WholeLender(
                self.clock, self.scenario, self.replicas, self._lend, rules.least_loan_s
            )
            self.clock.after(0.0, self._whole.run)
        elif rules.lends is LendingMode.PLANNER:
            polled = rules.gate is GateKind.POLLED
            signal = SignalSource.LOADS if polled else SignalSource.WIRE_TAP
            demands = SimulatedDemands(self.clock, self.routers)
            policy = LendingPolicy(by_gain=rules.by_gain)
            inputs = PlannerInputs(self.nodes.silence, runs=self._runs, policy=policy)
            if rules.by_demand:
                inputs = replace(inputs, demand=demands.of)
            self.planner = SimulatedPlanner(
                self.clock, self.scenario, self.replicas, self._lend, signal=signal, inputs=inputs
            )
            if rules.by_demand:
                self.clock.after(0.0, partial(demands.run, self.planner.plan))
            self.clock.after(0.0, self.planner.run)

    def _load(self, service: Service) -> None:
        load, seconds = service.load, self.scenario.warmup_s + self.scenario.seconds
        draw = random.Random(f"{self.seed}/{service.name}")  # noqa: S311  # a model's randomness
        if load.sessions:
            found = sessions(
                self.material.episodes,
                seconds=seconds,
                requests_per_s=load.requests_per_s or 1.0,
                token_s=service.tpot_ms / 1000,
                draw=draw,
            )
        elif load.trace:
            found = replay(
                self.material.traces[load.trace],
                seconds=seconds,
                requests_per_s=load.requests_per_s or 1.0,
                offset_s=load.offset_s + draw.random() * 60.0,
                draw=draw,
            )
            if load.prompt_spread:  # drawn apart, so that arrivals are those without it
                apart = random.Random(f"{self.seed}/{service.name}/prompts")  # noqa: S311
                found = spread(found, load.prompt_spread, apart)
        else:
            found = bursts(
                seconds=seconds,
                period_s=load.burst_every_s or seconds,
                first_s=load.offset_s,
                size=load.burst_size,
                prompt=load.burst_prompt,
                output=load.burst_output,
                draw=draw,
            )
        self.requests[service.name] = found
        for request in found:
            take = partial(self._balancer.take, request, service.name)
            self.clock.at(request.arrived_ns, take)

    def _serving(self, service: str) -> list[LentReplica]:
        return self._by_service[service] if self._whole is None else self._whole.serving(service)

    def _again(self, request: ServingRequest, replica: LentReplica) -> None:
        self._balancer.retry(request, replica.service.name)

    def _retry(self) -> None:
        self._balancer.retry_stranded()

    def _job(self, job: RolloutJob) -> None:
        rules, tuning = self.rules, Policy(**self.scenario.placement.model_dump())
        terms = LeaseTerms(
            max_staleness=0 if rules.newest_only else job.staleness, placement=rules.placement
        )
        stall = rules.stall_s
        patience = LegPatience() if stall is None else LegPatience(pause_seconds=stall)
        router = self._make_router(
            self.clock,
            job.name,
            policies_of(terms, tuning, patience),
            RouterOptions(
                rules.keeps,
                rules.waits,
                rules.knows_lengths,
                rules.oldest_first,
                rules.ends,
            ),
            random.Random(f"{self.seed}/{job.name}/dice"),  # noqa: S311  # a model's randomness
        )
        self.routers[job.name] = router
        newest = partial(self._newest, job.name)
        keys = self._keys[job.name]
        own = OwnEngines(self.clock, self.scenario, job, router, newest, keys=keys)
        self.own[job.name] = own
        for engine in own.engines:
            self.nodes.put(engine)
            engine.attach(0)
        draw = random.Random(f"{self.seed}/{job.name}")  # noqa: S311  # a model's randomness
        facts = JobFacts(
            job.group,
            job.batch_groups,
            job.staleness,
            job.train_s,
            job.gap_scale,
            job.surplus,
            job.oldest_first,
            job.awaits_weights,
            job.member_surplus,
            job.streams,
            job.reward_s,
            job.late,
        )
        one = Job(
            self.clock,
            facts,
            router,
            self.material.episodes,
            draw=draw,
            publish=lambda version: self._publish(job, version),
            round_over=own.on_round_over,
        )
        self.jobs[job.name] = one
        self.clock.after(0.0, one.start)

    def _newest(self, job: str) -> int:
        return self.jobs[job].version if job in self.jobs else 0

    # --- what replicas and jobs tell

    def _lend(self, replica: LentReplica, job: RolloutJob | None) -> None:
        now = self.clock.now_ns
        if job is not None:
            self._lent_ns[replica.name] = now
        elif replica.name in self._lent_ns:
            self._count_held(replica, now - self._lent_ns.pop(replica.name))
        replica.lend(job)

    def _count_held(self, replica: LentReplica, held_ns: int) -> None:
        held_ns *= replica.service.gpus_per_replica
        self.held_ns += held_ns
        if self.rules.lends.keeps_memory_back:
            self.reserved_ns += round(held_ns * replica.service.rollout_memory_share)

    def _runs(self, name: str) -> bool:
        """Whether a lent replica's engine has attested weights."""
        engines = (router.engines.get(name) for router in self.routers.values())
        return any(engine is not None and engine.version is not None for engine in engines)

    def _gate(self, replica: LentReplica, is_open: bool) -> None:
        if replica.job is None:
            return
        self.gate_moves.append((self.clock.now_s, 1 if is_open else -1))
        router = self.routers[replica.job.name]
        gate, engine = replica.gate, router.engines.get(replica.name)
        if engine is not None:
            engine.slowdown = gate.slowdown
        router.on_gate(replica.name, is_open)
        if isinstance(gate, PaperGate) and replica.name in router.engines:
            router.cut_to(replica.name, min(gate.cap, router.engines[replica.name].cap))

    def _lost(self, replica: LentReplica, _sequences: list[Sequence]) -> None:
        if replica.job is not None:
            self.routers[replica.job.name].on_engine_loss(replica.name)

    def _served(self, replica: LentReplica, batch: BatchEngine) -> None:
        job = replica.job
        assert job is not None  # noqa: S101  # only a lent replica has an engine
        now = self.clock.now_ns
        cap = max(1, min(job.cap, batch.kv_tokens // USUAL_CONTEXT))
        engine = AttachedEngine(
            replica.name, EngineKind.BORROWED, batch, None, replica.gate.is_open, cap, now
        )
        engine.slowdown = replica.gate.slowdown
        self.routers[job.name].attach(engine)
        self._send(job, engine, share=1.0)

    def _send(self, job: RolloutJob, engine: AttachedEngine, share: float) -> None:
        link = self.scenario.link
        model = costs(job.device, job.model, 1.0).fit
        size = round(model.weights_gb * 1e9 * share)
        self.weight_bytes += size
        wait = max(0.0, (self._link_up_ns - self.clock.now_ns) / SECOND)
        router, version = self.routers[job.name], self.jobs[job.name].version

        def attested() -> None:
            if router.engines.get(engine.name) is engine:
                router.on_version(engine.name, version)

        arrives_s = self.clock.now_s + wait + size * 8 / (link.gbps * 1e9) + link.apply_s
        # A delta is of no use before the weights that it changes.
        engine.ready_s = max(engine.ready_s, arrives_s)
        self.clock.at(round(engine.ready_s * SECOND), attested)

    def _publish(self, job: RolloutJob, version: int) -> None:
        router = self.routers[job.name]
        router.on_publish(version)
        for engine in list(router.engines.values()):
            if engine.kind is EngineKind.BORROWED:
                self._send(job, engine, self.scenario.link.delta_share)
            else:
                self.clock.after(
                    self.scenario.link.dedicated_s,
                    partial(router.on_version, engine.name, version),
                )
        if job.awaits_weights:
            has = partial(self.jobs[job.name].has_weights, version)
            self.clock.after(self.scenario.link.dedicated_s, has)
        for replica in self.replicas:
            if replica.job is job and isinstance(replica.gate, PaperGate):
                replica.gate.on_step()
                if replica.name in router.engines:
                    router.restore(replica.name)

    def _fail(self, failure: Failure) -> None:
        if failure.every_s:
            self.clock.after(failure.every_s, partial(self._fail, failure))
        if failure.kind == "link":
            self._link_up_ns = self.clock.now_ns + round(failure.seconds * SECOND)
            return
        if failure.kind == "node":
            self.nodes.fail(failure.target, failure.seconds)
            return
        gate = self.replicas[failure.target].gate
        gate.host.broken = gate.host.broken or failure.kind == "gone"
        if failure.kind in {"engine", "gone"}:
            gate.crash()
        else:
            gate.on_guard_death(failure.seconds)

    def settle(self) -> None:
        """Count up to now."""
        for replica in self.replicas:
            replica.device.finish()
        for own in self.own.values():
            for one in own.engines:
                one.batch.settle()
        now = self.clock.now_ns
        for name, since in self._lent_ns.items():
            self._count_held(next(r for r in self.replicas if r.name == name), now - since)
            self._lent_ns[name] = now
