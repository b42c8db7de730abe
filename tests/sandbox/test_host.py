"""The host keeps what an agent's world was: turns, records, forks, and who may go on.

The fake runtime stands in for runc, whose own contract tests are the same; its inspector here
compares all of its world, as the witness compares what Linux shows.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path

import pytest

from rose_core.sandboxes.outside import EffectsCrossed, EgressEffect
from rose_core.sandboxes.policy import HostPressure, ModelWait
from rose_dev.waiting import until
from rose_sandbox.answers import Restored
from rose_sandbox.box import key_of
from rose_sandbox.errors import (
    AlreadyThere,
    CannotCheckpoint,
    CommandDiffers,
    RuntimeFailed,
    TokensDiffer,
    UnknownSandbox,
    UnknownTurn,
)
from rose_sandbox.host import RENEW_SECONDS, Host
from rose_sandbox.inspector.inspector import Effects
from rose_sandbox.runtimes.fake import FakeRuntime
from rose_sandbox.runtimes.runtime import CheckpointParts, Facts, Handle, Kind, SandboxSpec
from rose_weights.errors import Fenced, StoreFailed
from rose_weights.store.record_store import StoredRecords
from rose_weights.store.records import OwnedSession, Records, TurnRecord, digest_of
from rose_weights.store.store import Store
from tests.weights.faulty import FaultyDisk


class Comparing:
    """Compares the fake's whole world with that of the mark."""

    def __init__(self, runtime: FakeRuntime, scratch: Path) -> None:
        self.runtime, self.scratch = runtime, scratch
        self.marks: dict[str, tuple[bytes, bytes]] = {}
        self.last: dict[str, tuple[bytes, bytes]] = {}
        self.unsure: tuple[str, ...] = ()

    async def _look(self, key: str) -> tuple[bytes, bytes]:
        (handle,) = [one for one in await self.runtime.sandboxes() if one.key == key]
        folder = self.scratch / key
        folder.mkdir(parents=True, exist_ok=True)
        undumpable, self.runtime._undumpable = self.runtime._undumpable, frozenset()
        parts = await FakeRuntime.checkpoint(self.runtime, handle, Kind.FULL, folder)
        self.runtime._undumpable = undumpable
        assert parts.files is not None
        assert parts.processes is not None
        processes = json.loads(parts.processes.path.read_bytes())
        del processes["next_pid"]
        return parts.files.path.read_bytes(), json.dumps(processes).encode()

    async def watch(self, key: str, facts: Facts) -> None:
        del facts
        self.marks[key] = self.last[key] = await self._look(key)

    async def effects(self, key: str, facts: Facts) -> Effects:
        del facts
        now, mark = await self._look(key), self.marks[key]
        self.last[key] = now
        return Effects(now[0] != mark[0], now[1] != mark[1], self.unsure)

    async def saved(self, key: str) -> None:
        self.marks[key] = self.last[key]

    async def forget(self, key: str) -> None:
        self.marks.pop(key, None)

    async def close(self) -> None:
        pass


class World:
    """A host, and what is around it."""

    def __init__(self, root: Path, name: str = "one", runtime: FakeRuntime | None = None) -> None:
        self.root, self.name = root, name
        self.runtime = runtime or FakeRuntime()
        self.inspector = Comparing(self.runtime, root / name / "looks")
        self.records = Records(Store(root / "store"), "grpo")
        self.traffic = HostPressure()
        self.renew_seconds = RENEW_SECONDS
        self.host = self.started()

    def started(self) -> Host:
        return Host(
            self.runtime,
            self.inspector,
            self.records,
            owner=self.name,
            scratch=self.root / self.name / "scratch",
            pressure=lambda: self.traffic,
            renew_seconds=self.renew_seconds,
        )

    def put_server(self, address: tuple[str, int]) -> None:
        """Let a server of the test be at port 80 of every sandbox."""
        absent = self.runtime.connect

        async def connect(handle: Handle, port: int) -> socket.socket:
            if port != 80:
                return await absent(handle, port)
            made = socket.create_connection(address)
            made.setblocking(False)
            return made

        self.runtime.connect = connect  # type: ignore[method-assign]

    async def output_of(self, session: str, command: str, host: Host | None = None) -> str:
        result = await (host or self.host).exec(session, command, 5)
        assert result.exit_code == 0, result
        return result.stdout.decode().strip()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_turn_saves_what_it_changed_and_a_lost_sandbox_comes_back(world: World) -> None:
    host = world.host
    await host.create("s")
    await world.output_of("s", "export SECRET=7; echo 1 > /home/a")
    await world.output_of("s", "sleep 100 &")
    result = await host.checkpoint("s", range(10))
    assert (result.turn, result.recoverable_to, result.action) == (1, 1, "full")
    await world.output_of("s", "cat /home/a")
    assert (await host.checkpoint("s", range(20))).action == "none"
    await world.output_of("s", "echo 2 > /home/a")
    assert (await host.checkpoint("s", range(30))).action == "files"
    await world.output_of("s", "echo lost > /home/a")
    await world.runtime.end(Handle(key_of("s")))
    back = await host.restore("s")
    assert back.ids == tuple(range(30))
    assert back.told.turn == 3
    assert await world.output_of("s", "cat /home/a") == "2"
    assert await world.output_of("s", "echo $SECRET") == "7"
    assert (await host.exec("s", "pgrep -x sleep", 5)).exit_code == 0


