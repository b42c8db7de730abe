"""Sandboxes of gVisor keep the contract, meet a kernel of their own, and say what they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sandboxes.own import own_gvisor
from rose_core.sandboxes.outside import EgressEffect
from rose_sandbox.egress import Egress
from rose_sandbox.errors import (
    BadPath,
    CannotCheckpoint,
    CannotRestore,
    RuntimeFailed,
    Unavailable,
)
from rose_sandbox.runtimes.kernel import FIRST_ID
from rose_sandbox.runtimes.parts import GVISOR, find_parts
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runsc import RunscRuntime
from rose_sandbox.runtimes.runtime import CheckpointParts, Kind, Runtime, SandboxSpec
from tests.sandbox.contract import (
    SMALL,
    RealContract,
    Serve,
    kill_in_checkpoint,
    output_of,
    serve_in_python,
)

pytestmark = pytest.mark.sandbox


class TestRunsc(RealContract):
    @pytest.fixture
    def runtime(self, runsc: RunscRuntime) -> Runtime:
        return runsc

    @pytest.fixture
    def serve(self) -> Serve:
        return serve_in_python


async def test_a_tenant_meets_another_kernel_and_is_nobody_on_the_host(
    runsc: RunscRuntime,
) -> None:
    box = await runsc.create(SandboxSpec("box", limits=SMALL))
    await output_of(runsc, box, "sleep 1000 &")
    assert "Starting gVisor" in await output_of(runsc, box, "dmesg")
    facts = await runsc.facts(box)
    assert facts.init is None
    assert facts.pids
    for pid in facts.pids:
        of = Path(f"/proc/{pid}")
        assert f"Uid:\t{FIRST_ID}" in (of / "status").read_text()
        assert b"sleep" not in (of / "cmdline").read_bytes()
    assert await output_of(
        runsc, box, "id -u; ls /sys/class/net 2>/dev/null; ip -br link | wc -l"
    ) == ("0\n1\n")
    for forbidden in ("mount -t tmpfs x /mnt", "mknod /home/disk b 254 0", "ping -c 1 1.1.1.1"):
        assert (await runsc.exec(box, forbidden, 20)).exit_code != 0, forbidden


async def test_a_key_lives_as_often_as_it_likes(runsc: RunscRuntime) -> None:
    """gVisor's control sockets were left, and it has four places for them."""
    for _ in range(5):
        await runsc.end(await runsc.create(SandboxSpec("box", limits=SMALL)))


