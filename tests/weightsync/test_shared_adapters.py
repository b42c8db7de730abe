"""Weight-sync of several runs on one engine: a real store, a real host, the fake with slots."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rose_agent.host.main import RunningHost
from rose_agent.host.processes.repair import forget_slot
from rose_agent.weightsync.follower import FollowedRun, Follower, Options
from rose_agent.weightsync.main import Followers
from rose_agent.weightsync.plugin import Plugin
from rose_core.adapters import TARGETS
from rose_core.delta.safetensors import StoredTensor
from rose_core.wire.host import EnsureEngine
from rose_core.wire.routing import AdapterVersion
from rose_core.wire.sync import AdapterSpec, WeightSource
from rose_engines.errors import EngineRefused
from rose_engines.node.rundir import EngineFile, RunDir, WeightsFile, read_json, write_json
from rose_engines.process.client import Generation, TurnClient
from rose_engines.tensors.canonical import host_tensors
from rose_engines.weights.adapters import AdapterSession, AdapterSlots
from rose_engines.weights.calls import Bind, Refused, Status, Unbind
from rose_engines.weights.control import ControlClient, ControlServer
from tests.host.helpers import TOKEN, guarding, order, running, serving, status_of, until
from tests.weightsync.run import PublishedRun, store_at


def ordered(address: str, *runs: str, slots: int = 3) -> EnsureEngine:
    """An engine with slots for adapters, of which these runs are to have one each."""
    plain = order()
    engine = msgspec.structs.replace(plain.engine, adapter=AdapterSpec(8, TARGETS, slots))
    source = WeightSource(address, runs[0], others=runs[1:])
    return msgspec.structs.replace(plain, engine=engine, weights=source)


@dataclass
class World:
    """A store with some runs, and an engine that holds an adapter of each."""

    host: RunningHost
    address: str
    rundir: RunDir
    runs: dict[str, PublishedRun]

    async def order(self, *runs: str) -> None:
        await self.host.host.ensure(ordered(self.address, *runs))

    async def adapters(self) -> dict[str, AdapterVersion]:
        return {one.run: one for one in (await status_of(self.host)).adapters}

    async def serves(self, **wanted: int) -> dict[str, AdapterVersion]:
        """Wait until the host says that each run's version is attested."""

        async def there() -> bool:
            found = await self.adapters()
            return {run: one.version for run, one in found.items()} == {
                run: f"{run}@1.{sequence}" for run, sequence in wanted.items()
            }

        await until(there, f"{wanted} are attested")
        return await self.adapters()

    async def turn(self, version: str, tokens: int = 5) -> Generation:
        """A turn as the router sends it: through the host's data route, its version in the key."""
        url = (await status_of(self.host)).endpoint
        async with TurnClient(url, TOKEN) as client:
            sampling = {"max_new_tokens": tokens}
            return await client.generate([1, 2, 3], sampling, extra_key=version)

    def process(self) -> int:
        record = read_json(self.rundir.slot("slot-1").engine, EngineFile)
        return record.started_ns if record is not None else 0

    async def starts_anew(self, before: int) -> None:
        """Wait for a process that is not the one of before."""

        async def another() -> bool:
            return self.process() not in {0, before}

        await until(another, "another process is there")


@contextlib.asynccontextmanager
async def world(rundir: Path, models: Path, store: Path, *runs: str) -> AsyncIterator[World]:
    async with store_at(store) as address, running(rundir, models) as host:
        published = {run: PublishedRun(address, models / "small", run) for run in runs}
        with guarding(rundir) as guard:
            made = World(host, address, RunDir(rundir), published)
            await made.order(*runs)
            guard.open()
            await serving(host)
            syncing = asyncio.create_task(Followers(made.rundir, Options()).run())
            try:
                yield made
            finally:
                syncing.cancel()
                await asyncio.wait({syncing})
                for run in published.values():
                    await run.close()


