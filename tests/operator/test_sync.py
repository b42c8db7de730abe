"""What Sync answers: complete only as a leader that knows everything, renewed offline."""

import pytest

from rose_core.wire.sync import SyncReply, SyncRequest
from rose_operator.kube.api import Kind
from rose_operator.kube.leader import LeaderLock
from rose_operator.sync.service import SyncService
from tests.operator.bench import SETTINGS, Bench, running


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("leads", [True, False])
async def test_sync_answers_completely_only_as_a_leader_that_knows_everything(
    known: bool, leads: bool
) -> None:
    bench = await running()
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    if leads:
        await lock.step()
    if not known:
        bench.stores[Kind.SLOT].complete = False
    reply = await ask(bench, lock)
    assert reply.complete is (known and leads)
    assert len(reply.grants) == (known and leads)


async def ask(bench: Bench, lock: LeaderLock, highest_term: int = 0) -> SyncReply:
    service = SyncService(
        SETTINGS, bench.stores, bench.telemetry, lock, clock=lambda: bench.now, wake=lambda: None
    )
    return await service.sync(SyncRequest("n1", "t", highest_term))


async def test_sync_offline_renews_and_a_higher_term_silences() -> None:
    bench = await running()
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    await lock.step()
    bench.now += 100
    reply = await ask(bench, lock)
    assert reply.complete
    (grant,) = reply.grants
    assert (grant.key.term, grant.ttl_seconds) == (1, SETTINGS.grant_seconds)
    assert [policy.pool for policy in reply.pools] == ["default/chat"]
    assert not (await ask(bench, lock, highest_term=9)).complete
    bench.now += 600
    assert not (await ask(bench, lock)).complete


async def test_sync_forgets_what_it_derived_when_an_object_changes() -> None:
    bench = await running()
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    await lock.step()
    service = SyncService(
        SETTINGS, bench.stores, bench.telemetry, lock, clock=lambda: bench.now, wake=lambda: None
    )
    request = SyncRequest("n1", "t", 0)
    assert len((await service.sync(request)).grants) == 1
    assert (await service.sync(SyncRequest("n2", "t", 0))).grants == ()
    bench.pool(**{"spec.mode": "Paused"})
    bench.report()
    await bench.turn()
    reply = await service.sync(request)
    assert reply.grants == ()
    assert reply.pools[0].mode == "Paused"
