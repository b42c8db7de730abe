"""``python -m bench.holds``: how long one request's body holds the router's loop, by kind of body.

While the loop is held no stream of another turn moves and no gate closes. Router and a stub engine
run as in production, the router inside this process, so that a ticker on its loop can see the
longest time between two of its ticks. Each kind is sent several times by another process; the
least of the longest holds counts. The aim is for the processor time of the loop's thread in that
time, which other work on the machine leaves alone. The time by the clock stands beside it: it has
what a thread that reads a body takes from the loop in it, and that other work.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.record import figure, record
from bench.router.routes import stub
from bench.router.stub import VERSION
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.models import make_model, scripted_recipe
from rose_dev.owners import owner
from rose_dev.scripted import Script
from rose_router.config import Settings
from rose_router.main import running, spare_collections

LEASE = "bench/holds"
AIM_MILLISECONDS = 5.0
_TICK_SECONDS = 0.0005
# A minimal client: what it does must not take the core of the router for long.
_CLIENT = """
import http.client, sys
for line in sys.stdin:
    host, path, file = line.split()
    body = open(file, "rb").read()
    asked = http.client.HTTPConnection(host, timeout=120)
    try:
        asked.request("POST", path, body, {"Content-Type": "application/json"})
    except (BrokenPipeError, ConnectionResetError):
        pass  # refused before it was read
    answer = asked.getresponse()
    print(answer.status, answer.read()[:200], flush=True)
    asked.close()
"""


def _chat(size: int) -> dict[str, Any]:
    """A conversation of so many bytes, in messages as an agent with tools sends them."""
    line = "the file has a line that says so and another one; "
    texts = (line * 40 for _ in range(size // (40 * len(line)) + 1))
    roles = ("user", "assistant")
    talk = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": [*talk, {"role": "user", "content": "go on"}], "max_tokens": 1}


def _ids(count: int) -> dict[str, Any]:
    ids = list(range(1, count + 1))
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}


def kinds() -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body."""
    dice = random.Random(7)
    encode = msgspec.json.encode
    chat = "/v1/chat/completions"
    yield "short turn", "/generate", encode(_ids(64))
    for count in (100_000, 1_000_000):
        yield f"{count:,} ids", "/generate", encode(_ids(count))
    fractions = [dice.random() for _ in range((8 << 20) // 20)]
    yield "8 MiB of fractions", "/generate", encode({"input_embeds": fractions})
    for size in (64, 256, 1024):
        yield f"chat of {size} KiB", chat, encode(_chat(size << 10))
    yield "chat of 10 MB", chat, encode(_chat(10_000_000))


class Ticker:
    """Sees how long a loop did nothing for us."""

    def __init__(self) -> None:
        self.longest = self.longest_by_clock = 0.0

    async def run(self) -> None:
        """Tick until cancelled."""
        last, used = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now, spent = time.perf_counter(), time.thread_time()
            self.longest = max(self.longest, spent - used)
            self.longest_by_clock = max(self.longest_by_clock, now - last - _TICK_SECONDS)
            last, used = now, spent


@contextmanager
def _body(raw: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        Path(file.name).write_bytes(raw)
        yield file.name


class Client:
    """The process that sends; it is there before the router, which must not fork."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("no pipes to the child")
        self._input, self._output = child.stdin, child.stdout

    async def send(self, port: int, path: str, file: str) -> str:
        """Post a file; status and the beginning of the answer."""
        self._input.write(f"127.0.0.1:{port} {path} {file}\n".encode())
        return (await self._output.readline()).decode().strip()


async def measure(repeats: int) -> list[tuple[str, float, float, str]]:
    """Milliseconds of each kind, by processor time and by the clock, and what was answered."""
    model = make_model(scripted_recipe("holds", Script("", ("yes",))))
    settings = Settings(lease=LEASE, tokenizer=model, memory_bytes=4 << 30)
    found = []
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, stdin=pipe, stdout=pipe
    )
    client = Client(child)
    with stub(0.0) as engine:
        async with running(settings) as router:
            update = EngineUpdate(
                *("engine", EngineKind.DEDICATED, LEASE, engine.url),
                gate_open=True,
                cap=64,
                version=VERSION,
                vocabulary=1 << 20,  # as engines say, so that ids are held to it
            )
            async with owner(router.attach_port, update):
                spare_collections()
                for name, path, raw in kinds():
                    with _body(raw) as file:
                        holds, clock, answer = [], [], ""
                        for _ in range(repeats):
                            ticker = Ticker()
                            ticking = asyncio.create_task(ticker.run())
                            answer = await client.send(router.http_port, path, file)
                            ticking.cancel()
                            holds.append(ticker.longest)
                            clock.append(ticker.longest_by_clock)
                    found.append((name, min(holds) * 1000, min(clock) * 1000, answer))
    child.terminate()
    await child.wait()
    return found


def main() -> int:
    """Measure and report."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--repeats", type=int, default=5)
    given = flags.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(given.repeats))
    notes = [f"{name}: {answer[:100]}" for name, _, _, answer in found]
    figures = [
        one
        for name, hold, clock, _ in found
        for one in (
            figure(f"longest hold, {name}", hold, "ms", at_most=AIM_MILLISECONDS),
            figure(f"the same by the clock, {name}", clock, "ms"),
        )
    ]
    record("holds", figures, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
