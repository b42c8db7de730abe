"""Grants: terms, deadlines on the node's own clock, complete and incomplete answers."""

from __future__ import annotations

from rose_core.guard.grants import GrantBook
from rose_core.identity import GrantKey, PodUid, SlotKey, SlotUid
from rose_core.wire.sync import EngineSpec, Grant, SyncReply, WeightSource


def grant(uid: str = "a", term: int = 1, generation: int = 1, ttl: float = 10.0) -> Grant:
    return Grant(
        key=GrantKey(term, SlotKey(SlotUid(uid), generation)),
        ttl_seconds=ttl,
        slot_name=uid,
        lease="ns/lease",
        pool="ns/pool",
        pod_uid=PodUid("pod"),
        pod_name="pod",
        gpu_uuids=(),
        engine=EngineSpec("fake", "m"),
        weights=WeightSource("h:1", "run"),
        router="",
    )


def reply(*grants: Grant, term: int = 1, complete: bool = True) -> SyncReply:
    return SyncReply(term, complete, grants)


def test_the_deadline_counts_from_the_sending() -> None:
    book = GrantBook().take(reply(grant()), sent_s=100.0)
    assert set(book.alive(109.9)) == {"a"}
    assert book.alive(110.0) == {}
    assert [book.is_alive(SlotUid("a"), at) for at in (109.9, 110.0)] == [True, False]
    assert not book.is_alive(SlotUid("b"), 100.0)


def test_a_renewal_never_shortens() -> None:
    book = GrantBook().take(reply(grant()), 100.0).take(reply(grant(ttl=1.0)), 101.0)
    assert set(book.alive(109.0)) == {"a"}


def test_a_missing_slot_has_been_taken_back() -> None:
    book = GrantBook().take(reply(grant("a"), grant("b")), 0.0).take(reply(grant("b")), 1.0)
    assert set(book.alive(2.0)) == {"b"}


def test_an_incomplete_answer_renews_and_neither_starts_nor_takes_back() -> None:
    book = GrantBook().take(reply(grant("a"), grant("b")), 0.0)
    book = book.take(reply(grant("b"), grant("c"), complete=False), 8.0)
    assert set(book.alive(9.0)) == {"a", "b"}
    assert set(book.alive(15.0)) == {"b"}
    assert book.complete_replies == 1


def test_a_lower_term_changes_nothing() -> None:
    book = GrantBook().take(reply(grant(term=5), term=5), 0.0)
    after = book.take(reply(grant("z", term=4), term=4), 1.0)
    assert after.alive(2.0) == book.alive(2.0)
    assert (after.highest_term, after.refused_terms) == (5, 1)


def test_a_restarted_agent_remembers_the_term() -> None:
    book = GrantBook(highest_term=7).take(reply(grant(term=6), term=6), 0.0)
    assert book.alive(1.0) == {}


def test_a_grant_of_an_older_term_inside_a_newer_answer_is_passed_over() -> None:
    book = GrantBook(highest_term=2).take(reply(grant(term=1), term=2), 0.0)
    assert book.alive(1.0) == {}


def test_an_older_generation_never_replaces_a_newer_one() -> None:
    book = GrantBook().take(reply(grant(generation=2)), 0.0)
    book = book.take(reply(grant(generation=1), complete=False), 1.0)
    assert book.alive(2.0)[SlotUid("a")].key.slot.generation == 2


def test_a_newer_generation_starts_its_own_deadline() -> None:
    book = GrantBook().take(reply(grant(ttl=100.0)), 0.0)
    book = book.take(reply(grant(generation=2, ttl=5.0)), 1.0)
    assert book.alive(7.0) == {}
