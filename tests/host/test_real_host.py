"""Stock SGLang under the host: checkpoint, two published versions, data route, hold, lapse, end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import psutil
import pytest

from rose_agent.host import main
from rose_agent.os.find_group import find_group
from rose_core.identity import BASE_LABEL, SlotKey, SlotUid, WeightVersion, is_base
from rose_core.wire.host import EngineState, HoldEngine, Holder
from rose_engines.node.rundir import EngineFile, RunDir, read_json
from tests.host.helpers import BEARER, guarding, status_of, stop, until
from tests.host.real import READY_SECONDS, attested, needed_model, order, ready, syncing_host
from tests.weightsync.run import RUN, PublishedRun, store_at

pytestmark = pytest.mark.engine

RID = "turn-under-test."
# Far more than are made before the test aborts the rest.
TOKENS = 7_000


# Tokens of the turn before the first publish.
EARLY = 4


def body() -> dict[str, object]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {
        "rid": RID,
        "input_ids": [104],
        "stream": True,
        "sampling_params": sampling | {"stream_interval": 20},
    }


async def test_a_real_engine_under_the_host(rundir: Path, tmp_path: Path) -> None:
    """It is started with the arguments of the sample lease."""
    model = needed_model()
    async with syncing_host(rundir, model.parent) as host:
        with guarding(rundir) as guard:
            async with store_at(tmp_path / "store") as address, aiohttp.ClientSession() as client:
                run = PublishedRun(address, model)
                await host.host.ensure(order(model, address))
                await ready(host)
                own = await _attested_checkpoint(host)
                assert (await status_of(host)).vocabulary > 0
                assert "--schedule-policy lpm" in _command_line(rundir), "as the sample has it"
                await _samples_with_it(client, host)
                await run.publish()
                await attested(host, run)
                assert (await status_of(host)).digest == own, "the run begins with the checkpoint"
                await _closed_to_neighbours(client, rundir)
                endpoint = (await status_of(host)).endpoint
                url = f"{endpoint}/generate"
                async with client.post(url, json=body(), headers=BEARER) as reply:
                    assert reply.status == 200
                    reading = asyncio.create_task(reply.content.read())
                    await _more_tokens(host)
                    await _hold(host, rundir)
                    await run.publish()
                    await attested(host, run)
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
            assert ended.generated_tokens == EARLY + last["completion_tokens"]


async def test_an_engine_over_two_ranks_stops_as_one_and_ends_with_either(
    rundir: Path, tmp_path: Path
) -> None:
    """A slot of two GPUs: one permit, one commit, and no rank goes on without the other."""
    model = needed_model()
    async with syncing_host(rundir, model.parent) as host:
        with guarding(rundir) as guard:
            async with store_at(tmp_path / "store") as address, aiohttp.ClientSession() as client:
                run = PublishedRun(address, model)
                await host.host.ensure(order(model, address, ranks=2))
                await ready(host)
                await _attested_checkpoint(host)
                await run.publish()
                await attested(host, run)
                endpoint = (await status_of(host)).endpoint
                url = f"{endpoint}/generate"
                async with client.post(url, json=body(), headers=BEARER) as reply:
                    reading = asyncio.create_task(reply.content.read())
                    await _more_tokens(host)
                    await run.publish()
                    await attested(host, run)
                    guard.close()
                    await _lapse(host, rundir)
                    guard.open()
                    await _more_tokens(host)
                    tree = _tree(rundir)
                    other = next(one for one in tree if "TP1" in " ".join(one.cmdline()))
                    other.kill()

                    async def gone() -> bool:
                        return not any(one.is_running() for one in tree)

                    await until(gone, "no rank goes on without the other")
                    with pytest.raises(aiohttp.ClientError):
                        await reading

                async def serves_anew() -> bool:
                    status = await status_of(host)
                    return status.restarts == 1 and status.state is EngineState.SERVING

                await until(serves_anew, "the host starts both anew", READY_SECONDS)
                await run.close()
            assert (await host.host.stop(stop())).state is EngineState.GONE


def _tree(rundir: Path) -> list[psutil.Process]:
    """Processes of the engine."""
    record = read_json(RunDir(rundir).slot("slot-1").engine, EngineFile)
    assert record is not None
    group = find_group(record)
    assert group is not None
    return [psutil.Process(pid) for pid in group.pids()]


def _command_line(rundir: Path) -> str:
    """How the engine was started."""
    record = read_json(RunDir(rundir).slot("slot-1").engine, EngineFile)
    assert record is not None
    return " ".join(psutil.Process(record.pids[0]).cmdline())


async def _attested_checkpoint(host: main.RunningHost) -> str:
    """The digest of version 0, once it is attested."""

    async def arrived() -> bool:
        return is_base((await status_of(host)).version)

    await until(arrived, "the checkpoint is attested as version 0")
    status = await status_of(host)
    assert status.version == str(WeightVersion.of_base(RUN, status.digest))
    return status.digest


async def _samples_with_it(client: aiohttp.ClientSession, host: main.RunningHost) -> None:
    """The engine's own word for its checkpoint is the one that the router reads as version 0."""
    endpoint = (await status_of(host)).endpoint
    sampling = {"max_new_tokens": EARLY, "temperature": 0, "ignore_eos": True}
    asked = {"input_ids": [104], "sampling_params": sampling}
    async with client.post(f"{endpoint}/generate", json=asked, headers=BEARER) as reply:
        assert reply.status == 200
        meta = (await reply.json())["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == [BASE_LABEL]


async def _closed_to_neighbours(client: aiohttp.ClientSession, rundir: Path) -> None:
    """Its port is the loopback's, where others listen too."""
    record = read_json(RunDir(rundir).slot("slot-1").engine, EngineFile)
    assert record is not None
    expected = {"flush_cache": 401, "update_weights_from_disk": 404, "abort_request": 401}
    for path, status in expected.items():
        async with client.post(f"{record.url}/{path}", json={"rid": ""}) as reply:
            assert reply.status == status
    async with client.get(f"{record.url}/server_info") as reply:
        assert reply.status == 404, "it would tell how the engine was started"


async def _hold(host: main.RunningHost, rundir: Path) -> None:
    """Held: no token comes, and the tree stands still; freed: it goes on."""
    slot = SlotKey(SlotUid("slot-1"), 1)
    await host.host.hold(HoldEngine(slot, Holder.GUARD, hold=True))
    await _still(rundir)
    await host.host.hold(HoldEngine(slot, Holder.GUARD, hold=False))

    async def goes_on() -> bool:
        return (await status_of(host)).reason == ""

    await until(goes_on, "the engine goes on")


async def _lapse(host: main.RunningHost, rundir: Path) -> None:
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
        return group.is_frozen()

    await until(frozen, "the tree stands still")
    pids = group.pids()
    assert len(pids) >= 3  # server, scheduler, detokenizer
    before = [psutil.Process(pid).cpu_times()[:2] for pid in pids]
    await asyncio.sleep(0.7)
    assert [psutil.Process(pid).cpu_times()[:2] for pid in pids] == before


async def _more_tokens(host: main.RunningHost) -> None:
    before = (await status_of(host)).generated_tokens

    async def grown() -> bool:
        return (await status_of(host)).generated_tokens > before

    await until(grown, "more tokens")
