"""What is done once and not for every sandbox: CRIU's look at the kernel, unpacking for a fork."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rose_sandbox.runtimes import criu
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import Kind, SandboxSpec

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
    await criu.learn_kernel(runc.parts.path, known)
    made = known.stat()
    assert made.st_size > 500
    await criu.learn_kernel(runc.parts.path, known)
    assert known.stat().st_ino == made.st_ino, "of this kernel already"


async def test_sandboxes_of_one_record_are_unpacked_once(
    runc: RuncRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await runc.create(SandboxSpec("box"))
    await runc.exec(box, "A=1; echo 2 > /home/b", 20, session="main")
    parts = await runc.checkpoint(box, Kind.FULL, tmp_path)
    unpacked = []
    real = criu.unpack_images

    async def unpack(path: str, file: Path, images: Path) -> None:
        unpacked.append(images)
        await real(path, file, images)

    monkeypatch.setattr(criu, "unpack_images", unpack)
    made = await runc.restore_all(parts, [SandboxSpec(f"child{n}") for n in range(3)])
    for child in made:
        said = await runc.exec(child, "echo $A; cat /home/b", 20, session="main")
        assert said.stdout == b"1\n2\n"
    assert len(unpacked) == 1
    assert not unpacked[0].exists(), "gone when all of them run"
