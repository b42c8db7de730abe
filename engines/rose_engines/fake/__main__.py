"""``python -m rose_engines.fake``: the fake engine as a process, with permit and control socket."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import BASE_LABEL
from rose_engines.fake import kvcached
from rose_engines.fake.device import connect
from rose_engines.fake.kvcached import TokenPool
from rose_engines.fake.memory import FakeMemory, FakeSleep
from rose_engines.fake.ranks import lead
from rose_engines.fake.scheduler import FakeRequest, FakeScheduler
from rose_engines.fake.server import FakeServer
from rose_engines.node.permit import Permit
from rose_engines.process.exposed_routes import KEY_VARIABLE
from rose_engines.tensors.canonical import Live, host_tensors
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.adapters import AdapterSession, AdapterSlots
from rose_engines.weights.control import ControlServer
from rose_engines.weights.decoding import HeldTensor
from rose_engines.weights.live import zero
from rose_engines.weights.multi_rank import LeaderSession
from rose_engines.weights.session import WeightSession
from rose_engines.weights.stager import InThread, OwnProcess, Stager
from rose_wire import faults

_STAGERS: Mapping[str, Callable[[Sequence[HeldTensor]], Stager]] = {
    "thread": InThread,
    "process": OwnProcess,
}


def parser() -> argparse.ArgumentParser:
    """Flags of the fake engine."""
    flags = argparse.ArgumentParser(prog="rose_engines.fake", description=__doc__)
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, default=0, help="0 = any; it is printed as url=...")
    flags.add_argument("--permit", type=Path, help="compute only while this permit is open")
    flags.add_argument(
        "--ignore-permit",
        choices=["", "true"],
        default="",
        help="compute whatever the permit says, as an engine whose plugin has failed",
    )
    flags.add_argument("--plugin-socket", type=Path, help="control socket: stage, commit, status")
    flags.add_argument("--model", type=Path, help="model folder whose tensors are the weights")
    flags.add_argument("--weight-version", default=BASE_LABEL, help="label at the start")
    flags.add_argument("--token-seconds", type=float, default=0.005, help="time per iteration")
    flags.add_argument("--prefill-token-seconds", type=float, default=0.0)
    flags.add_argument("--max-running", type=int, default=8)
    flags.add_argument("--kv-bytes", type=int, default=0, help="memory held beside the weights")
    flags.add_argument(
        "--release",
        choices=["real", "pretend", "refuse", "hang"],
        default="real",
        help="what it does when told to release its memory: pretend = says so and frees nothing",
    )
    flags.add_argument(
        "--memory-saver",
        action="store_true",
        help="as a serving engine: sleep and wake by SGLang's routes",
    )
    flags.add_argument(
        "--kvcached",
        choices=["real", "deaf", "absent"],
        default="real",
        help="what becomes of a limit of its KV memory where one is asked for (ENABLE_KVCACHED)",
    )
    flags.add_argument("--multiprocessors", type=int, default=0, help="of its GPU; 0 = none")
    flags.add_argument("--device-bytes", type=int, default=80 << 30, help="memory of its GPU")
    flags.add_argument("--ranks", type=int, default=1, help="processes that share the weights")
    flags.add_argument(
        "--adapter-slots", type=int, default=0, help="adapters of several runs; 0 = whole models"
    )
    flags.add_argument(
        "--stager",
        choices=["thread", "process"],
        default="thread",
        help="what decodes bundles; process = as a real engine's, which takes a second to start",
    )
    flags.add_argument("--vote-seconds", type=float, default=10.0, help="how late a rank may be")
    flags.add_argument("--member-fault", default="", help="where the last rank fails (torture)")
    flags.add_argument(
        "--without-numba",
        choices=["", "true"],
        default="",
        help="as where it is not installed: to load it takes longer than to serve a tiny model",
    )
    flags.add_argument(
        "--end-with",
        type=int,
        default=0,
        metavar="PID",
        help="end at once when this process has ended, as a test's that was killed; 0 = go on",
    )
    return flags


def load_weights(model: Path | None) -> Live:
    """Private copies of a model folder's tensors; no weights without a folder.

    Raises:
        UnsupportedEngine: the folder holds no readable safetensors.
    """
    if model is None:
        return {}
    stored = read_checkpoint(model)
    return host_tensors(
        {k: StoredTensor(kind, shape, bits.copy()) for k, (kind, shape, bits) in stored.items()}
    )


def open_session(
    flags: argparse.Namespace,
    wake: Callable[[], None],
    memory: FakeMemory | None,
    end_slot: Callable[[int], int],
) -> tuple[WeightSession | AdapterSlots, Callable[[], None]]:
    """The weights, and what takes the other ranks past a boundary."""
    if flags.adapter_slots:
        return adapter_slots(flags, wake, end_slot), lambda: None
    if flags.ranks == 1:
        live, stager = load_weights(flags.model), _STAGERS[flags.stager]
        session = WeightSession(live, flags.weight_version, wake=wake, memory=memory, stager=stager)
        return session, lambda: None
    joined, slices, members = lead(
        flags.model, flags.ranks, flags.plugin_socket, flags.member_fault
    )
    ranks = replace(joined, vote_seconds=flags.vote_seconds, undo_seconds=15 * flags.vote_seconds)
    return LeaderSession(slices, flags.weight_version, ranks, wake=wake), members.broadcast


def adapter_slots(
    flags: argparse.Namespace, wake: Callable[[], None], end_slot: Callable[[int], int]
) -> AdapterSlots:
    """Adapters that have the shape of the whole model, and are nothing at first."""
    sessions = []
    for number in range(flags.adapter_slots):
        live = load_weights(flags.model)
        for tensor in live.values():
            zero(tensor)
        end = partial(end_slot, number)
        sessions.append(AdapterSession(live, flags.weight_version, wake=wake, end_requests=end))
    return AdapterSlots(sessions)


async def serve(flags: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    memory = FakeMemory(
        flags.kv_bytes,
        flags.model,
        pretend=flags.release == "pretend",
        hang=flags.release == "hang",
    )
    session, broadcast = open_session(
        flags,
        wake=lambda: _discard(loop.call_soon_threadsafe(scheduler.wake)),
        memory=None if flags.release == "refuse" else memory,
        end_slot=lambda slot: scheduler.end_slot(slot),  # noqa: PLW0108  # it is made later
    )
    slots = session if isinstance(session, AdapterSlots) else None
    first = session if isinstance(session, WeightSession) else session[0]
    weights = [first] if slots is None else list(slots)
    device = connect(flags.multiprocessors, flags.device_bytes, os.environ)
    for one in weights:
        one.device = lambda: device
    permit = Permit.attach(flags.permit, writable=False) if flags.permit else None

    def permit_open() -> bool | None:
        return permit.is_open(time.monotonic_ns()) if permit else None

    pool = kvcached.connect(os.environ, flags.kv_bytes, flags.kvcached)
    sleep = FakeSleep(memory)
    make = FakeScheduler if pool is None else partial(ElasticScheduler, pool)
    scheduler = make(
        first,
        permit_open=lambda: (
            sleep.awake and (bool(flags.ignore_permit) or permit_open() is not False)
        ),
        token_seconds=flags.token_seconds,
        prefill_token_seconds=flags.prefill_token_seconds,
        max_running=flags.max_running,
        broadcast=broadcast,
        slots=slots,
    )
    memory.abort_all = lambda: scheduler.abort("", everything=True)
    for one in weights:
        one.permit_open = permit_open
    control = ControlServer(flags.plugin_socket, session.handle) if flags.plugin_socket else None
    stop = _stop_event(loop, flags.end_with)
    key = os.environ.pop(KEY_VARIABLE, "")
    application = FakeServer(scheduler, str(flags.model or "fake"), key).application()
    if pool is not None:
        add_flush(application, pool)
    if flags.memory_saver:
        sleep.add_to(application, scheduler)
    try:
        await _serve_until(stop, application, control, flags)
    finally:
        if pool is not None:
            pool.pool.close()


async def _serve_until(
    stop: asyncio.Event,
    application: web.Application,
    control: ControlServer | None,
    flags: argparse.Namespace,
) -> None:
    """Serve the engine's routes and its control socket, and print where."""
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, flags.host, flags.port)
        await site.start()
        if control:
            control.start()
        port = runner.addresses[0][1]
        sys.stdout.write(f"url=http://{flags.host}:{port}\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        if control:
            control.close()
        await runner.cleanup()


def _stop_event(loop: asyncio.AbstractEventLoop, process: int) -> asyncio.Event:
    """Set by SIGTERM or SIGINT; with this process, where one is given, we end at once."""
    if process:
        # Not the parent: an engine outlives its host, and must not outlive the host's test.
        loop.add_reader(os.pidfd_open(process), os._exit, 1)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _discard(_: object) -> None:
    """Makes a callback of something whose value nobody wants."""


def main(argv: list[str] | None = None) -> int:
    """Run the fake engine."""
    logging.basicConfig(level=logging.INFO)
    faults.arm()
    flags = parser().parse_args(argv)
    if flags.without_numba:
        sys.modules["numba"] = None  # type: ignore[assignment]  # how Python says: not there
    asyncio.run(serve(flags))
    return 0


class ElasticScheduler(FakeScheduler):
    """A scheduler whose requests take their room from a pool.

    Args:
        pool: the room.
        arguments: of ``FakeScheduler``.
    """

    def __init__(self, pool: TokenPool, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **named)
        self._pool = pool

    def _admit(self) -> bool:
        for request in (*self.running, *self.waiting):
            if request.finish is not None:
                self._pool.finish(request.rid)
        return super()._admit()

    def _step(self) -> None:
        every = self.running
        self.running = [one for one in every if one.finish is None and self._roomy(one)]
        super()._step()
        if not self.running:
            self._retract(every)
        self.running = every

    def _retract(self, every: list[FakeRequest]) -> None:
        """Nobody finds room: the youngest that has some gives it up and waits."""
        for place in reversed(range(len(every))):
            if self._pool.finish(every[place].rid):
                self.waiting.append(every.pop(place))
                return

    def _roomy(self, request: FakeRequest) -> bool:
        return self._pool.hold(request.rid, len(request.prompt) + len(request.output) + 1)


def add_flush(app: web.Application, pool: TokenPool) -> None:
    """SGLang's route that forgets finished turns; 400 while others run."""

    async def flush(_: web.Request) -> web.Response:
        return web.Response(status=200 if pool.flush() else 400)

    app.router.add_post("/flush_cache", flush)


if __name__ == "__main__":
    sys.exit(main())
