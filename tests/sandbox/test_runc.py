"""Real sandboxes keep the contract, keep their tenants in, and survive what agents do."""

from __future__ import annotations

import asyncio
import errno
import sys
from pathlib import Path

import grpc.aio
import pytest

from bench.sandboxes.own import own_runtime
from rose_sandbox.errors import BadPath, CannotCheckpoint, RuntimeFailed, SandboxError
from rose_sandbox.runtimes import kernel, volume
from rose_sandbox.runtimes.parts import Parts
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import Kind, Runtime, SandboxSpec
from rose_wire.cgroups import hierarchies
from tests.sandbox.contract import (
    SMALL,
    RealContract,
    Serve,
    kill_in_checkpoint,
    output_of,
    serve_in_python,
)

pytestmark = pytest.mark.sandbox

CALL = "import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(*map(int, sys.argv[1:])) < 0)"


class TestRunc(RealContract):
    @pytest.fixture
    def runtime(self, runc: RuncRuntime) -> Runtime:
        return runc

    @pytest.fixture
    def serve(self) -> Serve:
        return serve_in_python


async def test_a_tenant_is_nobody_on_the_host_and_sees_no_network(runc: RuncRuntime) -> None:
    box = await runc.create(SandboxSpec("box"))
    facts = await runc.facts(box)
    assert facts.cgroup is not None
    for pid in facts.pids:
        status = Path(f"/proc/{pid}/status").read_text()  # noqa: ASYNC240
        assert f"Uid:\t{kernel.FIRST_ID}" in status
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
    assert await output_of(
        runc, box, "id -u; ls /sys/class/net 2>/dev/null; ip -br link | wc -l"
    ) == ("0\n1\n")
    for forbidden in (
        "mount -t tmpfs x /mnt",
        "unshare -U true",
        "echo 1 > /proc/sys/kernel/panic",
        "cat /proc/kcore | head -c 1 | grep .",
        "mknod /home/disk b 254 0",
        "python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(425, 8, 0) < 0)'",
        # clone into a user namespace of its own, with every right in it
        f"python3 -c {CALL!r} 56 $((0x10000000 | 17)) 0 0 0 0",
        # the same by clone3, whose flags lie in memory
        "python3 -c 'import ctypes, sys; flags = ctypes.create_string_buffer(88); flags[3] = 16; "
        "sys.exit(ctypes.CDLL(None).syscall(435, flags, 88) < 0)'",
        # vsock, which no network namespace holds back, and the kernel's ciphers
        "python3 -c 'import socket; socket.socket(40, 1)'",
        "python3 -c 'import socket; socket.socket(38, 5)'",
    ):
        assert (await runc.exec(box, forbidden, 20)).exit_code != 0, forbidden


