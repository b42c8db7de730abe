"""Whether a conversation goes on after a loss: by what both ends remember."""

from __future__ import annotations

import pytest

from rose_core.sandboxes.conversations import ConversationLost, Inside, Outside, count_resent


@pytest.mark.parametrize(
    ("outside", "inside", "again"),
    [
        (Outside(sent=0, kept=0, given=0), Inside(took=0, made=0), 0),
        # All is there; one more answer is, which the caller has not been given.
        (Outside(sent=3, kept=0, given=3), Inside(took=3, made=3), 0),
        (Outside(sent=3, kept=1, given=2), Inside(took=3, made=3), 0),
        # A message under way, or one that the record is too old for: nobody knows its answer.
        (Outside(sent=4, kept=1, given=3), Inside(took=3, made=3), 1),
        (Outside(sent=6, kept=3, given=3), Inside(took=4, made=3), 2),
    ],
)
def test_what_nobody_has_answered_is_said_again(
    outside: Outside, inside: Inside, again: int
) -> None:
    assert count_resent(outside, inside) == again


@pytest.mark.parametrize(
    ("outside", "inside", "why"),
    [
        (Outside(sent=5, kept=1, given=4), Inside(took=2, made=2), "as it was 2 answers ago"),
        (Outside(sent=5, kept=1, given=2), Inside(took=3, made=3), "lacks 2 messages, of which 1"),
        (Outside(sent=1, kept=1, given=0), Inside(took=2, made=1), "2 messages of a caller who"),
    ],
)
def test_a_world_that_its_caller_was_told_other_things_of_is_not_gone_on_with(
    outside: Outside, inside: Inside, why: str
) -> None:
    with pytest.raises(ConversationLost, match=why):
        count_resent(outside, inside)
