"""A replica lent whole: guard, sleeper and an engine with memory that it can really let go of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web

from rose_agent.devices.static import StaticDriver
from rose_agent.devices.usage import ResidentMeter
from rose_agent.guard.loop import Guard, Settings
from rose_agent.pods.static import StaticPods
from rose_agent.signals.reader import DirectReaders
from rose_core.guard.gate import GateLimits
from rose_core.guard.whole import WholePhase
from rose_core.identity import PodUid, SlotKey
from rose_core.telemetry.events import Arrived
from rose_core.telemetry.signal import SignalLimits
from rose_core.telemetry.verify import SignalVerification
from rose_core.wire.host import EngineState, EngineStatus
from rose_core.wire.sync import Grant, SleepTerms, SyncReply
from rose_dev.engine_template import ProcessHandle
from rose_dev.process_testing import CLI, start_process
from rose_engines.node.permit import Permit
from rose_engines.node.rundir import RunDir
from rose_engines.node.servingdir import ServingDirs
from rose_wire.ports import free_port
from tests.agent.test_guard import GRANT, KEY, POLICY, health, is_open
from tests.engines import sleeping_server

POD = PodUid("pod")

MIB = 1 << 20
MEMORY = 64 * MIB
WHOLE = msgspec.structs.replace(GRANT, whole=True, ttl_seconds=3600.0)
TERMS = SleepTerms(MEMORY // 2, drain_seconds=60.0, wake_seconds=60.0)
PATIENCE_SECONDS = 90.0


@dataclass
class Node:
    """Everything of one node; ``kubelet`` says whether the owner's readiness probe is heeded."""

    guard: Guard
    permit: Permit
    engine: ProcessHandle
    folder: Path
    port: int
    kubelet: bool = True
    terms: SleepTerms = TERMS
    vacated_url: str = ""
    sleeper: ProcessHandle | None = None

    @property
    def phase(self) -> WholePhase:
        known = self.guard.whole._known.get(POD)
        return known.whole.phase if known else WholePhase.OFF

    @property
    def held(self) -> int:
        held = ResidentMeter().read((self.engine.pid,), ())
        assert held is not None
        return held

    @property
    def refusal(self) -> str:
        return self.guard.request().replicas[0].refusal

    def is_ready(self) -> bool:
        return self.guard.replicas[POD].pod.ready

    def is_served(self) -> bool:
        """Whether the engine listens: it has filled its memory and let go of what it came from."""
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def drain(self) -> Path:
        return ServingDirs(self.folder / "run").of("pod").drain

    def write_pod(self) -> None:
        entry = {
            "uid": "pod",
            "pool": "chat/pool",
            "port": self.port,
            "gpus": ["GPU-0"],
            "pids": [self.engine.pid],
            "ready": not (self.kubelet and self.drain.exists()),
        }
        path = self.folder / "replicas.yaml"
        text = yaml.safe_dump({"replicas": [entry]})
        if not path.exists() or path.read_text() != text:
            path.write_text(text)

    def grant(self, *grants: Grant) -> None:
        policy = msgspec.structs.replace(POLICY, port=self.port, sleep=self.terms)
        reply = SyncReply(1, True, grants, (policy,))
        self.guard.on_reply(reply, time.monotonic())

    def start_sleeper(self) -> None:
        words = (f"--rundir={self.folder / 'run'}", f"--vacated-url={self.vacated_url}")
        self.sleeper = start_process(CLI, "sleeper", "--devices=static", *words)

    async def until(self, seen: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not seen():
            if time.monotonic() > end:
                pytest.fail(f"never: {what}; {self.phase}, {self.refusal}")
            self.write_pod()
            self.guard.match()
            self.guard.on_tap([health()], time.monotonic_ns())
            self.guard.step_all()
            await asyncio.sleep(0.1)

    async def until_phase(self, phase: WholePhase) -> None:
        await self.until(lambda: self.phase is phase, str(phase))

    async def falls_asleep(self) -> int:
        """Memory that it held before."""
        await self.until(self.guard.whole._sleeper_lives, "a sleeper")
        before = self.held
        self.grant(WHOLE)
        await self.until_phase(WholePhase.ASLEEP)
        return before


@contextlib.asynccontextmanager
async def engine_host() -> AsyncIterator[str]:
    """Its page: no rollout engine holds a GPU."""

    async def vacated(request: web.Request) -> web.Response:
        return web.json_response({"free": request.query.getall("gpu") == ["GPU-0"]})

    app = web.Application()
    app.add_routes([web.get("/vacated", vacated)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    try:
        yield f"http://127.0.0.1:{port}/vacated"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def node(folder: Path, feature: str = "on") -> AsyncIterator[Node]:
    rundir = RunDir(folder / "run").create()
    permit = Permit.create(rundir.slot(KEY.uid).create().permit)
    port = free_port()
    engine = start_process(sleeping_server.__name__, "SGLang", str(port), str(MEMORY), feature)
    drain = ServingDirs(rundir.root).of("pod").drain_folder
    drain.mkdir(parents=True)  # what the kubelet makes of the owner's mount
    async with aiohttp.ClientSession() as session, engine_host() as page:
        settings = Settings("node", "", gate=GateLimits(reopen_ns=0))
        guard = Guard(rundir, settings, StaticDriver(None), DirectReaders(session))
        made = Node(guard, permit, engine, folder, port, vacated_url=page)
        made.write_pod()
        guard.pods = StaticPods(folder / "replicas.yaml")
        made.grant()
        known = guard.replicas[POD]
        known.verification = SignalVerification(verified=True)
        known.limits = SignalLimits(
            tap_stale_ns=10**12
        )  # a busy machine must not look like a dead tap
        guard.on_tap([health()], time.monotonic_ns())
        known.book.blind_ns = 0
        permit.beat_host(time.monotonic_ns() + 10**12)
        guard.pollers[POD].cancel()  # the engine has no counter to compare with
        made.start_sleeper()
        try:
            await made.until(made.is_served, "the engine listens")
            yield made
        finally:
            for process in (made.sleeper, engine):
                if process is not None:
                    process.kill()
                    process.wait()
            for task in guard.pollers.values():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            for slot in guard.slots.values():
                await slot.detach()
            guard.whole.forget(POD)
            guard.close()
            await guard.host._channel.close()
    permit.detach()


def serve_rollouts(made: Node) -> None:
    """The engine host starts what the guard asked for."""
    host = made.guard.host
    host.engines = {KEY.uid: EngineStatus(SlotKey(KEY.uid, 1), EngineState.SERVING)}
    host.asked_ns = host.answered_ns = time.monotonic_ns() + 10**12
    made.permit.beat_host(time.monotonic_ns() + 10**12)


async def test_serving_is_drained_sleeps_and_is_ready_again_when_the_loan_ends(
    short_dir: Path,
) -> None:
    async with node(short_dir) as made:
        before = await made.falls_asleep()
        assert before - made.held > MEMORY // 2
        assert made.drain.exists()
        assert not made.is_ready()
        assert made.refusal == "ReplicaNotReady"
        serve_rollouts(made)
        await made.until(lambda: is_open(made.permit), "the gate opens")
        made.grant()
        await made.until(lambda: not is_open(made.permit), "the gate closes")
        assert made.refusal == "ServingWaking"
        made.guard.host.engines = {}
        await made.until_phase(WholePhase.OFF)
        assert made.held > before - MEMORY // 10
        assert not made.drain.exists()
        assert made.is_ready()
        assert made.engine.poll() is None
        await made.until(lambda: not made.refusal, "nothing speaks against it")


async def test_nobody_is_lent_the_gpu_before_serving_sleeps(short_dir: Path) -> None:
    async with node(short_dir) as made:
        made.kubelet = False
        made.grant(WHOLE)
        serve_rollouts(made)
        await made.until_phase(WholePhase.DRAINING)
        made.guard.step_all()
        assert not is_open(made.permit)
        assert made.guard.slots[KEY.uid].verdict.reason == "ServingAwake"


async def test_a_pod_that_stays_ready_is_left_alone(short_dir: Path) -> None:
    async with node(short_dir) as made:
        made.kubelet = False
        made.terms = replace_terms(drain_seconds=1.0)
        before = made.held
        await made.until(made.guard.whole._sleeper_lives, "a sleeper")
        made.grant(WHOLE)
        await made.until_phase(WholePhase.RETURNING)
        assert made.refusal == "NotDrained"
        await made.until(lambda: not made.drain.exists(), "the word to drain is taken back")
        await made.until_phase(WholePhase.OFF)
        assert made.held > before - MEMORY // 10


async def test_serving_is_not_sent_to_sleep_while_its_arrivals_may_wait(short_dir: Path) -> None:
    async with node(short_dir) as made:
        await made.until(made.guard.whole._sleeper_lives, "a sleeper")
        made.grant(WHOLE)
        await made.until_phase(WholePhase.DRAINING)
        waiting = msgspec.structs.replace(health(), at_once=False)
        for _ in range(25):  # longer than it has to be quiet
            made.write_pod()
            made.guard.on_tap([waiting], time.monotonic_ns())
            made.guard.match()
            assert made.phase is WholePhase.DRAINING
            await asyncio.sleep(0.1)
        await made.until_phase(WholePhase.DRAINED)


async def test_an_answer_of_200_that_frees_nothing_ends_the_loan(short_dir: Path) -> None:
    async with node(short_dir, "off") as made:
        await made.until(made.guard.whole._sleeper_lives, "a sleeper")
        made.grant(WHOLE)
        await made.until_phase(WholePhase.RETURNING)
        assert made.refusal == "SleepRefused"
        await made.until_phase(WholePhase.OFF)
        assert made.engine.poll() is None


async def test_a_request_to_a_sleeping_replica_wakes_it(short_dir: Path) -> None:
    async with node(short_dir) as made:
        before = await made.falls_asleep()
        serve_rollouts(made)
        await made.until(lambda: is_open(made.permit), "the gate opens")
        now = time.monotonic_ns()
        made.guard.on_tap([Arrived(POD, 1, now, "/generate")], now)
        assert not is_open(made.permit), "at its arrival"
        made.guard.match()
        assert made.phase is WholePhase.RETURNING
        assert made.refusal == "RequestWhileAsleep"
        made.guard.host.engines = {}
        await made.until(lambda: made.held > before - MEMORY // 10, "its memory is back")


async def test_a_guard_that_dies_wakes_serving_by_doing_nothing(short_dir: Path) -> None:
    async with node(short_dir) as made:
        before = await made.falls_asleep()
        end = time.monotonic() + PATIENCE_SECONDS
        while made.drain.exists():
            assert time.monotonic() < end, "the guard is gone and serving sleeps on"
            await asyncio.sleep(0.2)
        assert made.held > before - MEMORY // 10


async def test_a_sleeper_that_is_ended_wakes_first_and_one_that_was_killed_afterwards(
    short_dir: Path,
) -> None:
    async with node(short_dir) as made:
        before = await made.falls_asleep()
        assert made.sleeper is not None
        made.sleeper.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(made.sleeper.wait, PATIENCE_SECONDS) == 0
        assert made.held > before - MEMORY // 10
        await made.until_phase(WholePhase.RETURNING)
        made.start_sleeper()
        await made.until_phase(WholePhase.OFF)


async def test_a_killed_sleeper_ends_the_loan_and_the_next_one_wakes_serving(
    short_dir: Path,
) -> None:
    async with node(short_dir) as made:
        before = await made.falls_asleep()
        assert made.sleeper is not None
        os.kill(made.sleeper.pid, signal.SIGKILL)
        made.sleeper.wait()
        await made.until_phase(WholePhase.RETURNING)
        assert made.refusal == "SleeperUnavailable"
        assert before - made.held > MEMORY // 2
        made.start_sleeper()
        await made.until_phase(WholePhase.OFF)
        assert made.held > before - MEMORY // 10


async def test_the_stop_button_wakes_serving(short_dir: Path) -> None:
    async with node(short_dir) as made:
        await made.falls_asleep()
        made.guard._stop_pressed = True
        await made.until_phase(WholePhase.RETURNING)
        await made.until_phase(WholePhase.OFF)


def replace_terms(**changes: float) -> SleepTerms:
    return msgspec.structs.replace(TERMS, **changes)
