"""Every field that people write has an effect that is seen, or is refused: one row each.

A row changes one field of a small world and says what is seen before and after, at the place where
it matters: what the planner lends or takes back, what admission answers, what a node is granted,
what its guard is given, what the router is started with. A field that has an effect in one mode
only has a second row: the rule by which the API server refuses it in the other
(``tests/api/test_rules.py`` tries those on a real one). A new field without a row fails.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose_agent.devices.watch import PoolGpuTerms
from rose_cli.ops.usage import usages
from rose_core.adapters import TARGETS
from rose_core.api import Reason, RolloutLease, RolloutSlot, ServingPool
from rose_core.api.crd import KINDS
from rose_core.api.schema import structural
from rose_core.devices.capabilities import Capability
from rose_core.lending import Demand
from rose_core.lending.autoscalers import Autoscaler
from rose_core.wire import sync
from rose_core.wire.sync import AdapterSpec, Grant, SyncRequest
from rose_operator.kube.api import ObjectKind
from rose_operator.sync.enrolment import callers_of
from rose_operator.sync.grants import adapter_runs, grants_of, policy_of
from tests.api.objects import LEASE, POOL, changed
from tests.api.test_rules import CREATION, TRANSITION
from tests.operator.bench import SETTINGS, Bench
from tests.operator.refused import Refused, part
from tests.operator.stub_agent import replica
from tests.operator.test_every_slot_field import OPERATORS, SLOTS

ROOT = Path(__file__).parents[2]
Spec = dict[str, Any]
ALL = tuple(sorted(TARGETS))

# name: node, zone, class of GPU, pool. KV use grows with the name, so the first is lent first.
FLEET = {
    "chat-0": ("n1", "z1", "h100", "default/chat"),
    "chat-1": ("n1", "z1", "h100", "default/chat"),
    "chat-2": ("n2", "z2", "h200", "default/chat"),
    "chat-3": ("n3", "z2", "h200", "default/chat"),
    "other-4": ("n4", "z3", "h200", "default/other"),
}
LONG_AGO, LATELY = "2027-01-01T00:00:00Z", "2027-01-02T00:00:00Z"  # the bench begins on Jan. 15


@dataclass(frozen=True)
class Row:
    """One field, changed.

    Attributes:
        set: path in the spec -> value, the change.
        look: what is seen of the world.
        before, after: what it sees without and with the change.
        pool, lease, policy: what else their specs say, both times.
        rival: an older lease for the same pool, with this spec.
        late: the rival is served before the lease is made.
        busy: what serving's replicas report, and the pool has learned, permille.
        full: replicas have no memory to lend beside serving.
        able: nodes have MPS.
        turns: what the lease's router says.
        then: what happens after the lease is served.
    """

    set: Spec
    look: Callable[[Stage], object]
    before: object
    after: object
    pool: Spec = field(default_factory=dict)
    lease: Spec = field(default_factory=dict)
    policy: Spec = field(default_factory=dict)
    rival: Spec | None = None
    late: bool = False
    busy: tuple[int, ...] = ()
    full: bool = False
    able: bool = False
    turns: Demand | None = None
    then: tuple[Callable[[Stage], None], ...] = ()
    around: Callable[[Stage], None] = lambda _: None


class Stage:
    """The operator's inside, a fleet, a pool, a lease."""

    def __init__(self, row: Row, kind: str, change: Spec) -> None:
        self.row = row
        own = {name: change if name == kind else {} for name in ("pool", "lease", "policy")}
        self.pool = row.pool | own["pool"]
        self.lease = {"slots": {"min": 0, "max": 5}} | row.lease | own["lease"]
        self.policy = row.policy | own["policy"]
        tenancy = kind == "policy"
        self.bench = Bench(settings=replace(SETTINGS, tenancy=tenancy))
        known = self.bench.reconciler.cluster_facts
        known.zones = {node: zone for node, zone, *_ in FLEET.values()}
        self.requests = self.slow = 0
        if tenancy:
            self._add_policy()
        row.around(self)

    async def play(self) -> object:
        self._add_pools()
        if self.row.rival is not None:
            self._add_lease("rival", {"slots": {"min": 0, "max": 5}} | self.row.rival, LONG_AGO)
            if self.row.late:
                await self._turn()
                self.bench.now += 3600
        self._add_lease("grpo", self.lease, LATELY)
        if self.row.turns is not None:
            self.bench.demand["default/grpo"] = self.row.turns
        await self._turn()
        for happens in self.row.then:
            happens(self)
            await self._turn()
        return self.row.look(self)

    def pass_on(self, seconds: float, *, slow: int = 0) -> None:
        """Time, in which serving ends a hundred requests of each replica, so many of them slow."""
        self.bench.now += seconds
        self.requests, self.slow = self.requests + 100, self.slow + slow

    def live(self) -> list[RolloutSlot]:
        return [RolloutSlot.model_validate(raw) for raw in self.bench.slots()]

    def of(self, lease: str) -> list[RolloutSlot]:
        return [one for one in self.live() if one.spec.lease_ref.name == lease]

    def object(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        return self.bench.api.objects[kind, f"default/{name}"]

    async def _turn(self) -> None:
        for node in sorted({node for node, *_ in FLEET.values()}):
            mine = [self._report(one) for one, (there, *_) in FLEET.items() if there == node]
            can = {Capability.MPS.value: ""} if self.row.able else {}
            request = SyncRequest(node, "t", 0, tuple(mine), capabilities=can)
            self.bench.telemetry.record(request, self.bench.now)
        await self.bench.turn(2)

    def _report(self, name: str) -> sync.ReplicaReport:
        *_, kind, pool = FLEET[name]
        found: dict[str, Any] = {"refusal": "InsufficientMemory"} if self.row.full else {}
        if self.row.busy:
            found["busy_permille"] = self.row.busy[0]
        return replica(
            pool,
            name,
            kv=100 * (1 + int(name[-1])),
            device_class=kind,
            requests_total=self.requests,
            slow_requests_total=self.slow,
            **found,
        )

    def _add_pools(self) -> None:
        self.bench.pool(**{f"spec.{path}": value for path, value in self.pool.items()})
        if self.row.busy:
            day = (self.row.busy * 48)[:48] if len(self.row.busy) == 1 else self.row.busy
            self.object(ObjectKind.POOL, "chat")["status"] = {"load": {"busyPermille": list(day)}}
        lends = {"spec.mode": "Lend", "spec.slo": {"ttftMilliseconds": 500}}
        lending = {"maxReplicasPercent": 100, "minUnlentReplicas": 0}
        other = changed(POOL, {"metadata.name": "other", "spec.lending": lending} | lends)
        self.bench.api.add(ObjectKind.POOL, other)

    def _add_lease(self, name: str, spec: Spec, made: str) -> None:
        paths = {f"spec.{path}": value for path, value in spec.items()}
        body = changed(LEASE, {"metadata.name": name} | paths)
        self.bench.api.add(ObjectKind.LEASE, body)
        self.object(ObjectKind.LEASE, name)["metadata"]["creationTimestamp"] = made

    def _add_policy(self) -> None:
        base = {
            "namespaces": {"names": ["default"]},
            "runs": [{"storeName": "main", "names": ["*"]}],
        }
        bare = {
            "apiVersion": "v1",
            "kind": "TenantPolicy",
            "metadata": {"name": "team"},
            "spec": base,
        }
        spec = {f"spec.{path}": value for path, value in self.policy.items()}
        self.bench.api.add(ObjectKind.POLICY, changed(bare, spec))
        labelled = {"metadata": {"name": "default", "labels": {"team": "a"}}}
        self.bench.api.add(ObjectKind.NAMESPACE, labelled)


# What is seen.


def lent(stage: Stage) -> str:
    """Numbers of the replicas that the lease has."""
    slots = [one for one in stage.of("grpo") if one.spec.desired == "Lent"]
    return "".join(sorted(one.spec.member.pod_name[-1] for one in slots))


def ended(stage: Stage) -> str:
    """Numbers of the replicas that the rival has lost."""
    kept = [one for one in stage.of("rival") if one.spec.desired == "Lent"]
    return "".join(sorted({"0"} - {one.spec.member.pod_name[-1] for one in kept}))


def accepted(stage: Stage) -> str:
    return stage.bench.reason(kind="Accepted")


def grant(path: str) -> Callable[[Stage], object]:
    """Part of the first grant that a node gets for the lease."""

    def look(stage: Stage) -> object:
        return part(_granted(stage.of("grpo")[0]), path)

    return look


def others(stage: Stage) -> object:
    """Runs whose adapters a node gets beside the lease's first."""
    lease = RolloutLease.model_validate(stage.object(ObjectKind.LEASE, "grpo"))
    slot = stage.of("grpo")[0]
    node, runs = slot.spec.member.node, adapter_runs([lease], SETTINGS, None)
    (found,) = grants_of(node, [slot], 1, SETTINGS, others=runs)
    return found.weights.others


def guard(path: str) -> Callable[[Stage], object]:
    """What the pool's guards are given."""
    return lambda stage: part(policy_of(_pool(stage)), path)


def device(path: str) -> Callable[[Stage], object]:
    """What a node's agent makes of it for the GPUs."""
    return lambda stage: part(PoolGpuTerms.of(policy_of(_pool(stage))), path)


def argument(name: str) -> Callable[[Stage], object]:
    """What the router is started with."""

    def look(stage: Stage) -> object:
        (container,) = _router(stage)["template"]["spec"]["containers"]
        found = [one.partition("=") for one in container["args"]]
        return [value for key, _, value in found if key == f"--{name}"]

    return look


def routers(stage: Stage) -> object:
    return _router(stage)["replicas"]


CALLER = {"name": "a", "sha256": "0" * 64}


def router_callers(stage: Stage) -> object:
    """Whom the lease's router is told to hear."""
    lease = RolloutLease.model_validate(stage.object(ObjectKind.LEASE, "grpo"))
    callers = callers_of(lease)
    return " ".join(f"{one.name} {one.turns_only:d} {one.expires}" for one in callers)


def price(stage: Stage) -> object:
    """What a lent hour costs on the lease's statement."""
    lease = RolloutLease.model_validate(stage.object(ObjectKind.LEASE, "grpo"))
    prices = usages([lease], {"default/chat": _pool(stage)})[0].prices
    return prices and prices.lent_hour


def late(stage: Stage) -> object:
    """What a late request costs there, of a lease beside a thousand of them."""
    met = {"servingRequests": 1000, "servingRequestsWithTokens": 1000}
    met |= {"servingInputTokens": 2000000, "servingOutputTokens": 500000}
    found = stage.object(ObjectKind.LEASE, "grpo") | {"status": {"totals": met}}
    lease, pools = RolloutLease.model_validate(found), {"default/chat": _pool(stage)}
    return usages([lease], pools, price_violations=True)[0].late.micros


def _pool(stage: Stage) -> ServingPool:
    return ServingPool.model_validate(stage.object(ObjectKind.POOL, "chat"))


def _router(stage: Stage) -> dict[str, Any]:
    (made,) = stage.bench.api.all(ObjectKind.DEPLOYMENT)
    spec: dict[str, Any] = made["spec"]
    return spec


def _granted(slot: RolloutSlot) -> Grant:
    (found,) = grants_of(slot.spec.member.node, [slot], 1, SETTINGS)
    return found


# What happens.


def misses(stage: Stage) -> None:
    """Half of the requests miss the objective."""
    stage.pass_on(120, slow=50)


def rests(stage: Stage) -> None:
    """Nothing is slow any more."""
    stage.pass_on(3600)


def scaled(stage: Stage) -> None:
    """An autoscaler of the pool follows the utilisation of GPUs."""
    follows = ("DCGM_FI_DEV_GPU_UTIL",)
    found = Autoscaler("HorizontalPodAutoscaler", "default", "chat", "chat", follows)
    stage.bench.reconciler.cluster_facts.autoscalers = (found,)


ONE = {"lending.maxReplicasPercent": 25}
OPEN = {"lending.timeWindows": [{"days": ["Fri"], "startTime": "07:00", "endTime": "09:00"}]}


def window(**changes: object) -> Spec:
    return {"lending.timeWindows": [OPEN["lending.timeWindows"][0] | changes]}


MORNING = (100,) * 20 + (900,) * 28  # the bench begins at 08:00; the load comes at 10:00
RETURNS: Spec = {"pool": {"lending.breaker": {"whenOpen": "Return"}}, "then": (misses,)}
NIGHT: Spec = {
    "pool": {
        "lending.forecast": {"maxBusyPercent": 40},
        "wholeReplica": {"minReleasedMebibytes": 512, "maxBusyPercent": 40},
    },
    "busy": (100,),
    "full": True,
}
BY_MPS: Spec = {"pool": {"compute": "MPS"}, "able": True}
SHARED: Spec = {"pool": ONE, "rival": {}}
# An older lease has the one slot when this one comes, which lacks its minimum and is stronger.
LATE: Spec = {"pool": ONE, "rival": {}, "late": True}
STRONG = {"slots": {"min": 1, "max": 1}, "priority": 5}
OTHER = {"namespace": "default", "name": "other"}

SLOWER = "maxLatencyIncreasePercent"
READ, WRITTEN = (f"revenue.perMillion{one}TokensMicros" for one in ("Input", "Output"))
POOLS: list[tuple[str, Row | Refused]] = [
    ("mode", Row({"mode": "Paused"}, lent, "0123", "")),
    (
        "selector.matchLabels",
        Row({"selector.matchLabels": {"a": "b"}}, guard("labels"), {"app": "chat"}, {"a": "b"}),
    ),
    ("engine.kind", Row({"engine.kind": "VLLM"}, guard("engine"), "SGLang", "VLLM")),
    ("engine.port", Row({"engine.port": 8000}, guard("port"), 30000, 8000)),
    (
        "slo.ttftMilliseconds",
        Row({"slo.ttftMilliseconds": 300}, guard("ttft_milliseconds"), 500, 300),
    ),
    (
        "slo.ttftAloneMilliseconds",
        Row({"slo.ttftAloneMilliseconds": 200}, guard("ttft_alone_milliseconds"), 0, 200),
    ),
    ("slo.tpotMilliseconds", Row({"slo.tpotMilliseconds": 50}, guard("tpot_milliseconds"), 0, 50)),
    ("slo.percentile", Row({"slo.percentile": 50}, lent, "", "0123", **RETURNS)),
    (SLOWER, Row({SLOWER: 5}, guard("max_increase_percent"), 0, 5)),
    ("withheldPercent", Row({"withheldPercent": 0}, guard("withheld_percent"), 2, 0)),
    ("allowedSignals", Row({"allowedSignals": ["Loads"]}, lent, "0123", "")),
    ("lending.maxReplicasPercent", Row({"lending.maxReplicasPercent": 50}, lent, "0123", "01")),
    ("lending.minUnlentReplicas", Row({"lending.minUnlentReplicas": 3}, lent, "0123", "0")),
    ("lending.maxReplicasPerNode", Row({"lending.maxReplicasPerNode": 1}, lent, "0123", "023")),
    (
        "lending.maxReplicasPerNode",
        Refused("maxReplicasPerNode says nothing while maxReplicasPercent is 0"),
    ),
    (
        "lending.maxReplicasPerZonePercent",
        Row({"lending.maxReplicasPerZonePercent": 50}, lent, "0123", "02"),
    ),
    (
        "lending.maxReplicasPerLeasePercent",
        Row({"lending.maxReplicasPerLeasePercent": 25}, lent, "0123", "0"),
    ),
    ("lending.maxLoansPerMinute", Row({"lending.maxLoansPerMinute": 1}, lent, "0123", "0")),
    (
        "lending.spread",
        Row({"lending.spread": "Zones"}, lent, "01", "02", lease={"slots": {"min": 0, "max": 2}}),
    ),
    (
        "lending.forecast.leadMinutes",
        Row(
            {"lending.forecast.leadMinutes": 180},
            lent,
            "012",
            "",
            pool={"lending.forecast": {"maxBusyPercent": 50}},
            busy=MORNING,
        ),
    ),
    (
        "lending.forecast.maxBusyPercent",
        Row(
            {"lending.forecast.maxBusyPercent": 95},
            lent,
            "0",
            "01",
            pool={"lending.forecast": {"leadMinutes": 30}},
            busy=(300,),
        ),
    ),
    (
        "lending.breaker.cooldownSeconds",
        Row(
            {"lending.breaker.cooldownSeconds": 86_400},
            lent,
            "0123",
            "",
            pool={"lending.breaker": {"cooldownSeconds": 0, "whenOpen": "Return"}},
            then=(misses, rests, rests),
        ),
    ),
    ("lending.breaker.cooldownSeconds", Refused("lending.breaker needs slo")),
    (
        "lending.breaker.whenOpen",
        Row(
            {"lending.breaker.whenOpen": "Return"},
            lent,
            "0123",
            "",
            then=(misses,),
        ),
    ),
    ("lending.breaker.whenOpen", Refused("lending.breaker needs slo")),
    (
        "lending.autoscalerCheck",
        Row(
            {"lending.autoscalerCheck": "Ignore"},
            accepted,
            Reason.POOL_NOT_ACCEPTED,
            Reason.ACCEPTED,
            around=scaled,
        ),
    ),
    (
        "lending.memoryHeadroomGiB",
        Row({"lending.memoryHeadroomGiB": 4}, device("headroom.gib"), None, 4),
    ),
    (
        "lending.memoryHeadroomPercent",
        Row({"lending.memoryHeadroomPercent": 30}, device("headroom.percent"), None, 30),
    ),
    (
        "lending.memoryRegrow",
        Row({"lending.memoryRegrow": "NextStep"}, device("regrow_next_step"), False, True),
    ),
    (
        "lending.maxPowerWatts",
        Row({"lending.maxPowerWatts": 500}, device("max_power_watts"), 0, 500),
    ),
    ("lending.timeWindows[].days", Row(window(days=["Mon"]), lent, "0123", "", pool=OPEN)),
    (
        "lending.timeWindows[].startTime",
        Row(window(startTime="08:30"), lent, "0123", "", pool=OPEN),
    ),
    ("lending.timeWindows[].endTime", Row(window(endTime="07:30"), lent, "0123", "", pool=OPEN)),
    (
        "lending.borrowerNamespaces",
        Row(
            {"lending.borrowerNamespaces": ["research"]},
            accepted,
            Reason.ACCEPTED,
            Reason.NAMESPACE_NOT_ALLOWED,
        ),
    ),
    (
        "lending.borrowerNamespaceSelector.matchLabels",
        Row(
            {"lending.borrowerNamespaceSelector": {"matchLabels": {"rl": "yes"}}},
            accepted,
            Reason.ACCEPTED,
            Reason.NAMESPACE_NOT_ALLOWED,
        ),
    ),
    ("lending.pricePerGPUHourMicros", Row({"lending.pricePerGPUHourMicros": 7}, price, 0, 7)),
    (READ, Row({READ: 400}, late, 0.0, 0.8)),
    (WRITTEN, Row({WRITTEN: 400}, late, 0.0, 0.2)),
    ("compute", Row({"compute": "MPS"}, lent, "0123", "")),  # these nodes cannot
    ("maxComputePercent", Row({"maxComputePercent": 40}, guard("max_compute_percent"), 0, 40)),
    (
        "maxComputePercent",
        Row({"maxComputePercent": 40}, grant("engine.sharing.percent"), 30, 40, **BY_MPS),
    ),
    ("maxComputePercent", Refused("maxComputePercent must not exceed 90 with compute MPS")),
    (
        "busyComputePercent",
        Row({"busyComputePercent": 9}, grant("engine.sharing.busy_percent"), 0, 9, **BY_MPS),
    ),
    ("busyComputePercent", Refused("busyComputePercent needs compute MPS")),
    ("memorySource", Row({"memorySource": "Elastic"}, lent, "0123", "")),  # these nodes cannot
    ("memoryLimit", Row({"memoryLimit": "Driver"}, lent, "0123", "")),  # these nodes cannot
    ("wholeReplica.maxReplicas", Row({"wholeReplica.maxReplicas": 2}, lent, "0", "01", **NIGHT)),
    (
        "wholeReplica.minAwakeReplicas",
        Row({"wholeReplica.minAwakeReplicas": 4}, lent, "0", "", **NIGHT),
    ),
    (
        "wholeReplica.maxBusyPercent",
        Row({"wholeReplica.maxBusyPercent": 11}, lent, "0", "", **NIGHT),
    ),
    (
        "wholeReplica.minReleasedMebibytes",
        Row(
            {"wholeReplica.minReleasedMebibytes": 1},
            guard("sleep.release_bytes"),
            512 << 20,
            1 << 20,
            **NIGHT,
        ),
    ),
    (
        "wholeReplica.drainSeconds",
        Row({"wholeReplica.drainSeconds": 9}, guard("sleep.drain_seconds"), 60.0, 9.0, **NIGHT),
    ),
    (
        "wholeReplica.wakeSeconds",
        Row({"wholeReplica.wakeSeconds": 9}, guard("sleep.wake_seconds"), 60.0, 9.0, **NIGHT),
    ),
]

BOTH = {"poolRefs": [OTHER]}
LEASES: list[tuple[str, Row | Refused]] = [
    (
        "poolRef.namespace",
        Row({"poolRef.namespace": "x"}, accepted, Reason.ACCEPTED, Reason.UNKNOWN_POOL),
    ),
    ("poolRef.name", Row({"poolRef.name": "other"}, lent, "0123", "4")),
    (
        "poolRefs[].namespace",
        Row({"poolRefs": [OTHER | {"namespace": "x"}]}, lent, "01234", "0123", lease=BOTH),
    ),
    ("poolRefs[].name", Row(BOTH, lent, "0123", "01234")),
    ("deviceClasses", Row({"deviceClasses": ["h200"]}, lent, "01234", "234", lease=BOTH)),
    ("model.name", Row({"model.name": "other"}, grant("engine.model"), "tiny", "other")),
    (
        "engineClass",
        Row({"engineClass": "x"}, accepted, Reason.ACCEPTED, Reason.UNKNOWN_ENGINE_CLASS),
    ),
    (
        "engineArguments",
        Row(
            {"engineArguments": {"dtype": "auto"}},
            grant("engine.arguments"),
            {},
            {"dtype": "auto"},
        ),
    ),
    (
        "engineArguments",
        Row(
            {"engineArguments": {"enable-return-routed-experts": "true"}},
            argument("routed-experts"),
            [],
            [""],
        ),
    ),
    (
        "engineArguments",
        Refused("engineArguments has a name that is not on the allow-list"),
    ),
    ("slots.min", Row({"slots": {"min": 1, "max": 5}}, lent, "", "0", **SHARED)),
    ("slots.max", Row({"slots": {"min": 0, "max": 2}}, lent, "0123", "01")),
    (
        "slots.idleSeconds",
        Row(
            {"slots.idleSeconds": 30},
            lent,
            "0123",
            "",
            turns=Demand(0, usual_turns=100, idle_seconds=100.0, published_seconds=60.0),
        ),
    ),
    ("gpusPerSlot", Refused("gpusPerSlot must be 1, 2, 4 or 8")),
    # These replicas have one GPU each.
    ("gpusPerSlot", Row({"gpusPerSlot": 2}, lent, "0123", "")),
    ("priority", Row({"priority": 5}, lent, "", "0", **SHARED)),
    (
        "weight",
        Row({"weight": 4}, lent, "1", "01", pool={"lending.maxReplicasPercent": 50}, rival={}),
    ),
    (
        "preemptionPolicy",
        Row({"preemptionPolicy": "Never"}, ended, "0", "", lease=STRONG, **LATE),
    ),
    ("preemptionPolicy", Refused("preemptionPolicy Never says nothing while slots.min is 0")),
    ("suspend", Row({"suspend": True}, lent, "0123", "")),
    (
        "lifetimeSeconds",
        Row({"lifetimeSeconds": 60}, accepted, Reason.ACCEPTED, Reason.LEASE_EXPIRED),
    ),
    (
        "weights.storeName",
        Row({"weights.storeName": "x"}, accepted, Reason.ACCEPTED, Reason.UNKNOWN_STORE),
    ),
    (
        "weights.frozen",
        Row({"weights": {"frozen": True}}, grant("weights.run"), "grpo", "frozen"),
    ),
    (
        "weights.adapterRank",
        Row({"weights.adapterRank": 8}, grant("engine.adapter"), None, AdapterSpec(8, ALL)),
    ),
    (
        "weights.adapterTargets",
        Row(
            {"weights.adapterTargets": ["v_proj", "q_proj"]},
            grant("engine.adapter"),
            AdapterSpec(8, ALL),
            AdapterSpec(8, ("q_proj", "v_proj")),
            lease={"weights.adapterRank": 8},
        ),
    ),
    ("weights.adapterTargets", Refused("adapterTargets needs adapterRank")),
    (
        "weights.adapterSlots",
        Row(
            {"weights.adapterSlots": 4},
            grant("engine.adapter"),
            AdapterSpec(8, ALL),
            AdapterSpec(8, ALL, 4),
            lease={"weights.adapterRank": 8},
        ),
    ),
    ("weights.adapterSlots", Refused("adapterSlots needs adapterRank")),
    (
        "weights.adapterRuns",
        Row(
            {"weights.adapterRuns": ["ppo", "dpo"]},
            others,
            (),
            ("ppo", "dpo"),
            lease={"weights.adapterRank": 8, "weights.adapterSlots": 3},
        ),
    ),
    ("weights.adapterRuns", Refused("are more adapters than adapterSlots")),
    ("weights.run", Row({"weights.run": "ppo"}, grant("weights.run"), "grpo", "ppo")),
    (
        "weights.maxStalenessVersions",
        Row({"weights.maxStalenessVersions": 3}, argument("max-staleness"), ["1"], ["3"]),
    ),
    (
        "weights.kvPolicy",
        Row({"weights.kvPolicy": "Reuse"}, grant("engine.kv_policy"), "Keep", "Reuse"),
    ),
    ("drafts", Row({"drafts": "Router"}, grant("engine.drafts"), False, True)),
    ("drafts", Refused("drafts needs engines of one GPU")),
    ("drafts", Refused("drafts cannot be combined")),
    ("kvStoreGiB", Row({"kvStoreGiB": 2}, grant("engine.kv_store_bytes"), 0, 2 << 30)),
    ("kvStoreGiB", Refused("kvStoreGiB needs engines of one GPU")),
    ("kvStoreGiB", Refused("kvStoreGiB cannot be combined")),
    (
        "maxTrajectoriesPerSlot",
        Row({"maxTrajectoriesPerSlot": 3}, grant("max_concurrent_turns"), 8, 3),
    ),
    ("contextTokens", Row({"contextTokens": 64}, argument("context-tokens"), ["4096"], ["64"])),
    ("kvTokens", Row({"kvTokens": 8192}, grant("engine.kv_tokens"), 16384, 8192)),
    ("dedicatedEngines", Row({"dedicatedEngines": ["d"]}, argument("dedicated"), [], ["d"])),
    ("router.queueLimit", Row({"router.queueLimit": 5}, argument("queue-limit"), ["1024"], ["5"])),
    (
        "router.queueTimeoutSeconds",
        Row({"router.queueTimeoutSeconds": 5}, argument("queue-seconds"), ["240"], ["5"]),
    ),
    ("router.policy", Row({"router.policy": "fixed"}, argument("policy"), ["joint"], ["fixed"])),
    ("router.maxAgeVersions", Row({"router.maxAgeVersions": 4}, argument("max-age"), ["1"], ["4"])),
    ("router.replicas", Row({"router.replicas": 2}, routers, 1, 2)),
    *(
        (
            f"router.callers[].{name}",
            Row({"router.callers": [CALLER | {key: value}]}, router_callers, a, b),
        )
        for name, key, value, a, b in (
            ("name", "name", "b", "", "b 0 None"),
            ("sha256", "sha256", "0" * 64, "", "a 0 None"),
            ("turnsOnly", "turnsOnly", True, "", "a 1 None"),
            ("expires", "expires", "1970-01-01T00:01:00Z", "", "a 0 60.0"),
        )
    ),
]

NO, YES = Reason.TENANT_POLICY_FORBIDS, Reason.ACCEPTED
POLICIES: list[tuple[str, Row | Refused]] = [
    ("namespaces.names", Row({"namespaces.names": ["x"]}, accepted, YES, Reason.NO_TENANT_POLICY)),
    (
        "namespaces.matchLabels",
        Row(
            {"namespaces": {"names": ["x"], "matchLabels": {"team": "a"}}},
            accepted,
            Reason.NO_TENANT_POLICY,
            YES,
            policy={"namespaces": {"names": ["x"]}},
        ),
    ),
    (
        "runs[].storeName",
        Row({"runs": [{"storeName": "x", "names": ["*"]}]}, accepted, YES, Reason.RUN_NOT_ALLOWED),
    ),
    (
        "runs[].names",
        Row(
            {"runs": [{"storeName": "main", "names": ["x"]}]}, accepted, YES, Reason.RUN_NOT_ALLOWED
        ),
    ),
    ("pools", Row({"pools": ["x/*"]}, accepted, YES, NO)),
    ("models", Row({"models": ["x"]}, accepted, YES, NO)),
    ("maxLeases", Row({"maxLeases": 0}, accepted, YES, Reason.TENANT_CAP_REACHED)),
    ("maxSlots", Row({"maxSlots": 4}, accepted, YES, Reason.TENANT_CAP_REACHED)),
    ("maxRouterReplicas", Row({"maxRouterReplicas": 0}, accepted, YES, NO)),
    (
        "maxTotalRouterReplicas",
        Row({"maxTotalRouterReplicas": 0}, accepted, YES, Reason.TENANT_CAP_REACHED),
    ),
    ("minPriority", Row({"minPriority": 1}, accepted, YES, NO, policy={"maxPriority": 1})),
    ("maxPriority", Row({"maxPriority": 5}, accepted, NO, YES, lease={"priority": 5})),
    ("maxWeight", Row({"maxWeight": 2}, accepted, NO, YES, lease={"weight": 2})),
    (
        "mayPreempt",
        Row({"mayPreempt": True}, ended, "", "0", lease=STRONG, policy={"maxPriority": 5}, **LATE),
    ),
]

PLAY = {"ServingPool": "pool", "RolloutLease": "lease", "TenantPolicy": "policy"}
STAGED = {"ServingPool": POOLS, "RolloutLease": LEASES, "TenantPolicy": POLICIES}


def rows(kind: str) -> Iterator[Any]:
    for path, row in STAGED[kind]:
        if isinstance(row, Row):
            yield pytest.param(kind, row, id=f"{kind}.{path}")


@pytest.mark.parametrize(("kind", "row"), [one for kind in STAGED for one in rows(kind)])
async def test_a_field_has_its_effect(kind: str, row: Row) -> None:
    assert await Stage(row, PLAY[kind], {}).play() == row.before
    assert await Stage(row, PLAY[kind], row.set).play() == row.after


# The walk.


def leaves(schema: Spec, path: str = "") -> Iterator[str]:
    """Paths of fields that hold something themselves."""
    inner = schema.get("items", schema)
    if "properties" not in inner:
        yield path
        return
    stem = f"{path}[]" if inner is not schema else path
    for name, child in inner["properties"].items():
        yield from leaves(child, f"{stem}.{name}" if stem else name)


def test_every_field_of_every_kind_has_a_row_and_every_row_a_field() -> None:
    tables: dict[str, list[tuple[str, Any]]] = {**STAGED, "RolloutSlot": SLOTS}
    for kind in KINDS:
        tried = {path for path, _ in tables[kind.name]}
        tried |= {*OPERATORS} if kind.name == "RolloutSlot" else set()
        assert tried == {*leaves(structural(kind.spec))}, kind.name


def test_every_refusal_is_tried_on_the_api_server() -> None:
    tables: dict[str, list[tuple[str, Any]]] = {**STAGED, "RolloutSlot": SLOTS}
    for kind, table in tables.items():
        for path, row in table:
            if isinstance(row, Refused):
                assert (kind, row.rule) in {*CREATION, *TRANSITION}, path


# The other end: nothing that a node is given may lie there unread.

GIVEN = (
    sync.PoolPolicy,
    sync.Sharing,
    sync.EngineSpec,
    sync.WeightSource,
    sync.SleepTerms,
    sync.Grant,
)


def test_agents_read_all_that_pools_and_slots_give_them() -> None:
    read = {
        node.attr
        for folder in ("agent", "rose_core/guard")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    given = {
        (f"{kind.__name__}.{one.name}", one.name)
        for kind in GIVEN
        for one in msgspec.structs.fields(kind)
    }
    assert {name for name, attribute in given if attribute not in read} == set()
