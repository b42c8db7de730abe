"""Questions of reasoning-gym to a lease, each answer to its reward at once.

    python -m examples.reasoning_gym.play --url LEASE --rewards http://127.0.0.1:8100 \
        --dataset chain_sum --questions 20 --members 8

It samples and does not train. Prints how many answers were correct, as the verifier said of each.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from examples.reasoning_gym.checks import dataset

_AGAIN_SECONDS = 1.0
_BUSY = 429


@dataclass
class Tally:
    """What came of the answers.

    Attributes:
        outcomes: scored, masked or lost.
        rewards: of the scored ones.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    correct: int = 0
    rewards: list[float] = field(default_factory=list)

    def add(self, verdict: dict[str, Any]) -> None:
        """One more result of ``rose rewards``."""
        self.outcomes[verdict["outcome"]] += 1
        if verdict["outcome"] == "scored":
            self.rewards.append(verdict["reward"])
            self.correct += verdict["correct"]


@dataclass(frozen=True)
class Player:
    """One run.

    Args:
        session: for both URLs; a token in its headers is shown to both.
        url: the lease's.
        rewards: URL of ``rose rewards``.
        model: by the lease's name.
        function: by the platform's name.
    """

    session: aiohttp.ClientSession
    url: str
    rewards: str
    model: str = "policy"
    function: str = "gym"
    most_tokens: int = 512

    async def play(self, name: str, *, seed: int, questions: int, members: int) -> Tally:
        """Ask each question ``members`` times.

        Raises:
            aiohttp.ClientError: the lease or the rewards cannot be reached, or refuse.
        """
        asked, tally = dataset(name, seed, questions), Tally()

        async def one(index: int, member: int) -> None:
            about = {"dataset": name, "seed": seed, "size": questions, "index": index}
            group = f"{name}/{seed}/{index}"
            answer = await self._answer(asked[index]["question"], f"{group}/{member}")
            tally.add(
                await self._reward(
                    trajectory=f"{group}/{member}",
                    group=group,
                    members=members,
                    function=self.function,
                    task=name,
                    answer=answer,
                    data=about,
                )
            )

        places = ((index, member) for index in range(questions) for member in range(members))
        async with asyncio.TaskGroup() as tasks:
            for index, member in places:
                tasks.create_task(one(index, member))
        return tally

    async def _answer(self, question: str, session: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self.most_tokens,
        }
        url, headers = f"{self.url}/v1/chat/completions", {"X-Rose-Session": session}
        async with self.session.post(url, json=body, headers=headers) as reply:
            reply.raise_for_status()
            verdict = await reply.json()
        return str(verdict["choices"][0]["message"]["content"])

    async def _reward(self, **fields: object) -> dict[str, Any]:
        while True:
            async with self.session.post(f"{self.rewards}/v1/rewards", json=fields) as reply:
                if reply.status != _BUSY:
                    reply.raise_for_status()
                    return dict(await reply.json())
            await asyncio.sleep(_AGAIN_SECONDS)


def parser() -> argparse.ArgumentParser:
    """The knobs."""
    made = argparse.ArgumentParser(prog="python -m examples.reasoning_gym.play")
    made.add_argument("--url", required=True, help="the lease's, from status.routerURL")
    made.add_argument("--rewards", required=True, help="URL of rose rewards")
    made.add_argument("--model", default="policy", help="name of the lease's model")
    made.add_argument("--dataset", default="chain_sum", help="one of reasoning-gym's")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--questions", type=int, default=20)
    made.add_argument("--members", type=int, default=4, help="answers to each question")
    return made


async def _main(given: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        player = Player(session, given.url, given.rewards, given.model)
        found = await player.play(
            given.dataset, seed=given.seed, questions=given.questions, members=given.members
        )
    mean = sum(found.rewards) / len(found.rewards) if found.rewards else float("nan")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.outcomes.items()))
    print(f"{given.dataset}: {counts}; {found.correct} correct, mean reward {mean:.3f}")


if __name__ == "__main__":
    asyncio.run(_main(parser().parse_args()))
