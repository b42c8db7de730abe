"""Whether a turn waits for keys that another node has, and what they are called there."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.engines.kv_pull import (
    FORGET_SECONDS,
    LONGEST_SECONDS,
    PAGE_NAME,
    SENT_BYTES_PER_SECOND,
    SETUP_SECONDS,
    LinkRate,
    SendLimit,
    page_names,
    patience,
)
from rose_core.rollouts.engines.kv_store import PAGE_TOKENS

SUFFIX = "-0123456789abcdef"
PAGE = 2 << 20  # of an 8B in bfloat16
QUICK, SLOW = 1e-5, 5e-4  # seconds of prefill for a token


def test_a_page_is_named_by_all_tokens_up_to_its_end_and_by_whose_it_is() -> None:
    tokens = list(range(3 * PAGE_TOKENS + 1))
    names = page_names(tokens, "turn\nrun@1.1@00", SUFFIX)
    assert len(names) == 3
    assert all(map(PAGE_NAME.fullmatch, names))
    changed = [*tokens[:PAGE_TOKENS], 99, *tokens[PAGE_TOKENS + 1 :]]
    other = page_names(changed, "turn\nrun@1.1@00", SUFFIX)
    assert other[0] == names[0]
    assert not set(other[1:]) & set(names)
    assert not set(page_names(tokens, "turn\nrun@1.1@01", SUFFIX)) & set(names)
    # The last token is computed whatever is kept, so its page is not looked for.
    assert page_names(tokens[:-1], "turn\nrun@1.1@00", SUFFIX) == names[:2]
    assert page_names([], "turn", SUFFIX) == []
    with pytest.raises(OverflowError):
        page_names([-1] * 40, "turn", SUFFIX)


def test_names_are_the_hash_chain_of_sglang() -> None:
    seed = hashlib.sha256(b"sglang-cache-namespace-v1")
    seed.update(b"\x01" + (3).to_bytes(8, "little") + b"key" + b"\x00")
    page = b"".join(n.to_bytes(4, "little") for n in range(PAGE_TOKENS))
    first = hashlib.sha256(seed.digest() + page).hexdigest()
    assert page_names(range(PAGE_TOKENS + 1), "key", SUFFIX) == [first + SUFFIX]


@pytest.mark.parametrize(
    ("pages", "seconds_per_token", "rate", "waits"),
    [
        (2000, SLOW, SENT_BYTES_PER_SECOND, True),
        (2000, QUICK, SENT_BYTES_PER_SECOND, False),  # a fast GPU, a slow link
        (2000, QUICK, 100e9, True),
        (1, SLOW, SENT_BYTES_PER_SECOND, False),  # the set-up alone takes longer
        (0, SLOW, SENT_BYTES_PER_SECOND, False),
        (2000, SLOW, 1e6, False),
    ],
)
def test_a_turn_waits_where_that_is_quicker_than_to_prefill(
    pages: int, seconds_per_token: float, rate: float, waits: bool
) -> None:
    assert (patience(pages, PAGE, seconds_per_token, rate) > 0) == waits


@given(
    pages=st.integers(0, 1 << 16),
    page_bytes=st.integers(1, 64 << 20),
    seconds_per_token=st.floats(0, 1),
    rate=st.floats(1, 1e12),
)
def test_a_turn_never_waits_longer_than_its_prefill_takes_nor_than_a_router_bears(
    pages: int, page_bytes: int, seconds_per_token: float, rate: float
) -> None:
    waits = patience(pages, page_bytes, seconds_per_token, rate)
    assert 0 <= waits <= min(LONGEST_SECONDS, pages * PAGE_TOKENS * seconds_per_token)
    if waits:
        assert SETUP_SECONDS + pages * page_bytes / rate < waits


def test_a_link_is_believed_as_it_was_seen_and_tried_again_after_a_while() -> None:
    link = LinkRate()
    assert link.believed(0.0) == SENT_BYTES_PER_SECOND
    assert link.saw(100, 1.0, 0.0) == link  # too little to tell
    slow = link.saw(10 << 20, 10.0, 5.0)
    assert slow.believed(5.0) == 1 << 20
    faster = slow.saw(30 << 20, 10.0, 6.0)
    assert (1 << 20) < faster.believed(6.0) < (3 << 20)
    assert slow.believed(5.0 + FORGET_SECONDS) == SENT_BYTES_PER_SECOND


@given(sizes=st.lists(st.integers(1, 64 << 20), min_size=1, max_size=50))
def test_whoever_waits_as_told_sends_no_more_than_the_rate(sizes: list[int]) -> None:
    pace, now = SendLimit(1e6), 100.0
    for size in sizes:
        now += pace.wait(size, now)
    assert sum(sizes) <= 1e6 * (now - 100.0 + 0.1) + 1


def test_a_pause_saves_up_no_more_than_a_tenth_of_a_second() -> None:
    pace = SendLimit(1e6)
    assert pace.wait(1_000_000, 100.0) == pytest.approx(0.9)
    assert pace.wait(100_000, 500.0) == pytest.approx(0.0)
    assert pace.wait(1_000_000, 500.0) == pytest.approx(1.0)
