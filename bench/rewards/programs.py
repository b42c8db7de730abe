"""``python -m bench.rewards.programs``: rewards of models' programs, at a sandbox host of its own.

A host (``rose sandbox-host``) and the gateway (``rose rewards``) are real processes with the
defaults of their pages; the programs are right ones, which run all of their cases, and wrong ones,
which end at the first. Then the host is killed under both kinds. Root, and ``make sandbox``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import aiohttp
import msgspec
import yaml

from bench.record import Figure, figure, record
from bench.sandboxes.own import remove
from rose_core.rewards.results import Result, Scored
from rose_core.stats import quantile
from rose_rewards.main import running
from rose_sandbox.main import RUNTIMES
from rose_sandbox.runtimes.parts import Parts, find_parts
from rose_trainer.rewards import RewardClient
from rose_wire.ports import free_port

_RIGHT = "n = int(input())\nprint(sum(int(input()) for _ in range(n)))\n"
_WRONG = "n = int(input())\nprint(n)\n"
_START_SECONDS = 60.0


def _cases(number: int, seed: int) -> dict[str, list[str]]:
    draw = random.Random(seed)
    rows = [[draw.randrange(100, 10**6) for _ in range(50)] for _ in range(number)]
    return {
        "inputs": ["\n".join(map(str, [len(row), *row])) for row in rows],
        "outputs": [str(sum(row)) for row in rows],
    }


@dataclass
class _Host:
    """A host in a process of its own, which may be killed and started anew at its address."""

    folder: Path
    runtime: str
    parts: Parts
    port: int
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rose_cli.main", "sandbox-host", "--run", "programs"),
            *("--store", str(self.folder / "store"), "--folder", str(self.folder / "host")),
            *("--address", f"127.0.0.1:{self.port}"),
            *("--token-file", str(self.folder / "token")),
            *("--runtime", self.runtime, "--log-level", "ERROR"),
            env=os.environ | {"ROSE_SANDBOX_PARTS": str(self.parts.folder)},
        )
        async with asyncio.timeout(_START_SECONDS), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"{self.url}/healthz"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)

    async def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def _host(folder: Path, runtime: str) -> AsyncIterator[_Host]:
    """A host that answers, of which nothing is left afterwards."""
    parts = find_parts(RUNTIMES[runtime].programs)
    (folder / "token").write_text("word")
    made = _Host(folder, runtime, parts, free_port())
    try:
        await made.start()
        yield made
    finally:
        await made.kill()
        remove(RUNTIMES[runtime](folder / "host" / runtime, parts).group)


async def _scored(
    client: RewardClient, program: str, expected: object, names: Sequence[str]
) -> tuple[list[Result], list[float], float]:
    """Results, seconds of each, and of all, which are asked for at once."""
    began = perf_counter()

    async def one(name: str) -> tuple[Result, float]:
        body = {"trajectory": name, "function": "programs", "answer": program}
        asked = perf_counter()
        found = await client.score({**body, "expected": expected}, 3600)
        return found, perf_counter() - asked

    found = await asyncio.gather(*(one(name) for name in names))
    return [one for one, _ in found], [took for _, took in found], perf_counter() - began


async def measure(given: argparse.Namespace) -> list[Figure]:
    """Figures of one runtime, with numbers of cases one after the other."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with _host(folder, given.runtime) as host, aiohttp.ClientSession() as http:
            function = {"sandbox": host.url, "tokenFile": str(folder / "token")}
            (folder / "list.yaml").write_text(yaml.safe_dump({"programs": function}))
            async with running(folder / "list.yaml", workers=1) as (_, port):
                client = RewardClient(f"http://127.0.0.1:{port}", http)
                for title, program, cases in (
                    ("right, 1 case", _RIGHT, 1),
                    ("right, 20 cases", _RIGHT, 20),
                    ("wrong, 20 cases", _WRONG, 20),
                ):
                    expected = _cases(cases, given.seed)
                    alone: list[Result] = []
                    each: list[float] = []
                    for number in range(given.alone):
                        key = f"alone/{title}/{number}"
                        found, took, _ = await _scored(client, program, expected, [key])
                        alone, each = alone + found, each + took
                    keys = [f"{title}/{number}" for number in range(given.programs)]
                    many, _, seconds = await _scored(client, program, expected, keys)
                    _check([*alone, *many], right=program is _RIGHT)
                    median = quantile(sorted(each), 0.5)
                    figures.append(figure(f"{title}: one by one, median", median, "s"))
                    figures.append(
                        figure(f"{title}: at once", given.programs / seconds, "programs/s")
                    )
                figures += await _killed(client, host, given)
    return figures


async def _killed(client: RewardClient, host: _Host, given: argparse.Namespace) -> list[Figure]:
    """Right and wrong programs while their host is killed and started anew."""
    expected = _cases(20, given.seed)
    kinds = [(_RIGHT, True), (_WRONG, False)] * (given.programs // 2)
    asked = [
        asyncio.create_task(_scored(client, program, expected, [f"killed/{number}"]))
        for number, (program, _) in enumerate(kinds)
    ]
    for kill in range(1, given.kills + 1):
        due = kill * len(asked) // (given.kills + 1)  # spread over the work, whatever its speed
        for one in itertools.islice(asyncio.as_completed(asked), due):
            await one
        await host.kill()
        await host.start()
    for (_, right), (found, _, _) in zip(kinds, await asyncio.gather(*asked), strict=True):
        _check(found, right=right)
    title = f"verdicts under {given.kills} kills of the host that are none, or another's"
    return [figure(title, 0, f"of {len(asked)}", at_most=0)]


def _check(found: Sequence[Result], *, right: bool) -> None:
    """Every program has the verdict that it has earned.

    Raises:
        RuntimeError: one has another, or none.
    """
    for one in found:
        if not isinstance(one, Scored) or one.correct is not right:
            message = (
                f"a program that is {'right' if right else 'wrong'}: {msgspec.to_builtins(one)}"
            )
            raise RuntimeError(message)


def main() -> int:
    """The flags; 0 measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.rewards.programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=100, help="asked for at once")
    parser.add_argument("--alone", type=int, default=11, help="asked for one after the other")
    parser.add_argument("--kills", type=int, default=10, help="of the host, under programs")
    parser.add_argument("--runtime", choices=sorted(RUNTIMES), default="runc")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    record(f"programs-{given.runtime}", asyncio.run(measure(given)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
