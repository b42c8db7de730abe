"""Serving engines put to sleep under a grant, and brought back by whoever is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest

from rose_agent.devices.usage import ResidentMeter
from rose_agent.sleeper.sleeper import DeadMan, SleeperRecord, WatchedServing
from rose_core.devices.sleeper import SleeperLimits, SleepStage
from rose_dev.engine_environment import is_ready
from rose_dev.engine_template import ProcessHandle
from rose_dev.engine_testing import start_engine
from rose_dev.process_testing import start_process
from rose_engines.node.permit import Permit
from rose_engines.node.rundir import read_json
from rose_engines.process.sleep import SERVING
from rose_wire.ports import free_port
from tests.engines import sleeping_server
from tests.host.helpers import until

MIB = 1 << 20
MEMORY = 128 * MIB
LIMITS = SleeperLimits(MEMORY // 2)
KINDS = ("SGLang", "VLLM")


class Grant:
    """Whoever grants: extends the permit until told otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._permit = Permit.create(path)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._extend()
        self._thread.start()

    def lapse(self) -> None:
        """As if whoever extended it had died, a deadline later."""
        self.end()
        self._permit.close_now()

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _extend(self) -> None:
        self._permit.extend(time.monotonic_ns() + 5_000_000_000)

    def _run(self) -> None:
        while not self._ending.wait(0.1):
            self._extend()


@pytest.fixture
def grant(rundir: Path) -> Iterator[Grant]:
    made = Grant(rundir / "permit")
    yield made
    made.end()


@dataclass
class Engine:
    url: str
    process: ProcessHandle

    @property
    def held(self) -> int:
        held = ResidentMeter().read((self.process.pid,), ())
        assert held is not None
        return held


