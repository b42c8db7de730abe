"""A frozen lease of one real engine: node, router, ``rose batches``, and OpenAI's client.

Serving and the lent engine are those of ``bench.guard``, pinned to one core. The lent engine has
the grant that a lease with ``weights: {frozen: true}`` gets: weight-sync attests its base's digest,
the agent attaches it to the lease's router, and lines reach it by nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bench.guard.node import Bench, grant_of, running
from bench.rewards.killed import running as processes
from rose_core.identity import FROZEN_RUN
from rose_core.wire.sync import Grant, RouterProof, WeightSource
from rose_dev.models import make_named
from tests.batches.processes import COMPLETIONS, Pair, pair
from tests.router.conftest import LEASE

if TYPE_CHECKING:
    import openai

# Short lines: 10,000 of them took twelve minutes on a busy machine, windows without lines included.
TOKENS: Final = 8
_PROMPT: Final = 16
_UNDER_WAY: Final = 64  # rose batches' own default
_TOKEN: Final = "secret"  # noqa: S105  # of a router on the loopback
_PATIENCE_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 1800.0


def line_file(count: int) -> bytes:
    """Lines of token ids, each another prompt."""
    lines = (
        {
            "custom_id": f"n{number}",
            "method": "POST",
            "url": COMPLETIONS,
            "body": {
                "model": "policy",
                "prompt": [10 + number % 190, 10 + number // 190, *range(10, 8 + _PROMPT)],
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@dataclass
class Ended:
    """What came of the batch.

    Attributes:
        wrong: lines by how.
    """

    asked: int
    wrong: Counter[str]


@dataclass
class Lease:
    """The running lease.

    Attributes:
        pid: of the lent engine as it was last seen ready.
    """

    node: Bench
    two: Pair
    http: aiohttp.ClientSession
    client: openai.OpenAI
    count: int
    pid: int = 0
    batch: str = ""
    kills: int = 0

    async def begin(self, folder: Path) -> None:
        """Upload the file and make the batch, as OpenAI's page shows it."""
        path = folder / "in.jsonl"
        path.write_bytes(line_file(self.count))

        def ask() -> str:
            with path.open("rb") as opened:
                file = self.client.files.create(file=opened, purpose="batch")
            made = self.client.batches.create(
                input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
            )
            return made.id

        self.batch = await asyncio.to_thread(ask)

    async def done(self) -> int:
        """Lines that have an answer."""
        found = await asyncio.to_thread(self.client.batches.retrieve, self.batch)
        counts = found.request_counts
        return 0 if counts is None else counts.completed + counts.failed

    async def tokens(self) -> float:
        """Output tokens that the router has seen so far."""
        async with self.http.get(f"{self.two.url}/metrics") as reply:
            text = await reply.text()
        name = "rose_router_tokens_total{"
        return sum(float(one.split()[-1]) for one in text.splitlines() if one.startswith(name))

    async def flowing(self) -> None:
        """Wait until the lent engine is ready, on its core, and has made tokens of lines.

        Raises:
            TimeoutError: it does not.
            RuntimeError: no line is left.
        """
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await self.node.rollouts_ready()
            file = self.node.engine()
            self.pid = file.pids[0] if file is not None else 0
            before = await self.tokens()
            while await self.tokens() == before:
                if await self.done() == self.count:
                    raise RuntimeError("no line is left for this window; give more (--lines)")
                await asyncio.sleep(_POLL_SECONDS)

    async def kill(self) -> None:
        """Kill the lent engine amid lines; returns when another one makes tokens."""
        os.kill(self.pid, signal.SIGKILL)
        self.kills += 1
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while (file := self.node.engine()) is None or self.pid in file.pids:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
        await self.flowing()

    async def ended(self) -> Ended:
        """Wait for the end of the batch, and look at each line.

        Raises:
            TimeoutError: it has no end.
        """
        until = time.monotonic() + _LONGEST_SECONDS
        while True:
            batch = await asyncio.to_thread(self.client.batches.retrieve, self.batch)
            if batch.status in {"completed", "failed", "expired", "cancelled"}:
                break
            if time.monotonic() > until:
                raise TimeoutError(f"the batch is {batch.status}, {batch.request_counts}")
            await asyncio.sleep(1.0)
        text = ""
        if batch.output_file_id is not None:
            answer = await asyncio.to_thread(self.client.files.content, batch.output_file_id)
            text = answer.text
        return judged([json.loads(line) for line in text.splitlines()], self.count)


def judged(lines: Sequence[Mapping[str, Any]], count: int) -> Ended:
    """What is wrong with the lines of an output file, of so many asked."""
    names = Counter(one["custom_id"] for one in lines)
    wrong = Counter(
        {
            "lost": count - len(names),
            "doubled": names.total() - len(names),
            "of another length": sum(
                one["response"]["body"]["usage"]["completion_tokens"] != TOKENS for one in lines
            ),
        }
    )
    return Ended(count, wrong)


def grant(model: str, attach: int) -> Grant:
    """Of a lease whose weights are frozen, with a router."""
    return msgspec.structs.replace(
        grant_of(model),
        lease=LEASE,
        weights=WeightSource("", FROZEN_RUN),
        router=f"127.0.0.1:{attach}",
        proof=RouterProof(_TOKEN),
    )


@contextlib.asynccontextmanager
async def lent(root: Path, model: str, count: int) -> AsyncIterator[Lease]:
    """Start everything, begin a batch of so many lines; end everything."""
    import openai  # noqa: PLC0415  # slow to import, and tests read this module without it

    two = pair(root, lines=_UNDER_WAY)
    asked = openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=5, timeout=60)
    async with (
        running(root, model, grant=grant(make_named(model).name, two.attach)) as node,
        processes(two.router, two.batches),
        aiohttp.ClientSession() as http,
    ):
        await node.rose("sync", "weight-sync")
        lease = Lease(node, two, http, asked, count)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not await _answers(http, f"{two.url}/v1/batches"):  # noqa: ASYNC110  # a process
                await asyncio.sleep(_POLL_SECONDS)
        await lease.begin(root)
        await lease.flowing()
        yield lease


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(url) as reply:
            return reply.status == 200
    return False
