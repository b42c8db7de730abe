"""A host with fake engines: orders, permit, holders, restarts, end; all over the real socket."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import threading
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from rose_agent.errors import NoFreezer
from rose_agent.host.processes.classes import LAUNCHERS
from rose_agent.host.processes.launchers import EngineOrder, EngineProgram
from rose_agent.os import freezers
from rose_agent.os.processes import start_ticks
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import (
    EngineState,
    HoldEngine,
    Holder,
    HostStatusRequest,
)
from rose_core.wire.sync import EngineSpec
from rose_engines.node.rundir import EngineFile, RunDir, WeightsFile, read_json, write_json
from rose_wire.errors import Refused
from rose_wire.rpc import call, connect
from rose_wire.services import ENSURE, HOLD, STATUS, STOP
from tests.host.helpers import (
    BEARER,
    body,
    generated,
    guarding,
    order,
    running,
    serving,
    stands_still,
    status_of,
    stop,
    until,
)


async def test_an_engine_is_started_serves_and_ends_over_the_socket(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host, aiohttp.ClientSession() as client:
        channel = connect(f"local:{rundir}/host.sock")
        with guarding(rundir):
            first = await call(channel, ENSURE, order(), timeout=30)
            assert first.state is EngineState.STARTING
            assert (await call(channel, ENSURE, order(), timeout=30)).slot == first.slot
            status = await serving(host)
            url = f"{status.endpoint}/generate"
            async with client.post(url, json=body(25), headers=BEARER) as reply:
                assert reply.status == 200
                assert len((await reply.json())["output_ids"]) == 25
            listed = await call(channel, STATUS, HostStatusRequest(), timeout=30)
            assert [one.generated_tokens for one in listed.engines] == [25]
            ended = await call(channel, STOP, stop(), timeout=60)
        assert ended.state is EngineState.GONE
        assert ended.pids == ()
        assert not RunDir(rundir).slot("slot-1").folder.exists()
        await channel.close()


async def test_a_host_that_ends_leaves_nothing_behind_that_nobody_took(
    rundir: Path, models: Path
) -> None:
    received: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: received.append(repr(context)))
    async with running(rundir, models):
        pass
    gc.collect()
    assert received == []


async def test_memory_that_was_promised_is_no_longer_once_the_engine_serves(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host:
        channel = connect(f"local:{rundir}/host.sock")
        promised = host.host._site.sizer.promised
        promised["slot-1"] = (frozenset({"GPU-a"}), 1 << 30)
        with guarding(rundir):
            await call(channel, ENSURE, order(), timeout=30)
            await serving(host)
        assert not promised
        await channel.close()


class SlowDriver:
    """A launcher that waits for a driver, and then claims memory as a GPU's engine does."""

    def __init__(self) -> None:
        self.asked, self.answered = threading.Event(), threading.Event()

    def __call__(self, made: EngineOrder) -> EngineProgram:
        self.asked.set()
        assert self.answered.wait(60)
        made.sizer.promised[made.slot.uid] = (frozenset({"GPU-a"}), 1 << 30)
        return LAUNCHERS["fake"](made)


async def test_the_guard_is_answered_while_the_driver_of_the_gpus_is_not(
    rundir: Path, models: Path
) -> None:
    slow = SlowDriver()
    async with running(rundir, models) as host:
        host.host._site.launchers = {"fake": slow}
        with guarding(rundir):
            await host.host.ensure(order())
            await asyncio.to_thread(slow.asked.wait, 60)
            assert (await status_of(host)).state is EngineState.STARTING
            slow.answered.set()
            await serving(host)


async def test_an_engine_that_ends_while_the_driver_is_asked_leaves_no_claim(
    rundir: Path, models: Path
) -> None:
    slow = SlowDriver()
    async with running(rundir, models) as host:
        host.host._site.launchers = {"fake": slow}
        await host.host.ensure(order())
        await asyncio.to_thread(slow.asked.wait, 60)
        ending = asyncio.create_task(host.host.stop(stop()))

        async def stopping() -> bool:
            return (await status_of(host)).state is EngineState.STOPPING

        await until(stopping, "its end is ordered")
        slow.answered.set()
        assert (await ending).state is EngineState.GONE
        assert not host.host._site.sizer.promised


@pytest.mark.parametrize("driver", ["v2", "v1", "signals"])
async def test_tokens_stop_when_the_permit_lapses_and_the_stream_goes_on_afterwards(
    rundir: Path, models: Path, driver: str
) -> None:
    try:
        freezer = freezers.detect(driver, scope=str(rundir))  # type: ignore[arg-type]
    except NoFreezer as error:
        pytest.skip(f"needs root and a writable hierarchy: {error}")
    async with running(rundir, models, freezer) as host, aiohttp.ClientSession() as client:
        with guarding(rundir) as guard:
            await host.host.ensure(order(token_seconds="0.01"))
            status = await serving(host)
            url = f"{status.endpoint}/generate"
            async with client.post(url, json=body(100_000, stream=True), headers=BEARER) as reply:

                async def tokens() -> int:
                    return (await status_of(host)).generated_tokens

                async for _ in reply.content:
                    if await tokens() >= 10:
                        break
                guard.close()

                async def stopped() -> bool:
                    return (await status_of(host)).reason == "PermitLapsed"

                await until(stopped, "the permit lapses")
                before = await stands_still(tokens)
                guard.open()
                async for _ in reply.content:
                    if await tokens() > before + 10:
                        break
                reply.close()