@contextmanager
def engine(kind: str, feature: str = "on") -> Iterator[Engine]:
    port = free_port()
    process = start_process(sleeping_server.__name__, kind, str(port), str(MEMORY), feature)
    try:
        yield Engine(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait()


@dataclass
class World:
    """What the test tells the switch."""

    now: float = 100.0
    vacated: bool = True
    restarts: list[float] = field(default_factory=list)

    async def is_vacated(self) -> bool:
        return self.vacated


@dataclass
class Bench:
    """A dead man's switch on a clock of its own."""

    man: DeadMan
    world: World

    async def until(self, stage: SleepStage) -> None:
        """Step, half a second at a time."""
        for _ in range(400):
            await self.man.step()
            if self.man.state.stage is stage:
                return
            self.world.now += 0.5
            await asyncio.sleep(0.02)
        pytest.fail(f"never {stage}: {self.man.state}")


@asynccontextmanager
async def bench(
    kind: str, one: Engine, grant: Grant, record: Path, limits: SleeperLimits = LIMITS
) -> AsyncIterator[Bench]:
    world = World()
    async with aiohttp.ClientSession() as session:
        serving = WatchedServing(
            SERVING[kind](session, one.url),
            ResidentMeter(),
            lambda: (one.process.pid,),
            lambda: world.restarts.append(world.now),
            vacated=world.is_vacated,
        )

        async def listens() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(one.url):
                    return True
            return False

        await until(listens, "the server listens")
        yield Bench(DeadMan(serving, grant.path, record, limits, lambda: world.now), world)


async def busy(url: str, running: int) -> None:
    async with aiohttp.ClientSession() as session:
        await session.post(f"{url}/test_busy", data=str(running))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_idle_engine_sleeps_while_it_is_granted_and_is_verified_when_it_is_back(
    kind: str, rundir: Path, grant: Grant
) -> None:
    with engine(kind) as one:
        async with bench(kind, one, grant, rundir / "record") as made:
            await made.until(SleepStage.AWAKE)
            await busy(one.url, 1)
            await made.man.step()
            assert made.man.state.stage is SleepStage.AWAKE
            await busy(one.url, 0)
            before = one.held
            await made.until(SleepStage.ASLEEP)
            assert before - one.held > MEMORY // 2
            grant.lapse()
            made.world.vacated = False
            await made.until(SleepStage.RECALLED)
            assert before - one.held > MEMORY // 2, "borrowers leave before serving comes back"
            made.world.vacated = True
            await made.until(SleepStage.AWAKE)
            assert one.held > before - MEMORY // 10
            assert made.man.state.refusal == ""
            assert (made.world.restarts, one.process.poll()) == ([], None)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_of_200_that_frees_nothing_is_found_out_and_serving_goes_on(
    kind: str, rundir: Path, grant: Grant
) -> None:
    with engine(kind, "off") as one:
        async with bench(kind, one, grant, rundir / "record") as made:
            await made.until(SleepStage.RECALLED)
            assert made.man.state.refusal == "NothingReleased"
            await made.until(SleepStage.AWAKE)
            assert (made.world.restarts, one.process.poll()) == ([], None)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_without_the_route_is_refused_by_its_own_words(
    kind: str, rundir: Path, grant: Grant
) -> None:
    with engine(kind, "missing") as one:
        async with bench(kind, one, grant, rundir / "record") as made:
            await made.until(SleepStage.FALLING)
            await made.until(SleepStage.AWAKE)
            assert "answered 404" in made.man.state.refusal
            assert (made.world.restarts, one.process.poll()) == ([], None)


async def test_a_vllm_that_answers_well_and_does_not_sleep_is_refused(
    rundir: Path, grant: Grant
) -> None:
    with engine("VLLM", "insomniac") as one:
        async with bench("VLLM", one, grant, rundir / "record") as made:
            await made.until(SleepStage.FALLING)
            grant.lapse()
            await made.until(SleepStage.RECALLED)
            assert "/is_sleeping" in made.man._refused


@pytest.mark.parametrize("feature", ["garbage", "deaf"])
@pytest.mark.parametrize("kind", KINDS)
async def test_serving_that_comes_back_with_other_weights_or_not_at_all_is_restarted(
    kind: str, feature: str, rundir: Path, grant: Grant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose_engines.process.sleep._PROBE", aiohttp.ClientTimeout(total=0.5))
    early = replace(LIMITS, wake_s=LIMITS.repeat_s / 2)
    with engine(kind, feature) as one:
        async with bench(kind, one, grant, rundir / "record", early) as made:
            await made.until(SleepStage.ASLEEP)
            grant.lapse()
            await made.until(SleepStage.BROKEN)
            assert len(made.world.restarts) == 1
    with engine(kind) as fresh:
        async with bench(kind, fresh, grant, rundir / "record") as made:
            made.world.now = 1000.0
            await made.until(SleepStage.AWAKE)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_switch_is_killed_while_serving_sleeps_and_the_next_one_wakes_it(
    kind: str, rundir: Path, grant: Grant
) -> None:
    record = rundir / "record"
    with engine(kind) as one:
        async with bench(kind, one, grant, rundir / "unused"):
            before = one.held

        def start() -> ProcessHandle:
            words = [
                "--engine",
                kind,
                "--url",
                one.url,
                "--grant",
                str(grant.path),
                "--record",
                str(record),
            ]
            words += ["--pid", str(one.process.pid), "--release-bytes", str(MEMORY // 2)]
            return start_process("rose_agent.sleeper.sleeper", *words, "--vacate-seconds", "0")

        async def stands(stage: SleepStage) -> None:
            async def there() -> bool:
                reported = read_json(record, SleeperRecord)
                return reported is not None and reported.sleeper.stage is stage

            await until(there, f"serving is {stage}")

        man = start()
        await stands(SleepStage.ASLEEP)
        os.kill(man.pid, signal.SIGKILL)
        man.wait()
        grant.lapse()
        assert before - one.held > MEMORY // 2
        man = start()
        try:
            await stands(SleepStage.AWAKE)
            assert one.held > before - MEMORY // 10
            assert one.process.poll() is None
        finally:
            man.kill()
            man.wait()


@pytest.mark.engine
async def test_a_real_sglang_that_ends_at_its_release_is_restarted_and_verified(
    rundir: Path, grant: Grant
) -> None:
    """SGLang 0.5.23 asks CUDA to settle after a release, and ends where there is none."""
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    record = rundir / "record"
    for name in ("first", "second"):
        (rundir / name).mkdir()
    with start_engine(rundir / "first") as real:
        one = Engine(real.url, real.process)
        async with bench("SGLang", one, grant, record) as made:
            await made.until(SleepStage.FALLING)
            grant.lapse()
            await made.until(SleepStage.BROKEN)
            reference, now = made.man.record.reference, made.world.now
            assert made.world.restarts == [now]
            assert real.process.poll() is not None
    with start_engine(rundir / "second") as real:
        async with bench("SGLang", Engine(real.url, real.process), grant, record) as made:
            made.world.now = now + 1
            await made.until(SleepStage.AWAKE)
            assert len(reference.split(",")) > 1
            assert made.man.record.reference == reference
