"""Real processes under ``kill -9``: rewards of a gateway and of a judge's lease, lines of a batch.

Half of the rewards are a module's, which workers compute, half are of a judge: a lease whose router
is a process of its own before two fake engines. The list says nothing of ``tries``: they are what
people get. Each reward is random and never 0, so that one that is computed twice, or by nobody, is
seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rose_dev.scripted import END, byte_tokens
from rose_wire.ports import free_ports
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
from tests.router.conftest import LEASE

_CHECKS = """
import random
draw = random.SystemRandom()
def score(reward):
    return 1.0 + draw.random()
"""
_ASKERS, _DIGITS = 64, 8
_ASSISTANT = "<assistant>"
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}" + _ASSISTANT
_PARTS = ("gateway", "router", "worker")
_KILLS_OF = (0.25, 0.15, 0.6)
"""Shares of the kills: what is slowest to come back is killed least often."""


@dataclass
class Killed:
    """What came of a run.

    Attributes:
        kills: by what was killed.
        wrong: by how.
        reasons: that were given for what is wrong.
    """

    asked: int
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


@contextlib.asynccontextmanager
async def running(*processes: Process) -> AsyncIterator[None]:
    """Start processes, and kill them in the end."""
    async with contextlib.AsyncExitStack() as stack:
        for one in processes:
            stack.push_async_callback(one.kill)
            await one.start()
        yield


@dataclass
class _Judge:
    """What a judge's engine says: one number of random digits, none of them 0."""

    draw: random.Random = field(default_factory=random.SystemRandom)

    def next_token(self, context: Sequence[int]) -> int:
        """One more digit behind the prompt's end, or the end."""
        answer = len(context) - bytes(one % END for one in context).rindex(_ASSISTANT.encode())
        return END if answer == len(_ASSISTANT) + _DIGITS else self.draw.choice(b"123456789")

    def text(self, tokens: Sequence[int]) -> str:
        """The digits."""
        return bytes(one for one in tokens if one != END).decode()


@dataclass
class _Asking:
    """Who asks for rewards, and who kills what computes them.

    Attributes:
        first: the reward that each trajectory had first.
        answers: results by function.
    """

    url: str
    gateway: Process
    router: Process
    session: aiohttp.ClientSession
    found: Killed
    draw: random.Random
    first: dict[int, float] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)

    async def ask(self, number: int) -> float:
        """The reward, however often it has to be asked for.

        Only a gateway that is away may be asked again without anything having gone wrong.
        """
        name = ("score", "judge")[number % 2]
        body = {"trajectory": f"t{number}", "function": name, "answer": number}
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.post(self.url, json=body) as reply:
                    answer = await reply.json()
                    self.answers[name] += 1
                    if answer.get("outcome") == "scored":
                        return float(answer["reward"])
                    if "outcome" in answer:
                        self.found.wrong[answer["outcome"]] += 1
                        self.found.reasons[f"{name}: {answer['reason']}"] += 1
            await asyncio.sleep(0.02)

    async def ask_all(self, numbers: Iterator[int]) -> None:
        """Ask for those that nobody else has taken yet."""
        for number in numbers:
            reward = await self.ask(number)
            if self.first.setdefault(number, reward) != reward:
                self.found.wrong["doubled"] += 1
            self.found.wrong["zero"] += reward == 0.0

    async def kill(self) -> None:
        """Kill the gateway, the judge's router or a worker, a hundred times each round."""
        killed_at = 0
        while True:
            await asyncio.sleep(self.draw.uniform(0.2, 0.6))
            if self.answers.total() < killed_at + self.found.asked // 100:
                continue  # it has to come back, and answer, before it dies again
            killed_at = self.answers.total()
            (chosen,) = self.draw.choices(_PARTS, _KILLS_OF)
            if chosen == "worker":
                if self.gateway.child is not None:
                    self.found.kills["worker"] += _kill_a_child(self.gateway.child.pid, self.draw)
                continue
            await (self.gateway if chosen == "gateway" else self.router).again()
            self.found.kills[chosen] += 1


def _judge_router(folder: Path, http_port: int, attach: int) -> Process:
    """The router of the judge's lease; it has a tokenizer, as judges are asked in words."""
    letters = {letter: byte for byte, letter in enumerate(byte_tokens())}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    described = {"chat_template": _TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "secret").write_text("secret\n")
    return Process(
        folder, "router", f"--lease={LEASE}", f"--http-address=127.0.0.1:{http_port}",
        f"--attach-address=127.0.0.1:{attach}", f"--token-file={folder / 'secret'}",
        f"--tokenizer={folder}",
    )  # fmt: skip


def _written(folder: Path, judge: str) -> Path:
    """The list of functions, in a folder that workers' users can enter."""
    folder.chmod(0o755)
    (folder / "checks.py").write_text(_CHECKS)
    listed = {
        "score": {"module": "checks:score", "path": str(folder)},
        "judge": {"judge": judge},
    }
    (folder / "functions.yaml").write_text(yaml.safe_dump(listed))
    return folder / "functions.yaml"


async def rewards(count: int, seed: int) -> Killed:
    """So many rewards while gateway, judge's router and workers are killed; each asked twice."""
    found, began = Killed(count), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rose-bench-rewards-") as name:
        folder, (port, http_port, attach) = Path(name), free_ports(3)
        router = _judge_router(folder, http_port, attach)
        listed = _written(folder, f"http://127.0.0.1:{http_port}")
        gateway = Process(
            folder, "rewards", f"--functions={listed}", "--workers=4",
            f"--folder={folder / 'kept'}", f"--address=127.0.0.1:{port}",
        )  # fmt: skip
        async with (
            running(gateway, router),
            engine_of(attach, "first", _ASKERS, _Judge()),
            engine_of(attach, "second", _ASKERS, _Judge()),
            aiohttp.ClientSession() as session,
        ):
            url = f"http://127.0.0.1:{port}/v1/rewards"
            asking = _Asking(url, gateway, router, session, found, random.Random(seed))
            killer = asyncio.create_task(asking.kill())
            try:
                for _ in range(2):
                    numbers = iter(range(count))
                    await asyncio.gather(*(asking.ask_all(numbers) for _ in range(_ASKERS)))
            finally:
                killer.cancel()
                await asyncio.gather(killer, return_exceptions=True)
        found.wrong["lost"] += count - len(asking.first)
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