async def test_links_of_a_tenant_do_not_lead_to_files_of_the_host(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's")
    box = await runc.create(SandboxSpec("box"))
    await output_of(runc, box, f"ln -s {secret} /home/a; ln -s /proc/1/root{secret} /home/b")
    await output_of(
        runc, box, f"ln -s {tmp_path} /home/folder; ln -s ../../../../..{secret} /home/c"
    )
    for path in ("/home/a", "/home/b", "/home/c", "/home/folder/secret"):
        with pytest.raises(BadPath):
            await runc.read_file(box, path)
    with pytest.raises(BadPath):
        await runc.write_file(box, "/home/folder/secret", b"the tenant's")
    assert secret.read_text() == "the host's"


async def test_a_full_disk_and_a_full_memory_end_what_fills_them(runc: RuncRuntime) -> None:
    box = await runc.create(SandboxSpec("box", limits=SMALL))
    full = await runc.exec(box, "dd if=/dev/zero of=/home/x bs=1M count=64", 60)
    assert b"quota exceeded" in full.stderr or b"No space" in full.stderr
    assert await output_of(runc, box, "rm /home/x; echo on") == "on\n"
    greedy = await runc.exec(box, "python3 -c 'x = bytearray(1 << 30)'", 60)
    assert greedy.exit_code != 0
    assert await output_of(runc, box, "echo on") == "on\n"


async def test_a_sandbox_that_takes_no_commands_says_why(runc: RuncRuntime) -> None:
    box = await runc.create(SandboxSpec("box", limits=SMALL))

    async def break_it() -> None:
        # The answer goes with the folder, so a turn lasts to its limit, and a busy machine may need
        # more than one.
        for _ in range(60):
            await runc.exec(box, "rm -rf /run/rose", 1)

    with pytest.raises(RuntimeFailed, match=r"takes no commands .*/run/rose.*earlier turn"):
        await break_it()


async def test_what_cannot_be_saved_is_named_and_the_sandbox_lives_on(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    box = await runc.create(SandboxSpec("box"))
    # A deleted file over CRIU's limit, still open.
    hold = "dd if=/dev/zero of=/home/x bs=1M count=70 2>/dev/null; (rm x; sleep 1000) <x & "
    hold += "until pgrep -x sleep; do sleep 0.05; done"
    assert (await runc.exec(box, hold, 60)).exit_code == 0
    for kind in (Kind.PROCESSES, Kind.FULL):
        with pytest.raises(CannotCheckpoint) as refused:
            await runc.checkpoint(box, kind, tmp_path / "..")
        assert refused.value.what == "large deleted file"
    assert not (tmp_path / ".." / "files.tar").exists()
    await output_of(runc, box, "pgrep -x sleep")
    (tmp_path / "into").mkdir()
    await runc.checkpoint(box, Kind.FILES, tmp_path / "into")


async def test_a_runtime_that_starts_anew_finds_what_ran_and_what_slept(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    box = await runc.create(SandboxSpec("box"))
    other = await runc.create(SandboxSpec("other"))
    await output_of(runc, box, "X=1; sleep 1000 &", session="main")
    await output_of(runc, other, "X=2", session="main")
    await runc.suspend(other, tmp_path)
    # Half of one more, from a host that was killed in the middle.
    (tmp_path / "host" / "sandboxes" / "half").mkdir()
    later = RuncRuntime(tmp_path / "host", runc.parts)
    assert [handle.key for handle in await later.sandboxes()] == ["box", "other"]
    assert await output_of(later, box, "echo $X; pgrep -x sleep >&2", session="main") == "1\n"
    awake = await later.resume(other)
    assert await output_of(later, awake, "echo $X", session="main") == "2\n"
    await later.create(SandboxSpec("half"))


async def test_a_host_that_was_killed_in_a_checkpoint_leaves_nothing_of_it(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    """Its cut was taken for the next one, with old files, and its sandbox stood still for ever."""
    box = await runc.create(SandboxSpec("box"))
    await output_of(runc, box, "echo old > /home/x")
    await kill_in_checkpoint(runc, tmp_path / "host", box, Kind.FILES, tmp_path)

    later = RuncRuntime(tmp_path / "host", runc.parts)
    await output_of(later, box, "echo new > /home/x")
    parts = await later.checkpoint(box, Kind.FILES, tmp_path)
    await later.end(box)
    box = await later.restore(parts, parts.spec)
    assert await output_of(later, box, "cat /home/x") == "new\n"


async def test_cuts_of_one_moment_wait_for_the_disk_together(
    runc: RuncRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel makes those of one folder one after the other, each with a wait of its own."""
    box = await runc.create(SandboxSpec("box"))
    await output_of(runc, box, "echo x > /home/x")
    places: list[Path] = []
    snapshot = kernel.snapshot_subvolume

    def noted(source: Path, folder: Path) -> None:
        places.append(folder.parent)
        snapshot(source, folder)

    monkeypatch.setattr(volume, "snapshot_subvolume", noted)
    children = await runc.fork(box, ["a", "b"])
    assert len(set(places)) == len(places) == 3
    assert [await output_of(runc, one, "cat /home/x") for one in children] == ["x\n", "x\n"]
    assert not any(place.exists() for place in places)


async def test_a_host_that_was_killed_in_a_cut_leaves_nothing_of_it(
    runc: RuncRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await runc.create(SandboxSpec("box"))
    made: list[Path] = []
    snapshot = kernel.snapshot_subvolume

    def dying(source: Path, folder: Path) -> None:
        made.append(folder)
        snapshot(source, folder)
        raise OSError(errno.EIO, "stopped here")

    monkeypatch.setattr(volume, "snapshot_subvolume", dying)
    monkeypatch.setattr(volume, "_remove_new", lambda _: None)  # as one that is dead
    with pytest.raises(SandboxError):
        await runc.checkpoint(box, Kind.FILES, tmp_path)
    monkeypatch.undo()
    assert made[0].exists()
    later = RuncRuntime(tmp_path / "host", runc.parts)
    assert await output_of(later, box, "echo on") == "on\n"
    assert not made[0].parent.exists()


def left_on_the_machine(word: str) -> list[str]:
    """Mounts, folders of mounts and control groups with a word in their path."""
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    places += map(str, Path("/run").iterdir())
    places += [str(group) for top in hierarchies() for group in top.glob("rose-sandbox-*")]
    return [place for place in places if word in place]


async def test_mounts_lie_apart_from_the_folder_of_state_and_end_with_the_runtime(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    box = await runc.create(SandboxSpec("box"))
    assert left_on_the_machine(str(tmp_path)) == []
    mounted = left_on_the_machine(runc.group)
    await runc.close()
    assert left_on_the_machine(runc.group) == mounted != []  # its sandbox lives on
    later = RuncRuntime(tmp_path / "host", runc.parts)
    await output_of(later, box, "echo on > /home/x")
    await later.end(box)
    await later.close()
    assert left_on_the_machine(runc.group) == []


async def test_what_a_killed_test_left_is_removed_by_the_next_one(
    parts: Parts, tmp_path: Path
) -> None:
    program = f"""
import asyncio, os, signal
from pathlib import Path
from bench.sandboxes.own import own_runtime
from rose_sandbox.runtimes.runtime import SandboxSpec
async def main():
    async with own_runtime(Path({str(tmp_path / "killed")!r})) as runtime:
        box = await runtime.create(SandboxSpec("box"))
        await runtime.exec(box, "sleep 1000 &", 20)
        await runtime._runc("box", "pause")
        print(runtime.group, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await killed.communicate()
    group = out.decode().strip()
    assert left_on_the_machine(group) != []
    async with own_runtime(tmp_path / "next", parts):
        # A control group goes only without a process.
        assert left_on_the_machine(group) == []


async def test_a_process_that_speaks_grpc_holds_sandboxes_too(runc: RuncRuntime) -> None:
    # Its library begins threads in forks of the process, and one with threads gets no namespace.
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        box = await runc.create(SandboxSpec("box"))
        assert (await runc.exec(box, "id -u", 20)).stdout == b"0\n"
    finally:
        await server.stop(None)
