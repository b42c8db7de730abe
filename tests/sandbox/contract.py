"""What every runtime does alike; a subclass says which one, and how a server starts in it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rose_sandbox.errors import (
    AlreadyThere,
    BadPath,
    CannotRestore,
    NotListening,
    Suspended,
    TooLarge,
    UnknownImage,
    UnknownSandbox,
)
from rose_sandbox.runtimes.runtime import (
    CheckpointParts,
    ExecResult,
    Handle,
    Kind,
    Limits,
    Runtime,
    SandboxSpec,
    State,
)

SMALL = Limits(cpus=1, memory_bytes=256 << 20, pids=64, disk_bytes=32 << 20)

Serve = Callable[[Runtime, Handle, int, bytes], Awaitable[None]]
_SERVER = """
import socket
door = socket.create_server(('127.0.0.1', {port}))
while True:
    connection, _ = door.accept()
    connection.sendall({answer!r})
    connection.close()
"""

_KILLED = """
import asyncio, os, signal
from pathlib import Path
from {module} import {name}
from rose_sandbox.runtimes.runtime import Handle, Kind
runtime = {name}(Path({home!r}))
async def cut(name, cut, real=runtime._volume.cut):
    await real(name, cut)
    os.kill(os.getpid(), signal.SIGKILL)
