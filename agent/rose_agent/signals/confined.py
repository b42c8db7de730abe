"""The processes that read serving pods, none of which is the guard.

A pool's owner decides every byte that is read from its pods. So the guard reads none of them:

| process | lives | keeps | does |
|---|---|---|---|
| factory | as long as the agent | two capabilities | forks the others, reads nothing |
| reader | one a replica, as long as it | no right, file, program | reads, says ``Figures`` |
| opener | for one opening, 2 s at most | two capabilities | hands a snapshot to the reader |

The two are SYS_PTRACE and DAC_OVERRIDE, without which ``/proc/PID/root`` does not open.

A reader that is stalled, killed or taken over ends alone: it is bounded in memory, is the first
that the kernel's OOM killer takes, and what it says to the guard is checked (``messages``). The
guard starts it anew (``reader``). If the factory ends, so does the agent: without readers nothing
is known; permits lapse.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import signal
import socket
from pathlib import Path

from rose_agent.os import kernel, seccomp
from rose_agent.pods.model import ServingPod
from rose_agent.signals.feed import Feed
from rose_agent.signals.http import EngineReader, session_of
from rose_agent.signals.messages import (
    LARGEST,
    MOST_COMMAND_LINES,
    Aim,
    Ask,
    Begin,
    Command,
    Describe,
    Described,
    Factory,
    Latest,
    Open,
    Page,
    PageReply,
    Reply,
    WireFigures,
    commands,
    factory_orders,
    pack,
)
from rose_agent.signals.snapshot import Snapshot, open_snapshot
from rose_core.telemetry.dialects import Figures

_log = logging.getLogger(__name__)
_FACTORY_RIGHTS = frozenset({kernel.SYS_PTRACE, kernel.DAC_OVERRIDE})
_OPENING_SECONDS = 2
# Beyond what a reader has when it begins: a page of 4 MiB as bytes, text and lines, with room.
_MORE_MEMORY = 256 * 1024 * 1024
_MOST_FILES = 64
# The flags of SGLang and vLLM that say over how many machines one engine stretches.
_MACHINES = re.compile(rb"--nnodes[ =](\d{1,6})\b")
_LONGEST_COMMAND = 64 * 1024
# An unchanged snapshot is repeated this often, so that silence means a reader that stands still.
_AGAIN_SECONDS = 0.5


def start() -> socket.socket:
    """Fork the factory; call it before threads, event loops and drivers exist.

    Returns:
        The channel for ``Factory`` orders; it reads as closed once the factory has ended.
    """
    own_end, reader_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        own_end.close()
        os._exit(serve(reader_end))
    reader_end.close()
    return own_end


def serve(channel: socket.socket) -> int:
    """Fork readers and openers until the agent is gone."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the agent's end is ours
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
        kernel.forbid_dumps()
        kernel.keep_capabilities(_FACTORY_RIGHTS)
        while True:
            data, descriptors, _, _ = socket.recv_fds(channel, LARGEST, 2)
            if not data:
                return 0
            _fork(channel, factory_orders.decode(data), descriptors)
    except Exception:  # noqa: BLE001  # a forked child must end here, with a trace
        _log.exception("the factory of readers failed")
        return 1


def _fork(channel: socket.socket, order: Factory, descriptors: list[int]) -> None:
    if os.fork():
        for descriptor in descriptors:
            os.close(descriptor)
        return
    code = 1
    try:
        channel.close()
        kernel.die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if isinstance(order, Open):
            _open(order.pid, *ends)
        else:
            _confine()
            asyncio.run(_Reader(order, *ends).run())
        code = 0
    except Exception:  # noqa: BLE001  # a forked child must end here, with a trace
        _log.exception("a reader of %s failed", getattr(order, "replica", "a snapshot"))
    os._exit(code)


