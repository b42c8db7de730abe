"""``python -m bench.router.bytecodes``: bytecodes of Python that the router executes for a turn.

Processor time depends on what else a machine does; this does not. Router and a stub engine run as
in production, the router inside this process and without what it does by the clock; callers are a
process of their own, whose connections stand before anything is counted. ``--top`` shows where the
bytecodes are. An event of a stream costs what ``--tokens`` more of them add.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import aiohttp
import msgspec
import uvloop

from bench.record import figure, record
from bench.router.routes import stub
from bench.router.stub import VERSION
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.owners import owner
from rose_router.config import Settings
from rose_router.main import running, spare_collections

LEASE = "bench/bytecodes"
MOST = 8000
"""What twice sglang-router's processor time pays for, about (decision 697)."""
_AT_ONCE = 8
_OURS = "/rose_"


@dataclass
class BytecodeCount:
    """Bytecodes and calls by code."""

    bytecodes: dict[CodeType, int] = field(default_factory=dict)
    calls: dict[CodeType, int] = field(default_factory=dict)

    def enter(self, frame: FrameType, _event: str, _: object) -> Any:  # noqa: ANN401  # a tracer
        """A function is called, or a coroutine goes on."""
        code = frame.f_code
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.calls[code] = self.calls.get(code, 0) + 1
        self.bytecodes.setdefault(code, 0)
        return self._step

    def _step(self, frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401  # a tracer
        if event == "opcode":
            self.bytecodes[frame.f_code] += 1
        return self._step


@contextmanager
def counted() -> Iterator[BytecodeCount]:
    """Count what this thread executes in the block."""
    count = BytecodeCount()
    sys.settrace(count.enter)
    try:
        yield count
    finally:
        sys.settrace(None)


async def call(url: str, turns: int, tokens: int, *, stream: bool) -> None:
    """Ask for turns, once to open connections and again when told to."""
    body = {
        "input_ids": list(range(1, 201)),
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0},
        "return_logprob": True,
        "stream": stream,
    }
    raw, headers = msgspec.json.encode(body), {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def caller(share: int) -> None:
            for _ in range(share):
                async with http.post(f"{url}/generate", data=raw) as reply:
                    reply.raise_for_status()
                    await reply.read()

        for _ in range(2):
            await asyncio.gather(*(caller(turns // _AT_ONCE) for _ in range(_AT_ONCE)))
            sys.stdout.write("done\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.readline)


async def measure(given: argparse.Namespace) -> BytecodeCount:
    """Count a run of turns."""
    with stub(given.token_seconds) as engine:
        update = EngineUpdate(
            *("stub", EngineKind.DEDICATED, LEASE, engine.url),
            gate_open=True,
            cap=4096,
            version=VERSION,
        )
        async with running(Settings(lease=LEASE)) as router, owner(router.attach_port, update):
            spare_collections()
            url = f"http://127.0.0.1:{router.http_port}"
            command = [sys.executable, "-m", "bench.router.bytecodes", f"--call={url}"]
            command += [f"--turns={given.turns}", f"--tokens={given.tokens}"]
            command += ["--stream"] * given.stream
            pipe = asyncio.subprocess.PIPE
            child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            if child.stdin is None or child.stdout is None:
                raise RuntimeError("no pipe to the callers")
            await child.stdout.readline()
            loops = router.service.loops
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            with counted() as count:
                child.stdin.write(b"\n")
                await child.stdout.readline()
            child.stdin.write(b"\n")
            await child.wait()
    return count


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.router.bytecodes", description=__doc__)
    parser.add_argument("--turns", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--top", type=int, default=0, help="functions that are shown")
    parser.add_argument("--call", default="", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Measure and report."""
    given = flags().parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if given.call:
            asked = (given.turns, given.tokens)
            runner.run(call(given.call, *asked, stream=given.stream))
            return 0
        count = runner.run(measure(given))
    turns = given.turns // _AT_ONCE * _AT_ONCE
    found = {code: sum_ for code, sum_ in count.bytecodes.items() if code.co_filename != __file__}
    ours = [code for code in found if _OURS in code.co_filename]
    for code in sorted(found, key=found.__getitem__, reverse=True)[: given.top]:
        where = "/".join(code.co_filename.split("/")[-2:])
        each = found[code] / turns, count.calls[code] / turns
        sys.stdout.write(f"{each[0]:8.1f} {each[1]:6.2f}  {code.co_qualname}  {where}\n")
    what = "a streamed turn" if given.stream else "a turn"
    calls = sum(count.calls[code] for code in found)
    figures = [
        figure(f"bytecodes of {what}", sum(found.values()) / turns, "", at_most=MOST),
        figure("of these ROSE's own modules", sum(found[code] for code in ours) / turns, ""),
        figure("calls of Python's functions", calls / turns, ""),
    ]
    record("router-bytecodes", figures, notes=[f"{turns} turns of {given.tokens} tokens"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