async def test_an_engine_is_held_until_every_holder_has_let_go(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(order())
            await serving(host)
            channel = connect(f"local:{rundir}/host.sock")
            slot = order().slot
            for holder in (Holder.GUARD, Holder.RETRACT):
                held = await call(channel, HOLD, HoldEngine(slot, holder, hold=True), timeout=30)
                assert held.turns == 0, "as the data route counts them"

            async def held_by_guard() -> bool:
                return (await status_of(host)).reason == "HeldByGuard"

            # A busy machine has not stopped the engine by the time of the answer.
            await until(held_by_guard, "the guard holds")
            await call(channel, HOLD, HoldEngine(slot, Holder.GUARD, hold=False), timeout=30)
            assert (await status_of(host)).holders == (Holder.RETRACT,)
            await call(channel, HOLD, HoldEngine(slot, Holder.RETRACT, hold=False), timeout=30)

            async def free() -> bool:
                return (await status_of(host)).reason == ""

            await until(free, "nobody holds")
            wrong = HoldEngine(SlotKey(SlotUid("slot-1"), 2), Holder.GUARD, hold=True)
            with pytest.raises(Refused, match="no engine"):
                await call(channel, HOLD, wrong, timeout=30)
            await channel.close()


async def test_the_stop_button_stops_and_its_end_continues(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(order())
            await serving(host)
            RunDir(rundir).stop.touch()

            async def pressed() -> bool:
                return (await status_of(host)).reason == "StopPressed"

            await until(pressed, "the stop button counts")
            RunDir(rundir).stop.unlink()

            async def goes_on() -> bool:
                return (await status_of(host)).reason == ""

            await until(goes_on, "the engine goes on")


async def test_a_higher_generation_replaces_a_lower_one_which_is_refused_for_good(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(order(generation=2))
            old = (await serving(host)).pids
            with pytest.raises(Refused, match="generation 2, not 1"):
                await host.host.ensure(order(generation=1))
            with pytest.raises(Refused, match="higher generation"):
                await host.host.ensure(order(generation=2, token_seconds="1"))
            with pytest.raises(Refused, match="generation 2, not 1"):
                await host.host.stop(stop(generation=1))
            await host.host.ensure(order(generation=3))
            status = await serving(host)
            assert status.slot.generation == 3
            assert not set(old) & set(status.pids)


async def test_a_new_token_is_taken_over_in_place(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host, aiohttp.ClientSession() as client:
        with guarding(rundir):
            await host.host.ensure(order())
            before = await serving(host)
            after = await host.host.ensure(order(token="another"))
            assert after.pids == before.pids
            url = f"{after.endpoint}/generate"
            async with client.post(url, json=body(1), headers=BEARER) as reply:
                assert reply.status == 401


async def test_a_dead_engine_comes_back_with_base_weights(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(order())
            status = await serving(host)
            folder = RunDir(rundir).slot("slot-1")
            record = read_json(folder.engine, EngineFile)
            assert record is not None
            attested = WeightsFile("run@1.1", "d", True, engine_started_ns=record.started_ns)
            write_json(folder.weights, attested)
            assert (await status_of(host)).version == "run@1.1"
            os.kill(status.pids[0], signal.SIGKILL)

            async def restarted() -> bool:
                now = await status_of(host)
                return now.restarts == 1 and now.state is EngineState.SERVING

            await until(restarted, "the engine is restarted")
            assert not folder.weights.exists()
            # What a slow weight-sync still writes about the dead process counts for nothing.
            write_json(folder.weights, attested)
            assert (await status_of(host)).version == ""


async def test_an_engine_with_broken_weights_is_started_anew(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(order())
            before = await serving(host)
            folder = RunDir(rundir).slot("slot-1")
            record = read_json(folder.engine, EngineFile)
            assert record is not None
            write_json(
                folder.weights, WeightsFile(broken=True, engine_started_ns=record.started_ns)
            )

            async def restarted() -> bool:
                now = await status_of(host)
                return now.restarts == 1 and now.state is EngineState.SERVING

            await until(restarted, "the engine is restarted")
            assert not set(before.pids) & set((await status_of(host)).pids)


@pytest.mark.parametrize(
    ("engine_class", "model", "text"),
    [
        ("warp-drive", "small", "it has fake"),
        ("fake", "../models", "no folder name"),
        ("fake", "", "no folder name"),
    ],
)
async def test_an_order_that_cannot_work_says_why_and_is_not_retried(
    rundir: Path, models: Path, engine_class: str, model: str, text: str
) -> None:
    wrong = msgspec.structs.replace(order(), engine=EngineSpec(engine_class, model))
    async with running(rundir, models) as host:
        await host.host.ensure(wrong)

        async def failed() -> bool:
            return (await status_of(host)).state is EngineState.FAILED

        await until(failed, "the order fails")
        status = await status_of(host)
        assert status.reason == "BadEngine"
        assert text in status.message
        assert status.restarts == 0


async def test_a_model_that_is_brought_later_needs_no_new_order(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(
                msgspec.structs.replace(order(), engine=EngineSpec("fake", "late"))
            )

            async def failed() -> bool:
                return (await status_of(host)).state is EngineState.FAILED

            await until(failed, "the model is missed")
            status = await status_of(host)
            assert status.reason == "NoModel"
            assert "no model 'late'" in status.message
            shutil.copytree(models / "small", models / "late")

            async def serves() -> bool:
                return (await status_of(host)).state is EngineState.SERVING

            await until(serves, "the engine starts with the model that has come")
            assert (await status_of(host)).reason != "NoModel"


async def test_an_argument_outside_the_allow_list_is_refused_by_name(
    rundir: Path, models: Path
) -> None:
    spec = EngineSpec("sglang-cpu", "small", arguments={"load-format": "dummy"})
    async with running(rundir, models) as host:
        await host.host.ensure(msgspec.structs.replace(order(), engine=spec))

        async def failed() -> bool:
            return (await status_of(host)).state is EngineState.FAILED

        await until(failed, "the order fails")
        assert "'load-format' is not allowed" in (await status_of(host)).message
        assert (await status_of(host)).pids == ()


async def test_an_engine_that_cannot_start_reports_the_end_of_its_log(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(order(no_such_flag="1"))

            async def failed() -> bool:
                return (await status_of(host)).state is EngineState.FAILED

            await until(failed, "the engine ends")
            assert "no-such-flag" in (await status_of(host)).message


async def test_a_uid_that_leaves_the_run_directory_is_refused(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host:
        with pytest.raises(Refused, match="no plain name"):
            await host.host.ensure(order(uid="../../etc"))


async def test_ending_the_host_leaves_no_process(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(order())
            pids = (await serving(host)).pids
        assert await host.stop(0.0)
        assert not any(start_ticks(pid) for pid in pids)


async def test_metrics_and_health_answer_while_the_engine_stands_still(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host, aiohttp.ClientSession() as client:
        await host.host.ensure(order())
        base = f"http://127.0.0.1:{host.http_port}"
        async with client.get(f"{base}/healthz") as reply:
            assert reply.status == 200
        async with client.get(f"{base}/metrics") as reply:
            assert 'rose_host_engines{state="Starting"} 1.0' in await reply.text()


async def test_the_pages_say_who_holds_a_gpu_until_the_engine_is_gone(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host, aiohttp.ClientSession() as client:

        async def free(gpu: str) -> bool:
            url = f"http://127.0.0.1:{host.http_port}/vacated?gpu={gpu}"
            async with client.get(url) as reply:
                return bool((await reply.json())["free"])

        assert await free("GPU-a")
        await host.host.ensure(msgspec.structs.replace(order(), gpu_uuids=("GPU-a",)))
        assert not await free("GPU-a")
        assert await free("GPU-b")
        await host.host.stop(stop())
        assert await free("GPU-a")


async def test_the_engine_itself_listens_on_the_loopback_only(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host, aiohttp.ClientSession() as client:
        with guarding(rundir):
            await host.host.ensure(order())
            await serving(host)
            record = read_json(RunDir(rundir).slot("slot-1").engine, EngineFile)
            assert record is not None
            assert record.url == f"http://127.0.0.1:{record.port}"
            assert await generated(client, record.url) == 0


async def test_an_engines_admin_routes_are_nobodys_and_the_host_alone_aborts(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host, aiohttp.ClientSession() as client:
        with guarding(rundir):
            await host.host.ensure(order())
            endpoint = (await serving(host)).endpoint
            record = read_json(RunDir(rundir).slot("slot-1").engine, EngineFile)
            assert record is not None

            async def asked(url: str, **headers: str) -> int:
                async with client.post(url, json={"rid": "r"}, headers=headers) as reply:
                    return reply.status

            # A neighbour on the loopback; the slot's token is the proxy's business.
            assert await asked(f"{record.url}/slow_down", **BEARER) == 404
            assert await asked(f"{record.url}/abort_request") == 401
            assert await asked(f"{record.url}/abort_request", **BEARER) == 401
            assert await asked(f"{endpoint}/abort_request", **BEARER) == 200
            key = host.host.engines()[0].key
            assert key
            assert key not in " ".join(psutil.Process(record.pids[0]).cmdline())
