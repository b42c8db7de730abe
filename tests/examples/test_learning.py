"""The learner on a model of a few thousand parameters; torch and transformers, no engine."""

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.grpo.client import Span, Turn
from examples.grpo.errors import ModelMismatch
from examples.grpo.evaluate import answer, judge, paired_interval
from examples.grpo.learner import Policy, advantages, make_batch, one_version, sampled_pairs
from examples.grpo.progress import Progress
from examples.grpo.publishing import Published
from examples.grpo.rollouts import Group, Trajectory
from examples.grpo.run import Run, Settings, begin
from examples.grpo.task import ANSWER_TOKENS, TURNS, Task, draw, evaluation_tasks
from rose_core.identity import WeightVersion
from rose_dev.models import Recipe, make_model

SMALL = Recipe(
    "nano", layers=1, hidden=32, intermediate=32, heads=2, kv_heads=1, head_size=16, context=128
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(SMALL, tmp_path_factory.mktemp("models"))


def episodes(policy: Policy, tasks: list[Task], generator: torch.Generator) -> list[Trajectory]:
    """Play tasks with the local policy, as an engine would have."""
    contexts = [task.opening() for task in tasks]
    starts: list[list[int]] = [[] for _ in tasks]
    turns: list[list[Turn]] = [[] for _ in tasks]
    rewards: list[list[float]] = [[] for _ in tasks]
    for number in range(TURNS):
        prompts = torch.tensor(contexts)
        with torch.no_grad():
            answers = policy._sample(prompts, generator)
            logprobs = policy.logprobs(torch.cat([prompts, answers], 1))[:, -ANSWER_TOKENS:]
        for row, task in enumerate(tasks):
            tokens = answers[row].tolist()
            span = Span("grpo@1.0", 0, len(tokens))
            starts[row].append(len(contexts[row]))
            turns[row].append(Turn(tuple(tokens), tuple(logprobs[row].tolist()), (span,)))
            rewards[row].append(task.reward(number, tokens))
            contexts[row] += tokens
            if number + 1 < TURNS:
                contexts[row] += task.observation(number, tokens)
    return [
        Trajectory(task, tuple(context), tuple(start), tuple(turn), tuple(reward))
        for task, context, start, turn, reward in zip(
            tasks, contexts, starts, turns, rewards, strict=True
        )
    ]


def groups(policy: Policy, count: int = 4, size: int = 4, seed: int = 0) -> list[Group]:
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tasks = [draw(source) for _ in range(count)]
    members = episodes(policy, [task for task in tasks for _ in range(size)], generator)
    return [tuple(members[row * size : (row + 1) * size]) for row in range(count)]


def test_advantages_are_centred_per_turn(folder: Path) -> None:
    group = groups(Policy(folder, learning_rate=0.0), count=1, size=8)[0]
    assert np.allclose(np.mean(advantages(group), axis=0), 0.0, atol=1e-6)


def test_a_batch_marks_sampled_tokens_only_and_ratios_on_policy_are_one(folder: Path) -> None:
    policy = Policy(folder, learning_rate=0.0)
    taken = groups(policy)
    batch = make_batch(taken)
    assert batch.sampled.sum() == len(batch.tokens) * TURNS * ANSWER_TOKENS
    statistics = policy.step(batch)
    assert statistics.ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert statistics.truncated_share == 0.0


def test_ratios_are_cut_at_the_truncation(folder: Path) -> None:
    policy = Policy(folder, learning_rate=0.0)
    batch = make_batch(groups(policy))
    batch.behaviour.sub_(2.0 * batch.sampled)
    assert policy.step(batch).truncated_share == 1.0


def test_published_weights_reproduce_the_logprobs_of_their_version(folder: Path) -> None:
    policy = Policy(folder, learning_rate=1e-2)
    state = policy.published_state()
    taken = groups(policy)
    batch = make_batch(taken)
    policy.step(batch)
    rows = [0, 3]
    recomputed = torch.zeros_like(batch.behaviour)
    recomputed[rows] = policy.logprobs_with(state, batch.tokens[rows])
    behaviour, expected = sampled_pairs(batch, recomputed, rows)
    assert len(behaviour) == len(rows) * TURNS * ANSWER_TOKENS
    assert np.abs(behaviour - expected).max() < 1e-3
    now = policy.logprobs(batch.tokens).detach()
    assert np.abs(sampled_pairs(batch, now, rows)[1] - behaviour).max() > 1e-3
    assert one_version(taken[0][0]) == "grpo@1.0"


def test_reward_rises_and_the_shuffled_control_does_not(folder: Path) -> None:
    trained, frozen, shuffled = (Policy(folder, learning_rate=2e-2) for _ in range(3))
    for step in range(50):
        batch = make_batch(groups(trained, count=8, size=8, seed=step))
        trained.step(batch)
        shuffled.step(batch.shuffled(torch.Generator().manual_seed(step)))
    tasks = evaluation_tasks()
    evaluation = judge(*(answer(policy, tasks, 0) for policy in (trained, frozen, shuffled)))
    assert evaluation.learned
    assert evaluation.control_flat
    assert evaluation.trained > evaluation.shuffled + 0.1


def test_a_rising_control_is_called_out() -> None:
    evaluation = judge([0.9] * 20, [0.2] * 20, [0.5] * 20)
    assert evaluation.learned
    assert not evaluation.control_flat


def test_paired_interval_holds_the_mean_and_refuses_unpaired_values() -> None:
    interval = paired_interval([0.0, 0.1, 0.2, 0.3], [0.5, 0.5, 0.5, 0.5])
    assert interval.low <= interval.mean <= interval.high
    with pytest.raises(ValueError, match="paired"):
        paired_interval([1.0], [])


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    policy_folder = make_model(Recipe("short", layers=1, hidden=32, vocabulary=300), tmp_path)
    config = policy_folder / "config.json"
    policy = Policy(policy_folder, learning_rate=0.0)
    policy.model.config.vocab_size = 40
    with pytest.raises(ModelMismatch, match="needs more than"):
        policy._check_vocabulary(config.parent)


class Nowhere:
    """Takes weights and keeps none."""

    def publish(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightVersion:
        assert list(tensors)
        return WeightVersion("grpo", 1, step)

    def finished(self, *, wait: bool = False) -> list[Published]:
        return []


def run_of(folder: Path, progress: Progress) -> Run:
    return begin(Settings(folder, learning_rate=1e-2), Nowhere(), progress)


def bits(policy: Policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("cuts", [(1, 2, 3), (3,), (1,), (2, 2, 3)])
def test_a_step_in_parts_is_the_whole_batchs_bit_for_bit(
    folder: Path, tmp_path: Path, cuts: tuple[int, ...]
) -> None:
    with Progress(tmp_path / "a", echo=None) as one, Progress(tmp_path / "b", echo=None) as other:
        whole, parts = run_of(folder, one), run_of(folder, other)
        for step in range(3):
            taken = groups(whole.trained, count=4, seed=step)
            whole.learn(taken)
            before, at = bits(parts.trained), 0
            for cut in cuts:
                parts.add(taken[at:cut])
                at = cut
            assert same(bits(parts.trained), before), "the weights wait for the last part"
            parts.learn(taken[at:])
            assert not same(bits(parts.trained), before)
            assert same(bits(parts.trained), bits(whole.trained)), step
            assert same(bits(parts.shuffled), bits(whole.shuffled)), step
        assert parts.step == whole.step == 3


def test_a_step_without_any_group_is_none(folder: Path, tmp_path: Path) -> None:
    with Progress(tmp_path, echo=None) as progress:
        run = run_of(folder, progress)
        before = bits(run.trained)
        run.learn([])
        assert (run.step, same(bits(run.trained), before)) == (0, True)


def test_parts_add_up_to_the_gradient_of_one_large_batch(folder: Path) -> None:
    apart, together = (Policy(folder, learning_rate=1e-2) for _ in range(2))
    taken = groups(apart)
    for group in taken:
        apart.add(make_batch([group]))
    apart.finish()
    together.step(make_batch(taken))
    pairs = zip(bits(apart), bits(together), strict=True)
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in pairs)
