"""What Sync answers: complete only as a leader that knows everything, renewed offline."""

from dataclasses import replace

import pytest

from rose_core.wire.sync import SyncReply, SyncRequest
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.leader import LeaderLock
from rose_operator.sync.service import SyncService
from rose_operator.weight_stores import Runs
from tests.operator.bench import SETTINGS, Bench, running


def lock_of(bench: Bench) -> LeaderLock:
    return LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )


def service_of(bench: Bench, lock: LeaderLock) -> SyncService:
    of_tenancy = set() if bench.settings.tenancy else {ObjectKind.POLICY, ObjectKind.NAMESPACE}
    return SyncService(
        bench.settings,
        {kind: store for kind, store in bench.stores.items() if kind not in of_tenancy},
        bench.telemetry,
        lock,
        clock=lambda: bench.now,
        wake=lambda: None,
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("leads", [True, False])
async def test_sync_answers_completely_only_as_a_leader_that_knows_everything(
    known: bool, leads: bool
) -> None:
    bench = await running()
    lock = lock_of(bench)
    if leads:
        await lock.step()
    if not known:
        bench.stores[ObjectKind.SLOT].complete = False
    reply = await ask(bench, lock)
    assert reply.complete is (known and leads)
    assert len(reply.grants) == (known and leads)


async def ask(bench: Bench, lock: LeaderLock, highest_term: int = 0) -> SyncReply:
    return await service_of(bench, lock).sync(SyncRequest("n1", "t", highest_term))


async def test_sync_offline_renews_and_a_higher_term_silences() -> None:
    bench = await running()
    lock = lock_of(bench)
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
    service = await leading(bench)
    request = SyncRequest("n1", "t", 0)
    assert len((await service.sync(request)).grants) == 1
    assert (await service.sync(SyncRequest("n2", "t", 0))).grants == ()
    bench.pool(**{"spec.mode": "Paused"})
    bench.report()
    await bench.turn()
    reply = await service.sync(request)
    assert reply.grants == ()
    assert reply.pools[0].mode == "Paused"


WEIGHTS = {"storeName": "main", "run": "grpo", "adapterRank": 8, "adapterSlots": 4}


async def adapters(bench: Bench, *runs: str) -> None:
    """Patch the lease's runs beside its first, as its team does."""
    bench.lease(spec__weights=WEIGHTS | {"adapterRuns": list(runs)})
    bench.report()
    await bench.turn(2)
    bench.now += 60  # statuses that only say something else are written now and then
    bench.report()
    await bench.turn()


async def test_runs_that_a_lease_gains_and_loses_are_in_the_next_grant_of_the_same_slot() -> None:
    bench = Bench()
    bench.pool()
    await adapters(bench)
    await adapters(bench)
    service = await leading(bench)
    found = []
    for runs in ((), ("ppo",), ("ppo", "dpo"), ("dpo",)):
        await adapters(bench, *runs)
        (grant,) = (await service.sync(SyncRequest("n1", "t", 0))).grants
        assert (grant.weights.run, grant.weights.others) == ("grpo", runs)
        found.append(grant.key.slot)
    assert len(set(found)) == 1, "no other engine is asked for"


async def leading(bench: Bench) -> SyncService:
    lock = lock_of(bench)
    await lock.step()
    return service_of(bench, lock)


@pytest.mark.parametrize("by", ["store", "policy"])
async def test_a_run_that_may_not_be_followed_is_left_out_and_named_and_the_lease_goes_on(
    by: str,
) -> None:
    names = ("grpo", "ppo")
    if by == "store":
        listed: dict[str, Runs] = {"main": {"default": names}}
        settings = replace(SETTINGS, runs=listed)
    else:
        settings = replace(SETTINGS, tenancy=True)
    bench = Bench(settings=settings)
    bench.pool()
    allowed = [{"storeName": "main", "names": list(names)}]
    team = {"namespaces": {"names": ["default"]}, "runs": allowed}
    bench.api.add(ObjectKind.POLICY, {"metadata": {"name": "team"}, "spec": team})
    await adapters(bench, "ppo")
    await adapters(bench, "ppo", "secret")
    service = await leading(bench)
    (grant,) = (await service.sync(SyncRequest("n1", "t", 0))).grants
    assert grant.weights.others == ("ppo",)
    reported = bench.condition(kind="Accepted")
    assert (reported["status"], reported["reason"]) == ("True", "Accepted")
    assert "adapterRuns: secret;" in reported["message"]
    reported = bench.condition(kind="WeightsSynced")
    assert (reported["status"], reported["reason"]) == ("True", "VersionAttested"), (
        "of the weights alone"
    )
    await adapters(bench, "ppo")
    assert "secret" not in bench.condition(kind="Accepted").get("message", "")
    bench.lease(spec__weights=WEIGHTS | {"run": "secret"})
    await bench.turn(2)
    assert bench.reason(kind="Accepted") == "RunNotAllowed", "the first run refuses the lease"
