"""Reading serving pods: one contract for both kinds of readers, and pods that are hostile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from aiohttp import web

from rose_agent.pods.model import ServingPod
from rose_agent.signals import confined, reader
from rose_agent.signals.http import LARGEST_PAGE, session_of
from rose_agent.signals.messages import Describe, Described, Latest, WireFigures, pack, replies
from rose_agent.signals.reader import ConfinedReaders, DirectReaders, Reader, ReaderFactoryGone
from rose_agent.signals.snapshot import LARGEST_SNAPSHOT, Snapshot, open_snapshot
from rose_core.identity import PodUid
from rose_core.telemetry.dialects import Figures
from rose_dev.waiting import until

POD = PodUid("uid")

_MIB = 1024 * 1024
PAGE = "sglang:num_running_reqs 2\nsglang:num_queue_reqs 1\n"
BUSY = {"num_running_reqs": 3, "num_waiting_reqs": 0}
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _page(body: bytes, **headers: str) -> Route:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    return answer


@contextlib.asynccontextmanager
async def serving(metrics: Route) -> AsyncIterator[ServingPod]:
    """A serving pod whose ``/metrics`` is this."""
    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/loads", _page(msgspec.json.encode({"loads": [BUSY]})))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield ServingPod(POD, "chat", "pod", "chat/pool", "127.0.0.1", port)
    await runner.cleanup()


@contextlib.contextmanager
def factory() -> Iterator[tuple[socket.socket, psutil.Process]]:
    """The factory in a process that was never this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (
        "import socket, sys; from rose_agent.signals import confined;"
        "sys.exit(confined.serve(socket.socket(fileno=int(sys.argv[1]))))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    try:
        yield ours, psutil.Process(process.pid)
    finally:
        ours.close()
        process.wait(30)


def child(of: psutil.Process) -> psutil.Process:
    """The one reader that runs."""
    (found,) = of.children()
    return found


@contextlib.asynccontextmanager
async def reading(pod: ServingPod, *, own: bool) -> AsyncIterator[Reader]:
    """A reader of this pod, in its own process or in this one."""
    if own:
        with factory() as (channel, _):
            made = ConfinedReaders(channel).of(pod, "SGLang")
            yield made
            made.close()
    else:
        async with session_of() as session:
            made_here = DirectReaders(session).of(pod, "SGLang")
            yield made_here
            made_here.close()


def status_of(process: psutil.Process) -> dict[str, str]:
    """What the kernel says of a process."""
    folder = Path(f"/proc/{process.pid}")
    lines = (folder / "status").read_text().splitlines()
    score = (folder / "oom_score_adj").read_text().strip()
    return {"oom_score_adj": score} | dict(one.split(":\t", 1) for one in lines if ":\t" in one)


both = pytest.mark.parametrize("own", [False, True], ids=["direct", "confined"])


@pytest.fixture
def shared() -> Iterator[Path]:
    """A load snapshot in shared memory, whose name is as SGLang's."""
    path = Path("/dev/shm") / f"sglang_loads_{uuid.uuid4().hex}"  # as SGLang does
    path.write_bytes(snapshot_of(**BUSY))
    yield path
    path.unlink(missing_ok=True)


def snapshot_of(**entry: int) -> bytes:
    body = msgspec.msgpack.encode(entry)
    return bytes(12) + len(body).to_bytes(4, "little") + body + bytes(4080 - len(body))


@contextlib.contextmanager
def mapping(path: Path) -> Iterator[int]:
    """A process that has this file mapped, as a scheduler has; its pid."""
    code = (
        "import mmap, sys, time; f = open(sys.argv[1], 'r+b');"
        "m = mmap.mmap(f.fileno(), 4096); print(flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# --- the contract


@both
async def test_pages_become_figures_and_answers_are_counted(own: bool) -> None:
    async with serving(_page(PAGE.encode())) as pod, reading(pod, own=own) as one:
        figures = await one.metrics()
        assert figures is not None
        assert (figures.running, figures.waiting, one.scrapes) == (2, 1, 1)
        assert (await one.loads()).running == 3
        assert one.snapshot() == Figures()


@both
async def test_a_pod_that_does_not_answer_is_unknown(own: bool) -> None:
    pod = ServingPod(POD, "chat", "pod", "chat/pool", "127.0.0.1", 9)
    async with reading(pod, own=own) as one:
        assert await one.metrics() is None
        assert await one.loads() == Figures()
        assert one.scrapes == 0


@both
async def test_a_schedulers_snapshot_is_followed(own: bool, shared: Path) -> None:
    pod = ServingPod(POD, "chat", "pod", "chat/pool", "127.0.0.1", 9)
    with mapping(shared) as pid:
        async with reading(pod, own=own) as one:
            one.watch(0.02)
            one.follow(pid)
            await until(lambda: one.snapshot().running == 3)
            with shared.open("r+b") as file:
                file.write(snapshot_of(num_running_reqs=5, num_waiting_reqs=0))
            await until(lambda: one.snapshot().running == 5)


async def test_a_reader_without_a_snapshot_does_not_wake_for_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = ServingPod(POD, "chat", "pod", "chat/pool", "127.0.0.1", 9)
    channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handover, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rest, woken = asyncio.sleep, asyncio.Event()

    async def sleep(seconds: float) -> None:
        woken.set()
        await rest(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with channel, far, handover, its_end, mapping(shared) as pid:
        running = asyncio.create_task(
            confined._Reader(confined.begin_of(pod, "SGLang"), far, its_end).run()
        )
        channel.setblocking(False)
        channel.send(pack(Describe(())))
        await asyncio.get_running_loop().sock_recv(channel, 65536)  # it has begun
        for _ in range(10):
            await rest(0)
        assert not woken.is_set()
        descriptor = open_snapshot(pid)
        assert descriptor is not None
        socket.send_fds(handover, [b"."], [descriptor])
        os.close(descriptor)
        await woken.wait()
        channel.shutdown(socket.SHUT_RDWR)
        await running


@both
@pytest.mark.parametrize(
    ("command", "machines"),
    [
        ("python -m sglang.launch_server --nnodes 2 --node-rank 1", 2),
        ("vllm serve llama --nnodes=4", 4),
        ("python -m sglang.launch_server --nnodes 1", 1),
        ("sh -c sglang --nnodes $SIZE", 1),
    ],
)
async def test_an_engine_of_several_machines_is_known_by_its_command_line(
    own: bool, command: str, machines: int
) -> None:
    code = "import time; time.sleep(600)"
    arguments = [sys.executable, "-c", code, *command.split()]
    process = subprocess.Popen(arguments)  # noqa: ASYNC220  # it only starts
    pod = ServingPod(POD, "c", "pod", "c/p", "127.0.0.1", 9, pids=(process.pid,))
    # Until it has become that program its command line is still ours.
    await until(lambda: "time.sleep(600)" in " ".join(psutil.Process(process.pid).cmdline()))
    try:
        async with reading(pod, own=own) as one:
            await until(lambda: one.machines == machines)
    finally:
        process.kill()
        process.wait()


# --- hostile pods


@both
async def test_a_compressed_page_is_not_unpacked(own: bool) -> None:
    bomb = gzip.compress(bytes(64 * _MIB))
    page = _page(bomb, **{"Content-Encoding": "gzip"})
    async with serving(page) as pod, reading(pod, own=own) as one:
        assert await one.metrics() is None


@both
async def test_a_page_without_an_end_is_left_at_its_limit(own: bool) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while sent < 20 * LARGEST_PAGE:
                await answer.write(b"x 1\n" * 16384)
                sent += 65536
        return answer

    async with serving(endless) as pod, reading(pod, own=own) as one:
        assert await one.metrics() is None
    assert sent < 10 * LARGEST_PAGE


@both
async def test_a_redirect_leads_nowhere(own: bool) -> None:
    asked = 0

    async def elsewhere(_: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        raise web.HTTPFound("/metrics")

    async with serving(elsewhere) as pod, reading(pod, own=own) as one:
        assert await one.metrics() is None
    assert asked == 1


def test_a_snapshot_that_shrinks_is_a_short_read(shared: Path) -> None:
    with mapping(shared) as pid:
        descriptor = open_snapshot(pid)
        assert descriptor is not None
        one = Snapshot(descriptor)
        assert one.read().running == 3
        os.truncate(shared, 0)
        assert one.read() == Figures()
        one.close()


def test_of_a_huge_snapshot_the_beginning_is_read(shared: Path) -> None:
    os.truncate(shared, 2 << 30)
    with mapping(shared) as pid:
        descriptor = open_snapshot(pid)
        assert descriptor is not None
        assert len(Snapshot(descriptor).raw()) == LARGEST_SNAPSHOT
        assert Snapshot(descriptor).read().running == 3
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_not_opened(shared: Path, tmp_path: Path, kind: str) -> None:
    # What the scheduler mapped has been replaced since, by somebody who wants us to wait or to err.
    proc = tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "root").symlink_to(tmp_path / "root")
    (tmp_path / "root").mkdir()
    evil = tmp_path / "root" / shared.name
    (proc / "7" / "maps").write_text(f"7f00-7f01 rw-s 0 0:1 5 /{shared.name}\n")
    if kind == "link":
        evil.symlink_to(shared)
    elif kind == "pipe":
        os.mkfifo(evil)
    else:
        evil.mkdir()
    assert open_snapshot(7, proc) is None
    evil.unlink() if kind != "folder" else evil.rmdir()
    evil.write_bytes(b"x")
    descriptor = open_snapshot(7, proc)
    assert descriptor is not None
    os.close(descriptor)


def test_a_link_among_the_folders_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "root").mkdir()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "sglang_loads_1").write_bytes(b"secret")
    (tmp_path / "7" / "root" / "shm").symlink_to(tmp_path / "ours")
    (tmp_path / "7" / "maps").write_text("7f00-7f01 rw-s 0 0:1 5 /shm/sglang_loads_1\n")
    assert open_snapshot(7, tmp_path) is None


# --- the processes


async def test_a_reader_has_no_right_no_file_and_no_program() -> None:
    pod = ServingPod(POD, "chat", "pod", "chat/pool", "127.0.0.1", 9)
    with factory() as (channel, process):
        one = ConfinedReaders(channel).of(pod, "SGLang")
        await one.metrics()
        fields = status_of(child(process))
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        assert fields["oom_score_adj"] == "1000"
        one.close()


def test_a_confined_process_opens_no_file_and_starts_no_program(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    code = f"""
import os, subprocess
from rose_agent.signals import confined
confined._confine()
for what in (lambda: open({str(secret)!r}), lambda: open({str(tmp_path / "new")!r}, "w"),
             lambda: subprocess.run(["/bin/true"])):
    try:
        what()
        print("done")
    except PermissionError:
        print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if "no Landlock" in done.stderr:
        pytest.skip("this kernel has no Landlock")
    assert done.stdout.split() == ["refused"] * 3


async def test_one_replicas_reader_dies_and_the_others_do_not_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "_BACK_OFF_SECONDS", (0.05, 0.1))
    async with serving(_page(PAGE.encode())) as pod:
        with factory() as (channel, process):
            first = ConfinedReaders(channel).of(pod, "SGLang")
            await first.metrics()
            victim = child(process)
            second = ConfinedReaders(channel).of(pod, "SGLang")
            assert await second.metrics() is not None
            victim.send_signal(signal.SIGBUS)
            await until(lambda: victim.pid not in psutil.pids())
            assert await second.metrics() is not None
            assert second.scrapes == 2

            await until(lambda: first._channel is not None and bool(process.children()[1:]))
            assert await first.metrics() is not None
            assert first.scrapes == 2, "what the one before had counted still counts"
            first.close()
            second.close()


async def test_a_reader_that_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TIMEOUT_SECONDS", -0.9)
    pod = ServingPod(POD, "chat", "pod", "chat/pool", "127.0.0.1", 9)
    with factory() as (channel, process):
        one = ConfinedReaders(channel).of(pod, "SGLang")
        await until(lambda: bool(process.children()))
        child(process).suspend()
        assert await one.metrics() is None
        for number in range(2000):  # more than a socket holds
            one.watch(number / 1e6)
        child(process).resume()
        one.close()


async def test_words_of_no_reader_end_it_and_change_nothing() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pod = ServingPod(POD, "chat", "pod", "chat/pool", "127.0.0.1", 9, pids=(1,))
    one = ConfinedReaders(ours).of(pod, "SGLang")
    _, descriptors, _, _ = socket.recv_fds(theirs, 65536, 2)
    taken_over = socket.socket(fileno=descriptors[0])
    taken_over.send(pack(Latest(WireFigures(running=1))))
    await until(lambda: one.snapshot().running == 1)
    taken_over.send(msgspec.msgpack.encode({"type": "latest", "figures": {"running": -1}}))
    await until(lambda: one._channel is None)
    assert one.snapshot() == Figures()
    assert one.machines is None
    one.close()
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    taken_over.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "reported",
    [
        {"type": "latest", "figures": {"requests": {str(n): n for n in range(65)}}},
        {"type": "latest", "figures": {"requests": {"x" * 257: 1}}},
        {"type": "latest", "figures": {"activity": [1] * 65}},
        {"type": "latest", "figures": {"kv_permille": 1001}},
        {"type": "latest", "figures": {"running": 2**53}},
        {"type": "described", "machines": 0},
    ],
)
def test_what_a_reader_may_say_is_bounded(reported: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        replies.decode(msgspec.msgpack.encode(reported))
    assert replies.decode(pack(Described(2))) == Described(2)


async def test_the_agent_ends_with_its_factory() -> None:
    with factory() as (channel, process):
        running = asyncio.create_task(ConfinedReaders(channel).run())
        await asyncio.sleep(0)
        process.kill()
        with pytest.raises(ReaderFactoryGone, match="has ended"):
            await running