async def test_links_of_a_tenant_do_not_lead_to_files_of_the_host(
    runsc: RunscRuntime, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's")
    box = await runsc.create(SandboxSpec("box"))
    await output_of(runsc, box, f"ln -s {secret} /home/a; ln -s ../../../../..{secret} /home/b")
    for path in ("/home/a", "/home/b", f"/proc/1/root{secret}"):
        with pytest.raises(BadPath):
            await runsc.read_file(box, path)
    await output_of(runsc, box, f"ln -s {tmp_path} /home/folder")
    with pytest.raises(BadPath):
        await runsc.write_file(box, "/home/folder/secret", b"the tenant's")
    assert secret.read_text() == "the host's"


async def test_what_lies_in_memory_and_in_tmp_comes_back_with_its_half(
    runsc: RunscRuntime, tmp_path: Path
) -> None:
    """Of gVisor's own accord an empty ``/tmp`` would lie in memory, and not among the files."""
    box = await runsc.create(SandboxSpec("box"))
    await output_of(runsc, box, "echo 1 > /tmp/x; echo 2 > /run/x; echo 3 > /dev/shm/x")
    parts = await runsc.checkpoint(box, Kind.FULL, tmp_path)
    for key, expected in (("whole", "1\n2\n3\n"), ("files", "1\n")):
        processes = parts.processes if key == "whole" else None
        half = CheckpointParts(parts.spec, parts.files, processes)
        made = await runsc.restore(half, SandboxSpec(key))
        answer = await runsc.exec(made, "cat /tmp/x /run/x /dev/shm/x", 20)
        assert answer.stdout.decode() == expected


async def test_files_of_one_runtime_begin_a_sandbox_of_another_and_processes_do_not(
    runsc: RunscRuntime, runc: RuncRuntime, tmp_path: Path
) -> None:
    for saver, reader in ((runsc, runc), (runc, runsc)):
        (into := tmp_path / saver.name).mkdir()
        box = await saver.create(SandboxSpec("box"))
        await output_of(saver, box, "echo 1 > /home/x; chown 7:8 /home/x; rm /etc/debian_version")
        parts = await saver.checkpoint(box, Kind.FULL, into)
        with pytest.raises(CannotRestore, match="saved by another runtime"):
            await reader.restore(parts, parts.spec)
        made = await reader.restore(CheckpointParts(parts.spec, parts.files), parts.spec)
        look = "cat /home/x; stat -c %u:%g /home/x; test -e /etc/debian_version; echo $?"
        assert await output_of(reader, made, look) == "1\n7:8\n1\n"
        await saver.end(box)
        await reader.end(made)


async def test_what_cannot_be_saved_is_named_and_the_sandbox_lives_on(
    runsc: RunscRuntime, tmp_path: Path
) -> None:
    box = await runsc.create(SandboxSpec("box"))
    hold = "echo 1 > /home/x; (rm x; sleep 1000) <x & until pgrep -x sleep; do sleep 0.05; done"
    assert (await runsc.exec(box, hold, 60)).exit_code == 0
    for kind in (Kind.PROCESSES, Kind.FULL):
        with pytest.raises(CannotCheckpoint, match="--runtime runc") as refused:
            await runsc.checkpoint(box, kind, tmp_path)
        assert refused.value.what == "deleted file"
        assert "\n" not in str(refused.value), "a trace of gVisor's own program"
    assert not (tmp_path / "files.tar").exists()
    await output_of(runsc, box, "pgrep -x sleep")
    await runsc.checkpoint(box, Kind.FILES, tmp_path)


async def test_a_sandbox_that_takes_no_commands_says_why(runsc: RunscRuntime) -> None:
    box = await runsc.create(SandboxSpec("box", limits=SMALL))

    async def break_it() -> None:
        # The answer goes with the folder, so a turn lasts to its limit, and a busy machine may need
        # more than one.
        for _ in range(60):
            await runsc.exec(box, "rm -rf /run/rose", 1)

    with pytest.raises(RuntimeFailed, match=r"takes no commands .*/run/rose.*earlier turn"):
        await break_it()


async def test_a_runtime_that_starts_anew_finds_what_ran_what_slept_and_what_stood_still(
    runsc: RunscRuntime, tmp_path: Path
) -> None:
    box = await runsc.create(SandboxSpec("box"))
    other = await runsc.create(SandboxSpec("other"))
    await output_of(runsc, box, "X=1; sleep 1000 &", session="main")
    await output_of(runsc, other, "X=2", session="main")
    await runsc.suspend(other, tmp_path)
    await kill_in_checkpoint(runsc, tmp_path / "gvisor", box, Kind.FULL, tmp_path)

    later = RunscRuntime(tmp_path / "gvisor", runsc.parts)
    assert [handle.key for handle in await later.sandboxes()] == ["box", "other"]
    assert await output_of(later, box, "echo $X; pgrep -x sleep >&2", session="main") == "1\n"
    awake = await later.resume(other)
    assert await output_of(later, awake, "echo $X", session="main") == "2\n"
    await later.end(box)
    await later.end(awake)
    await later.close()


async def test_the_way_out_is_the_hosts_proxy_after_a_restore_too(tmp_path: Path) -> None:
    received: list[str] = []

    async def record(effect: EgressEffect) -> None:
        received.append(effect.method)

    try:
        parts = find_parts(GVISOR)
    except Unavailable as error:
        pytest.skip(str(error))
    ask = "curl -s -x http://127.0.0.1:3128 http://forbidden.example/ -o /dev/stdout"
    async with own_gvisor(tmp_path / "gvisor", parts, way_out=True) as runtime:
        box = await runtime.create(SandboxSpec("box"))
        for life in range(2):
            facts = await runtime.facts(box)
            assert facts.door is not None
            egress = Egress(["allowed.example"], record)
            await egress.listen_at(facts.door)
            assert "is not allowed" in await output_of(runtime, box, ask)
            await egress.close()
            if life == 0:
                (into := tmp_path / "into").mkdir()
                saved = await runtime.checkpoint(box, Kind.FULL, into)
                await runtime.end(box)
                box = await runtime.restore(saved, saved.spec)
        full = await runtime.exec(box, "touch /run/rose-way/x", 20)
        assert b"Read-only file system" in full.stderr
    assert received == [], "what is not allowed is no effect"