async def test_another_host_takes_a_session_over_and_the_first_one_is_fenced(
    world: World, tmp_path: Path
) -> None:
    other = World(tmp_path, "two")
    await world.host.create("s")
    await world.output_of("s", "echo 1 > /home/a")
    await world.host.checkpoint("s", [1, 2])
    back = await other.host.restore("s", tokens=digest_of([1, 2]))
    assert back.ids == (1, 2)
    assert await other.output_of("s", "cat /home/a") == "1"
    await world.output_of("s", "echo stale > /home/a")
    with pytest.raises(Fenced, match="two's under fence"):
        await world.host.checkpoint("s", [1, 2, 3])
    with pytest.raises(Fenced):
        await world.host.state("s")
    assert await world.runtime.sandboxes() == ()


async def test_a_restored_sandbox_is_looked_at_while_its_session_is_taken_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.host.create("a")
    await world.host.checkpoint("a", [1])
    looked, watch, own = threading.Event(), world.inspector.watch, world.records.claim

    async def watching(key: str, facts: Facts) -> None:
        looked.set()
        await watch(key, facts)

    def owning(session: str, owner: str, over: int | None = None) -> OwnedSession:
        assert looked.wait(20), "the look waits for the records"
        return own(session, owner, over)

    monkeypatch.setattr(world.inspector, "watch", watching)
    monkeypatch.setattr(world.records, "claim", owning)
    assert (await world.host.restore("a")).told.turn == 1


