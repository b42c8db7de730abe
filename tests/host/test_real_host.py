"""Stock SGLang under the host: data route, hold, lapse, two published versions, end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import psutil
import pytest

from rose_agent.host import freezers, main
from rose_agent.host.repair import find_group
from rose_agent.weightsync.follower import Options
from rose_agent.weightsync.main import Followers
from rose_core.identity import SlotKey
from rose_core.wire.host import EngineState, EnsureEngine, HoldEngine, Holder
from rose_core.wire.sync import EngineSpec, WeightSource
from rose_dev.engine_environment import engine_python, is_ready
from rose_dev.models import make_named
from rose_engines.rundir import EngineFile, RunDir, read_json
from tests.host.helpers import BEARER, TOKEN, guarding, status_of, stop, until
from tests.weightsync.run import RUN, PublishedRun, store_at

pytestmark = pytest.mark.engine

READY_SECONDS = 240.0


def order(model: Path, endpoint: str) -> EnsureEngine:
    return EnsureEngine(
        slot=SlotKey("slot-1", 1),
        slot_name="real",
        engine=EngineSpec(
            "sglang-cpu", model.name, context_tokens=8192, kv_tokens=16384, max_running=4
        ),
        weights=WeightSource(endpoint, RUN),
        token=TOKEN,
    )


RID = "turn-under-test."
# Far more than are made before the test aborts the rest.
TOKENS = 7_000


def body() -> dict[str, object]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {
        "rid": RID,
        "input_ids": [104],
        "stream": True,
        "sampling_params": sampling | {"stream_interval": 20},
    }


async def test_a_real_engine_under_the_host(rundir: Path, tmp_path: Path) -> None:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    model = make_named("tiny-peaked")
    arguments = main.parser().parse_args(
        [
            *("--rundir", str(rundir), "--models", str(model.parent)),
            *("--engine-python", str(engine_python()), "--data-port", "0", "--http-port", "0"),
        ]
    )
    host = await main.start(arguments, freezers.detect("auto", scope=str(rundir)))
    syncing = asyncio.create_task(Followers(RunDir(rundir), Options()).run())
    try:
        with guarding(rundir) as guard:
            async with store_at(tmp_path / "store") as address, aiohttp.ClientSession() as client:
                run = PublishedRun(address, model)
                await run.publish()
                await host.host.ensure(order(model, address))
                await _ready(host)
                await _attested(host, run)
                endpoint = (await status_of(host)).endpoint
                url = f"{endpoint}/generate"
                async with client.post(url, json=body(), headers=BEARER) as reply:
                    assert reply.status == 200
                    reading = asyncio.create_task(reply.content.read())
                    await _more_tokens(host)
                    await _hold(host, rundir)
                    await run.publish()
                    await _attested(host, run)
                    await _more_tokens(host)
                    guard.close()
                    await _lapse(host, rundir)
                    guard.open()
                    await _more_tokens(host)
                    aborting = f"{endpoint}/abort_request"
                    async with client.post(aborting, json={"rid": RID}, headers=BEARER) as aborted:
                        assert aborted.status == 200
                    received = await reading
                last = json.loads(received.split(b"data: ")[-2])["meta_info"]
                assert last["finish_reason"]["type"] == "abort"
                assert 0 < last["completion_tokens"] < TOKENS
                versions = [span["version"] for span in last["weight_versions"]]
                assert versions == ["grpo@1.0", "grpo@1.1"]
                await run.close()
            ended = await host.host.stop(stop())
            assert ended.state is EngineState.GONE
            assert ended.generated_tokens == last["completion_tokens"]
    finally:
        syncing.cancel()
        await asyncio.wait({syncing})
        assert await host.stop(0.0)


async def _ready(host: main.Running) -> None:
    async def serves() -> bool:
        status = await status_of(host)
        assert status.restarts == 0, status.message
        assert status.state is not EngineState.FAILED, status.message
        return status.state is EngineState.SERVING

    await until(serves, "SGLang is ready", READY_SECONDS)


async def _attested(host: main.Running, run: PublishedRun) -> None:
    assert run.manifest is not None
    wanted = (str(run.manifest.target), run.manifest.digest)

    async def arrived() -> bool:
        status = await status_of(host)
        return (status.version, status.digest) == wanted

    await until(arrived, f"{wanted} is attested")


async def _hold(host: main.Running, rundir: Path) -> None:
    """Held: no token comes, and the tree stands still; freed: it goes on."""
    slot = SlotKey("slot-1", 1)
    await host.host.hold(HoldEngine(slot, Holder.GUARD, hold=True))
    await _still(rundir)
    await host.host.hold(HoldEngine(slot, Holder.GUARD, hold=False))

    async def goes_on() -> bool:
        return (await status_of(host)).reason == ""

    await until(goes_on, "the engine goes on")


async def _lapse(host: main.Running, rundir: Path) -> None:
    async def lapsed() -> bool:
        return (await status_of(host)).reason == "PermitLapsed"

    await until(lapsed, "the permit lapses")
    await _still(rundir)


async def _still(rundir: Path) -> None:
    """No process of the engine gets any time of a core."""
    record = read_json(RunDir(rundir).slot("slot-1").engine, EngineFile)
    assert record is not None
    group = find_group(record)
    assert group is not None

    async def frozen() -> bool:
        return group.frozen()

    await until(frozen, "the tree stands still")
    pids = group.pids()
    assert len(pids) >= 3  # server, scheduler, detokenizer
    before = [psutil.Process(pid).cpu_times()[:2] for pid in pids]
    await asyncio.sleep(0.7)
    assert [psutil.Process(pid).cpu_times()[:2] for pid in pids] == before


async def _more_tokens(host: main.Running) -> None:
    before = (await status_of(host)).generated_tokens

    async def grown() -> bool:
        return (await status_of(host)).generated_tokens > before

    await until(grown, "more tokens")
