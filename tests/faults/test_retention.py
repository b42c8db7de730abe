"""The tap has seen a prompt and an answer; afterwards neither is anywhere in its memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

from tests.agent.node import Node, node, tap_refusal

pytestmark = pytest.mark.skipif(bool(tap_refusal()), reason=tap_refusal() or "-")

_WRITABLE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw")
MARK = 918_273_645
# Requests that come after: buffers of the kernel and of ours are used again.
AFTER = 30


def occurrences(pid: int, wanted: bytes) -> int:
    """How often bytes stand in the writable memory of a process."""
    count = 0
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if (found := _WRITABLE.match(line)) is None:
                continue
            start, end = (int(text, 16) for text in found.groups())
            try:
                memory.seek(start)
                count += memory.read(end - start).count(wanted)
            except (OSError, OverflowError):
                continue  # the kernel's own pages
    return count


def tap_pids(parts: Node) -> list[int]:
    tap = psutil.Process(parts.processes["tap"].pid)
    return [tap.pid, *(child.pid for child in tap.children())]


async def test_nothing_of_a_prompt_stays_in_the_tap(short_dir: Path) -> None:
    text = str(MARK).encode()
    here = [text]  # the search finds what is there
    assert occurrences(os.getpid(), here[0]) > 0
    async with node(short_dir) as parts:
        await parts.until(lambda: parts.operator.slot is not None, "the tap is heard")
        await parts.generate(5, prompt=[MARK] * 200)
        seen = await parts.report()
        assert seen["replicas"], "the guard follows the replica through the tap"
        for _ in range(AFTER):
            await parts.generate(2)
        assert {pid: occurrences(pid, text) for pid in tap_pids(parts)} == dict.fromkeys(
            tap_pids(parts), 0
        )
        logs = b"".join(path.read_bytes() for path in parts.root.rglob("*.log"))
        assert text not in logs
        assert text not in repr(parts.operator.requests).encode()
        assert text not in str(await parts.trace()).encode()