async def test_a_sandbox_whose_session_is_not_taken_over_is_not_looked_at_further(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(session: str, owner: str, over: int | None = None) -> OwnedSession:
        raise StoreFailed("the disk is full")

    monkeypatch.setattr(world.records, "claim", refused)
    with pytest.raises(StoreFailed):
        await world.host.create("a")
    assert world.inspector.marks == {}
    assert await world.runtime.sandboxes() == ()


async def test_a_host_that_slept_over_a_restore_takes_the_session_from_nobody(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller gave up and went to another host; it wakes up at any step of what it was asked."""
    two = World(tmp_path, "two")
    await world.host.create("s")
    await world.host.checkpoint("s", [1, 2])
    seen = await world.host.fence("s")
    real = world.runtime.restore_all

    async def slow(*parts: object) -> tuple[Handle, ...]:
        await two.host.restore("s")
        return await real(*parts)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:  # between its look and the step that takes it over
        patched.setattr(world.runtime, "restore_all", slow)
        with pytest.raises(Fenced, match="two's under fence"):
            await world.host.restore("s")
    assert await world.runtime.sandboxes() == ()
    with pytest.raises(Fenced, match="was seen under fence"):  # before it has begun
        await world.host.restore("s", over=seen)
    await two.host.checkpoint("s", [1, 2, 3])
    assert (await world.host.restore("s", over=await world.host.fence("s"))).ids == (1, 2, 3)


async def test_of_two_that_restore_a_session_at_one_host_the_late_one_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives a slow host up, and is not heard, asks it again."""
    await world.host.create("s")
    await world.output_of("s", "export STEP=1")
    await world.host.checkpoint("s", [1, 2])
    seen = await world.host.fence("s")
    real, first, done = world.records.history, threading.Lock(), threading.Event()

    def slow(record: TurnRecord) -> bytes:
        if not first.acquire(blocking=False):
            done.wait()
        return real(record)

    monkeypatch.setattr(world.records, "history", slow)
    both = [asyncio.create_task(world.host.restore("s", over=seen)) for _ in range(2)]
    ended, late = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    done.set()
    result = await asyncio.gather(*ended, *late, return_exceptions=True)
    assert [type(one) for one in result] == [Restored, Fenced]
    assert await world.output_of("s", "echo $STEP") == "1"
    assert (await world.host.checkpoint("s", [1, 2, 3])).recoverable_to == 2


async def test_an_end_waits_for_what_gives_the_session_back(world: World) -> None:
    await world.host.create("s")
    await world.host.checkpoint("s", [1, 2])
    back = asyncio.create_task(world.host.restore("s"))
    await asyncio.sleep(0)
    await world.host.end("s")
    await back
    assert world.host.sessions() == ()
    assert await world.runtime.sandboxes() == ()


async def test_a_checkpoint_beside_an_end_says_that_the_sandbox_is_gone(world: World) -> None:
    await world.host.create("s")
    (box,) = world.host._boxes.values()
    async with box.lock:
        asked = asyncio.create_task(world.host.checkpoint("s", [1, 2]))
        await asyncio.sleep(0)
        await world.host.end("s")
    with pytest.raises(UnknownSandbox):
        await asked


async def test_an_end_that_comes_late_is_of_that_hosts_sandbox_alone(
    world: World, tmp_path: Path
) -> None:
    two = World(tmp_path, "two")
    await world.host.create("s")
    await world.host.checkpoint("s", [1, 2])
    await two.host.restore("s")
    for _ in range(2):  # its caller may send it again
        with pytest.raises(Fenced, match="two's under fence"):
            await world.host.end("s", forget=True)
    assert await world.runtime.sandboxes() == ()
    assert (await two.host.checkpoint("s", [1, 2, 3])).recoverable_to == 2
    await two.host.end("s", forget=True)
    assert two.records.turns("s") == ()


async def test_a_host_that_slept_while_it_created_takes_the_session_from_nobody(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, real = World(tmp_path, "two"), world.runtime.create

    async def slow(spec: SandboxSpec) -> Handle:
        await two.host.create("s")
        return await real(spec)

    monkeypatch.setattr(world.runtime, "create", slow)
    with pytest.raises(Fenced, match="two's under fence"):
        await world.host.create("s")
    assert await world.runtime.sandboxes() == ()
    assert (await two.host.checkpoint("s", [1])).recoverable_to == 1


async def test_a_host_learns_that_it_is_fenced_before_its_next_boundary(
    world: World, tmp_path: Path
) -> None:
    world.renew_seconds = 0.01
    world.host = world.started()
    await world.host.create("s")
    await world.host.create("kept")
    await world.host.checkpoint("s", [1, 2])
    await World(tmp_path, "two").host.restore("s")
    await until(lambda: world.host.sessions() == ("kept",))
    with pytest.raises(Fenced, match="two's under fence"):
        await world.host.exec("s", "echo stale > /home/a", 5)
    await until_one(world.runtime)
    await world.host.close()


async def test_a_fenced_sandbox_that_cannot_be_ended_is_tried_again_and_hides_no_other(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failed end stopped the asking for good, and left out the close of what is beneath."""
    world.renew_seconds = 0.01
    world.host = world.started()
    other = World(tmp_path, "two")
    for session in ("a", "b"):
        await world.host.create(session)
        await world.host.checkpoint(session, [1])
    real, refused, closed = world.runtime.end, 0, False

    async def end(handle: Handle) -> None:
        nonlocal refused
        if handle.key == key_of("a") and refused < 3:
            refused += 1
            raise RuntimeFailed("runc delete: device or resource busy")
        await real(handle)

    async def close() -> None:
        nonlocal closed
        closed = True

    monkeypatch.setattr(world.runtime, "end", end)
    monkeypatch.setattr(world.inspector, "close", close)
    await other.host.restore("a")
    await until(lambda: refused > 0)
    with pytest.raises(Fenced, match="two's under fence"):
        await world.host.exec("a", "echo stale > /home/a", 5)
    await other.host.restore("b")
    await until(lambda: world.host.sessions() == ())
    assert refused == 3
    assert await world.runtime.sandboxes() == ()
    await world.host.close()
    assert closed


async def test_a_sandbox_ends_though_its_boundary_fails_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had left the host's list by then, and nobody ended it."""
    await world.host.create("s")
    goes_on = hold_suspends(world, monkeypatch)

    def publish(*_: object) -> None:
        raise StoreFailed("away")

    async def resume(_handle: Handle) -> Handle:
        raise RuntimeFailed("criu restore: no memory")

    monkeypatch.setattr(world.records, "publish", publish)
    monkeypatch.setattr(world.runtime, "resume", resume)
    await world.host.turn_began("s", [1], wait=ModelWait(120.0, 0.9))
    while (await world.host.state("s")).phase != "saving":  # noqa: ASYNC110
        await asyncio.sleep(0)
    ending = asyncio.create_task(world.host.end("s"))
    await asyncio.sleep(0)
    goes_on.set()
    await ending
    assert await world.runtime.sandboxes() == ()


def hold_suspends(world: World, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Suspends wait for the event."""
    goes_on, real = asyncio.Event(), world.runtime.suspend

    async def suspend(handle: Handle, into: Path) -> CheckpointParts:
        await goes_on.wait()
        return await real(handle, into)

    monkeypatch.setattr(world.runtime, "suspend", suspend)
    return goes_on


async def until_one(runtime: FakeRuntime) -> None:
    """Wait until one sandbox is left."""
    async with asyncio.timeout(60):
        while len(await runtime.sandboxes()) != 1:  # noqa: ASYNC110 - the runtime tells nobody
            await asyncio.sleep(0)


async def test_a_store_that_is_away_fences_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.host.create("s")

    def away(_owned: object) -> None:
        raise StoreFailed("away")

    monkeypatch.setattr(world.records, "check", away)
    await world.host.renew()
    assert world.host.sessions() == ("s",)
    await world.host.close()


async def test_a_fork_goes_on_from_a_turn_whether_its_parent_runs_is_away_or_is_gone(
    world: World,
) -> None:
    host = world.host
    await host.create("s")
    await world.output_of("s", "echo 1 > /home/a")
    await host.checkpoint("s", [1])
    await world.output_of("s", "echo 2 > /home/a")
    await host.checkpoint("s", [1, 2])
    children = list((await host.fork("s", 3, 1)).sessions)
    await host.suspend("s")
    children += (await host.fork("s", 1, 1)).sessions
    await host.end("s")
    children += (await host.fork("s", 2, 1)).sessions
    for number, child in enumerate(children):
        assert await world.output_of(child, "cat /home/a") == "1"
        await world.output_of(child, f"echo {number} > /home/a")
        assert (await host.checkpoint(child, [1, 9])).recoverable_to == 2
    assert [await world.output_of(child, "cat /home/a") for child in children] == list("012345")
    with pytest.raises(UnknownTurn, match="no record of turn 7 of session s"):
        await host.fork("s", 2, 7)
    with pytest.raises(UnknownTurn, match="there are: none"):
        await host.fork("nobody", 2)
    with pytest.raises(ValueError, match="n is 0"):
        await host.fork("s", 0)


async def test_a_suspended_sandbox_comes_back_when_it_is_needed(world: World) -> None:
    await world.host.create("s")
    await world.output_of("s", "export A=1")
    result = await world.host.suspend("s")
    assert (result.phase, result.recoverable_to) == ("suspended", 1)
    assert await world.output_of("s", "echo $A") == "1"
    assert (await world.host.state("s")).phase == "acting"


@pytest.mark.parametrize("step", ["exec", "write", "read", "connect"])
async def test_a_grader_that_comes_while_a_session_ends_finds_its_sandbox(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It waited for the suspend, and was told that the sandbox is suspended."""
    await world.host.create("s")
    await world.output_of("s", "echo 1 > /home/a")
    world.runtime.serve(world.host._box("s").handle, 80, b"up")
    goes_on = hold_suspends(world, monkeypatch)
    ending = asyncio.create_task(world.host.ended("s"))
    while (await world.host.state("s")).phase != "saving":  # noqa: ASYNC110
        await asyncio.sleep(0)

    async def grade() -> bytes:
        match step:
            case "exec":
                return (await world.host.exec("s", "cat /home/a", 5)).stdout
            case "write":
                await world.host.write_file("s", "/home/a", b"1\n")
            case "connect":
                (await world.host.connect("s", 80)).close()
        return await world.host.read_file("s", "/home/a")

    grading = asyncio.create_task(grade())
    for _ in range(5):
        await asyncio.sleep(0)
    goes_on.set()
    assert (await ending).recoverable_to == 1
    assert await grading == b"1\n"
    assert (await world.host.state("s")).phase == "acting"


async def test_a_session_that_ends_unsaved_beside_a_command_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, runtime=FakeRuntime(undumpable=["uring"]))
    await world.host.create("s")
    await world.output_of("s", "uring &")
    goes_on = hold_suspends(world, monkeypatch)
    ending = asyncio.create_task(world.host.ended("s"))
    while (await world.host.state("s")).phase != "saving":  # noqa: ASYNC110
        await asyncio.sleep(0)
    grading = asyncio.create_task(world.output_of("s", "echo on"))
    for _ in range(5):
        await asyncio.sleep(0)
    goes_on.set()
    assert (await ending).unsaved == "uring"
    assert await grading == "on"


async def test_a_long_wait_suspends_and_the_answer_resumes(world: World) -> None:
    await world.host.create("s")
    await world.host.turn_began("s", [1], wait=ModelWait(120.0, 0.9))
    while (await world.host.state("s")).phase != "suspended":  # noqa: ASYNC110
        await asyncio.sleep(0)
    result = await world.host.tokens_ready("s")
    assert (result.phase, result.recoverable_to, result.action) == ("acting", 1, "suspend")
    await world.output_of("s", "true")


async def test_no_checkpoint_runs_while_serving_burns_its_budget(world: World) -> None:
    await world.host.create("s")
    world.traffic = HostPressure(serving_burns=True)
    await world.host.turn_began("s", [1])
    await asyncio.sleep(0.25)
    assert (await world.host.state("s")).recoverable_to == 0
    world.traffic = HostPressure()
    result = await world.host.tokens_ready("s")
    assert result.recoverable_to == 1


async def test_what_cannot_be_saved_is_named_and_the_sandbox_lives_on(tmp_path: Path) -> None:
    world = World(tmp_path, runtime=FakeRuntime(undumpable=["uring"]))
    await world.host.create("s")
    await world.output_of("s", "uring &")
    with pytest.raises(CannotCheckpoint, match="uring"):
        await world.host.checkpoint("s", [1])
    assert (await world.host.state("s")).recoverable_to == 0
    await world.output_of("s", "pgrep -x uring")


async def test_bad_calls_are_refused_by_name(world: World) -> None:
    await world.host.create("s")
    with pytest.raises(AlreadyThere):
        await world.host.create("s")
    await world.host.end("s")
    with pytest.raises(AlreadyThere, match="has records"):
        await world.host.create("s")
    await world.host.end("s", forget=True)
    await world.host.create("s")


# The five failures of "Safe to Resume?", each excluded or found out.


async def test_incomplete_what_the_inspector_cannot_vouch_for_is_saved_in_full(
    world: World,
) -> None:
    await world.host.create("s")
    await world.host.checkpoint("s", [1])
    world.inspector.unsure = ("lost events",)
    assert (await world.host.checkpoint("s", [2])).action == "full"


async def test_incomplete_a_record_that_failed_is_made_up_for_by_the_next(
    world: World, tmp_path: Path
) -> None:
    await world.host.create("s")
    await world.output_of("s", "echo 1 > /home/a")
    whole = world.records._store
    full = Store(tmp_path / "store", disk=FaultyDisk(0, full=True))
    world.records._store = StoredRecords(full)
    with pytest.raises(CannotCheckpoint, match="No space left"):
        await world.host.checkpoint("s", [1])
    world.records._store = whole
    result = await world.host.checkpoint("s", [2])
    assert (result.action, result.recoverable_to) == ("full", 2)
    await world.host.restore("s", 2)
    assert await world.output_of("s", "cat /home/a") == "1"


@pytest.mark.parametrize("error", [RuntimeFailed("runc state: gone"), KeyError("a bug")])
async def test_a_boundary_that_dies_before_it_saves_holds_no_agent(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The clock stood at Waiting: every command raised the same, and no turn could begin."""
    await world.host.create("s")
    await world.host.checkpoint("s", [1])
    await world.output_of("s", "echo 1 > /home/a")

    async def effects(_key: str, _facts: Facts) -> Effects:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(world.inspector, "effects", effects)
        await world.host.turn_began("s", [1, 2])
        result = await world.host.tokens_ready("s")
    assert (result.phase, result.recoverable_to) == ("acting", 1)
    assert result.unsaved
    await world.output_of("s", "echo 2 > /home/b")
    result = await world.host.checkpoint("s", [1, 2, 3])
    assert (result.recoverable_to, result.action, result.reason) == (3, "full", "unknown changes")
    await world.runtime.end(Handle(key_of("s")))
    await world.host.restore("s")
    assert await world.output_of("s", "cat /home/a") == "1"
    assert await world.output_of("s", "cat /home/b") == "2"


async def test_a_suspend_that_dies_is_brought_back_by_whoever_needs_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record, and no processes either: the sandbox was lost to its agent for ever."""
    await world.host.create("s")
    await world.output_of("s", "echo 1 > /home/a")

    def away(*_: object) -> None:
        raise StoreFailed("away")

    async def busy(_handle: Handle) -> Handle:
        raise RuntimeFailed("criu restore: no memory")

    with monkeypatch.context() as broken:
        broken.setattr(world.records, "publish", away)
        broken.setattr(world.runtime, "resume", busy)
        await world.host.turn_began("s", [1], wait=ModelWait(120.0, 0.9))
        with pytest.raises(RuntimeFailed, match="no memory"):
            await world.host.tokens_ready("s")
    result = await world.host.tokens_ready("s")
    assert (result.phase, result.recoverable_to) == ("acting", 0)
    assert await world.output_of("s", "cat /home/a") == "1"
    assert (await world.host.checkpoint("s", [1, 2])).recoverable_to == 2


@pytest.mark.parametrize("change", ["true", "echo 2 > /home/a"])
async def test_a_lost_block_of_an_earlier_record_is_made_up_for_at_once(
    world: World, tmp_path: Path, change: str
) -> None:
    """What points to it is no record, and a turn that changed nothing had nothing else to say."""
    await world.host.create("s")
    await world.output_of("s", "echo 1 > /home/a")
    await world.host.checkpoint("s", [1])
    for block in (tmp_path / "store" / "record-blocks").glob("*/??/*"):
        block.unlink()
    await world.output_of("s", change)
    result = await world.host.checkpoint("s", [1, 2])
    assert (result.recoverable_to, result.action) == (2, "full")
    assert result.reason == "an earlier record is lost"
    there = await world.output_of("s", "cat /home/a")
    await world.runtime.end(Handle(key_of("s")))
    assert (await world.host.restore("s")).ids == (1, 2)
    assert await world.output_of("s", "cat /home/a") == there
    assert (await world.host.checkpoint("s", [1, 2, 3])).action == "none"


async def test_a_damaged_block_that_a_restored_host_reads_again_is_made_up_for_at_once(
    world: World, tmp_path: Path
) -> None:
    """It has no index of what lies where, so it reads what the record before has."""
    await world.host.create("s")
    await world.output_of("s", "echo 1 > /home/a")
    await world.host.checkpoint("s", [1])
    await world.runtime.end(Handle(key_of("s")))
    await world.host.restore("s")
    files = world.records.read("s").files
    assert files is not None
    (name,) = files.packs.values()
    (block,) = (tmp_path / "store" / "record-blocks").glob(f"*/??/{name}")
    block.write_bytes(b"torn")
    await world.output_of("s", "echo 2 > /home/a")
    result = await world.host.checkpoint("s", [1, 2])
    assert (result.recoverable_to, result.action) == (2, "full")
    assert result.reason == "an earlier record is lost"
    await world.runtime.end(Handle(key_of("s")))
    assert (await world.host.restore("s")).ids == (1, 2)
    assert await world.output_of("s", "cat /home/a") == "2"


async def test_inconsistent_halves_are_never_joined(world: World, tmp_path: Path) -> None:
    await world.host.create("s")
    await world.output_of("s", "true")
    await world.host.checkpoint("s", [1])
    await world.output_of("s", "echo 1 > /home/a")
    cut = world.runtime.checkpoint

    async def moving(handle: Handle, kind: Kind, into: Path) -> CheckpointParts:
        parts = await cut(handle, kind, into)
        if kind is Kind.FILES:  # a job in the background goes on while the files are cut
            await world.runtime.exec(handle, "sleep 100 &", 5)
            await world.runtime.exec(handle, "echo 2 > /home/a", 5)
        return parts

    world.runtime.checkpoint = moving  # type: ignore[method-assign]
    result = await world.host.checkpoint("s", [1, 2])
    assert result.action == "full"
    await world.host.restore("s")
    assert await world.output_of("s", "cat /home/a") == "2"
    assert (await world.host.exec("s", "pgrep -x sleep", 5)).exit_code == 0
    del tmp_path


async def test_stale_reads_of_the_world_outside_are_told(world: World) -> None:
    await world.host.create("s")
    await world.host.checkpoint("s", [1])
    box = world.host._box("s")
    await world.host._left(box, EgressEffect(0, "GET", "news.example/"))
    await world.host.checkpoint("s", [1, 2])
    back = await world.host.restore("s", 1)
    assert [one.target for one in back.crossing.stale] == ["news.example/"]


async def test_an_unbound_replay_is_refused(world: World) -> None:
    await world.host.create("s")
    counted = "echo x >> /home/log"
    for _ in range(2):  # asked twice, run once
        assert (await world.host.exec("s", counted, 5, name="turn-1")).exit_code == 0
    assert await world.output_of("s", "cat /home/log") == "x"
    with pytest.raises(CommandDiffers, match="turn-1 of session s was another command"):
        await world.host.exec("s", "rm /home/log", 5, name="turn-1")
    await world.host.checkpoint("s", [1, 2])
    await world.host.restore("s")
    await world.host.exec("s", counted, 5, name="turn-1")
    assert await world.output_of("s", "cat /home/log") == "x"
    with pytest.raises(TokensDiffer, match="restore the turn whose tokens you have"):
        await world.host.restore("s", tokens=digest_of([1, 3]))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), StoreFailed("away")])
async def test_a_suspend_without_a_record_runs_on_as_after_any_resume(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The inspector went on with the group of processes that were gone, the proxy in no network."""
    await world.host.create("s")
    watched: list[str] = []
    real = world.inspector.watch

    async def watch(key: str, facts: Facts) -> None:
        watched.append(key)
        await real(key, facts)

    def publish(*_: object) -> None:
        raise error

    monkeypatch.setattr(world.inspector, "watch", watch)
    with monkeypatch.context() as away:
        away.setattr(world.records, "publish", publish)
        with pytest.raises(CannotCheckpoint, match=r"No space|away"):
            await world.host.suspend("s")
    assert watched == [key_of("s")]
    assert (await world.host.exec("s", "echo on", 20)).stdout == b"on\n"
    assert (await world.host.checkpoint("s", [1])).recoverable_to > 0


async def test_a_fenced_host_that_suspends_ends_its_sandbox(world: World, tmp_path: Path) -> None:
    await world.host.create("s")
    await world.host.checkpoint("s", [1])
    await world.output_of("s", "echo 1 > /home/a")
    await World(tmp_path, "two").host.restore("s")
    with pytest.raises(Fenced):
        await world.host.suspend("s")
    assert world.host.sessions() == ()
    assert await world.runtime.sandboxes() == ()


async def test_unrecorded_effects_an_effect_is_in_the_record_before_it_happens(
    world: World, tmp_path: Path
) -> None:
    await world.host.create("s")
    await world.host.checkpoint("s", [1])
    await world.host._left(world.host._box("s"), EgressEffect(0, "POST", "pay.example/orders"))
    # The host dies here, before the turn's boundary; another one goes on.
    other = World(tmp_path, "two")
    with pytest.raises(EffectsCrossed, match=r"turn 2: POST pay\.example/orders"):
        await other.host.restore("s")
    back = await other.host.restore("s", flag=True)
    assert [one.target for one in back.crossing.once] == ["pay.example/orders"]
    await other.host.checkpoint("s", [1, 2])
    assert [one.target for one in other.records.read("s").effects] == ["pay.example/orders"]
