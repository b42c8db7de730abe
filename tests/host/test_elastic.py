"""Elastic engines under the host: found, limited at once, judged by what they then hold."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest

from rose_agent.devices.elastic import KvcachedSegment
from rose_agent.host import main
from rose_agent.host.discovery.capabilities import Capabilities
from rose_agent.host.memory.elastic import Elastic
from rose_agent.host.sharing.sharing import SharingMeans, segment_name
from rose_core.devices.elastic import FIRST_PERMILLE, ElasticLimits
from rose_core.host_reasons import HostReason
from rose_core.identity import SlotUid
from rose_core.wire.host import EngineState, EngineStatus, EnsureEngine, LimitMemory
from rose_core.wire.sync import Sharing
from rose_engines.node.rundir import RunDir
from tests.host.helpers import (
    BEARER,
    body,
    failed,
    guarding,
    order,
    running,
    serving,
    status_of,
    stop,
    until,
)

POOL = 64 << 20
BUNDLE = POOL // 64


def elastic_order(**arguments: str) -> EnsureEngine:
    plain = order(kv_bytes=str(POOL), token_seconds="0.001", **arguments)  # type: ignore[arg-type]
    sharing = Sharing(memory_source="Elastic")
    engine = msgspec.structs.replace(plain.engine, sharing=sharing)
    return msgspec.structs.replace(plain, engine=engine)


def segment(rundir: Path) -> KvcachedSegment:
    return KvcachedSegment(segment_name(RunDir(rundir).slot("slot-1").plugin_socket))


async def limited(host: main.RunningHost, permille: int) -> EngineStatus:
    asked = order()
    return await host.host.limit_memory(LimitMemory(asked.slot, permille))


@asynccontextmanager
async def turns(url: str, tokens: int) -> AsyncIterator[None]:
    """Four turns of which each needs room for its tokens."""

    async def turn(client: aiohttp.ClientSession) -> None:
        async with client.post(f"{url}/generate", json=body(tokens), headers=BEARER) as reply:
            await reply.read()

    async with aiohttp.ClientSession() as client:
        asked = [asyncio.create_task(turn(client)) for _ in range(4)]
        try:
            yield
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


async def holds(host: main.RunningHost, least: int, most: int) -> None:
    async def there() -> bool:
        held = (await status_of(host)).kv_held_bytes
        return held is not None and least <= held <= most

    await until(there, f"it holds {least >> 20} to {most >> 20} MiB")


async def test_an_elastic_engine_begins_small_grows_and_gives_back_while_it_serves(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(elastic_order())
            status = await serving(host)
            assert status.kv_permille == FIRST_PERMILLE
            first = segment(rundir).read()
            assert first is not None
            assert first.limit == POOL * FIRST_PERMILLE // 1000 // BUNDLE * BUNDLE
            assert (await limited(host, 1000)).kv_permille == 1000
            whole = segment(rundir).read()
            assert whole is not None
            assert whole.limit == POOL - BUNDLE, "at once, and never the whole pool"
            async with turns(status.endpoint, 50_000):
                await holds(host, POOL // 2, POOL)
                await limited(host, 250)
                lowered = segment(rundir).read()
                assert lowered is not None
                assert lowered.limit == POOL // 4
                await holds(host, 1, POOL // 4)
            assert (await status_of(host)).restarts == 0
            assert (await host.host.stop(stop())).state is EngineState.GONE
        assert segment(rundir).read() is None


async def test_an_idle_engine_gives_back_what_it_had_only_cached(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(elastic_order())
            status = await serving(host)
            await limited(host, 1000)
            async with aiohttp.ClientSession() as client:
                url = f"{status.endpoint}/generate"
                async with client.post(url, json=body(600), headers=BEARER) as reply:
                    assert len((await reply.json())["output_ids"]) == 600
            await holds(host, POOL // 2, POOL)
            await limited(host, 125)
            await holds(host, 0, POOL // 8)
            assert (await status_of(host)).restarts == 0


async def test_an_engine_without_kvcached_is_ended_although_it_answers_well(
    rundir: Path, models: Path, monkeypatch: pytest.MonkeyPatch, failures: list[EngineStatus]
) -> None:
    monkeypatch.setattr("rose_agent.host.memory.elastic._APPEAR_SECONDS", 0.5)
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(elastic_order(kvcached="absent"))
            refused = await failed(failures, HostReason.ELASTIC_UNAVAILABLE)
            assert "runs without kvcached" in refused.message


def hasty(host: main.RunningHost, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ElasticLimits(flush_s=0.2, effect_s=1.0, unknown_s=1.0)
    plain = Elastic.__init__

    def made(self: Elastic, *arguments: object) -> None:
        plain(self, *arguments, limits=short)  # type: ignore[arg-type, misc]

    monkeypatch.setattr(Elastic, "__init__", made)


async def test_an_engine_that_was_limited_and_keeps_its_memory_is_ended(
    rundir: Path, models: Path, monkeypatch: pytest.MonkeyPatch, failures: list[EngineStatus]
) -> None:
    async with running(rundir, models) as host:
        hasty(host, monkeypatch)
        with guarding(rundir):
            await host.host.ensure(elastic_order(kvcached="deaf"))
            status = await serving(host)
            async with turns(status.endpoint, 50_000):
                kept = await failed(failures, HostReason.MEMORY_KEPT)
            assert "after it was limited to 8" in kept.message
            await serving(host)
            assert (await status_of(host)).restarts == 1


async def test_a_segment_that_goes_while_the_engine_lives_is_unknown_and_then_the_end(
    rundir: Path, models: Path, monkeypatch: pytest.MonkeyPatch, failures: list[EngineStatus]
) -> None:
    async with running(rundir, models) as host:
        hasty(host, monkeypatch)
        with guarding(rundir):
            await host.host.ensure(elastic_order())
            await serving(host)
            segment(rundir).forget()

            async def unknown() -> bool:
                return (await status_of(host)).kv_held_bytes is None

            await until(unknown, "nothing is known of what it holds")
            await failed(failures, HostReason.ELASTIC_UNAVAILABLE)


async def test_the_guards_word_outlives_a_restart_of_the_engine(
    rundir: Path, models: Path, failures: list[EngineStatus]
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(elastic_order())
            await serving(host)
            await limited(host, 500)
            host.host._lives[SlotUid("slot-1")].current.fail(
                HostReason.BROKEN_WEIGHTS, "for the test"
            )
            await failed(failures, HostReason.BROKEN_WEIGHTS)
            await serving(host)
            seen = segment(rundir).read()
            assert seen is not None
            assert seen.limit == POOL // 2


async def test_a_host_says_what_its_engines_lack_for_elastic_memory(tmp_path: Path) -> None:
    """And a python in which kvcached is there, hooked in and loads, lacks nothing."""

    numbers = itertools.count()

    async def reported(code: str, *, hooked: bool = True, version: str = "0.1.5") -> str:
        site = tmp_path / f"site-{next(numbers)}"
        package = site / "kvcached"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "vmm_ops.py").write_text(code)
        if hooked:
            (site / "kvcached_autopatch.pth").touch()
        info = site / f"kvcached-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: kvcached\nVersion: {version}\n")
        python = site / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec /usr/bin/env python3 "$@"\n')
        python.chmod(0o755)
        able = Capabilities(SharingMeans(), None, 0, python, files=())
        await able.refresh()
        return able.texts["ElasticMemory"]

    assert await reported("") == ""
    assert "libcuda.so.1" in await reported("raise ImportError('libcuda.so.1 not found')")
    assert "would not be patched" in await reported("", hooked=False)
    assert "older than 0.1" in await reported("", version="0.0.9")
    able = Capabilities(replace(SharingMeans()), None, 0, Path("/usr/bin/python3"), files=())
    await able.refresh()
    assert able.texts["ElasticMemory"].startswith("ElasticUnavailable: ")
    assert "No module named 'kvcached'" in able.texts["ElasticMemory"]