async def test_every_run_is_followed_and_a_publish_of_one_moves_no_other(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store", "a", "b") as here:
        first = {run: await one.publish() for run, one in here.runs.items()}
        found = await here.serves(a=0, b=0)
        assert {run: one.digest for run, one in found.items()} == {
            run: manifest.digest for run, manifest in first.items()
        }
        before = here.process()
        second = await here.runs["b"].publish()
        found = await here.serves(a=0, b=1)
        assert (found["b"].digest, found["b"].head) == (second.digest, "b@1.1")
        assert found["a"].digest == first["a"].digest
        for version in ("a@1.0", "b@1.1"):
            turn = await here.turn(version)
            assert [span.version for span in turn.spans] == [version]
        status = await status_of(here.host)
        assert (status.version, status.message) == ("a@1.0", "")  # the lease's first run
        assert here.process() == before


async def test_a_run_goes_and_another_comes_to_the_same_process(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store", "a", "b", "c") as here:
        for one in here.runs.values():
            await one.publish()
        await here.serves(a=0, b=0, c=0)
        before = here.process()
        newcomer = PublishedRun(here.address, models / "small", "d")
        await newcomer.publish()
        await here.order("a", "c", "d")
        await here.serves(a=0, c=0, d=0)
        assert here.process() == before
        async with await ControlClient.connect(
            here.rundir.slot("slot-1").plugin_socket, "d"
        ) as control:
            assert sorted((await control.status()).runs) == ["a", "c", "d"]
        with pytest.raises(EngineRefused, match="holds no adapter of that run"):
            await here.turn("b@1.0")
        assert [span.version for span in (await here.turn("d@1.0")).spans] == ["d@1.0"]
        await newcomer.close()


async def test_a_killed_engine_gets_all_its_adapters_again(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store", "a", "b") as here:
        for one in here.runs.values():
            await one.publish()
        await here.serves(a=0, b=0)
        before = here.process()
        for pid in (await status_of(here.host)).pids:
            os.kill(pid, signal.SIGKILL)
        await here.starts_anew(before)
        found = await here.serves(a=0, b=0)
        assert all(one.digest for one in found.values())
        assert [span.version for span in (await here.turn("b@1.0")).spans] == ["b@1.0"]


async def test_what_is_wrong_with_one_run_is_said_with_its_name(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store", "a", "b") as here:
        await here.runs["a"].publish()

        async def reported() -> bool:
            message = (await status_of(here.host)).message
            return message.startswith("run b:") and "unknown" in message

        await until(reported, "the run without a publisher is named")


async def test_a_run_that_was_taken_away_leaves_nothing_that_could_be_believed_when_it_returns(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store", "a", "b") as here:
        for one in here.runs.values():
            await one.publish()
        await here.serves(a=0, b=0)
        slot, process = here.rundir.slot("slot-1"), here.process()
        before = read_json(slot.weights_of("b"), WeightsFile)
        assert before is not None
        assert before.attested
        slot.bundle_of("b").mkdir()
        await here.order("a")

        async def forgotten() -> bool:
            return not slot.weights_of("b").exists() and not slot.bundle_of("b").exists()

        await until(forgotten, "nothing of run b is left")
        await here.serves(a=0)
        # Weight-sync had ended between the two: the file is still there, the adapter is not.
        write_json(slot.weights_of("b"), before)
        source = WeightSource("127.0.0.1:1", "b")
        follower = Follower(slot, source, process, Options(), FollowedRun("b", first=False))
        following = asyncio.create_task(follower.run())

        async def disowned() -> bool:
            found = read_json(slot.weights_of("b"), WeightsFile)
            return found is not None and not found.attested and not found.version

        await until(disowned, "what was attested of run b is void")
        following.cancel()
        await asyncio.wait({following})
        await here.order("a", "b")
        await here.serves(a=0, b=0)
        assert here.process() == process


async def test_a_run_that_returns_before_it_was_let_go_takes_turns_again(rundir: Path) -> None:
    slot = RunDir(rundir).create().slot("slot-1").create()
    bits = {"w": StoredTensor("F32", (4,), np.zeros(4, "<u4"))}
    slots = AdapterSlots([AdapterSession(host_tensors(bits), "base") for _ in range(2)])
    server = ControlServer(slot.plugin_socket, slots.handle)
    server.start()
    assert isinstance(slots.handle(Bind("b")), Status)
    answer = slots.handle(Unbind("b", 0.01))  # no boundary came
    assert isinstance(answer, Refused)
    assert slots.slot_for("b@1.0") is None
    plugin = Plugin(slot, "b", first=False)
    await plugin.read_engine()
    assert slots.slot_for("b@1.0") == 1
    await plugin.close()


async def test_bytes_and_broken_weights_of_every_run_count(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store", "a", "b") as here:
        for one in here.runs.values():
            await one.publish()
        await here.serves(a=0, b=0)
        slot, process = here.rundir.slot("slot-1"), here.process()
        files = [read_json(slot.weights_of(run), WeightsFile) for run in ("", "b")]
        fetched = [one.fetched_bytes for one in files if one is not None]
        assert all(fetched)
        assert (await status_of(here.host)).weight_bytes == sum(fetched)
        await here.order("a")
        await here.serves(a=0)
        assert (await status_of(here.host)).weight_bytes == sum(fetched)
        await here.order("a", "b")
        await here.serves(a=0, b=0)
        other = read_json(slot.weights_of("b"), WeightsFile)
        assert other is not None
        write_json(slot.weights_of("b"), msgspec.structs.replace(other, broken=True))
        await here.starts_anew(process)
        await here.serves(a=0, b=0)


def test_a_slot_that_is_forgotten_leaves_no_word_of_any_run(rundir: Path) -> None:
    slot = RunDir(rundir).create().slot("slot-1").create()
    for run in ("", "a", "b.c"):
        write_json(slot.weights_of(run), WeightsFile(attested=True))
    slot.permit.touch()
    forget_slot(slot, permit=False)
    assert list(slot.folder.iterdir()) == [slot.permit]
