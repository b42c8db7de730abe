"""Weight-sync between a real store and the fake engine under a real host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rose_agent.host.main import RunningHost
from rose_agent.weightsync import follower, main, records
from rose_agent.weightsync.follower import Options
from rose_agent.weightsync.main import Followers, subjects
from rose_core.identity import FROZEN_RUN
from rose_core.wire.host import EnsureEngine
from rose_core.wire.sync import WeightSource
from rose_dev.process_testing import CLI, spawn_process
from rose_engines.node.rundir import RunDir, WeightsFile, read_json
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.control import ControlClient
from rose_weights.messages import VersionInfo, WatchRequest
from rose_weights.receive.client import WeightsClient
from rose_weights.serve.service import WeightService
from tests.host.helpers import Guard, guarding, order, running, serving, status_of, until
from tests.weightsync.run import ENCODE_SECONDS, RUN, PublishedRun, store_at


def weighted(endpoint: str, run: str = RUN) -> EnsureEngine:
    return msgspec.structs.replace(order(), weights=WeightSource(endpoint, run))


@dataclass
class World:
    """A store, a host with one serving fake engine, its guard; weight-sync inside this process."""

    run: PublishedRun
    host: RunningHost
    guard: Guard
    rundir: RunDir
    address: str
    syncing: asyncio.Task[None] | None = field(default=None)

    @property
    def weights(self) -> WeightsFile:
        return read_json(self.rundir.slot("slot-1").weights, WeightsFile) or WeightsFile()

    def sync(
        self,
        attest_every_seconds: float = 600.0,
        silence_seconds: float = 600.0,
        most_bytes: int = 0,
    ) -> None:
        options = Options(
            attest_every_seconds=attest_every_seconds,
            silence_seconds=silence_seconds,
            most_bytes=most_bytes,
        )
        self.syncing = asyncio.create_task(Followers(self.rundir, options).run())

    async def stop_sync(self) -> None:
        if self.syncing is not None:
            self.syncing.cancel()
            await asyncio.wait({self.syncing})
            self.syncing = None

    async def serves(self, version: str) -> WeightsFile:
        async def there() -> bool:
            return self.weights.version == version and self.weights.attested

        await until(there, f"{version} is attested")
        return self.weights

    async def write(self, text: str) -> WeightsFile:
        async def reported() -> bool:
            return text in self.weights.error

        await until(reported, f"an error about {text!r}")
        return self.weights

    async def live(self, path: Path) -> dict[str, np.ndarray]:
        socket = self.rundir.slot("slot-1").plugin_socket
        async with await ControlClient.connect(socket) as control:
            await control.export(path)
        return {name: parts[2] for name, parts in read_checkpoint(path.parent).items()}


@contextlib.asynccontextmanager
async def world(rundir: Path, models: Path, store: Path) -> AsyncIterator[World]:
    async with store_at(store) as address, serving_from(address, rundir, models) as made:
        yield made


@contextlib.asynccontextmanager
async def serving_from(address: str, rundir: Path, models: Path) -> AsyncIterator[World]:
    """An engine that serves and is to follow a store; the store's life is the caller's."""
    async with running(rundir, models) as host:
        run = PublishedRun(address, models / "small")
        with guarding(rundir) as guard:
            made = World(run, host, guard, RunDir(rundir), address)
            await host.host.ensure(weighted(address))
            await serving(host)
            try:
                yield made
            finally:
                await made.stop_sync()
                await run.close()


async def test_an_engine_follows_the_head_bit_for_bit(
    rundir: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        here.sync()
        await here.write("is unknown here")
        first = await here.run.publish()
        file = await here.serves("grpo@1.0")
        assert (file.digest, file.head, file.lag, file.error) == (first.digest, "grpo@1.0", 0, "")
        for _ in range(3):
            last = await here.run.publish()
        file = await here.serves("grpo@1.3")
        assert file.digest == last.digest
        assert file.history[0] == "grpo@1.0"
        assert file.history[-1] == "grpo@1.3"
        (tmp_path / "live").mkdir()
        live = await here.live(tmp_path / "live" / "model.safetensors")
        assert all(np.array_equal(live[name], bits) for name, bits in here.run.state.items())
        status = await status_of(here.host)
        assert (status.version, status.digest, status.head) == ("grpo@1.3", last.digest, "grpo@1.3")
        assert not list(here.rundir.slot("slot-1").bundles.iterdir())
        every = records.read(here.rundir.slot("slot-1").folder / records.FILE)
        recorded = every[-1]
        assert status.weight_bytes == sum(one.block_bytes for one in every) > 0
        assert recorded.version == "grpo@1.3"
        assert recorded.encode_seconds == ENCODE_SECONDS


async def test_an_engines_own_checkpoint_is_a_version_until_something_is_published(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        here.sync()

        async def attested() -> bool:
            return here.weights.attested

        await until(attested, "the checkpoint is attested")
        own = here.weights
        assert own.version == f"grpo@base.{own.digest[:12]}"
        status = await status_of(here.host)
        assert (status.version, status.digest, status.head) == (own.version, own.digest, "")
        # The next weight-sync of this engine process knows what this one has attested.
        await here.stop_sync()
        here.sync()
        first = await here.run.publish(change=False)
        assert first.digest == own.digest  # the run begins with the very same weights
        assert (await here.serves("grpo@1.0")).digest == own.digest
        assert here.weights.history == ("grpo@1.0",)


async def test_frozen_weights_are_attested_without_a_store(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            frozen = WeightSource("", FROZEN_RUN)
            await host.host.ensure(msgspec.structs.replace(order(), weights=frozen))
            await serving(host)
            slot = RunDir(rundir).slot("slot-1")
            syncing = asyncio.create_task(Followers(RunDir(rundir), Options()).run())
            try:

                async def attested() -> bool:
                    return (read_json(slot.weights, WeightsFile) or WeightsFile()).attested

                await until(attested, "the checkpoint is attested")
                own = read_json(slot.weights, WeightsFile)
                assert own is not None
                assert own.version == f"frozen@base.{own.digest[:12]}"
                assert (own.head, own.error, own.fetched_bytes) == ("", "", 0)
                status = await status_of(host)
                assert (status.version, status.digest) == (own.version, own.digest)
            finally:
                syncing.cancel()
                await asyncio.wait({syncing})


async def test_a_store_that_does_not_answer_has_not_said_that_nothing_is_published(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with store_at(tmp_path / "store") as address:
        pass
    async with serving_from(address, rundir, models) as here:
        here.sync()
        await here.write(address)
        assert (here.weights.version, here.weights.attested) == ("", False)


async def test_a_restarted_engine_is_brought_back_to_the_head(
    rundir: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        here.sync()
        await here.run.publish()
        await here.run.publish()
        before = await here.serves("grpo@1.1")
        os.kill((await status_of(here.host)).pids[0], signal.SIGKILL)

        async def anew() -> bool:
            now = here.weights
            return now.engine_started_ns > before.engine_started_ns and now.attested

        await until(anew, "the new process is attested")
        assert here.weights.digest == before.digest
        assert (await serving(here.host)).restarts == 1


async def test_nothing_is_committed_while_the_gate_is_closed(
    rundir: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        here.sync()
        await here.run.publish()
        await here.serves("grpo@1.0")
        here.guard.close()

        async def stopped() -> bool:
            return (await status_of(here.host)).reason == "PermitLapsed"

        await until(stopped, "the permit lapses")
        await here.run.publish()

        async def received() -> bool:
            return here.weights.head == "grpo@1.1"

        await until(received, "the new head is known")
        await asyncio.sleep(1.0)
        assert (here.weights.version, here.weights.lag) == ("grpo@1.0", 1)
        here.guard.open()
        await here.serves("grpo@1.1")


async def test_a_store_that_goes_away_leaves_the_old_version_serving(
    rundir: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[WeightsClient] = []

    def dial(*given: Any, **named: Any) -> WeightsClient:  # noqa: ANN401  # as WeightsClient takes
        dialled.append(WeightsClient(*given, **named))
        return dialled[-1]

    monkeypatch.setattr(follower, "WeightsClient", dial)
    async with contextlib.AsyncExitStack() as stack:
        async with store_at(tmp_path / "store") as address:
            here = await stack.enter_async_context(serving_from(address, rundir, models))
            here.sync()
            await here.run.publish()
            await here.serves("grpo@1.0")
        file = await here.write(address)
        assert (file.version, file.attested) == ("grpo@1.0", True)
        # A weight-sync that starts while the store is away knows what its predecessor attested.
        await here.stop_sync()
        here.sync()
        before = len(dialled)

        async def dials_anew() -> bool:
            return len(dialled) > before + 1

        await until(dials_anew, "the store is dialled with the certificate and authorities of now")
        assert (here.weights.version, here.weights.attested) == ("grpo@1.0", True)
        async with store_at(tmp_path / "store", address):
            await here.run.publish()
            await here.serves("grpo@1.1")


async def test_a_watch_that_has_lost_its_store_without_a_word_is_renewed(
    rundir: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, watches = WeightService.watch, []

    async def deaf(service: WeightService, request: WatchRequest) -> AsyncIterator[VersionInfo]:
        watches.append(request)
        renewed = len(watches) > 1
        async for head in watch(service, request):
            yield head
            if not renewed:
                await asyncio.Event().wait()

    monkeypatch.setattr(WeightService, "watch", deaf)
    async with world(rundir, models, tmp_path / "store") as here:
        await here.run.publish()
        here.sync(silence_seconds=2.0)
        await here.serves("grpo@1.0")
        await here.run.publish()
        await here.serves("grpo@1.1")
        assert here.weights.error == ""


async def test_a_kill_in_mid_transfer_or_mid_commit_is_made_good_by_the_next_process(
    rundir: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        await here.run.publish()
        words = ("weight-sync", "--rundir", str(rundir), "--http-port", "0")
        for number in range(1, 5):
            process = await spawn_process(CLI, *words)
            try:
                await here.serves(f"grpo@1.{number - 1}")
                await here.run.publish()
                # Somewhere between hearing of the head and having written what is attested.
                await asyncio.sleep(0.004 * number)
            finally:
                process.kill()
                await process.wait()
        here.sync()
        file = await here.serves("grpo@1.4")
        assert here.run.manifest is not None
        assert file.digest == here.run.manifest.digest


async def test_flipped_bytes_never_reach_the_engine(
    rundir: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        await here.run.publish()
        here.sync()
        await here.serves("grpo@1.0")
        await here.stop_sync()
        published = await here.run.publish()
        damaged = []
        for block in published.blocks:
            name = block.sha256.hex()
            damaged += list((tmp_path / "store").rglob(f"*{name[4:]}*"))
        assert damaged
        kept = {path: path.read_bytes() for path in damaged}
        for path, data in kept.items():
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        here.sync()
        file = await here.write("block")
        assert (file.version, file.attested) == ("grpo@1.0", True)
        for path, data in kept.items():
            path.write_bytes(data)
        await here.serves("grpo@1.1")


async def test_an_unreachable_endpoint_and_a_wrong_shape_are_clear_errors(
    rundir: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        here.sync()
        await here.host.host.ensure(weighted("127.0.0.1:1"))
        await here.write("127.0.0.1:1")
        await here.host.host.ensure(weighted(here.address))
        await here.write("is unknown here")
        other = tmp_path / "other"
        other.mkdir()
        from safetensors.numpy import save_file  # noqa: PLC0415

        save_file(
            {"model.layers.0.mlp.up_proj.weight": np.zeros((2, 2), np.float32)},
            other / "model.safetensors",
        )
        wrong = PublishedRun(here.address, other)
        await wrong.publish()
        file = await here.write("Layout")
        assert (file.version, file.attested) == ("", False)
        await wrong.close()


async def test_a_version_that_is_too_large_for_the_node_is_refused_by_name(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        here.sync(most_bytes=1)
        await here.run.publish()
        await here.serves("grpo@1.0")  # the engine has these weights: there is nothing to fetch
        await here.run.publish()
        file = await here.write("weightSync.versionGibibytes")
        assert "grpo@1.1 takes" in file.error
        assert (file.version, file.attested) == ("grpo@1.0", True)
        assert not list(here.rundir.slot("slot-1").bundles.iterdir()), "nothing of it was brought"
        await here.stop_sync()
        here.sync()
        await here.serves("grpo@1.1")


async def test_a_half_written_run_directory_is_no_subject(rundir: Path) -> None:
    folder = RunDir(rundir).create().slot("slot-9").create()
    folder.slot.write_text("{")
    assert subjects(RunDir(rundir)) == frozenset()


@pytest.mark.parametrize("text", ["", "{", '{"version": 3}'])
def test_garbage_in_weights_json_is_nothing_known(rundir: Path, text: str) -> None:
    folder = RunDir(rundir).create().slot("slot-9").create()
    folder.weights.write_text(text)
    assert read_json(folder.weights, WeightsFile) is None


async def test_weight_sync_that_follows_nothing_any_more_ends(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise ValueError("a file of the run directory")

    monkeypatch.setattr(main, "subjects", broken)
    given = main.parser().parse_args([f"--rundir={short_dir}", "--http-port=0"])
    assert await main.serve(given) == 1
