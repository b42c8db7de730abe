"""One serving replica with what it may lend: device, gate, engine host, weights of its guest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from rose_core.guard.chunk import prefill_chunk
from rose_core.guard.predictor import CostProfile
from rose_core.guard.slack import LatencyObjective
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.gpus.device import CorunningCost, SharedGpus
from rose_simulate.model.gpus.gates import ReplicaGate, ServingRequest, SimulatedHost, Timings
from rose_simulate.model.gpus.guarded import BYTES_PER_TOKEN, GuardedGate
from rose_simulate.model.gpus.kept import JobKeys
from rose_simulate.model.gpus.paper import ACTIVATION_S, QUANTUM, PaperGate
from rose_simulate.model.regimes import GateKind, LendingMode, RegimeRules
from rose_simulate.model.scenarios.costs import ModelCosts, costs, costs_of, kv_tokens, pairs
from rose_simulate.model.scenarios.machines import Machine
from rose_simulate.model.scenarios.scenario import RolloutJob, Scenario, Service

# Period of utilisation exporters.
LOOK_S = 1.0
# Idle for so long before it is lent; windows of slack last 2 to 8 s at the median.
QUIET_S = 5.0


class OnOffGate(ReplicaGate):
    """Open after ``QUIET_S`` of idleness, closed at the first look that sees work: a baseline.

    Such systems look at a GPU's activity once a second and lend it when it was idle for a while.
    Both figures are ours, of the order that such systems use; nothing here is production's.
    """

    def __init__(
        self,
        clock: VirtualClock,
        device: SharedGpus,
        host: SimulatedHost,
        changed: Callable[[bool], None],
    ) -> None:
        super().__init__(clock, device, host, changed)
        self._busy_ns = 0
        self._seen_ns = 0
        clock.after(LOOK_S, self._look)

    def on_engine_ready(self) -> None:
        """Opens at a look, never by itself."""

    def _look(self) -> None:
        serving, now = self.device.serving, self.clock.now_ns
        if serving is not None:
            serving.settle()
            if serving.live or serving.busy_ns > self._seen_ns:
                self._busy_ns = now
            self._seen_ns = serving.busy_ns
        if now - self._busy_ns < QUIET_S * SECOND:
            self.shut()
        elif self.device.rollout is not None and self.granted:
            self.device.allow()
            self.set_open(True)
        self.clock.after(LOOK_S, self._look)


@dataclass(frozen=True)
class ReplicaCallbacks:
    """Who hears of a lent replica.

    Attributes:
        gate: the gate has moved, or its cap.
        lost: the rollout engine is gone with these sequences.
        served: a rollout engine begins to serve.
    """

    gate: Callable[[LentReplica, bool], None]
    lost: Callable[[LentReplica, list[Sequence]], None]
    served: Callable[[LentReplica, BatchEngine], None]


class LentReplica:
    """One replica of a service under one regime's rules; ``machine`` None = one of its own.

    ``keys``: by job, where keys of its other engines are.
    """

    def __init__(
        self,
        clock: VirtualClock,
        number: int,
        service: Service,
        scenario: Scenario,
        *,
        rules: RegimeRules,
        ears: ReplicaCallbacks,
        machine: Machine | None = None,
        keys: Mapping[str, JobKeys] | None = None,
    ) -> None:
        self._keys = keys or {}
        self.number, self.service = number, service
        self.name = f"{service.name}-{number}"
        self.machine = machine or Machine(self.name)
        self._under_way: dict[ServingRequest, None] = {}
        self.job: RolloutJob | None = None
        self._clock, self._scenario, self._ears = clock, scenario, ears
        slow = scenario.interference
        sharing = CorunningCost(**slow.model_dump(), yielding=rules.yielding)
        self.device = SharedGpus(clock, sharing)
        gpus = service.gpus_per_replica
        pays = scenario.prefill_attention
        own = costs(service.device, service.model, scenario.derate, gpus, attention=pays)
        spare = service.rollout_memory_share if rules.whole_memory else 0.0
        share = min(1.0, service.serving_memory_share + spare)
        pool = kv_tokens(service.device, service.model, share, gpus)
        self.serving = BatchEngine(clock, own, pool, self.device.update)
        self.device.serving = self.serving
        once = rules.lends is LendingMode.ONCE  # the paper's engines lie dormant on every replica
        start_s = ACTIVATION_S if once else scenario.delays.start_s
        self.host = SimulatedHost(clock, self.device, start_s, self._make, self._lost)
        self._papers = rules.gate is GateKind.PAPER
        self.gate = self._gate(rules, own)

    def _gate(self, rules: RegimeRules, own: ModelCosts) -> ReplicaGate:
        service, delays = self.service, self._scenario.delays
        ttft_s, tpot_s = service.ttft_ms / 1000, service.tpot_ms / 1000

        def changed(is_open: bool) -> None:
            self._ears.gate(self, is_open)

        if rules.gate is GateKind.PAPER:
            return PaperGate(
                self._clock,
                self.device,
                self.host,
                changed,
                profile=own,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
            )
        if rules.gate in {GateKind.GUARD, GateKind.POLLED}:
            timings = Timings(**delays.model_dump())
            return GuardedGate(
                self._clock,
                self.device,
                self.host,
                changed,
                name=self.name,
                timings=timings,
                objective=LatencyObjective(ttft_s, tpot_s),
                pool=partial(self.machine.pool, service.name, profile(own)),
                tapped=rules.gate is GateKind.GUARD,
                percentile=service.percentile,
            )
        if rules.gate is GateKind.ON_OFF:
            return OnOffGate(self._clock, self.device, self.host, changed)
        return ReplicaGate(self._clock, self.device, self.host, changed)

    def _make(self) -> BatchEngine:
        service, job = self.service, self.job
        assert job is not None  # noqa: S101  # a slot was granted to a job
        gpus = service.gpus_per_replica
        derate, pays = self._scenario.derate, self._scenario.prefill_attention
        own = costs_of(job, service.device, gpus, derate, attention=pays)
        pool = kv_tokens(service.device, job.model, service.rollout_memory_share, gpus)
        chunk = QUANTUM if self._papers else prefill_chunk(self._scenario.contexts.most)
        keys = self._keys.get(job.name)
        engine = BatchEngine(
            *(self._clock, own, pool, self.device.update),
            quantum=chunk,
            kept=None if keys is None else keys.at(self.machine.name),
            history=None if keys is None else keys.history_of(self.machine.name),
        )
        engine.set_speed(0.0)
        self._ears.served(self, engine)
        return engine

    def _lost(self, sequences: list[Sequence]) -> None:
        self._ears.lost(self, sequences)

    def lend(self, job: RolloutJob | None) -> None:
        """Grant a slot to a job, or take it back."""
        if job is not None:
            self.job = job
        self.gate.lend(job is not None)

    def serve(self, request: ServingRequest) -> None:
        """Take a live request."""
        request.replica = self.number
        self._under_way[request] = None

        def first() -> None:
            request.first_ns = self._clock.now_ns
            self.gate.on_first_token(request)

        def done() -> None:
            request.ended_ns = self._clock.now_ns
            del self._under_way[request]
            self.gate.on_end(request)

        sequence = Sequence(request.session, request.prompt, request.output, first, done)
        request.sequence = sequence
        self.gate.on_arrival(request)
        self.serving.submit(sequence)

    def lose(self) -> list[ServingRequest]:
        """Its node is gone; the requests that were under way here."""
        lost = list(self._under_way)
        self._under_way.clear()
        self.serving.clear()
        self.gate.on_node_death()
        return lost


def profile(own: ModelCosts) -> CostProfile:
    """The guard's profile of this engine; it corrects itself from there."""
    base, growth = own.step(1, 1000)[0], own.step(2, 2000)[0] - own.step(1, 1000)[0]
    more = own.prefill(2048, pairs(2048)) - own.prefill(1024, pairs(1024))
    per_kilobyte = more / (1024 * BYTES_PER_TOKEN / 1024)
    return CostProfile(
        prefill_base_s=own.prefill(1, 0.0),
        prefill_per_kilobyte_s=per_kilobyte,
        decode_base_s=base - growth,
        decode_per_request_s=growth,
    )
