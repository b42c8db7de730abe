"""Real processes under ``kill -9``: rewards of a gateway, lines of a batch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import yaml

from rose_wire.ports import free_port
from tests.batches.helpers import Caller
from tests.batches.processes import (
    COMPLETIONS,
    Process,
    ask,
    check_answers,
    engine_of,
    pair,
    token_file,
)

# Random, so that a reward that is computed twice is seen, and never 0.
_CHECKS = """
import random
draw = random.SystemRandom()
def score(reward):
    return 1.0 + draw.random()
"""
_ASKERS = 64


@dataclass
class Killed:
    """What came of a run.

    Attributes:
        kills: by what was killed.
        wrong: by how.
    """

    asked: int
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)


@contextlib.asynccontextmanager
async def running(*processes: Process) -> AsyncIterator[None]:
    """Start processes, and kill them in the end."""
    async with contextlib.AsyncExitStack() as stack:
        for one in processes:
            stack.push_async_callback(one.kill)
            await one.start()
        yield


@dataclass
class _Asking:
    """Who asks for rewards, and who kills what computes them.

    Attributes:
        first: the reward that each trajectory had first.
    """

    url: str
    gateway: Process
    session: aiohttp.ClientSession
    found: Killed
    draw: random.Random
    first: dict[int, float] = field(default_factory=dict)

    async def ask(self, number: int) -> float:
        """The reward, however often it has to be asked for."""
        body = {"trajectory": f"t{number}", "function": "score", "answer": number}
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.post(self.url, json=body) as reply:
                    said = await reply.json()
                    if said.get("outcome") == "scored":
                        return float(said["reward"])
            await asyncio.sleep(0.02)

    async def ask_all(self, numbers: Iterator[int]) -> None:
        """Ask for those that nobody else has taken yet."""
        for number in numbers:
            reward = await self.ask(number)
            if self.first.setdefault(number, reward) != reward:
                self.found.wrong["doubled"] += 1
            self.found.wrong["zero"] += reward == 0.0

    async def kill(self) -> None:
        """Kill the gateway or a worker, again and again."""
        last = -1
        while True:
            await asyncio.sleep(self.draw.uniform(0.2, 0.6))
            if len(self.first) == last:
                continue  # it has to come back before it dies again
            last = len(self.first)
            if self.draw.random() < 0.3:
                await self.gateway.again()
                self.found.kills["gateway"] += 1
            elif self.gateway.child is not None:
                self.found.kills["worker"] += _kill_a_child(self.gateway.child.pid, self.draw)


def _written(folder: Path) -> Path:
    """The list of functions, in a folder that workers' users can enter."""
    folder.chmod(0o755)
    (folder / "checks.py").write_text(_CHECKS)
    listed = {"score": {"module": "checks:score", "path": str(folder), "tries": 5}}
    (folder / "functions.yaml").write_text(yaml.safe_dump(listed))
    return folder / "functions.yaml"


async def rewards(count: int, seed: int) -> Killed:
    """So many rewards, while gateway and workers are killed again and again; each asked twice."""
    found, began = Killed(count), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rose-bench-rewards-") as name:
        folder, port = Path(name), free_port()
        gateway = Process(
            folder, "rewards", f"--functions={_written(folder)}", "--workers=4",
            f"--folder={folder / 'kept'}", f"--address=127.0.0.1:{port}",
        )  # fmt: skip
        async with running(gateway), aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/v1/rewards"
            asking = _Asking(url, gateway, session, found, random.Random(seed))
            killer = asyncio.create_task(asking.kill())
            try:
                for _ in range(2):
                    numbers = iter(range(count))
                    await asyncio.gather(*(asking.ask_all(numbers) for _ in range(_ASKERS)))
            finally:
                killer.cancel()
                await asyncio.gather(killer, return_exceptions=True)
        found.wrong["lost"] = count - len(asking.first)
    found.seconds = time.monotonic() - began
    return found


def _kill_a_child(parent: int, draw: random.Random) -> int:
    with contextlib.suppress(psutil.Error, OSError):
        children = psutil.Process(parent).children()
        if children:
            os.kill(draw.choice(children).pid, 9)
            return 1
    return 0


async def batch(count: int, seed: int) -> Killed:
    """A batch of so many lines, while router, ``rose batches`` and engines are killed."""
    draw, found, began = random.Random(seed), Killed(count), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rose-bench-batch-") as name:
        two = pair(Path(name), lines=128)
        async with (
            running(two.router, two.batches),
            aiohttp.ClientSession() as http,
            engine_of(two.attach, "first", 64) as first,
            engine_of(two.attach, "second", 64) as second,
        ):
            deeds = {"router": two.router.again, "batches": two.batches.again}
            engines = {"first engine": first, "second engine": second}
            while await ask(http, f"{two.url}/v1/batches") is None:  # noqa: ASYNC110  # other processes
                await asyncio.sleep(0.05)
            team = Caller(two.url, http, {})
            made = await team.begin(token_file(count), endpoint=COMPLETIONS)
            answered = killed_at = 0
            while True:
                shown = await ask(http, f"{two.url}/v1/batches/{made}")
                answered = shown["request_counts"]["completed"] if shown else answered
                if shown and shown["status"] not in {"validating", "in_progress"}:
                    break
                if answered >= killed_at + count // 12:
                    killed_at = answered
                    chosen = draw.choice([*deeds, *engines])
                    found.kills[chosen] += 1
                    if chosen in deeds:
                        await deeds[chosen]()
                    else:
                        engines[chosen].set()
                await asyncio.sleep(0.1)
            ended = await team.ended(made)
            lines = await team.lines(ended["output_file_id"])
    names = Counter(one["custom_id"] for one in lines)
    found.wrong["lost"] = count - len(names)
    found.wrong["doubled"] = sum(names.values()) - len(names)
    if not found.wrong.total():
        check_answers(lines, count)
    found.seconds = time.monotonic() - began
    return found
