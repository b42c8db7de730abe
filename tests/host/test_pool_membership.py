"""What the host tells an engine of the pool of keys, and what it counts of the answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from rose_agent.host.slots import pool_membership
from rose_agent.host.slots.pool_membership import PoolMembership
from rose_agent.metrics import REGISTRY
from rose_core.rollouts.engines.kv_store import PoolCounts
from rose_dev.waiting import until
from rose_engines.weights.calls import Answer, Call, JoinPool, PoolJoined, Refused
from rose_engines.weights.control import ControlServer


def counted() -> dict[str, float]:
    """The host's metrics of the pool, without their first words."""
    first = "rose_host_kv_pool_"
    return {
        one.name.removeprefix(first) + "".join(one.labels.values()): one.value
        for family in REGISTRY.collect()
        for one in family.samples
        if one.name.startswith(first) and not one.name.endswith("_created")
    }


async def test_an_engine_is_told_the_secret_and_its_counts_are_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_membership, "_LOOK_SECONDS", 0.01)
    calls: list[Call] = []
    answers = [
        PoolCounts(),
        PoolCounts(True, 10, 0.5, 20, 30, 1, 2),
        PoolCounts(False, 15, 1.0, 20, 30, 1, 3),
    ]

    def handle(call: Call) -> Answer:
        calls.append(call)
        return PoolJoined(answers[min(len(calls), len(answers)) - 1])

    before = counted()
    keeping = asyncio.create_task(PoolMembership(tmp_path / "socket", "secret").keep())
    await asyncio.sleep(0)  # no engine listens yet
    server = ControlServer(tmp_path / "socket", handle)
    server.start()
    try:
        await until(lambda: len(calls) > len(answers))
        assert set(calls) == {JoinPool("secret")}
        more = {name: value - before[name] for name, value in counted().items() if name in before}
        expected = {"engines": 1, "joined_engines": 0, "pull_seconds_total": 1.0}
        expected |= {"late_orders_total": 1, "failures_total": 3}
        assert {name: more[name] for name in expected} == expected
        kinds = {"pulled": 15, "written": 20, "dropped": 30}
        assert {name: counted()[f"bytes_total{name}"] for name in kinds} == {
            name: before.get(f"bytes_total{name}", 0) + value for name, value in kinds.items()
        }
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        server.close()
    assert counted()["engines"] == before["engines"]


async def test_an_engine_that_does_not_answer_is_not_asked_again_until_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_membership, "_LOOK_SECONDS", 0.01)
    calls: list[Call] = []
    goes_on = threading.Event()

    def handle(call: Call) -> Answer:
        calls.append(call)
        goes_on.wait(60)
        return PoolJoined(PoolCounts(joined=True))

    server = ControlServer(tmp_path / "socket", handle)
    server.start()
    joined = counted()["joined_engines"]
    keeping = asyncio.create_task(PoolMembership(tmp_path / "socket", "secret").keep())
    try:
        await until(lambda: bool(calls))
        await asyncio.sleep(0.1)
        assert len(calls) == 1
        goes_on.set()
        await until(lambda: counted()["joined_engines"] == joined + 1)
    finally:
        goes_on.set()
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        server.close()
    assert counted()["joined_engines"] == joined


async def test_an_engine_that_knows_of_no_pool_is_asked_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = ControlServer(tmp_path / "socket", lambda _: Refused("NoPool", "none is here"))
    server.start()
    try:
        await PoolMembership(tmp_path / "socket", "secret").keep()
    finally:
        server.close()
    assert "joins no pool of keys: none is here" in caplog.text
    assert "secret" not in caplog.text