def _open(pid: int, handover: socket.socket) -> None:
    """Hand the snapshot over, if there is one; a pod that lets us wait is not waited for."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_OPENING_SECONDS)
    descriptor = open_snapshot(pid)
    if descriptor is not None:
        socket.send_fds(handover, [b"."], [descriptor])


def _confine() -> None:
    """Give up everything but the two sockets, TCP, and reading our own libraries and ``/proc``."""
    kernel.forbid_dumps()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + _MORE_MEMORY, held + _MORE_MEMORY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_FILES, _MOST_FILES))
    kernel.keep_capabilities()
    try:
        kernel.read_only_below(kernel.LIBRARIES, Path("/proc"))
    except OSError as error:
        _log.info("a reader may see files, as this kernel has no Landlock: %s", error)
    seccomp.confine(seccomp.READER)


class _Reader:
    """Reads one replica; it knows only what the guard says."""

    def __init__(self, begin: Begin, channel: socket.socket, handover: socket.socket) -> None:
        self._begin = begin
        self._channel, self._handover = channel, handover
        self._source: Feed | Snapshot | None = None
        self._every_seconds = begin.every_seconds
        self._has_source = asyncio.Event()
        self._sent: Figures | None = None
        self._sent_at = 0.0

    async def run(self) -> None:
        """Read until the guard hangs up."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        self._channel.setblocking(False)
        self._handover.setblocking(False)
        async with session_of() as session:
            engine = EngineReader(session, self._begin.base, self._begin.engine)
            asks: asyncio.Queue[Ask] = asyncio.Queue(maxsize=8)
            loop.add_reader(self._channel, self._take, engine, asks, gone)
            loop.add_reader(self._handover, self._take_over)
            if self._begin.feed_host:
                self._source = Feed(self._begin.feed_host, self._begin.feed_port)
                self._has_source.set()
            tasks = [asyncio.create_task(self._answer(engine, asks)) for _ in range(2)]
            tasks.append(asyncio.create_task(self._watch()))
            try:
                await asyncio.wait({gone, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()

    def _take(
        self, engine: EngineReader, asks: asyncio.Queue[Ask], gone: asyncio.Future[None]
    ) -> None:
        data = self._channel.recv(LARGEST)
        if not data:
            if not gone.done():
                gone.set_result(None)
            return
        command: Command = commands.decode(data)
        if isinstance(command, Ask):
            with contextlib.suppress(asyncio.QueueFull):  # the guard gives up by itself
                asks.put_nowait(command)
        elif isinstance(command, Aim):
            engine.aim(command.base, command.engine)
        elif isinstance(command, Describe):
            self._send(Described(machines_of(command.pids[:MOST_COMMAND_LINES])))
        else:
            self._every_seconds = command.every_seconds

    def _take_over(self) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._handover, 16, 1)
        if not descriptors:
            asyncio.get_running_loop().remove_reader(self._handover)
            return
        if self._source is not None:
            self._source.close()
        self._source = Snapshot(descriptors[0])
        self._has_source.set()

    async def _answer(self, engine: EngineReader, asks: asyncio.Queue[Ask]) -> None:
        while True:
            ask = await asks.get()
            if ask.page is Page.METRICS:
                figures, scrapes = await engine.metrics(), engine.scrapes
            else:
                figures, scrapes = await engine.loads(), engine.scrapes
            self._send(PageReply(ask.number, scrapes, WireFigures.of(figures)))

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        await self._has_source.wait()  # most engines have none, and waking for nothing costs
        while True:
            if self._source is not None:
                figures = self._source.read()
                if figures != self._sent or loop.time() - self._sent_at >= _AGAIN_SECONDS:
                    self._sent, self._sent_at = figures, loop.time()
                    self._send(Latest(WireFigures.of(figures) or WireFigures()))
            await asyncio.sleep(self._every_seconds)

    def _send(self, reply: Reply) -> None:
        with contextlib.suppress(BlockingIOError):  # the guard is behind, and knows it misses some
            self._channel.send(pack(reply))


def machines_of(pids: tuple[int, ...], proc: Path = Path("/proc")) -> int:
    """Over how many machines the engine of these processes stretches, as command lines say.

    A command line is the process's own memory, and may be missing, wrong or slow to read.
    """
    most = 1
    for pid in pids:
        with contextlib.suppress(OSError), (proc / str(pid) / "cmdline").open("rb") as file:
            command = file.read(_LONGEST_COMMAND).replace(b"\0", b" ")
            most = max([most, *map(int, _MACHINES.findall(command))])
    return most


def begin_of(pod: ServingPod, engine: str) -> Begin:
    """What a reader of this pod begins with."""
    host = pod.address if pod.feed_port else ""
    return Begin(pod.uid, pod.url, engine, host, pod.feed_port)
