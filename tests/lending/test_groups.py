"""Replicas over several pods: which are whole, and what counts against the owner's limits."""

from __future__ import annotations

import pytest

from rose_core.api import Reason
from rose_core.identity import PodUid
from rose_core.lending import Replica, plan
from rose_core.lending.groups import form
from rose_core.wire.sync import FollowerPod, GroupPlace, ReplicaGroup, ReplicaReport, SyncRequest
from tests.lending.world import NOW, lease, lent, pool, released, replica, slot, world


def node(name: str, *places: GroupPlace, guard: str = "g:1") -> SyncRequest:
    reports = tuple(
        ReplicaReport("s/chat", "s", "pod", PodUid(f"{name}-{place.index}"), place=place)
        for place in places
    )
    return SyncRequest(name, "t", 0, reports, guard=guard)


def at(index: int, size: int = 2, group: str = "llama/0") -> GroupPlace:
    return GroupPlace(group, index, size)


def test_a_whole_group_tells_its_guards_who_leads() -> None:
    found = form([node("b", at(1)), node("a", at(0), guard="a:1"), node("c", at(0, 1, "x/0"))])
    assert found["s/chat/llama/0"].refusal == ""
    assert found["s/chat/llama/0"].formed == ReplicaGroup(
        PodUid("a-0"), "a", "a:1", (FollowerPod(PodUid("b-1"), "b"),)
    )
    assert found["s/chat/x/0"].formed is not None


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([node("a", at(0))], "worker-index 1 is not"),
        ([node("b", at(1))], "worker-index 0 is not"),
        ([node("a", at(0)), node("b", at(1)), node("c", at(0))], "3 pods say that they are of"),
        ([node("a", at(0)), node("b", at(1, 3))], "different sizes"),
        ([node("a", at(0)), node("b", at(1), guard="")], "guard of node b is not asked"),
        # What a guard cannot dial, and would end with.
        ([node("a", at(0), guard="local:/run/x"), node("b", at(1))], "guard of node a is not"),
        # An annotation of any pod says so: no list of so many is made.
        ([node("a", at(0, 10**15))], "worker-index 1, 2, 3, 4 is not"),
    ],
)
def test_a_group_that_is_not_whole_is_refused_in_words(nodes: list[SyncRequest], text: str) -> None:
    (found,) = form(nodes).values()
    assert text in found.refusal
    assert found.formed is None


def group(name: str, pods: int = 2) -> list[Replica]:
    return [replica(f"{name}{index}", group=f"s/chat/{name}/0") for index in range(pods)]


WANTS = lease("x", max_slots=9)


def test_pods_of_a_group_are_one_replica_against_the_owners_limits() -> None:
    half = pool(max_replicas_percent=50)
    both = [*group("a"), *group("b")]
    found = lent(world(both, [WANTS], pools=[half]))
    assert sorted(name for _, name in found) == ["a0", "a1"]
    assert lent(world(group("a"), [WANTS], pools=[pool(min_unlent_replicas=1)])) == []


def test_a_replica_that_is_lent_in_part_gives_the_rest_and_no_other_does() -> None:
    a, b = group("a"), group("b")
    held = [slot(WANTS, a[0])]
    found = plan(world([*a, *b], [WANTS], held, [pool(max_replicas_percent=50)]), NOW)
    assert [one.replica for one in found.lends] == ["a1"]
    refused = {one.replica: one.reason for one in found.members["s/chat"]}
    assert refused["s/b0"] is Reason.POOL_LIMIT_REACHED


def test_beside_a_group_that_is_lent_in_part_the_limit_holds_for_single_pods_too() -> None:
    a, single, other = group("a"), replica("b", kv_permille=50), replica("c", kv_permille=50)
    held = [slot(WANTS, a[0])]
    pools = [pool(max_replicas_percent=34)]
    leases = [WANTS, lease("y", max_slots=9)]
    found = plan(world([*a, single, other], leases, held, pools), NOW)
    assert [one.replica for one in found.lends] == ["a1"]


def test_all_slots_of_a_replica_go_back_together() -> None:
    a, b = group("a"), group("b")
    held = [slot(WANTS, one) for one in (*a, *b)]
    gone = released(world([*a, *b], [WANTS], held, [pool(max_replicas_percent=50)]))
    assert set(gone.values()) == {Reason.POOL_LIMIT_REACHED}
    assert sorted(name.split("-")[-1] for name in gone) in (["a0", "a1"], ["b0", "b1"])


def test_a_lease_may_hold_every_pod_of_what_it_may_hold() -> None:
    found = lent(world(group("a", 3), [WANTS]))
    assert len(found) == 3
