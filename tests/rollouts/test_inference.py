"""Groups and ends of trajectories that nobody names; times are virtual."""

from __future__ import annotations

from rose_core.identity import WeightVersion
from rose_core.rollouts.placement.guards import PlacementCase, RolloutOutlook, narrowed
from rose_core.rollouts.placement.views import PolicyName
from rose_core.rollouts.terms import LeaseTerms, policies_of
from rose_core.rollouts.trajectories.inclusion import Arm, Fate
from rose_core.rollouts.trajectories.inference import MARK, Idle, InferredGroups, Pauses, is_over
from rose_core.rollouts.trajectories.prospects import Deadline, Hint, Prospects
from tests.rollouts.test_policies import LENT, OURS, TURN
from tests.rollouts.test_prospects import version

PROMPT = (1, 2, 3)


def test_equal_prompts_that_begin_together_are_a_group() -> None:
    groups = InferredGroups()
    names = [groups.of(PROMPT, "", 0, float(second), 1) for second in range(8)]
    assert len(set(names)) == 1
    assert names[0].startswith(MARK)
    assert groups.of((1, 2, 4), "", 0, 8.0, 1) != names[0]
    assert groups.of(PROMPT, "other job", 0, 8.0, 1) != names[0]
    assert groups.of(PROMPT, "", 0, 8.0, 1, run="other run") != names[0]
    assert groups.joined == 7


def test_the_same_prompt_in_the_next_epoch_is_another_group() -> None:
    groups = InferredGroups()
    first = groups.of(PROMPT, "", 0, 0.0, 1)
    assert groups.of(PROMPT, "", 1, 60.0, 1) == first
    assert groups.of(PROMPT, "", 3, 61.0, 1) != first, "three publishes later"
    again = groups.of(PROMPT, "", 3, 62.0, 1)
    assert groups.of(PROMPT, "", 3, 500.0, 1) != again, "minutes later"


def test_prompts_are_forgotten_in_the_order_in_which_they_were_last_seen() -> None:
    groups = InferredGroups(most=2)
    first = groups.of((1,), "", 0, 0.0, 1)
    groups.of((2,), "", 0, 0.0, 1)
    assert groups.of((1,), "", 0, 1.0, 1) == first
    groups.of((3,), "", 0, 2.0, 1)
    assert groups.of((1,), "", 0, 3.0, 1) == first


def test_idle_is_over_only_beyond_what_this_lease_is_used_to() -> None:
    assert not is_over(Idle(0.0, published=False), None, 59.0)
    assert is_over(Idle(0.0, published=False), None, 60.0)
    assert not is_over(Idle(0.0, published=False), 40.0, 100.0), "tools take 40 s here"
    assert is_over(Idle(0.0, published=False), 40.0, 120.0)


def test_a_publish_makes_it_over_sooner_but_not_at_once() -> None:
    assert not is_over(Idle(0.0, published=True), None, 4.0)
    assert is_over(Idle(0.0, published=True), None, 5.0)
    assert not is_over(Idle(0.0, published=True), 40.0, 59.0)


def test_the_usual_pause_is_what_nearly_all_keep_below() -> None:
    pauses = Pauses()
    assert pauses.usual() is None
    for number in range(200):
        pauses.record(1.0 if number else 300.0)
    assert pauses.usual() == 1.0


def _ran(memory: Prospects, name: str, tokens: int, at: float) -> None:
    memory.begin_turn(name, Hint(), 3, at, prompt=PROMPT)
    memory.end_turn(name, tokens, 3 + tokens, at + 1)


def test_siblings_learn_from_an_end_that_nobody_told() -> None:
    memory = Prospects()
    _ran(memory, "one", 4000, 0.0)
    memory.begin_turn("other", Hint(), 3, 2.0, prompt=PROMPT)
    assert memory.infer_ends(30.0) == 0
    assert memory.infer_ends(61.0) == 1
    assert memory.with_expectation("other", TURN, 61.0).tail_tokens == 4000
    assert (memory.inferred_ends, memory.mistaken_ends) == (1, 0)


def test_another_checkpoint_is_no_publish_and_the_first_publish_is_one() -> None:
    one, other = (WeightVersion.of_base("run", digit * 32) for digit in "ab")
    memory = Prospects()
    memory.note_head(one, 0.0)
    _ran(memory, "one", 40, 0.0)
    memory.note_head(other, 2.0)
    assert memory.infer_ends(20.0) == 0
    memory.note_head(version(0), 21.0)
    assert memory.infer_ends(22.0) == 1, "trained on: a publish came after it"


