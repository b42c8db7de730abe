"""The tables of splice, watch, admission, versions and estimates, line by line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_core.identity import WeightVersion
from rose_core.rollouts.capacity.admission import QueueLimits, has_room, rank, retry_after
from rose_core.rollouts.engines.estimates import Hazard, Speed, weight_of
from rose_core.rollouts.errors import InvalidTurn, UnknownVersion, VersionGone
from rose_core.rollouts.placement.watch import LegPatience, LegView, MoveReason, judge, queues
from rose_core.rollouts.requests import splice
from rose_core.rollouts.versions import (
    Pin,
    age,
    check_pin,
    fresh,
    lag,
    newest,
    next_head,
    older,
    read_pin,
    satisfies,
)


@pytest.mark.parametrize(
    "name", [n for n, r in splice.SAMPLING.items() if r.rule is splice.SpliceRule.DEDICATED]
)
def test_what_cannot_be_spliced_is_named_with_its_reason(name: str) -> None:
    (reason,) = splice.dedicated_because({name: 0.5}, {})
    assert reason.startswith(f"{name}: ")
    assert len(reason) > len(name) + 2
    for neutral in splice.SAMPLING[name].neutral:
        assert splice.dedicated_because({name: neutral}, {}) == ()


@pytest.mark.parametrize(
    "name",
    [
        n
        for n, r in splice.SAMPLING.items()
        if r.rule
        in {splice.SpliceRule.CARRIED, splice.SpliceRule.ADJUSTED, splice.SpliceRule.SPLIT}
    ],
)
def test_what_can_be_spliced_may_run_anywhere(name: str) -> None:
    assert splice.dedicated_because({name: 3}, {}) == ()


def test_stop_strings_move_where_somebody_looks_for_them() -> None:
    (reason,) = splice.dedicated_because({"stop": ["</end>"]}, {})
    assert "--tokenizer" in reason
    assert splice.dedicated_because({"stop": ["</end>"]}, {}, emulated=("stop",)) == ()
    assert splice.dedicated_because({"stop": []}, {}) == ()


def test_what_the_last_engine_says_of_all_tokens_moves_and_what_it_cannot_say_does_not() -> None:
    assert splice.dedicated_because({}, {"return_sampling_mask": True}) == ()
    assert splice.dedicated_because({}, {"return_routed_experts": True}) == ()
    (reason,) = splice.dedicated_because({}, {"return_hidden_states": True})
    assert "prompt" in reason


@pytest.mark.parametrize(
    ("sampling", "request_fields"),
    [({"beam_width": 4}, {}), ({}, {"input_embeds": [[1.0]]}), ({}, {"background": True})],
)
def test_what_is_refused_is_refused_by_name(
    sampling: dict[str, object], request_fields: dict[str, object]
) -> None:
    (name,) = {**sampling, **request_fields}
    with pytest.raises(InvalidTurn, match=name):
        splice.dedicated_because(sampling, request_fields)


def test_the_next_leg_asks_for_what_is_missing() -> None:
    sampling = {"max_new_tokens": 10, "min_new_tokens": 4, "temperature": 0.7, "n": 2}
    assert splice.remaining(sampling, 0) == {
        "max_new_tokens": 10,
        "min_new_tokens": 4,
        "temperature": 0.7,
    }
    assert splice.remaining(sampling, 3) == {
        "max_new_tokens": 7,
        "min_new_tokens": 1,
        "temperature": 0.7,
    }
    assert splice.remaining(sampling, 9)["min_new_tokens"] == 0
    assert splice.remaining({}, 28) == {"max_new_tokens": 100}


@pytest.mark.parametrize("value", [0, -1, "7", 1.5, True])
def test_a_wrong_number_of_tokens_is_refused(value: object) -> None:
    with pytest.raises(InvalidTurn, match="max_new_tokens"):
        splice.most_tokens({"max_new_tokens": value})


NOW = 100.0
CALM = LegView(known=True, leaving=False, gate_open=True, gate_since=0.0, last_event=99.0)
PATIENCE = LegPatience(pause_seconds=5, stall_seconds=60)


@pytest.mark.parametrize(
    ("leg", "elsewhere", "expected"),
    [
        (CALM, True, None),
        (replace(CALM, known=False), False, MoveReason.GONE),
        (replace(CALM, leaving=True), False, MoveReason.REVOKED),
        (replace(CALM, gate_open=False, gate_since=0.0), True, None),
        (replace(CALM, last_event=41.0), True, None),
        (replace(CALM, last_event=40.0), True, MoveReason.STALLED),
        (replace(CALM, last_event=40.0, gate_since=60.0), True, None),
        (replace(CALM, excess=True), True, MoveReason.CAP_CUT),
        (replace(CALM, excess=True), False, None),
    ],
)
def test_when_a_leg_must_end(leg: LegView, elsewhere: bool, expected: MoveReason | None) -> None:
    assert judge(leg, PATIENCE, elsewhere, NOW) is expected


@pytest.mark.parametrize(
    ("leg", "expected"),
    [
        (replace(CALM, gate_open=False, gate_since=95.0, last_event=94.0), True),
        (replace(CALM, gate_open=False, gate_since=96.0, last_event=94.0), False),
        (replace(CALM, gate_open=False, gate_since=90.0, last_event=96.0), False),
        (CALM, False),
        (replace(CALM, gate_open=False, leaving=True), False),
        (replace(CALM, gate_open=False, known=False), False),
    ],
)
def test_whose_gate_has_been_closed_for_long_queues_for_another_engine(
    leg: LegView, *, expected: bool
) -> None:
    assert queues(leg, PATIENCE, NOW) is expected


def test_turns_that_hold_tokens_go_first_then_priority_then_age() -> None:
    ranks = [rank(False, 0, 1), rank(False, 5, 2), rank(True, 0, 3), rank(False, 0, 0)]
    assert sorted(ranks) == [ranks[2], ranks[1], ranks[3], ranks[0]]


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    assert has_room(1, QueueLimits(most=2))
    assert not has_room(2, QueueLimits(most=2))
    assert retry_after(100, 0) == 30
    assert retry_after(100, 5) == 2
    assert retry_after(0, 5) == 1
    assert retry_after(10_000, 1) == 30


def version(sequence: int, incarnation: int = 1, run: str = "run") -> WeightVersion:
    return WeightVersion(run, incarnation, sequence)


def test_lag_counts_publishes_and_never_crosses_runs_or_incarnations() -> None:
    assert lag(version(3), version(5)) == 2
    assert lag(version(6), version(5)) == 0
    assert lag(version(5), version(0, incarnation=2)) is None
    assert lag(version(5, run="other"), version(5)) is None
    assert fresh(version(4), version(5), 1)
    assert not fresh(version(3), version(5), 1)
    assert not fresh(version(5), version(0, incarnation=2), 100)


def test_a_new_incarnation_is_newer_than_any_sequence_of_the_old() -> None:
    assert newest([version(9), version(0, incarnation=2)]) == version(0, incarnation=2)
    assert newest([]) is None


def base(digit: str = "a") -> WeightVersion:
    return WeightVersion.of_base("run", digit * 32)


def test_version_0_is_fresh_until_something_is_published_and_then_never() -> None:
    assert fresh(base(), base(), 0)
    assert not fresh(base(), version(0), 100)


def test_another_checkpoint_is_another_version_0_whatever_the_bound() -> None:
    assert lag(base("b"), base("a")) is None
    assert not fresh(base("a"), base("b"), 100)
    assert not fresh(base("b"), base("a"), 100)


def test_the_first_publish_is_one_publish_after_version_0() -> None:
    assert age(base(), base()) == 0
    assert age(base("a"), base("b")) == 0
    assert age(base(), version(0)) == 1
    assert age(base(), version(2)) == 3
    assert age(base(), version(0, incarnation=2)) is None
    assert age(base(), version(0, run="other")) is None
    assert age(version(1), version(3)) == 2


def test_the_newest_version_0_stays_it_while_an_engine_has_it() -> None:
    a, b = base("a"), base("b")
    assert next_head(None, [a], [a]) == a
    assert next_head(a, [b], [a, b, b]) == a
    assert next_head(a, [], [b, b, base("c")]) == b
    assert next_head(a, [], []) == a
    assert next_head(a, [version(0), None], [a]) == version(0)
    assert next_head(version(0), [a], [a]) == version(0)


def test_a_pin_to_what_is_published_is_not_met_by_version_0() -> None:
    assert not satisfies(base(), Pin(minimum=version(0)))
    assert satisfies(version(0), Pin(minimum=base()))
    assert satisfies(base(), Pin(exact=base()))
    assert satisfies(base(), Pin(minimum=base()))
    with pytest.raises(UnknownVersion, match=r"the newest version known here is run@base\.a"):
        check_pin(Pin(minimum=version(0)), base(), [base()])


def test_checkpoints_have_no_order() -> None:
    a, b = base("a"), base("b")
    assert not older(a, b)
    assert not older(b, a)
    assert older(b, version(0))
    for one, other in ((a, b), (b, a)):
        assert not satisfies(one, Pin(minimum=other))
        assert not satisfies(one, Pin(exact=other))


def test_a_pin_is_satisfied_by_its_version_or_within_its_run_by_newer_ones() -> None:
    assert satisfies(version(3), Pin(minimum=version(3)))
    assert not satisfies(version(2), Pin(minimum=version(3)))
    assert not satisfies(version(9, run="other"), Pin(minimum=version(3)))
    assert satisfies(version(0, incarnation=2), Pin(minimum=version(3)))
    assert not satisfies(version(4), Pin(exact=version(3)))
    assert read_pin(None, "") == Pin()
    with pytest.raises(InvalidTurn, match=r"rose\.version: expected text"):
        read_pin(None, 7)


def test_a_pin_must_be_known() -> None:
    check_pin(Pin(minimum=version(5)), version(5), [])
    check_pin(Pin(exact=version(3)), version(5), [version(3)])
    check_pin(Pin(exact=version(5)), version(5), [])
    with pytest.raises(UnknownVersion, match=r"run@1\.6 or newer"):
        check_pin(Pin(minimum=version(6)), version(5), [])
    for gone in (version(2), version(9, run="other"), base()):
        with pytest.raises(VersionGone, match="no engine has version"):
            check_pin(Pin(exact=gone), version(5), [version(3)])
    for coming in (version(9), version(0, incarnation=2)):
        with pytest.raises(UnknownVersion, match="no engine has version") as found:
            check_pin(Pin(exact=coming), version(5), [version(3)])
        assert not isinstance(found.value, VersionGone)
    with pytest.raises(UnknownVersion, match="no version is known"):
        check_pin(Pin(minimum=version(0)), None, [])


def test_speed_follows_what_was_seen() -> None:
    speed = Speed(step_seconds=0.02, prefill_seconds_per_token=0.001)
    for _ in range(100):
        speed = speed.saw_step(0.1).saw_first_token(2.0, 1000)
    assert speed.step_seconds == pytest.approx(0.1, rel=0.01)
    assert speed.prefill_seconds_per_token == pytest.approx(0.002, rel=0.01)
    assert speed.saw_first_token(5.0, 3) == speed


def test_one_lesson_weighs_as_much_as_those_that_it_stands_for() -> None:
    one_by_one = Speed()
    for _ in range(7):
        one_by_one = one_by_one.saw_step(0.1)
    at_once = Speed().saw_step(0.1, weight_of(7))
    assert at_once.step_seconds == pytest.approx(one_by_one.step_seconds)


def test_turns_of_a_batch_tell_of_each_step_once() -> None:
    speed = Speed(step_seconds=0.1)
    assert not speed.teaches(0.004)  # as far apart as one batch's events are
    assert speed.teaches(0.098)


def test_hazard_grows_with_reclaims_and_is_forgotten() -> None:
    calm = Hazard()
    shaky = calm
    for _ in range(10):
        shaky = shaky.passed(10, is_open=True).passed(6, is_open=False, reclaimed=True)
    assert shaky.per_second > 5 * calm.per_second > 0
    assert shaky.passed(3000, is_open=True).per_second < calm.per_second


def test_short_closings_lower_the_open_share_and_nothing_else() -> None:
    flickering = Hazard()
    for _ in range(600):
        flickering = flickering.passed(1, is_open=True).passed(1, is_open=False)
    assert flickering.open_share == pytest.approx(0.5, abs=0.05)
    assert flickering.per_second < Hazard().per_second
    assert Hazard(open_seconds=0.0, closed_seconds=5.0).open_share == 0.01


def test_a_step_is_carried_to_another_load_by_what_steps_did_when_the_load_changed() -> None:
    speed = Speed()
    for live in (16, 12, 8, 4, 8, 12, 16) * 3:
        speed = speed.saw_step(0.006 + 0.001 * live, 1.0, live)
    assert speed.per_turn_seconds == pytest.approx(0.001, rel=0.01)
    assert speed.step_at(16) == pytest.approx(0.022, rel=0.01)
    assert speed.step_at(1) == pytest.approx(0.007, rel=0.1)
    # Never carried below a quarter of what was seen.
    assert speed.step_at(-100) == pytest.approx(speed.step_seconds / 4)


def test_a_step_without_a_load_says_nothing_about_loads() -> None:
    speed = Speed().saw_step(0.05).saw_step(0.01).saw_step(0.05, live=3).saw_step(0.01, live=3)
    assert not speed.per_turn_seconds
    assert speed.step_at(1) == speed.step_at(16) == speed.step_seconds
