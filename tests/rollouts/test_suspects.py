"""Which turn may have ended an engine, and when it is not tried again."""

from __future__ import annotations

from rose_core.rollouts.engines.suspects import SuspectRecord, suspects


def test_a_turn_without_a_token_is_the_likelier_cause() -> None:
    assert suspects({"a": 7, "b": 0, "c": 3, "d": 0}) == {"b", "d"}


def test_of_turns_that_all_had_tokens_none_is_a_suspect() -> None:
    assert suspects({"a": 7, "b": 3}) == frozenset()


def test_a_suspect_that_ends_another_process_does_not_run_again() -> None:
    record = SuspectRecord()
    assert not record.saw_death("a", suspected=True, held=0)
    assert record.must_be_alone()
    assert record.saw_death("b", suspected=True, held=0)
    assert record.engines == ("a", "b")


def test_one_token_more_than_at_the_death_clears_a_suspect() -> None:
    record = SuspectRecord()
    record.saw_death("a", suspected=True, held=3)
    record.note_tokens(3)
    assert record.must_be_alone()
    record.note_tokens(4)
    assert not record.must_be_alone()
    assert not record.engines
    assert not record.saw_death("a", suspected=True, held=9)


def test_who_stood_by_twice_is_a_suspect_and_has_one_more_try() -> None:
    record = SuspectRecord()
    assert not record.saw_death("a", suspected=False, held=5)
    assert not record.must_be_alone()
    assert not record.saw_death("a", suspected=False, held=5)
    assert record.must_be_alone()
    assert record.saw_death("a", suspected=True, held=5)