def test_one_that_comes_back_was_not_over() -> None:
    memory = Prospects()
    _ran(memory, "one", 40, 0.0)
    memory.infer_ends(61.0)
    memory.begin_turn("one", Hint(), 43, 70.0)
    memory.end_turn("one", 40, 83, 71.0)
    assert memory.mistaken_ends == 1
    assert memory.infer_ends(140.0) == 0, "it paused for 69 s before"
    assert memory.infer_ends(71.0 + 3 * 69 + 1) == 1
    found = memory.conclude("one", trained=True)
    assert found is not None
    assert found.tokens == 80


def test_nobody_learns_from_the_length_of_an_end_that_was_a_mistake() -> None:
    memory = Prospects()
    _ran(memory, "one", 4000, 0.0)
    memory.begin_turn("other", Hint(), 3, 2.0, prompt=PROMPT)
    memory.infer_ends(61.0)
    assert memory.with_expectation("other", TURN, 61.0).tail_tokens == 4000
    memory.begin_turn("one", Hint(), 43, 70.0)
    assert memory.with_expectation("other", TURN, 70.0).tail_tokens == 0, "nothing has ended"
    memory.end_turn("one", 1000, 5043, 71.0)
    memory.conclude("one", trained=True)
    assert memory.with_expectation("other", TURN, 72.0).tail_tokens == 5000


def test_where_nobody_reports_the_meter_says_what_was_in_time_and_loses_the_rest() -> None:
    memory = Prospects(Deadline(publishes=1))
    memory.note_head(version(0), 0.0)
    _ran(memory, "in time", 40, 0.0)
    memory.begin_turn("late", Hint(), 3, 0.0)
    for publish in (1, 2, 3):
        memory.note_head(version(publish), 10.0 * publish)
    memory.end_turn("late", 40, 43, 31.0)
    memory.infer_ends(200.0)
    (row,) = (row for row in memory.in_time.rows() if row.dimension == "all")
    assert (row.any.trained, row.any.dropped) == (1, 1)
    assert memory.inclusion.rows() == [], "an inference is no report"
    memory.forget_silent(10_000.0)
    (row,) = (row for row in memory.inclusion.rows() if row.dimension == "all")
    assert (row.any.trained, row.any.lost) == (0, 2)


def test_what_is_withdrawn_is_not_counted() -> None:
    memory = Prospects()
    _ran(memory, "one", 40, 0.0)
    memory.forget("one")
    assert memory.forget_silent(10_000.0) == 0
    assert memory.inclusion.rows() == []


def test_a_group_of_the_control_arm_has_its_members_run_on_dedicated_engines() -> None:
    memory = Prospects(control=1.0)
    memory.begin_turn("t", Hint(group="g"), 3, 0.0)
    view = memory.with_expectation("t", TURN, 0.0)
    policy = policies_of(LeaseTerms()).placement
    assert narrowed(PlacementCase(view, [LENT, OURS], [], policy, RolloutOutlook())) == [OURS]
    assert narrowed(PlacementCase(view, [LENT], [OURS], policy, RolloutOutlook())) == [], (
        "it waits for a place"
    )
    assert narrowed(PlacementCase(view, [LENT], [], policy, RolloutOutlook())) == [LENT], (
        "there is none at all"
    )
    found = memory.conclude("t", trained=True)
    assert found is not None
    assert (found.arm, found.fate) == (Arm.CONTROL, Fate.TRAINED)


def test_groups_are_assigned_only_under_the_rule_that_keeps_to_it() -> None:
    under = {
        name: policies_of(LeaseTerms(placement=name)).memory()
        for name in (PolicyName.JOINT, PolicyName.LEAST_LOADED)
    }
    arms = {name: set[Arm]() for name in under}
    for name, memory in under.items():
        for number in range(400):
            memory.begin_turn(str(number), Hint(), 3, 0.0)
            found = memory.conclude(str(number), trained=True)
            assert found is not None
            arms[name].add(found.arm)
    assert arms[PolicyName.JOINT] == {Arm.ANY, Arm.CONTROL}
    assert arms[PolicyName.LEAST_LOADED] == {Arm.ANY}
