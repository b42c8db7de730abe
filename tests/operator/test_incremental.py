"""A snapshot that takes over what has not changed is the one that is made from nothing."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.api import RolloutLease, RolloutSlot, ServingPool
from rose_core.identity import SlotKey, SlotUid
from rose_core.lending import PlannerMemory, PlannerPolicy, plan
from rose_core.wire.sync import SlotReport, SlotState, SyncRequest
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import ObjectCache
from rose_operator.plan.admission import Offer
from rose_operator.plan.cluster_facts import ClusterFacts
from rose_operator.plan.cluster_state import ClusterState, observe_cluster, utc
from rose_operator.plan.load_history import LoadHistory
from rose_operator.plan.memo import Memo
from rose_operator.plan.snapshot import Knowledge, Snapshots, snapshot
from rose_operator.plan.telemetry import NodeTelemetry
from rose_operator.plan.toggle_costs import ToggleCosts
from rose_operator.plan.typed_objects import TypedReader
from tests.api.objects import LEASE, POOL, SLOT, changed
from tests.operator.stub_agent import replica

START = 1_800_000_000.0
POLICY = PlannerPolicy()
NODES = ("n0", "n1", "n2")
PODS = ("a", "b", "c")
CREATED = "2027-01-15T07:00:00Z"
NAMES = st.sampled_from(["one", "two"])
POOLS = st.fixed_dictionaries(
    {
        "metadata.name": st.sampled_from(["chat", "other"]),
        "spec.mode": st.sampled_from(["Lend", "Observe", "Paused"]),
        "spec.compute": st.sampled_from(["TimeSlice", "MPS"]),
        "spec.lending": st.sampled_from(
            [{}, {"forecast": {"leadMinutes": 30}}, {"maxReplicasPercent": 50}]
        ),
    }
)
LEASES = st.fixed_dictionaries(
    {
        "metadata.name": NAMES,
        "spec.priority": st.integers(0, 2),
        "spec.slots": st.sampled_from([{"min": 0, "max": 1}, {"min": 1, "max": 3}]),
        "spec.weights.storeName": st.sampled_from(["main", "elsewhere"]),
        "spec.suspend": st.sampled_from([..., True]),
        "spec.lifetimeSeconds": st.sampled_from([..., 3660]),
    }
)
SLOTS = st.fixed_dictionaries(
    {
        "metadata.name": st.sampled_from(["s1", "s2"]),
        "spec.desired": st.sampled_from(["Lent", "Released"]),
        "spec.members": st.builds(
            lambda node, pod: [
                {"node": node, "podName": pod, "podUid": f"uid-{pod}", "gpuUUIDs": [f"GPU-{pod}"]}
            ],
            st.sampled_from(NODES),
            st.sampled_from(PODS),
        ),
    }
)
REPLICAS = st.lists(
    st.builds(
        lambda pool, pod, fields: replica(pool, pod, **fields),
        st.sampled_from(["default/chat", "default/other", "default/none"]),
        st.sampled_from(PODS),
        st.fixed_dictionaries(
            {
                "pod_uid": st.sampled_from([f"uid-{pod}" for pod in PODS]),
                "ready": st.booleans(),
                "kv_used_permille": st.sampled_from([None, 100, 950]),
                "busy_permille": st.sampled_from([None, 300]),
                "refusal": st.sampled_from(["", "InsufficientMemory"]),
                "lendable_bytes": st.sampled_from([None, 10 << 30, (10 << 30) + 1, 40 << 30]),
                "verified": st.sampled_from([True, False, None]),
            }
        ),
    ),
    max_size=3,
    unique_by=lambda one: one.pod_uid,
)
REPORTS = st.builds(
    lambda node, replicas, slots, fields: SyncRequest(
        node,
        "t",
        0,
        tuple(replicas),
        tuple(
            SlotReport(SlotKey(SlotUid(f"uid-{one}"), 1), state, reason, needs_bytes=needed)
            for one, (state, reason, needed) in slots.items()
        ),
        fields,
    ),
    st.sampled_from(NODES),
    REPLICAS,
    st.dictionaries(
        st.sampled_from(["s1", "s2", "unknown"]),
        st.tuples(
            st.sampled_from([SlotState.RUNNING, SlotState.STARTING, SlotState.GONE]),
            st.sampled_from(["", "InsufficientMemory"]),
            st.sampled_from([None, 10 << 30, 20 << 30]),
        ),
        max_size=2,
    ),
    st.sampled_from([{}, {"MPS": ""}, {"MPS": "MpsFault: down"}, {"DeviceAccess": "Other: no"}]),
)
EVENTS = st.one_of(
    st.tuples(st.just("report"), REPORTS),
    st.tuples(st.just(ObjectKind.POOL), POOLS),
    st.tuples(st.just(ObjectKind.LEASE), LEASES),
    st.tuples(st.just(ObjectKind.SLOT), SLOTS),
    st.tuples(st.just("remove"), st.tuples(st.sampled_from(list(ObjectKind)), st.integers(0, 3))),
    st.tuples(st.just("sleep"), st.sampled_from([0.5, 5.0, 20.0, 2000.0])),
    st.tuples(st.just("cordon"), st.sets(st.sampled_from(NODES))),
    st.tuples(st.just("zones"), st.dictionaries(st.sampled_from(NODES), st.just("z1"))),
    st.tuples(st.just("again"), st.sampled_from(NODES)),
)
BASES = {ObjectKind.POOL: POOL, ObjectKind.LEASE: LEASE, ObjectKind.SLOT: SLOT}


class Inside:
    """The operator's knowledge, fed by events."""

    def __init__(self) -> None:
        self.now, self.version = 0.0, 0
        self.stores = {kind: ObjectCache() for kind in ObjectKind}
        self.readers = (
            TypedReader(ServingPool, self.stores[ObjectKind.POOL]),
            TypedReader(RolloutLease, self.stores[ObjectKind.LEASE]),
            TypedReader(RolloutSlot, self.stores[ObjectKind.SLOT]),
        )
        self.telemetry = NodeTelemetry(0.0)
        self.known = Knowledge(ClusterFacts(), LoadHistory(), ToggleCosts())

    def happen(self, what: object, value: Any) -> None:  # noqa: ANN401  # as the event says
        self.version += 1
        if isinstance(what, ObjectKind):
            name = value["metadata.name"]
            known = self.stores[what].get(f"default/{name}")
            metadata = {
                "metadata.uid": f"uid-{name}",
                "metadata.creationTimestamp": CREATED,
                "metadata.resourceVersion": str(self.version),
                "metadata.generation": known["metadata"]["generation"] + 1 if known else 1,
            }
            self.stores[what].put(changed(BASES[what], metadata | value))
        elif what == "remove":
            kind, number = value
            for raw in self.stores[kind].all()[number : number + 1]:
                self.stores[kind].remove(raw)
        elif what == "report":
            self.telemetry.record(value, self.now)
        elif what == "again" and value in self.telemetry.nodes:
            self.telemetry.record(self.telemetry.nodes[value].request, self.now)
        elif what == "sleep":
            self.now += value
            self.telemetry.forget(self.now, POLICY.forget_seconds)
        elif what == "cordon":
            self.known.cluster_facts.cordoned = frozenset(value)
        elif what == "zones":
            self.known.cluster_facts.zones = value

    def look(self) -> ClusterState:
        pools, leases, slots = self.readers
        world = observe_cluster(
            pools.read(),
            leases.read(),
            slots.read(),
            self.telemetry,
            cluster_facts=self.known.cluster_facts,
            offer=Offer(frozenset({"main"}), frozenset({"sglang"})),
            now=utc(START + self.now),
            monotonic=self.now,
        )
        now = world.now.timestamp()
        reports = {key: [one for _, one in reported] for key, reported in world.reports.items()}
        self.known.loads.observe(world.pools.good, reports, now)
        self.known.toggles.observe(world.slots.good.values(), self.telemetry, now)
        self.known.sizes.observe(
            world.leases.good.values(), world.slots.good.values(), self.telemetry
        )
        return world


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_whatever_happens_the_kept_snapshot_is_the_one_made_from_nothing(
    events: list[tuple[object, object]],
) -> None:
    inside, memory = Inside(), PlannerMemory()
    snapshots = Snapshots(inside.known)
    for what, value in events:
        inside.happen(what, value)
        world = inside.look()
        kept = snapshots.take(world, memory, POLICY, {"default/chat": 2})
        anew = snapshot(world, memory, POLICY, {"default/chat": 2}, inside.known)
        assert kept == anew
        now = world.now.timestamp()
        assert plan(kept, now) == plan(anew, now)
        memory = plan(anew, now).memory