runtime._volume.cut = cut
asyncio.run(runtime.checkpoint(Handle({key!r}), Kind({kind!r}), Path({folder!r})))
"""


async def kill_in_checkpoint(
    runtime: Runtime, home: Path, box: Handle, kind: Kind, folder: Path
) -> None:
    """Another process with the same home begins a checkpoint, and is killed at its cut."""
    of = type(runtime)
    names = {"module": of.__module__, "name": of.__name__, "key": box.key}
    program = _KILLED.format(**names, home=str(home), kind=kind.value, folder=str(folder))
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await killed.wait() == -signal.SIGKILL


async def output_of(runtime: Runtime, box: Handle, command: str, session: str | None = None) -> str:
    """What a command says that must go well."""
    result = await runtime.exec(box, command, 20, session=session)
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def serve_in_python(runtime: Runtime, box: Handle, port: int, answer: bytes) -> None:
    """A server that answers at a port, in a sandbox that has Python."""
    program = _SERVER.format(port=port, answer=answer).encode()
    await runtime.write_file(box, "/home/server.py", program)
    door = f"/dev/tcp/127.0.0.1/{port}"
    listens = f"until (exec 3<>{door}) 2>/dev/null; do sleep 0.05; done"
    await output_of(runtime, box, f"python3 server.py & {listens}")


class Contract:
    """Inherited by the test class of each runtime, which has fixtures ``runtime`` and ``serve``."""

    @pytest.fixture
    async def box(self, runtime: Runtime) -> Handle:
        return await runtime.create(SandboxSpec("box", limits=SMALL))

    async def test_a_command_runs_and_says_how_it_ended(
        self, runtime: Runtime, box: Handle
    ) -> None:
        assert await output_of(runtime, box, "echo one && echo two") == "one\ntwo\n"
        assert (await runtime.exec(box, "exit 7", 20)).exit_code == 7
        missing = await runtime.exec(box, "no-such-command", 20)
        assert missing.exit_code == 127
        assert b"not found" in missing.stderr

    async def test_it_starts_in_its_folder_with_its_environment(self, runtime: Runtime) -> None:
        box = await runtime.create(
            SandboxSpec("box", limits=SMALL, environment={"A": "b c"}, folder="/home")
        )
        assert await output_of(runtime, box, "pwd; echo $A") == "/home\nb c\n"

    async def test_a_session_keeps_what_its_shell_knows_and_others_do_not(
        self, runtime: Runtime, box: Handle
    ) -> None:
        await output_of(runtime, box, "export X=1; cd /etc", session="main")
        assert await output_of(runtime, box, "echo $X; pwd", session="main") == "1\n/etc\n"
        assert await output_of(runtime, box, "echo $X; pwd") == "\n/home\n"
        assert await output_of(runtime, box, "echo $X", session="other") == "\n"

    async def test_a_session_that_exits_is_lost_and_begins_anew(
        self, runtime: Runtime, box: Handle
    ) -> None:
        await output_of(runtime, box, "export X=1", session="main")
        ended = await runtime.exec(box, "exit 3", 20, session="main")
        assert (ended.exit_code, ended.session_lost) == (3, True)
        assert await output_of(runtime, box, "echo $X", session="main") == "\n"

    async def test_a_command_that_never_ends_is_killed_and_the_sandbox_lives_on(
        self, runtime: Runtime, box: Handle
    ) -> None:
        ended = await runtime.exec(box, "echo begun; sleep 1000", 1)
        assert (ended.exit_code, ended.timed_out) == (124, True)
        assert ended.stdout == b"begun\n"
        await output_of(runtime, box, "export X=1", session="main")
        assert (await runtime.exec(box, "sleep 1000", 1, session="main")).timed_out
        assert await output_of(runtime, box, "echo $X", session="main") == "1\n"

    async def test_what_a_command_left_in_the_background_outlives_a_later_one_that_is_killed(
        self, runtime: Runtime, box: Handle
    ) -> None:
        await output_of(runtime, box, "sleep 1001 &")
        assert (await runtime.exec(box, "sleep 1000", 1)).timed_out
        await output_of(runtime, box, "pgrep -x sleep")

    @pytest.mark.parametrize("session", ["main", None])
    async def test_a_command_whose_caller_has_gone_is_killed_and_the_next_one_does_not_wait(
        self, runtime: Runtime, box: Handle, session: str | None
    ) -> None:
        await output_of(runtime, box, "export X=1; sleep 1001 &", session="main")
        command = "echo 1 > /home/begun; sleep 1000; echo 1 > /home/ended"
        asking = asyncio.create_task(runtime.exec(box, command, 600, session=session))
        async with asyncio.timeout(20):
            while (await runtime.exec(box, "test -e /home/begun", 20)).exit_code:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await output_of(runtime, box, "echo $X", session="main") == "1\n"
        left = await output_of(runtime, box, "pgrep -x sleep")
        assert len(left.split()) == 1, "the job of before alone"
        if session is None:  # a session's shell lives, and goes on to what stands behind
            with pytest.raises(BadPath):
                await runtime.read_file(box, "/home/ended")

    async def test_a_caller_that_goes_at_once_leaves_no_command_that_begins_later(
        self, runtime: Runtime, box: Handle
    ) -> None:
        for steps in range(6):
            command = "sleep 2 && echo 1 > /home/ended"  # a kill is late on busy cores
            asking = asyncio.create_task(runtime.exec(box, command, 600, session="main"))
            for _ in range(steps):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert await output_of(runtime, box, "sleep 3; echo on", session="main") == "on\n"
        with pytest.raises(BadPath):
            await runtime.read_file(box, "/home/ended")

    async def test_long_output_is_cut_in_the_middle(self, runtime: Runtime, box: Handle) -> None:
        await runtime.write_file(box, "/home/long", b"a" * 600 + b"b" * 600)
        result = await runtime.exec(box, "cat long", 20, output_bytes=100)
        assert (result.stdout, result.cut) == (b"a" * 50 + b"b" * 50, True)

    async def test_files_go_in_and_out(self, runtime: Runtime, box: Handle) -> None:
        data = bytes(range(256)) * 100
        await runtime.write_file(box, "/opt/new/folder/x.bin", data)
        assert await runtime.read_file(box, "/opt/new/folder/x.bin") == data
        await output_of(runtime, box, "echo out > /home/y")
        assert await runtime.read_file(box, "/home/y") == b"out\n"

    async def test_bad_files_are_refused_by_name(self, runtime: Runtime, box: Handle) -> None:
        with pytest.raises(BadPath):
            await runtime.read_file(box, "/home/none")
        with pytest.raises(BadPath):
            await runtime.write_file(box, "relative", b"")
        await runtime.write_file(box, "/home/x", b"12345")
        with pytest.raises(TooLarge):
            await runtime.read_file(box, "/home/x", limit=4)
        with pytest.raises(BadPath):
            await runtime.write_file(box, "/home/x/below", b"")
        with pytest.raises(TooLarge):
            await runtime.write_file(box, "/home/big", bytes(SMALL.disk_bytes + 1))
        assert await output_of(runtime, box, "echo on") == "on\n"

    async def test_bad_sandboxes_are_refused_by_name(self, runtime: Runtime, box: Handle) -> None:
        with pytest.raises(AlreadyThere):
            await runtime.create(SandboxSpec("box"))
        with pytest.raises(UnknownImage, match="base"):
            await runtime.create(SandboxSpec("other", image="none"))
        for key in ("", "a/b", "..", "-x", "x" * 64):
            with pytest.raises(BadPath):
                await runtime.create(SandboxSpec(key))
        with pytest.raises(UnknownSandbox):
            await runtime.exec(Handle("none"), "true", 1)

    async def test_an_ended_sandbox_is_gone_and_its_key_is_free(
        self, runtime: Runtime, box: Handle
    ) -> None:
        await output_of(runtime, box, "echo 1 > /home/x; sleep 1000 &")
        await runtime.end(box)
        await runtime.end(box)
        assert await runtime.sandboxes() == ()
        with pytest.raises(UnknownSandbox):
            await runtime.exec(box, "true", 1)
        box = await runtime.create(SandboxSpec("box", limits=SMALL))
        assert (await runtime.exec(box, "test -e /home/x", 20)).exit_code == 1
        assert (await runtime.exec(box, "pgrep -x sleep", 20)).exit_code == 1

    async def test_a_full_checkpoint_gives_files_processes_and_shells_back(
        self, runtime: Runtime, box: Handle, tmp_path: Path
    ) -> None:
        await output_of(runtime, box, "export X=1; echo 1 > /home/x; sleep 1000 &", session="main")
        parts = await runtime.checkpoint(box, Kind.FULL, tmp_path)
        assert parts.files is not None
        assert parts.files.bytes == parts.files.path.stat().st_size > 0
        await output_of(
            runtime, box, "export X=2; echo 2 > /home/x; pkill -x sleep", session="main"
        )
        assert (await runtime.exec(box, "pgrep -x sleep", 20)).exit_code == 1
        await runtime.end(box)

        box = await runtime.restore(parts, parts.spec)
        assert await output_of(runtime, box, "echo $X; cat /home/x", session="main") == "1\n1\n"
        await output_of(runtime, box, "pgrep -x sleep")
        assert (await runtime.exec(box, "sleep 1000", 1)).timed_out
        await output_of(runtime, box, "pkill -x sleep")

    async def test_files_alone_come_back_without_processes(
        self, runtime: Runtime, box: Handle, tmp_path: Path
    ) -> None:
        await output_of(runtime, box, "echo 1 > /home/x; sleep 1000 &")
        parts = await runtime.checkpoint(box, Kind.FILES, tmp_path)
        assert parts.processes is None
        other = await runtime.restore(parts, replace(parts.spec, key="other"))
        assert await output_of(runtime, other, "cat /home/x") == "1\n"
        assert (await runtime.exec(other, "pgrep -x sleep", 20)).exit_code == 1
        await output_of(runtime, box, "pgrep -x sleep")

    async def test_parts_of_two_checkpoints_are_joined(
        self, runtime: Runtime, box: Handle, tmp_path: Path
    ) -> None:
        folders = [tmp_path / "files", tmp_path / "processes"]
        for folder in folders:
            folder.mkdir()
        await output_of(runtime, box, "echo 1 > /home/x")
        files = await runtime.checkpoint(box, Kind.FILES, folders[0])
        await output_of(runtime, box, "sleep 1000 &")
        processes = await runtime.checkpoint(box, Kind.PROCESSES, folders[1])
        assert processes.files is None
        await runtime.end(box)
        joined = CheckpointParts(files.spec, files.files, processes.processes)
        box = await runtime.restore(joined, joined.spec)
        assert await output_of(runtime, box, "cat /home/x") == "1\n"
        await output_of(runtime, box, "pgrep -x sleep")

    async def test_torn_parts_are_refused_and_leave_nothing(
        self, runtime: Runtime, box: Handle, tmp_path: Path
    ) -> None:
        await output_of(runtime, box, "echo 1 > /home/x", session="main")
        parts = await runtime.checkpoint(box, Kind.FULL, tmp_path)
        await runtime.end(box)
        assert parts.files is not None
        assert parts.processes is not None
        for part in (parts.files, parts.processes):
            whole = part.path.read_bytes()
            part.path.write_bytes(whole[: len(whole) // 2])
            with pytest.raises(CannotRestore):
                await runtime.restore(parts, parts.spec)
            part.path.write_bytes(whole)
        assert await runtime.sandboxes() == ()
        box = await runtime.restore(parts, parts.spec)
        assert await output_of(runtime, box, "cat /home/x") == "1\n"

    async def test_children_of_a_fork_begin_alike_and_go_their_own_ways(
        self, runtime: Runtime, box: Handle
    ) -> None:
        await output_of(runtime, box, "export X=1; echo 1 > /home/x; sleep 1000 &", session="main")
        children = await runtime.fork(box, ["a", "b", "c"])
        assert [child.key for child in children] == ["a", "b", "c"]
        for child in children:
            await output_of(runtime, child, "pgrep -x sleep")
            name = child.key
            await output_of(
                runtime, child, f"export X={name}; echo {name} > /home/x", session="main"
            )
        for child in (*children, box):
            name = "1" if child is box else child.key
            expected = f"{name}\n{name}\n"
            assert (
                await output_of(runtime, child, "echo $X; cat /home/x", session="main") == expected
            )
        with pytest.raises(AlreadyThere):
            await runtime.fork(box, ["d", "a"])
        assert len(await runtime.sandboxes()) == 4

    async def test_any_number_begin_from_the_same_parts_all_or_none(
        self, runtime: Runtime, box: Handle, tmp_path: Path
    ) -> None:
        await output_of(runtime, box, "export X=1; echo 1 > /home/x; sleep 1000 &", session="main")
        parts = await runtime.checkpoint(box, Kind.FULL, tmp_path)
        await output_of(runtime, box, "echo 2 > /home/x")
        specs = [replace(parts.spec, key=key) for key in ("a", "b", "c")]
        children = await runtime.restore_all(parts, specs)
        assert [child.key for child in children] == ["a", "b", "c"]
        for child in children:
            await output_of(runtime, child, "pgrep -x sleep")
            assert (
                await output_of(runtime, child, "echo $X; cat /home/x", session="main") == "1\n1\n"
            )
            await output_of(runtime, child, f"echo {child.key} > /home/x")
        for child in children:
            assert await output_of(runtime, child, "cat /home/x") == f"{child.key}\n"
        with pytest.raises(AlreadyThere):
            await runtime.restore_all(parts, [replace(parts.spec, key="d"), specs[0]])
        assert len(await runtime.sandboxes()) == 4

    async def test_a_suspended_sandbox_has_no_process_and_runs_on_when_resumed(
        self, runtime: Runtime, box: Handle, tmp_path: Path
    ) -> None:
        await output_of(runtime, box, "export X=1; echo 1 > /home/x; sleep 1000 &", session="main")
        parts = await runtime.suspend(box, tmp_path)
        assert parts.files is not None
        assert parts.processes is not None
        facts = await runtime.facts(box)
        assert (facts.state, facts.pids) == (State.SUSPENDED, ())
        with pytest.raises(Suspended):
            await runtime.exec(box, "true", 1)
        with pytest.raises(AlreadyThere):
            await runtime.create(SandboxSpec("box"))
        again = await runtime.resume(box)
        assert again.incarnation == box.incarnation + 1
        assert await output_of(runtime, again, "echo $X; cat /home/x", session="main") == "1\n1\n"
        await output_of(runtime, again, "pgrep -x sleep")
        with pytest.raises(UnknownSandbox):
            await runtime.exec(box, "true", 1)
        assert (await runtime.facts(again)).state is State.RUNNING

    async def test_a_server_in_it_is_reached_at_its_port(
        self, runtime: Runtime, box: Handle, serve: object
    ) -> None:
        with pytest.raises(NotListening):
            await runtime.connect(box, 8000)
        assert callable(serve)
        await serve(runtime, box, 8000, b"hello")
        with await runtime.connect(box, 8000) as connection:
            assert await asyncio.get_running_loop().sock_recv(connection, 100) == b"hello"

    async def test_a_sandbox_that_wants_too_much_is_stopped_at_its_limits(
        self, runtime: Runtime, box: Handle
    ) -> None:
        few = await runtime.create(SandboxSpec("few", limits=replace(SMALL, pids=8)))
        results: list[ExecResult] = []
        while not results or results[-1].exit_code == 0:
            results.append(await runtime.exec(few, "sleep 1000 &", 3))
            assert len(results) <= 8
        await runtime.end(few)
        assert await output_of(runtime, box, "echo on") == "on\n"


class RealContract(Contract):
    """What runtimes of real processes do besides."""

    @pytest.mark.parametrize("session", ["main", None])
    @pytest.mark.parametrize("set_up", ["", "set -m; "])
    async def test_no_shell_of_a_killed_command_goes_on_because_its_child_was_killed_first(
        self, runtime: Runtime, box: Handle, session: str | None, set_up: str
    ) -> None:
        # Of twenty pairs some are met child first, whatever the order in which they are killed.
        shells = "for i in {1..20}; do (sleep 1000; echo 1 > /home/ended) & done"
        command = f"{set_up}{shells}; echo 1 > /home/begun; wait"
        asking = asyncio.create_task(runtime.exec(box, command, 600, session=session))
        async with asyncio.timeout(20):
            while (await runtime.exec(box, "test -e /home/begun", 20)).exit_code:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await output_of(runtime, box, "while pgrep -x sleep; do sleep 0.01; done")
        with pytest.raises(BadPath):
            await runtime.read_file(box, "/home/ended")
