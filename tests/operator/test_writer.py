"""Writes of a pass: refused ones wait longer each time, others go on, an outage ends the pass."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from rose_operator.errors import ApiRefused, ApiUnavailable, NotLeader
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.backoff import ExponentialBackoff, KeyedBackoff
from rose_operator.kube.object_cache import ObjectCache
from rose_operator.kube.writer import Write, Writer
from rose_operator.status.report import StatusDeferral
from tests.operator.fake_api import FakeApi


class Desk:
    """A writer with a clock that the test turns and no jitter."""

    def __init__(self) -> None:
        self.now = 0.0
        self.leads = True
        self.done: list[str] = []
        self.backoff = KeyedBackoff(lambda: 0.0)
        self.writer = Writer(
            FakeApi(),
            {kind: ObjectCache() for kind in ObjectKind},
            "rose-system",
            may_write=lambda: self.leads,
            clock=lambda: self.now,
            backoff=self.backoff,
        )

    def write(self, key: str, attempt: str = "1", error: Exception | None = None) -> Write:
        async def run() -> None:
            self.done.append(key)
            await asyncio.sleep(0)
            if error is not None:
                raise error

        return Write(key, attempt, run)


REFUSED = ApiRefused(422, "no")


async def test_a_refused_write_waits_twice_as_long_each_time_and_concerns_itself_alone() -> None:
    desk = Desk()
    tried = []
    for second in range(20):
        desk.now, desk.done = float(second), []
        await desk.writer.run([desk.write("bad", error=REFUSED), desk.write("good")])
        assert "good" in desk.done
        if "bad" in desk.done:
            tried.append(second)
    assert tried == [0, 1, 3, 7, 15]


async def test_writes_step_back_when_something_more_urgent_waits() -> None:
    desk = Desk()
    things = [desk.write(f"w{number}") for number in range(40)]
    assert not await desk.writer.run(things, lambda: len(desk.done) >= 5)
    assert len(desk.done) < 40
    assert await desk.writer.run(things)


async def test_a_refused_status_waits_although_its_times_and_counts_move() -> None:
    desk, tried = Desk(), []

    async def refused() -> None:
        tried.append(desk.now)
        raise REFUSED

    for second in range(16):
        desk.now = float(second)
        ready = {"type": "Ready", "status": "False", "reason": "NoReplicaQualifies"}
        found = {"conditions": [ready | {"lastTransitionTime": str(second)}], "tokens": second}
        metadata = {"namespace": "n", "name": "grpo"}
        manifest = {"metadata": metadata, "status": found}
        await desk.writer.run([desk.writer.status(ObjectKind.LEASE, manifest, refused)])
    assert tried == [0, 1, 3, 7, 15]


async def test_another_content_or_version_is_tried_at_once_and_success_forgets() -> None:
    desk = Desk()
    await desk.writer.run([desk.write("a", "old", REFUSED)])
    await desk.writer.run([desk.write("a", "old")])
    await desk.writer.run([desk.write("a", "new")])
    await desk.writer.run([desk.write("a", "old")])
    assert desk.done == ["a", "a", "a"]
    assert len(desk.backoff) == 0


async def test_objects_that_are_gone_are_forgotten() -> None:
    desk = Desk()
    await desk.writer.run([desk.write("a", error=REFUSED), desk.write("b", error=REFUSED)])
    desk.writer.keep({"b"})
    assert len(desk.backoff) == 1


async def test_an_outage_ends_the_pass_after_the_writes_that_have_begun() -> None:
    desk = Desk()
    many = [desk.write(f"w{n}", error=ApiUnavailable("429")) for n in range(100)]
    with pytest.raises(ApiUnavailable):
        await desk.writer.run(many)
    assert len(desk.done) <= 12


async def test_nothing_is_written_without_the_lead() -> None:
    desk = Desk()
    desk.leads = False
    with pytest.raises(NotLeader):
        await desk.writer.run([desk.write("a")])
    assert desk.done == []


async def test_writes_run_side_by_side() -> None:
    desk = Desk()
    together = asyncio.Barrier(12)

    def meeting() -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await together.wait()

        return run

    async with asyncio.timeout(5):
        await desk.writer.run([Write(f"w{n}", "", meeting()) for n in range(12)])


def test_a_growing_wait_is_bounded_spread_and_reset() -> None:
    exact, spread = (
        ExponentialBackoff(0.5, 4.0, lambda: 0.0),
        ExponentialBackoff(0.5, 4.0, lambda: 1.0),
    )
    assert [exact.next() for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert [spread.next() for _ in range(2)] == [0.25, 0.5]
    exact.reset()
    assert exact.next() == 0.5


def test_a_difference_waits_for_its_patience_from_its_first_sight() -> None:
    deferral = StatusDeferral()
    assert not deferral.due("a", 5.0, 100.0)
    assert deferral.waiting
    assert not deferral.due("a", 5.0, 104.0)
    assert deferral.due("a", 5.0, 105.0)
    assert deferral.due("b", 0.0, 105.0)
    deferral.settle("a")
    assert not deferral.due("a", 5.0, 106.0)
    deferral.keep(set())
    assert not deferral.waiting


async def test_who_changed_what_and_how_it_ended_is_written_down_but_no_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rose_operator.access")
    api = FakeApi()
    stores = {kind: ObjectCache() for kind in ObjectKind}
    writer = Writer(
        api, stores, "rose-system", may_write=lambda: True, clock=lambda: 0.0, identity="pod-1"
    )
    api.refuse = {"bad"}
    for name in ("good", "bad", "good"):
        metadata = {"namespace": "rose-system", "name": name}
        await writer.run(
            [writer.apply(ObjectKind.SLOT, {"kind": "RolloutSlot", "metadata": metadata})]
        )

    async def reported() -> None: ...

    metadata = {"namespace": "n", "name": "grpo"}
    await writer.run(
        [writer.status(ObjectKind.LEASE, {"metadata": metadata, "status": {}}, reported)]
    )
    await writer.run([writer.delete(ObjectKind.SLOT, "good")])
    api.down = True
    with pytest.raises(ApiUnavailable):
        await writer.run([writer.delete(ObjectKind.SLOT, "other")])
    lines = [one.getMessage() for one in caplog.records if one.name == "rose_operator.access"]
    slot = "RolloutSlot rose-system"
    assert lines[0] == f"create {slot}/good by operator pod-1: done"
    assert lines[1].startswith(f"create {slot}/bad by operator pod-1: refused (")
    assert lines[2:] == [
        f"apply {slot}/good by operator pod-1: done",
        f"delete {slot}/good by operator pod-1: done",
        f"delete {slot}/other by operator pod-1: no answer",
    ]
