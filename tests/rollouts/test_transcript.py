"""Legs, cumulative and incremental events, placed and unplaced tokens, folding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.rollouts.errors import BrokenStream
from rose_core.rollouts.transcripts.spans import Kv, TokenSpan, covers, joined, normal
from rose_core.rollouts.transcripts.transcript import Folded, Leg, StreamEvent, Transcript
from rose_core.wire.routing import EngineKind

V0, V1 = "run@1.0", "run@1.1"


def leg(offset: int = 0, version: str = V0) -> Leg:
    return Leg("e", EngineKind.BORROWED, "rid", version, offset)


def event(
    ids: list[int],
    count: int | None = None,
    *,
    spans: list[tuple[str, int, int]] | None = None,
    finish: dict[str, object] | None = None,
    label: str = V0,
) -> StreamEvent:
    return StreamEvent(
        ids=ids,
        count=len(ids) if count is None else count,
        per_token={"output_token_logprobs": [[-float(t), t, None] for t in ids]},
        text="".join(chr(97 + t % 26) for t in ids),
        finish=finish,
        spans=spans,
        label=label,
    )


@settings(deadline=None)
@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=8), incremental=st.booleans())
def test_cumulative_and_incremental_streams_give_the_same_tokens(
    cuts: list[int], incremental: bool
) -> None:
    tokens = list(range(sum(cuts)))
    one, position = leg(), 0
    for size in cuts:
        start = position if incremental else 0
        position += size
        one.take(event(tokens[start:position], position, spans=[(V0, 0, position)]))
    assert one.ids == tokens
    assert [entry[1] for entry in one.per_token["output_token_logprobs"]] == tokens
    assert one.placed == len(tokens)
    assert one.placed_text == "".join(chr(97 + t % 26) for t in tokens)


def test_an_engine_that_appended_more_than_it_counted_is_taken_at_its_count() -> None:
    one = leg()
    one.take(event([1, 2, 3], 2))
    one.take(event([1, 2, 3, 4], 3))
    assert one.ids == [1, 2, 3]


def test_the_last_event_of_an_aborted_incremental_stream_repeats_a_token() -> None:
    one = leg()
    one.take(event([1, 2, 3], 3))
    one.take(event([3], 3, finish={"type": "abort"}))
    assert one.ids == [1, 2, 3]
    assert one.aborted
    assert not one.complete


def test_an_abort_behind_new_tokens_in_one_incremental_event_doubles_nothing() -> None:
    """SGLang joins waiting events: the new tokens, then the last one with everything so far."""
    one = leg()
    one.take(event([1], spans=[(V0, 0, 1)]))
    pairs = [[-2.0, 2, None], *([-float(t), t, None] for t in (1, 2))]
    joined = StreamEvent(
        ids=[2, 2],
        count=2,
        per_token={"output_token_logprobs": pairs},
        text="cbc",
        finish={"type": "abort"},
        spans=[(V0, 0, 2)],
    )
    one.take(joined)
    assert one.ids == [1, 2]
    assert one.per_token["output_token_logprobs"] == [[-1.0, 1, None], [-2.0, 2, None]]
    assert one.placed_text == "bc"


def test_text_that_comes_after_the_last_token_is_kept_with_the_rest() -> None:
    one = leg()
    one.take(event([1, 2], spans=[(V0, 0, 2)]))
    last = StreamEvent([], 2, text="!", finish={"type": "stop"}, spans=[(V0, 0, 2)])
    one.take(last)
    assert (one.ids, one.placed_text) == ([1, 2], "bc!")
    assert one.complete


def test_a_gap_breaks_the_stream() -> None:
    one = leg()
    one.take(event([1, 2], 2))
    with pytest.raises(BrokenStream, match="output_ids: 1 entries where tokens 2 to 5"):
        one.take(event([9], 5))


def test_counting_backwards_breaks_the_stream() -> None:
    one = leg()
    one.take(event([1, 2], 2))
    with pytest.raises(BrokenStream, match="counted 2 tokens before and 1 now"):
        one.take(event([1], 1))


def test_missing_log_probs_break_the_stream() -> None:
    one = leg()
    bad = StreamEvent(ids=[1, 2], count=2, per_token={"output_token_logprobs": []})
    with pytest.raises(BrokenStream, match="output_token_logprobs"):
        one.take(bad)


def test_without_spans_nothing_is_placed_until_the_end() -> None:
    one = leg()
    one.take(event([1, 2], 2))
    assert one.placed == 0
    one.take(event([1, 2, 3], 3, finish={"type": "stop"}))
    assert one.placed == 3
    assert one.spans == (TokenSpan(V0, 0, 3),)
    assert one.complete


def test_an_answer_without_a_token_is_no_answer() -> None:
    one = leg()
    one.take(event([], 0, spans=[], finish={"type": "stop"}))
    assert not one.complete


def test_an_old_engine_whose_label_moved_leaves_its_tokens_unplaced() -> None:
    one = leg()
    one.take(event([1, 2], 2, finish={"type": "stop"}, label=V1))
    assert one.placed == 0
    assert not one.complete


@pytest.mark.parametrize("spans", [[("base", 0, 2)], [(V0, 0, 1)], [(V0, 1, 2)], []])
def test_spans_that_nobody_attested_or_that_do_not_cover_place_nothing(
    spans: list[tuple[str, int, int]],
) -> None:
    one = leg()
    one.take(event([1, 2], 2, spans=spans, finish={"type": "stop"}))
    assert one.placed == 0


def test_tokens_that_carry_another_runs_label_are_not_placed() -> None:
    one = leg()
    one.take(event([1, 2], 2, spans=[("other@1.0", 0, 2)], finish={"type": "stop"}))
    assert (one.placed, one.spans) == (0, ())


def test_tokens_after_a_commit_sit_on_mixed_keys() -> None:
    one = leg()
    one.take(event([1, 2, 3], 3, spans=[(V0, 0, 2), (V1, 2, 3)]))
    assert one.spans == (TokenSpan(V0, 0, 2), TokenSpan(V1, 2, 3, Kv.MIXED))


def test_an_engine_that_reuses_keys_over_commits_vouches_for_none_of_them() -> None:
    one = Leg("a", EngineKind.BORROWED, "rid", V0, 0, reused=True)
    one.take(event([1, 2], 2, spans=[(V0, 0, 2)]))
    assert one.spans == (TokenSpan(V0, 0, 2, Kv.MIXED),)


def test_folding_keeps_what_is_placed_and_forgets_the_rest() -> None:
    turn = Transcript([9, 9])
    first = leg()
    first.take(event([1, 2], 2, spans=[(V0, 0, 2)]))
    first.take(event([1, 2, 3], 3))
    assert turn.fold(first) == Folded(kept=2, dropped=1)
    assert turn.tokens == [1, 2]
    assert turn.context == (9, 9, 1, 2)
    assert not turn.exact_text
    second = leg(offset=2, version=V1)
    second.take(event([5], 1, spans=[(V1, 0, 1)], finish={"type": "stop"}))
    turn.fold(second)
    assert turn.tokens == [1, 2, 5]
    assert turn.spans == (TokenSpan(V0, 0, 2), TokenSpan(V1, 2, 3))
    assert [entry[1] for entry in turn.per_token["output_token_logprobs"]] == [1, 2, 5]


def test_an_exact_pin_cuts_at_the_first_foreign_token() -> None:
    turn = Transcript([9])
    one = leg()
    spans = [(V0, 0, 2), (V1, 2, 4)]
    one.take(event([1, 2, 3, 4], 4, spans=spans, finish={"type": "stop"}))
    folded = turn.fold(one, exact=V0)
    assert (folded.kept, folded.dropped) == (2, 2)
    assert turn.spans == (TokenSpan(V0, 0, 2),)


def test_an_undisturbed_turn_keeps_the_engines_text() -> None:
    turn = Transcript([9])
    one = leg()
    one.take(event([1, 2], 2, spans=[(V0, 0, 2)], finish={"type": "stop"}))
    turn.fold(one)
    assert turn.exact_text
    assert turn.text == "bc"


@given(ends=st.lists(st.integers(0, 12), max_size=5), count=st.integers(0, 12))
def test_normal_spans_cover_exactly_or_are_empty(ends: list[int], count: int) -> None:
    raw, start = [], 0
    for number, end in enumerate(sorted(ends)):
        raw.append((f"run@1.{number}", start, end))
        start = end
    spans = normal(raw, "run@1.0", count)
    assert spans == () or covers(spans, count)
    assert bool(spans) == (start >= count > 0)


def test_neighbours_of_one_version_become_one_span() -> None:
    assert joined([TokenSpan(V0, 0, 2), TokenSpan(V0, 2, 3), TokenSpan(V1, 3, 4)]) == (
        TokenSpan(V0, 0, 3),
        TokenSpan(V1, 3, 4),
    )


BASE = "run@base.0123456789ab"


def test_an_engines_own_word_for_its_checkpoint_is_the_version_it_was_attested_as() -> None:
    one = leg(version=BASE)
    one.take(event([1, 2, 3], spans=[("base", 0, 2), (V0, 2, 3)]))
    assert one.spans == (TokenSpan(BASE, 0, 2), TokenSpan(V0, 2, 3, Kv.MIXED))
    last = leg(version=BASE)
    last.take(event([1, 2], finish={"type": "stop"}, label="base"))
    assert last.complete
    assert last.spans == (TokenSpan(BASE, 0, 2),)


def test_tokens_of_a_checkpoint_that_nobody_attested_are_not_placed() -> None:
    one = leg(version=V0)
    one.take(event([1, 2], spans=[("base", 0, 2)]))
    assert (one.placed, one.spans) == (0, ())


class _SlowLeg(Leg):
    """Takes no event in one go."""

    __slots__ = ()

    def _fresh(self, event: StreamEvent, held: int) -> int:
        return 0


_SPANS = st.sampled_from([(V0, 0, 0), (V0, 0, 9), (V0, 1, 9), (V1, 0, 9), ("base", 0, 9)])
_EVENTS = st.builds(
    StreamEvent,
    ids=st.lists(st.integers(0, 3), max_size=3),
    count=st.integers(0, 6),
    per_token=st.dictionaries(
        st.sampled_from(["output_token_logprobs", "output_top_logprobs"]),
        st.lists(st.integers(0, 3), max_size=3),
        max_size=2,
    ),
    text=st.sampled_from([None, "", "a", "bc"]),
    finish=st.sampled_from([None, None, {"type": "length"}, {"type": "abort"}]),
    spans=st.none() | st.lists(_SPANS, max_size=2),
    label=st.sampled_from([V0, V1, ""]),
)


@settings(deadline=None, max_examples=400)
@given(
    events=st.lists(_EVENTS, min_size=1, max_size=6),
    plain=st.lists(st.integers(1, 3), max_size=3),
    cumulative=st.booleans(),
    version=st.sampled_from([V0, "run@0.0"]),
    reused=st.booleans(),
)
def test_an_event_taken_in_one_go_is_taken_as_any_other(
    events: list[StreamEvent], plain: list[int], cumulative: bool, version: str, reused: bool
) -> None:
    count, usual = 0, list[StreamEvent]()
    for size in plain:  # what engines of ours send
        count += size
        ids = list(range(count if cumulative else size))
        usual.append(event(ids, count, spans=[(version, 0, count)]))
    found = []
    for kind in (Leg, _SlowLeg):
        one, received = (
            kind("e", EngineKind.BORROWED, "rid", version, 0, reused=reused),
            list[object](),
        )
        try:
            for given_event in (*usual, *events):
                received.append(one.take(given_event))
        except BrokenStream as error:
            received.append(str(error))
        else:  # of a stream that breaks only what was placed before counts
            received.append({name: getattr(one, name) for name in Leg.__slots__})
        found.append(received)
    assert found[0] == found[1]
