"""Stock SGLang at rung 4: memory measured, stopped, restored, attested at the newest version."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import msgspec
import pytest

from rose_agent.host import main
from rose_core.identity import SlotUid
from rose_core.wire.host import EngineState, HoldEngine, Holder, SetDormant
from tests.host.helpers import BEARER, guarding, status_of, stop, until
from tests.host.real import attested, needed_model, order, ready, syncing_host
from tests.weightsync.run import PublishedRun, store_at

pytestmark = pytest.mark.engine

# Enough of a KV pool to stand out of what a Python process holds anyway.
KV_TOKENS = 400_000


async def _turn(client: aiohttp.ClientSession, host: main.RunningHost, version: str) -> list[int]:
    """A greedy turn; every token must come from the version."""
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [104, 101], "sampling_params": sampling}
    url = f"{(await status_of(host)).endpoint}/generate"
    async with client.post(url, json=body, headers=BEARER) as reply:
        answer = await reply.json()
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [version]
    output: list[int] = answer["output_ids"]
    return output


async def test_a_real_engine_rests_and_comes_back_at_the_newest_version(
    rundir: Path, tmp_path: Path
) -> None:
    model = needed_model()
    async with syncing_host(rundir, model.parent) as host:
        with guarding(rundir) as guard:
            async with store_at(tmp_path / "store") as address, aiohttp.ClientSession() as client:
                run = PublishedRun(address, model)
                await run.publish()
                wanted = order(model, address)
                spec = msgspec.structs.replace(wanted.engine, kv_tokens=KV_TOKENS)
                await host.host.ensure(msgspec.structs.replace(wanted, engine=spec))
                await ready(host)
                await attested(host, run)
                before = await _turn(client, host, "grpo@1.0")
                guard.close()
                held = await _dormant(host)
                guard.open()
                await _active(host)
                await attested(host, run)
                assert await _turn(client, host, "grpo@1.0") == before
                guard.close()
                assert await _dormant(host) == pytest.approx(held, rel=0.2)
                await run.publish()
                guard.open()
                await _active(host)
                await attested(host, run)
                await _turn(client, host, "grpo@1.1")
                assert (await status_of(host)).restarts == 0
                await run.close()
            assert (await host.host.stop(stop())).state is EngineState.GONE


async def _dormant(host: main.RunningHost) -> int:
    """Hold and release as the guard does; returns what is still held."""
    slot = (await status_of(host)).slot
    life = host.host._lives[SlotUid("slot-1")].current  # the meter's view of it
    before = life.held_bytes(life.dormancy.site.meter)
    await host.host.hold(HoldEngine(slot, Holder.GUARD, hold=True))
    await host.host.set_dormant(SetDormant(slot, dormant=True))

    async def rests() -> bool:
        status = await status_of(host)
        assert status.state is not EngineState.FAILED, status.message
        return status.state is EngineState.DORMANT

    await until(rests, "the engine is dormant")
    status = await status_of(host)
    assert before is not None
    assert status.residue_bytes is not None
    kv_bytes = KV_TOKENS * 2 * 2 * 2 * 16  # keys and values, at least: 2 layers, 16 wide, bf16
    assert before - status.residue_bytes > kv_bytes // 2
    assert (status.version, status.endpoint) == ("", "")
    await host.host.hold(HoldEngine(slot, Holder.GUARD, hold=False))
    return status.residue_bytes


async def _active(host: main.RunningHost) -> None:
    slot = (await status_of(host)).slot

    async def serves() -> bool:
        await host.host.set_dormant(SetDormant(slot, dormant=False))
        return (await status_of(host)).state is EngineState.SERVING

    await until(serves, "the engine serves again")
