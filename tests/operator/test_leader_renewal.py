"""Renewals of the lead go on beside a busy loop, and end with a loop that hangs."""

import asyncio
import time
from collections.abc import Callable

import pytest

from rose_operator.kube.api import ObjectKind
from rose_operator.kube.leader import LOCK_NAME, LeaderLock, LockRenewal, LockState
from rose_operator.kube.object_cache import Raw
from tests.operator.fake_api import FakeApi


class Counting(FakeApi):
    """Counts looks at the Lease; they happen in the lock's thread."""

    looks = 0

    async def get(self, kind: ObjectKind, name: str) -> Raw | None:
        self.looks += 1
        return await super().get(kind, name)


class Lead:
    """A lock that renews every tenth of a second on its thread, and the loop it runs beside."""

    def __init__(self, api: FakeApi) -> None:
        self.late = 0.0
        self.closed = False
        self.lock = LeaderLock(
            api, identity="me", duration=0.3, offline_seconds=600, clock=time.monotonic
        )
        self.renewing = LockRenewal(self.lock, self._close, clock=self._clock, stuck_seconds=60.0)
        self.task = asyncio.create_task(self.renewing.run())

    def _clock(self) -> float:
        return time.monotonic() + self.late

    async def _close(self) -> None:
        self.closed = True

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.renewing.release()


def block_until(look: Callable[[], bool], seconds: float = 30) -> bool:
    """Keep the loop from turning until it is so, or until the time is over."""
    deadline = time.monotonic() + seconds
    while not look() and time.monotonic() < deadline:
        time.sleep(0.01)
    return look()


async def leading(api: FakeApi) -> Lead:
    lead = Lead(api)
    await asyncio.sleep(0)  # its task starts the thread
    assert block_until(lambda: lead.lock.term > 0)
    return lead


async def test_a_loop_that_is_busy_delays_no_renewal() -> None:
    api = Counting()
    lead = await leading(api)
    before = api.looks
    assert block_until(lambda: api.looks >= before + 3)
    await lead.end()


async def test_a_loop_that_hangs_leaves_the_lead_to_another() -> None:
    api = Counting()
    lead = await leading(api)
    lead.late = 61.0  # the last beat was long ago, and no beat comes while this test blocks
    assert block_until(lambda: lead.lock.state is LockState.OFFLINE)
    before = api.looks
    assert not block_until(lambda: api.looks > before, seconds=0.2)
    await lead.end()


async def test_ended_it_gives_the_lead_back_and_closes_its_connections() -> None:
    api = FakeApi()
    lead = await leading(api)
    await lead.end()
    found = await api.get(ObjectKind.LOCK, LOCK_NAME)
    assert found is not None
    assert found["spec"]["holderIdentity"] == ""
    assert lead.closed


@pytest.mark.parametrize("silent", [0.0, 59.0])
async def test_a_loop_that_is_a_little_late_keeps_the_lead(silent: float) -> None:
    lead = await leading(FakeApi())
    lead.late = silent
    assert lead.renewing.is_alive()
    await lead.end()
