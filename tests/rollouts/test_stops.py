"""Stop strings across a move end a turn where an engine that saw all of it would have."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rose_core.rollouts.requests.stops import CutStops, StopMatch, Stops, sure, trimmed

PIECES = ["a", "b", "ab", "</", "end", ">", " ", "</end>", "\n"]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[number] for number in ids)


def stops(*strings: str, window: int) -> Stops:
    return Stops(strings, window, decode)


def undisturbed(tokens: Sequence[int], rule: Stops) -> StopMatch | None:
    """What SGLang does after each token: the tail's text is searched, word by word."""
    for count in range(1, len(tokens) + 1):
        tail = decode(tokens[:count][-rule.window :])
        for string in rule.strings:
            if string in tail:
                return StopMatch(count, string)
    return None


def test_a_string_that_began_before_the_move_ends_the_turn_with_its_last_token() -> None:
    crossing = CutStops(stops("</end>", window=4), held=[0, 1, 3])
    assert crossing.match([4]) is None
    assert crossing.match([4, 5, 0]) == StopMatch(2, "</end>")


def test_what_lies_inside_the_leg_is_the_engines_to_find() -> None:
    crossing = CutStops(stops("ab", window=3), held=[6, 6])
    assert crossing.match([6, 6, 6, 0, 1]) is None


def test_of_several_strings_the_callers_order_counts() -> None:
    rule = stops("end>", "</end>", window=4)
    assert CutStops(rule, held=[3]).match([4, 5]) == StopMatch(2, "end>")


@pytest.mark.parametrize("seed", range(40))
def test_wherever_a_turn_is_cut_it_ends_as_if_it_had_not_been(seed: int) -> None:
    chance = random.Random(seed)
    strings = tuple(chance.sample(["ab", "</end>", "b</", "\n ", "endab"], 2))
    rule = stops(*strings, window=chance.randint(2, 6))
    tokens = chance.choices(range(len(PIECES)), k=60)
    whole = undisturbed(tokens, rule)
    for cut in range(1, whole.count if whole else len(tokens)):
        held, new = tokens[:cut], tokens[cut:]
        crossing = CutStops(rule, held)
        found = None
        for count in range(1, len(new) + 1):  # token by token, as a stream comes
            found = found or crossing.match(new[:count])
        engine = undisturbed(new, rule)
        first = min(
            (one for one in (found, engine) if one), key=lambda one: one.count, default=None
        )
        assert (first.count + cut if first else None) == (whole.count if whole else None)
        if found and whole:
            assert found.string == whole.string


@pytest.mark.parametrize(
    ("finish", "keep", "expected"),
    [
        ({"type": "stop", "matched": "</end>"}, False, "so "),
        ({"type": "stop", "matched": "</end>"}, True, "so </end>"),
        ({"type": "stop", "matched": 7}, False, "so </end> and"),
        ({"type": "length", "length": 3}, False, "so </end> and"),
        ({"type": "stop", "matched": "never"}, False, "so </end> and"),
        (None, False, "so </end> and"),
    ],
)
def test_the_string_is_left_out_of_the_text_as_the_engine_leaves_it_out(
    finish: dict[str, object] | None, keep: bool, expected: str
) -> None:
    assert trimmed("so </end> and", finish, keep=keep) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so", "so"),
        ("so <", "so "),
        ("so </end", "so "),
        ("so </end>", "so "),
        ("so </end or", "so </end or"),
        ("so \n<", "so \n"),
        ("so \n", "so "),
        ("", ""),
    ],
)
def test_what_may_become_a_string_is_not_shown_before_it_is_sure(text: str, expected: str) -> None:
    assert sure(text, ("</end>", "\n\n")) == expected
