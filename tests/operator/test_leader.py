"""The leader lock: states, terms, and what is allowed in which."""

import pytest

from rose_operator.errors import ApiRefused, ApiUnavailable
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.leader import (
    LOCK_NAME,
    LeaderLock,
    LeaseRecord,
    LeaseStep,
    LockState,
    decide,
)
from rose_operator.kube.object_cache import Raw
from rose_operator.metrics import REGISTRY
from tests.operator.fake_api import FakeApi

MINE, OTHER = "me", "other"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lock(api: FakeApi, clock: Clock, identity: str = MINE) -> LeaderLock:
    return LeaderLock(api, identity=identity, duration=15, offline_seconds=600, clock=clock)


def allowed(lock: LeaderLock) -> tuple[LockState, bool, bool]:
    """State, whether it may write, whether it may renew."""
    return lock.state, lock.may_write, lock.may_renew


def counted(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


def record(holder: str, term: int) -> LeaseRecord:
    return LeaseRecord(holder, term, 15.0, "1")


@pytest.mark.parametrize(
    ("found", "my_term", "unchanged", "step"),
    [
        (None, 0, 0.0, LeaseStep.CREATE),
        (None, 3, 0.0, LeaseStep.CREATE),
        (record("", 4), 0, 0.0, LeaseStep.CLAIM),
        (record(MINE, 4), 0, 0.0, LeaseStep.CLAIM),
        (record(OTHER, 4), 0, 14.9, LeaseStep.WAIT),
        (record(OTHER, 4), 0, 15.0, LeaseStep.CLAIM),
        (record(MINE, 4), 4, 0.0, LeaseStep.RENEW),
        (record(OTHER, 5), 4, 0.0, LeaseStep.YIELD),
        (record(MINE, 5), 4, 0.0, LeaseStep.YIELD),
        (record("", 4), 4, 0.0, LeaseStep.YIELD),
    ],
)
def test_every_edge(
    found: LeaseRecord | None, my_term: int, unchanged: float, step: LeaseStep
) -> None:
    assert decide(found, MINE, my_term, unchanged) is step


async def test_a_first_leader_renews_in_one_term() -> None:
    api, clock = FakeApi(), Clock()
    mine = lock(api, clock)
    assert not mine.may_renew
    await mine.step()
    assert (mine.state, mine.term) == (LockState.LEADER, 1)
    clock.now += 11
    await mine.step()
    clock.now += 11
    assert (mine.state, mine.term) == (LockState.LEADER, 1)


async def test_without_renewal_it_is_offline_then_powerless_and_leads_again_in_its_term() -> None:
    api, clock = FakeApi(), Clock()
    mine = lock(api, clock)
    await mine.step()
    api.down = True
    clock.now += 12.1
    await mine.step()
    assert allowed(mine) == (LockState.OFFLINE, False, True)
    clock.now += 588
    assert allowed(mine) == (LockState.OFFLINE, False, False)
    api.down, lapses = False, counted("rose_operator_lead_lapses_total")
    await mine.step()
    assert (mine.state, mine.term) == (LockState.LEADER, 1)
    assert counted("rose_operator_lead_lapses_total") == lapses + 1


async def test_a_successor_waits_for_the_duration_and_deposes() -> None:
    api, clock = FakeApi(), Clock()
    mine, other = lock(api, clock), lock(api, clock, OTHER)
    await mine.step()
    await other.step()
    clock.now += 14
    await other.step()
    assert not other.may_renew
    clock.now += 1
    await other.step()
    assert (other.state, other.term) == (LockState.LEADER, 2)
    await mine.step()
    assert mine.state is LockState.DEPOSED
    assert not mine.may_renew


async def test_a_lease_that_was_given_back_is_claimed_at_once_in_a_higher_term() -> None:
    api, clock = FakeApi(), Clock()
    mine, other = lock(api, clock), lock(api, clock, OTHER)
    await mine.step()
    await mine.release()
    assert not mine.may_write
    await other.step()
    assert (other.state, other.term) == (LockState.LEADER, 2)


async def test_the_lease_says_since_when_its_term_is_held() -> None:
    """The official client's election takes a Lease that does not for free, and leads beside us."""
    api, clock, since = FakeApi(), Clock(), "2026-01-01T00:00:00.000000Z"
    mine, other = lock(api, clock), lock(api, clock, OTHER)
    await mine.step()
    (held,) = (one["spec"] for (kind, _), one in api.objects.items() if kind is ObjectKind.LOCK)
    assert held["acquireTime"] == held["renewTime"]
    held["acquireTime"] = since
    await mine.step()
    renewed = await api.get(ObjectKind.LOCK, LOCK_NAME)
    assert renewed is not None
    assert renewed["spec"]["acquireTime"] == since
    await mine.release()
    await other.step()
    claimed = await api.get(ObjectKind.LOCK, LOCK_NAME)
    assert claimed is not None
    assert claimed["spec"]["acquireTime"] > since


async def test_the_same_pod_restarted_claims_at_once_in_a_higher_term() -> None:
    api, clock = FakeApi(), Clock()
    await lock(api, clock).step()
    again = lock(api, clock)
    await again.step()
    assert (again.state, again.term) == (LockState.LEADER, 2)


async def test_two_claims_at_once_have_one_winner() -> None:
    api, clock = FakeApi(), Clock()
    one, two = lock(api, clock), lock(api, clock, OTHER)
    unheld = await api.get(ObjectKind.LOCK, LOCK_NAME)
    await one.step()
    with pytest.raises(ApiUnavailable, match="409"):
        await two._act(unheld, clock.now)
    assert one.may_write
    assert not two.may_write


async def test_a_term_that_nodes_know_from_a_lost_lease_is_outbid() -> None:
    api, clock = FakeApi(), Clock()
    mine = lock(api, clock)
    await mine.step()
    mine.outbid(41)
    await mine.step()
    assert (mine.state, mine.term) == (LockState.LEADER, 42)
    mine.outbid(7)
    await mine.step()
    assert mine.term == 42


async def test_an_impossible_term_is_not_outbid() -> None:
    api, clock = FakeApi(), Clock()
    mine = lock(api, clock)
    await mine.step()
    mine.outbid(2**62)
    await mine.step()
    assert (mine.state, mine.term) == (LockState.LEADER, 1)


async def test_expired_credentials_end_the_process_so_that_a_new_one_reads_new_ones() -> None:
    class Expired(FakeApi):
        async def get(self, kind: ObjectKind, name: str) -> Raw | None:
            raise ApiRefused(401, "Unauthorized")

    mine = lock(Expired(), Clock())
    await mine.step()
    assert mine.state is LockState.DEPOSED
