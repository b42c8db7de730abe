"""A reward function of the platform's list: reasoning-gym's own verifier, as it is.

    gym: {module: "checks:score", path: /teams/a, team: a, seconds: 30, memoryMebibytes: 4096}

``path`` is a folder with this file and ``pip install --target`` of reasoning-gym. A question is
named by dataset, seed and number, so that nobody sends the solution over the network: the verifier
makes the question anew.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import reasoning_gym


@lru_cache(maxsize=64)
def dataset(name: str, seed: int, size: int) -> Any:  # noqa: ANN401  # the library's own kind
    """The questions of a seed; kept, because a worker verifies many of one dataset."""
    return reasoning_gym.create_dataset(name, seed=seed, size=size)


def score(reward: dict[str, Any]) -> dict[str, Any]:
    """``data`` names the question: ``dataset``, ``seed``, ``size`` and ``index``.

    Returns:
        The library's score, 0 to 1; correct is a whole 1.
    """
    asked = reward["data"]
    questions = dataset(asked["dataset"], asked["seed"], asked["size"])
    found = float(questions.score_answer(reward["answer"], questions[asked["index"]]))
    return {"reward": found, "correct": found >= 1.0}
