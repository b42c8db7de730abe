"""Conversations behind responses: their own job's, within a bound, the least recent forgotten."""

from __future__ import annotations

import pytest

from rose_router.errors import NotFound
from rose_router.http.conversations.stored_responses import StoredResponses

TALK = [{"role": "user", "content": "x" * 100}]


def test_a_response_is_found_by_its_own_job_alone() -> None:
    kept = StoredResponses(10_000)
    kept.keep("a", "resp_1", TALK)
    assert kept.find("a", "resp_1") == TALK
    with pytest.raises(NotFound, match="another job's"):
        kept.find("b", "resp_1")


def test_the_least_recently_used_goes_first() -> None:
    kept = StoredResponses(1100)  # room for eight of them
    for number in range(8):
        kept.keep("a", f"resp_{number}", TALK)
    kept.find("a", "resp_0")
    kept.keep("a", "resp_8", TALK)
    assert kept.find("a", "resp_0") == TALK
    with pytest.raises(NotFound):
        kept.find("a", "resp_1")


def test_one_that_would_push_out_too_many_others_is_not_kept() -> None:
    kept = StoredResponses(1100)
    kept.keep("a", "resp_1", TALK)
    kept.keep("a", "resp_2", [{"role": "user", "content": "x" * 500}])
    assert kept.find("a", "resp_1") == TALK
    with pytest.raises(NotFound):
        kept.find("a", "resp_2")
