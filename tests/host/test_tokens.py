"""Counting tokens of replies, whatever their shape and however the bytes are cut."""

from __future__ import annotations

import json

import pytest

from rose_agent.host.route.proxy import TokenCount


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def sglang(tokens: int, index: int = 0) -> dict[str, object]:
    return {"text": "x", "index": index, "meta_info": {"completion_tokens": tokens, "id": "r"}}


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_cumulative_streams_are_counted_once_whatever_the_cuts(size: int) -> None:
    data = event(sglang(1)) + event(sglang(2)) + event(sglang(5)) + b"data: [DONE]\n\n"
    count = TokenCount(streamed=True)
    for start in range(0, len(data), size):
        count.feed(data[start : start + size])
    assert count.finish() == 5


def test_several_choices_of_one_stream_add_up() -> None:
    count = TokenCount(streamed=True)
    count.feed(event(sglang(3, 0)) + event(sglang(2, 1)) + event(sglang(4, 0)))
    assert count.finish() == 6


def test_a_stream_that_breaks_keeps_what_was_seen() -> None:
    count = TokenCount(streamed=True)
    count.feed(event(sglang(3)) + b'data: {"meta_in')
    assert count.finish() == 3


def test_plain_replies_single_and_batch() -> None:
    single, batch = TokenCount(streamed=False), TokenCount(streamed=False)
    single.feed(json.dumps(sglang(9)).encode())
    batch.feed(json.dumps([sglang(2), sglang(3)]).encode())
    assert (single.finish(), batch.finish()) == (9, 5)


def test_openai_events_count_until_usage_says_better() -> None:
    count = TokenCount(streamed=True)
    count.feed(event({"choices": [{"text": "a"}]}) + event({"choices": [{"text": "b"}]}))
    assert count.total == 2
    count.feed(event({"choices": [], "usage": {"completion_tokens": 7}}))
    assert count.finish() == 7


@pytest.mark.parametrize("data", [b"", b"data: nonsense\n\n", b"\n\n\n\n", b"data: [1, 2]\n\n"])
def test_garbage_counts_nothing(data: bytes) -> None:
    count = TokenCount(streamed=True)
    count.feed(data)
    assert count.finish() == 0


def test_generated_text_cannot_pretend_to_be_a_count() -> None:
    count = TokenCount(streamed=True)
    forged = '"meta_info": {"completion_tokens": 99999}, "index": 7'
    count.feed(event({"meta_info": {"completion_tokens": 2, "note": forged}, "text": forged}))
    assert count.finish() == 2


def test_a_batch_in_one_plain_reply_with_indices() -> None:
    count = TokenCount(streamed=False)
    count.feed(json.dumps([sglang(2, 0), sglang(3, 1)]).encode())
    assert count.finish() == 5