def test_a_pass_translates_only_what_has_changed() -> None:
    inside = Inside()
    inside.happen(ObjectKind.POOL, {"metadata.name": "chat"})
    for name in ("one", "two"):
        inside.happen(ObjectKind.LEASE, {"metadata.name": name})
    for number, node in enumerate(NODES):
        reported = replica("default/chat", PODS[number])
        inside.happen("report", SyncRequest(node, "t", 0, (reported,)))
    snapshots = Snapshots(inside.known)

    def made() -> int:
        before = snapshots.computed_count
        snapshots.take(inside.look(), PlannerMemory(), POLICY, {})
        return snapshots.computed_count - before

    assert made() == 6
    assert made() == 0
    for node in NODES:
        inside.happen("again", node)
    assert made() == 0
    inside.happen("report", SyncRequest("n0", "t", 0, (replica("default/chat", "a", ready=False),)))
    assert made() == 1
    inside.happen(ObjectKind.LEASE, {"metadata.name": "one", "spec.priority": 5})
    assert made() == 1
    inside.happen("cordon", {"n1", "n2"})
    assert made() == 2


def test_what_a_pass_did_not_ask_for_is_forgotten() -> None:
    kept: Memo[int] = Memo()
    source = object()
    for _ in range(2):
        kept.begin_pass()
        assert kept.get("a", source, 0, lambda: 7) == 7
    assert kept.computed_count == 1
    kept.begin_pass()
    kept.begin_pass()
    kept.get("a", source, 0, lambda: 7)
    assert kept.computed_count == 2
