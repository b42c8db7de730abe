"""What is done once and not for every sandbox: CRIU's look at the kernel, unpacking for a fork."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rose_sandbox.errors import RuntimeFailed
from rose_sandbox.runtimes import container
from rose_sandbox.runtimes.processes import freeze
from rose_sandbox.runtimes.runc import RuncRuntime, learn_kernel
from rose_sandbox.runtimes.runtime import Handle, Kind, SandboxSpec

pytestmark = pytest.mark.sandbox


async def test_criu_looks_at_the_kernel_once(runc: RuncRuntime, tmp_path: Path) -> None:
    """In a container, where ``/run`` is not in memory, each call looked anew."""
    box = await runc.create(SandboxSpec("box"))
    await runc.checkpoint(box, Kind.PROCESSES, tmp_path)
    (log,) = (tmp_path / "host").glob("sandboxes/box/dump/dump.log")
    assert "Loaded kdat cache" in log.read_text(errors="replace")


async def test_what_is_known_of_another_kernel_is_found_out_anew(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    known = tmp_path / "criu.kdat"
    known.write_bytes(b"of before the machine started")
    os.utime(known, (0, 0))
    await learn_kernel(runc.parts.path, known)
    made = known.stat()
    assert made.st_size > 500
    await learn_kernel(runc.parts.path, known)
    assert known.stat().st_ino == made.st_ino, "of this kernel already"


async def test_what_cannot_be_kept_is_no_end_of_the_start(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    """Where ``/run`` cannot be written, no sandbox could be made."""
    with pytest.raises(RuntimeFailed, match=r"no/criu\.kdat cannot be written"):
        await learn_kernel(runc.parts.path, tmp_path / "no" / "criu.kdat")


async def test_sandboxes_of_one_record_are_unpacked_once(
    runc: RuncRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await runc.create(SandboxSpec("box"))
    await runc.exec(box, "A=1; echo 2 > /home/b", 20, session="main")
    parts = await runc.checkpoint(box, Kind.FULL, tmp_path)
    unpacked = []
    real = container.unpack_images

    async def unpack(path: str, file: Path, images: Path) -> None:
        unpacked.append(images)
        await real(path, file, images)

    monkeypatch.setattr(container, "unpack_images", unpack)
    made = await runc.restore_all(parts, [SandboxSpec(f"child{n}") for n in range(3)])
    for child in made:
        result = await runc.exec(child, "echo $A; cat /home/b", 20, session="main")
        assert result.stdout == b"1\n2\n"
    assert len(unpacked) == 1
    assert not unpacked[0].exists(), "gone when all of them run"


async def test_of_a_fork_that_is_cancelled_no_child_stays(
    runc: RuncRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that ran by then were known to nobody, and ran on."""
    box = await runc.create(SandboxSpec("box"))
    begun, real = asyncio.Event(), runc._begin

    async def begin(spec: SandboxSpec, beginning: Any) -> Handle:  # noqa: ANN401  # its own
        if spec.key == "late":
            await asyncio.Event().wait()
        made = await real(spec, beginning)
        begun.set()
        return made

    monkeypatch.setattr(runc, "_begin", begin)
    forking = asyncio.create_task(runc.fork(box, ["early", "late"]))
    await begun.wait()
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert await runc.sandboxes() == (box,)


async def test_a_checkpoint_that_is_cancelled_as_it_freezes_lets_go_on(
    runc: RuncRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that froze it went on after its caller, and nobody thawed it."""
    box = await runc.create(SandboxSpec("box"))
    begun, go, frozen = threading.Event(), threading.Event(), threading.Event()

    def slowly(groups: Sequence[Path]) -> None:
        begun.set()
        go.wait(20)
        freeze(groups)
        frozen.set()

    monkeypatch.setattr("rose_sandbox.runtimes.runc.freeze", slowly)
    saving = asyncio.create_task(runc.checkpoint(box, Kind.FILES, tmp_path))
    await asyncio.to_thread(begun.wait, 20)
    saving.cancel()
    asyncio.get_running_loop().call_soon(go.set)
    with pytest.raises(asyncio.CancelledError):
        await saving
    await asyncio.to_thread(frozen.wait, 20)
    assert (await runc.exec(box, "echo on", 5)).stdout == b"on\n"
