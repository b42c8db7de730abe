"""What a follower does when its engine misbehaves; all scripted, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from rose_agent.weightsync.decide import DENSE_AFTER, Engine
from rose_agent.weightsync.follower import Follower, Options
from rose_agent.weightsync.plugin import Gate, Plugin
from rose_core.delta import Builder, Manifest, TensorSpec, table
from rose_core.identity import BASE_LABEL, FROZEN_RUN, WeightVersion
from rose_core.wire.sync import WeightSource
from rose_engines.errors import CommitRefused
from rose_engines.node.rundir import SlotDir, WeightsFile
from rose_engines.weights.calls import Attested, Committed, Staged
from rose_weights.messages import Description, VersionInfo
from rose_weights.receive.client import WeightsClient

HEAD = WeightVersion("run", 1, 5)
FOLLOWING = WeightSource("x:1", "run")


def manifest_of(digest: str) -> Manifest:
    builder = Builder(table([TensorSpec("w", "F32", (0,))]), None, lambda _data: None)
    builder.add(None, np.zeros(0, np.uint32))
    return msgspec.structs.replace(builder.finish(HEAD), digest=digest)


@dataclass
class ScriptedPlugin:
    """An engine at the head whose answers the test changes."""

    gate: Gate
    engine: Engine = field(default_factory=lambda: Engine(str(HEAD), "right"))
    recomputed: str = "right"
    refuse: list[str] = field(default_factory=list)
    commits: int = 0

    async def read_engine(self) -> Engine:
        return self.engine

    async def attest(self) -> Attested:
        self.engine = replace(self.engine, digest=self.recomputed)
        return Attested(self.engine.label, self.recomputed, 0.0)

    async def stage(self, _bundle: Path) -> Staged:
        return Staged(str(HEAD), "", "right", 0, 0, 0.0)

    async def commit(self, version: str) -> Committed:
        if self.refuse:
            raise CommitRefused(self.refuse.pop(0), "scripted")
        self.commits += 1
        self.engine = Engine(version, "right")
        return Committed(version, "right", 0, 0, 0)

    async def close(self) -> None:
        pass


@dataclass
class ScriptedStore:
    """Remembers which digests pulls named."""

    pulls: list[str] = field(default_factory=list)

    async def describe(self, run: str) -> Description:
        return Description(run=run, head=VersionInfo(HEAD, "right"))

    async def watch(self, _run: str) -> AsyncIterator[VersionInfo]:
        yield VersionInfo(HEAD, "right")
        await asyncio.Event().wait()

    async def pull(
        self,
        _run: str,
        _folder: Path,
        *,
        have: WeightVersion | None,
        digest: str,
        codecs: tuple[int, ...],
        most_bytes: int,
    ) -> Manifest:
        assert most_bytes == 0, "these followers have no limit"
        self.pulls.append(digest)
        return manifest_of("right")

    async def report_attested(self, _version: WeightVersion, _digest: str) -> bool:
        return True

    async def close(self) -> None:
        pass


@dataclass
class Stage:
    slot: SlotDir
    plugin: ScriptedPlugin
    store: ScriptedStore
    written: list[WeightsFile]
    task: asyncio.Task[None]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(3600):
            while not condition():  # scripted parts announce nothing
                if self.task.done():
                    await self.task
                    raise AssertionError("the follower has ended")
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def follower(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: WeightSource = FOLLOWING,
) -> AsyncIterator[Stage]:
    slot = SlotDir(tmp_path / "s").create()
    plugin, store = ScriptedPlugin(Gate(slot.permit)), ScriptedStore()
    written: list[WeightsFile] = []
    loop = asyncio.get_running_loop()
    made = Follower(slot, source, 7, Options(attest_every_seconds=60.0, clock=loop.time))
    monkeypatch.setattr(made, "_plugin", cast("Plugin", plugin))
    monkeypatch.setattr(
        "rose_agent.weightsync.follower.WeightsClient",
        lambda *_args, **_kwargs: cast("WeightsClient", store),
    )
    monkeypatch.setattr(
        "rose_agent.weightsync.follower.write_json",
        lambda _path, value, **_mode: written.append(value),
    )
    task = asyncio.create_task(made.run())
    try:
        yield Stage(slot, plugin, store, written, task)
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.mark.looptime
async def test_weights_that_rot_are_quarantined_and_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with follower(tmp_path, monkeypatch) as here:
        await here.until(lambda: bool(here.written) and here.written[-1].attested)
        assert here.store.pulls == []
        here.plugin.recomputed = "rotten"
        await here.until(lambda: here.plugin.commits == 1)
        await here.until(lambda: here.written[-1].attested)
        offered = [(file.version, file.attested) for file in here.written]
        good = offered.index((str(HEAD), True))
        # Between the two good states nothing was offered at all.
        assert ("", False) in offered[good:]
        assert here.store.pulls == [""]
        assert here.written[-1].version == str(HEAD)
        assert here.written[-1].error == ""


@pytest.mark.looptime
async def test_frozen_weights_that_rot_are_broken_for_no_store_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = WeightSource("", FROZEN_RUN)
    async with follower(tmp_path, monkeypatch, frozen) as here:
        right, rotten = "a" * 32, "b" * 32
        here.plugin.engine = Engine(BASE_LABEL, right)
        here.plugin.recomputed = right
        await here.until(lambda: bool(here.written) and here.written[-1].attested)
        here.plugin.recomputed = rotten
        async with asyncio.timeout(600):
            await here.until(lambda: here.written[-1].broken)
        assert (here.written[-1].version, here.written[-1].attested) == ("", False)
        assert f"have digest {rotten}" in here.written[-1].error
        assert not any(file.version.endswith("b") for file in here.written)


@pytest.mark.looptime
async def test_refused_bundles_end_in_the_full_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with follower(tmp_path, monkeypatch) as here:
        here.plugin.engine = Engine("run@1.4", "old")
        here.plugin.refuse = ["WrongBase", "Corrupt", "Layout"]
        await here.until(lambda: here.plugin.commits == 1)
        assert here.store.pulls == ["old"] * DENSE_AFTER + [""]
        errors = {file.error for file in here.written}
        assert {"WrongBase: scripted", "Corrupt: scripted", "Layout: scripted"} <= errors


@pytest.mark.looptime
async def test_a_gate_that_keeps_closing_costs_no_second_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with follower(tmp_path, monkeypatch) as here:
        here.plugin.engine = Engine("run@1.4", "old")
        here.plugin.refuse = ["Busy"] * 20
        await here.until(lambda: here.plugin.commits == 1)
        assert here.store.pulls == ["old"]


@pytest.mark.looptime
async def test_broken_weights_are_said_to_be_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with follower(tmp_path, monkeypatch) as here:
        here.plugin.engine = Engine("run@1.4", "old", broken=True)
        await here.until(lambda: bool(here.written) and here.written[-1].broken)
        assert not here.written[-1].attested
        assert "broken" in here.written[-1].error
        assert here.store.pulls == []
