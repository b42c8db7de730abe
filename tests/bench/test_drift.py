"""What the study of the fixed prompt compares: the same weights computed otherwise, and faults."""

import pytest
import torch

from bench import drift
from rose_core.delta.probe import LIMIT, PROMPT, distance
from rose_dev.models import TINY, tensors


@pytest.fixture(scope="module")
def state() -> drift.State:
    return tensors(TINY)


def test_every_arithmetic_answers_the_whole_prompt_nearly_alike(state: drift.State) -> None:
    truth = drift.reference(TINY, state)
    found = dict(drift.right_answers(TINY, state))
    assert {len(one) for one in found.values()} == {len(PROMPT) - 1}
    assert len(set(found.values())) > 2  # they are computed otherwise
    assert max(distance(truth, one) for one in found.values()) < LIMIT


def test_every_fault_changes_what_is_answered(state: drift.State) -> None:
    truth = drift.reference(TINY, state)
    before = {name: one * 1.01 for name, one in state.items()}
    for name, found in drift.wrong_answers(TINY, state, before):
        assert distance(truth, found) > 0, name


def test_training_gives_the_weights_before_and_after_its_last_step() -> None:
    torch.manual_seed(0)
    before, after = drift.trained(TINY, 2)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in after)
    assert {one.dtype for one in after.values()} == {torch.bfloat16}
