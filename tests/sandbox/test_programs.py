"""Programs of the runtime: one that has begun is waited for, whenever its caller is cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rose_sandbox.errors import RuntimeFailed
from rose_sandbox.runtimes.programs import run

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


@pytest.mark.parametrize("steps", range(1, 7))
async def test_a_cancelled_program_has_ended_when_the_call_has(tmp_path: Path, steps: int) -> None:
    # Each step of the loop is another moment: before the fork, between fork and return, after.
    wide = "head -c 1000000 /dev/zero; touch " + str(tmp_path / "ended")
    running = asyncio.create_task(run(PATH, "sh", "-c", wide))
    for _ in range(steps):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "ended").exists()


async def test_a_program_that_fails_says_what_it_said() -> None:
    with pytest.raises(RuntimeFailed, match=r"exit code 3 .*: because"):
        await run(PATH, "sh", "-c", "echo because >&2; exit 3")


async def test_a_program_that_is_not_there_is_named() -> None:
    """A host in a container of few programs answered 500 without a word."""
    with pytest.raises(RuntimeFailed, match="no-such-program is not there"):
        await run(PATH, "no-such-program")
