"""reasoning-gym's questions over a lease, verified by a real worker; ``make reasoning-gym``."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from rose_dev.environments import cache_folder
from rose_dev.models import scripted_recipe
from rose_dev.scripted import Script
from rose_rewards.main import running
from tests.router.conftest import Stage, stage  # noqa: F401  # a fixture
from tests.router.scripts import Follows, folder

GYM = cache_folder() / "reasoning-gym"
Staging = Callable[..., AbstractAsyncContextManager[Stage]]

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not GYM.exists(), reason="no reasoning-gym; run `make reasoning-gym`"),
    # What it brings along is compiled when it is first imported.
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
]
# One of each kind: numbers, words, games, graphs; their solutions are in the library.
DATASETS = (
    "basic_arithmetic",
    "chain_sum",
    "countdown",
    "leg_counting",
    "letter_counting",
    "number_sorting",
    "simple_equations",
    "spell_backward",
    "word_ladder",
)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """reasoning-gym beside our own packages, which come first."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(GYM)])


@pytest.fixture
async def rewards(tmp_path: Path) -> AsyncIterator[str]:
    """URL of a gateway whose workers find the library where the platform has put it."""
    gym = {"module": "checks:score", "path": str(GYM), "memoryMebibytes": 4096}
    (tmp_path / "functions.yaml").write_text(yaml.safe_dump({"gym": gym}))
    # As this process' user: the cache lies where others may not look.
    async with running(tmp_path / "functions.yaml", workers=2, first_user=0) as (_, port):
        yield f"http://127.0.0.1:{port}"


async def _scored(session: aiohttp.ClientSession, url: str, **fields: object) -> dict[str, Any]:
    async with session.post(f"{url}/v1/rewards", json={"function": "gym", **fields}) as reply:
        assert reply.status == 200, await reply.text()
        return dict(await reply.json())


async def test_the_librarys_own_verifier_is_a_function_of_the_platforms_list(rewards: str) -> None:
    from examples.reasoning_gym.checks import dataset  # noqa: PLC0415  # it takes the library

    async with aiohttp.ClientSession() as session:
        for name in DATASETS:
            about = {"dataset": name, "seed": 7, "size": 5, "index": 3}
            right = dataset(name, 7, 5)[3]["answer"]
            for answer, correct in ((right, True), ("none of these", False)):
                result = await _scored(
                    session, rewards, trajectory=f"{name} {correct}", answer=answer, data=about
                )
                assert (result["outcome"], result["correct"]) == ("scored", correct), (name, result)
                assert (result["reward"] == 1.0) == correct


async def test_a_question_that_there_is_not_is_lost_and_no_zero(rewards: str) -> None:
    about = {"dataset": "no such dataset", "seed": 7, "size": 5, "index": 3}
    async with aiohttp.ClientSession() as session:
        result = await _scored(session, rewards, trajectory="t", answer="4", data=about)
    assert result["outcome"] == "lost"


async def test_questions_go_over_a_lease_and_each_answer_to_its_reward(
    rewards: str,
    stage: Staging,  # noqa: F811  # the fixture
) -> None:
    from examples.reasoning_gym.checks import dataset  # noqa: PLC0415
    from examples.reasoning_gym.play import Player  # noqa: PLC0415

    answers = [one["answer"] for one in dataset("leg_counting", 1, 20)]
    recipe = scripted_recipe("reasoning-gym", Script("", (answers[0],)))
    async with stage(tokenizer=folder(recipe)) as s:
        await s.engine(script=Follows(recipe))
        player = Player(s.http, s.url, rewards)
        found = await player.play("leg_counting", seed=1, questions=20, members=2)
    assert found.outcomes == {"scored": 40}
    assert found.correct == 2 * answers.count(answers[0]), "the model says the same to everything"
    assert found.correct < 40
