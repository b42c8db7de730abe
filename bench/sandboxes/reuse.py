"""``python -m bench.sandboxes.reuse``: how much of a fork's prefix its children need not prefill.

A session plays turns on one of two real engines (SGLang on the CPU) behind the real router, and its
sandbox is on a real host. It is forked; all children then ask for their next turn at once. The
engines say how much of each prompt they had cached.

| way | the children are |
|---|---|
| forked | sessions that ``POST /sessions/{key}/fork`` made |
| not forked | sessions with the same tokens, of which nobody told the router |

The parent of the second way is another session, so that no way finds keys of the other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.fire.engines import MODEL, start_real
from bench.fire.fleet import Lease, lease
from bench.record import figure, record
from bench.sandboxes.__main__ import CHILDREN, host_of
from bench.sandboxes.own import own_runtime
from rose_dev.models import RECIPES
from rose_sandbox.errors import Unavailable
from rose_sandbox.host import Host
from rose_sandbox.http import ServingTraffic, application

_TOKEN = "word"  # noqa: S105  # of a host that ends with this program
_PROMPT, _ANSWER, _RESULT = 600, 48, 80
"""Tokens of a task, of a model's turn, of a tool's answer; agents have about this ratio."""


@dataclass(frozen=True)
class Child:
    """A first turn of a session that goes on from another's tokens.

    Attributes:
        inherited: tokens of its prompt that are its parent's.
        cached: tokens of its prompt that its engine had in its cache.
    """

    inherited: int
    cached: int


@asynccontextmanager
async def _serve(host: Host) -> AsyncIterator[str]:
    runner = web.AppRunner(application(host, ServingTraffic(), lambda: _TOKEN))
    await runner.setup()
    try:
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await runner.cleanup()


@dataclass
class Agents:
    """Sessions of one lease, their tokens drawn at random."""

    made: Lease
    draw: random.Random

    def _some(self, count: int) -> list[int]:
        return [self.draw.randrange(3, self.made.vocabulary) for _ in range(count)]

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.made.secret}"}
        async with self.made.http.post(self.made.url + path, json=body, headers=headers) as reply:
            answer: dict[str, Any] = await reply.json()
            if not reply.ok:
                message = f"POST {path}: {reply.status} {answer}"
                raise RuntimeError(message)
            return answer

    async def _turn(self, session: str, ids: Sequence[int]) -> dict[str, Any]:
        sampling = {"max_new_tokens": _ANSWER, "temperature": 1, "ignore_eos": True}
        body = {"input_ids": list(ids), "session_id": session, "sampling_params": sampling}
        return await self._post("/generate", body)

    async def play(self, session: str, turns: int) -> list[int]:
        """Play turns; returns the ids of the last prompt with its answer."""
        ids = self._some(_PROMPT)
        for number in range(turns):
            ids += self._some(_RESULT) if number else []
            ids += (await self._turn(session, ids))["output_ids"]
        return ids

    async def fork(self, session: str, n: int) -> tuple[list[str], int]:
        """Fork after the last turn; the children, and how many tokens they inherit."""
        answer = await self._post(f"/sessions/{session}/fork", {"n": n})
        return answer["sessions"], answer["tokens"]

    async def go_on(self, sessions: Sequence[str], ids: Sequence[int]) -> list[Child]:
        """All sessions ask for a turn after the same tokens, at once."""
        asked = [self._turn(session, [*ids, *self._some(_RESULT)]) for session in sessions]
        answers = await asyncio.gather(*asked)
        return [Child(len(ids), answer["meta_info"]["cached_tokens"]) for answer in answers]


async def measure(
    host: Host, root: Path, turns: int, rounds: int, seed: int
) -> dict[str, list[Child]]:
    """Children by way."""
    found: dict[str, list[Child]] = {"forked": [], "not forked": []}
    vocabulary = RECIPES[MODEL].vocabulary
    async with _serve(host) as url:
        token = root / "sandbox-token"
        token.write_text(_TOKEN)
        options = ("--sandbox-host", url, "--sandbox-token-file", str(token))
        async with lease(
            "bench/reuse", root / "lease", start_real, 2, vocabulary=vocabulary, options=options
        ) as made:
            agents = Agents(made, random.Random(seed))
            for number in range(rounds):
                parent, other = f"parent-{number}", f"other-{number}"
                await host.create(parent)
                ids = await agents.play(parent, turns)
                children, inherited = await agents.fork(parent, CHILDREN)
                # A record is taken while the model computes: it ends with the last turn's prompt.
                found["forked"] += await agents.go_on(children, ids[:inherited])
                for session in (*children, parent):
                    await host.end(session, forget=True)
                ids = (await agents.play(other, turns))[:inherited]
                strangers = [f"{other}-{child}" for child in range(CHILDREN)]
                found["not forked"] += await agents.go_on(strangers, ids)
    return found


async def _measured(root: Path, turns: int, rounds: int, seed: int) -> dict[str, list[Child]]:
    async with own_runtime(root / "runc") as runtime:
        host = host_of(runtime, root)
        try:
            return await measure(host, root, turns, rounds, seed)
        finally:
            for left in await runtime.sandboxes():
                await runtime.end(left)
            await host.close()


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: this machine cannot run sandboxes."""
    flags = argparse.ArgumentParser(prog="python -m bench.sandboxes.reuse", description=__doc__)
    flags.add_argument("--turns", type=int, default=6, help="of a parent before it is forked")
    flags.add_argument("--rounds", type=int, default=5, help="parents of each way")
    flags.add_argument("--seed", type=int, default=1, help="of the tokens")
    given = flags.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rose-bench-reuse-") as text:
        try:
            run = _measured(Path(text), given.turns, given.rounds, given.seed)
            found = asyncio.run(run)
        except Unavailable as error:
            sys.stderr.write(f"{error}\n")
            return 1
    figures = []
    for way, children in found.items():
        shares = [100 * one.cached / one.inherited for one in children]
        least = 95.0 if way == "forked" else None
        whole = 100 * sum(one.cached for one in children) / sum(one.inherited for one in children)
        figures += [
            figure(f"{way}: prefix reuse", whole, "%", at_least=least),
            figure(f"{way}: prefix reuse, least of a child", min(shares), "%"),
        ]
    figures.append(figure("children of each way", len(found["forked"]), ""))
    record("sandboxes-reuse", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
