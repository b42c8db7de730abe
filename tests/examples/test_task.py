import random

import pytest

from examples.grpo.task import (
    ANSWER_TOKENS,
    FAMILIES,
    HIGHEST_ID,
    TOPICS,
    Task,
    draw,
    evaluation_tasks,
)


def test_reward_is_the_share_of_tokens_in_the_demanded_family() -> None:
    task = Task(0, (1, 2))
    assert task.reward(0, [1, 5, 9, 2]) == 0.75
    assert task.reward(1, [1, 5, 9, 2]) == 0.25
    assert task.reward(0, []) == 0.0


def test_observation_tells_success_and_the_next_sign() -> None:
    task = Task(0, (1, 2))
    right = task.observation(0, [1] * ANSWER_TOKENS)
    wrong = task.observation(0, [0] * ANSWER_TOKENS)
    assert right[0] != wrong[0]
    assert right[1] == wrong[1] == Task(3, (2, 0)).opening()[1]


def test_evaluation_tasks_are_every_combination_once() -> None:
    tasks = evaluation_tasks()
    assert len(tasks) == len(set(tasks)) == TOPICS * FAMILIES**2


def test_prompts_use_no_id_above_the_highest() -> None:
    source = random.Random(1)
    for _ in range(200):
        task = draw(source)
        assert max(task.opening() + task.observation(0, [0])) <= HIGHEST_ID


def test_signs_outside_the_families_are_refused() -> None:
    with pytest.raises(ValueError, match="2 signs"):
        Task(0, (FAMILIES, 0))
