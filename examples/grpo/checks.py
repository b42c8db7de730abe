"""The task's reward as a function of ``rose rewards``: one turn's answer, judged elsewhere.

grpo: {module: "examples.grpo.checks:score", path: /rose}     # a checkout of ROSE
"""

from __future__ import annotations

from typing import Any

from examples.grpo.task import TURNS, Task, right


def score(reward: dict[str, Any]) -> dict[str, Any]:
    """``answer`` has the turn's token ids, ``data`` the family that was asked for."""
    task = Task(0, (int(reward["data"]["sign"]),) * TURNS)
    found = task.reward(0, reward["answer"])
    return {"reward": found, "correct": right(found)}
