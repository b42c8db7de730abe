"""Tokens that come one by one make the text that they make together."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.transcripts.detokenize import BROKEN, IncrementalDetokenizer


def of_bytes(tokens: Sequence[int]) -> str:
    """One byte for every token, so that characters come in parts."""
    return bytes(tokens).decode(errors="replace")


@given(st.text(max_size=60), st.lists(st.integers(1, 5), min_size=1))
def test_pieces_of_any_size_only_ever_add_to_the_text(text: str, sizes: list[int]) -> None:
    tokens = text.encode()
    made = IncrementalDetokenizer(of_bytes)
    count = step = 0
    shown = ""
    while count < len(tokens):
        count, step = min(len(tokens), count + sizes[step % len(sizes)]), step + 1
        now = made.text(tokens[:count])
        assert now.startswith(shown)
        assert text.startswith(now)
        shown = now
        assert made.text(tokens[:count]) == now  # asked twice, it says the same
    assert shown == text.rstrip(BROKEN)


def test_words_whose_space_belongs_to_the_next_one_are_joined_as_if_decoded_together() -> None:
    """As SentencePiece does: a first space is dropped, one between words is kept."""
    made = IncrementalDetokenizer(lambda ids: "".join(f" w{number}" for number in ids)[1:])
    assert [made.text(range(count)) for count in range(4)] == ["", "w0", "w0 w1", "w0 w1 w2"]


def test_what_a_stream_costs_grows_with_its_length_and_not_with_its_square() -> None:
    decoded = 0

    def counted(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return of_bytes(tokens)

    made = IncrementalDetokenizer(counted)
    chance = random.Random(1)
    tokens = "".join(chance.choices("aé€ ", k=1000)).encode()
    for count in range(len(tokens)):
        made.text(tokens[: count + 1])
    assert decoded < 10 * len(tokens)
