"""Turns without a key find their trajectory by what it left behind."""

from __future__ import annotations

from rose_core.rollouts.conversations.prefixes import Prefixes


def test_the_next_turn_of_a_trajectory_is_recognized_by_its_prefix() -> None:
    prefixes = Prefixes()
    first = list(range(100))
    prefixes.note("t", first[:60], first[60:])
    assert prefixes.find([*first, 7, 8, 9]) == "t"
    second = [*first, *range(500, 560)]
    prefixes.note("t", second[:103], second[103:])
    assert prefixes.find([*second, 1]) == "t"


def test_answers_to_the_same_prompt_are_told_apart() -> None:
    prefixes = Prefixes()
    prompt = list(range(64))
    for name, output in (("a", range(200, 240)), ("b", range(300, 340))):
        prefixes.note(name, prompt, output)
    assert prefixes.find(prompt) == ""
    assert prefixes.find([*prompt, *range(200, 240), 5]) == "a"
    assert prefixes.find([*prompt, *range(300, 340), 5]) == "b"


def test_too_little_output_is_not_noted() -> None:
    prefixes = Prefixes()
    prefixes.note("t", list(range(64)), list(range(64, 70)))
    assert len(prefixes) == 0


def test_memory_is_bounded() -> None:
    prefixes = Prefixes(most=3)
    for number in range(10):
        prefixes.note(str(number), [number], [number] * 31)
    assert len(prefixes) == 3
    assert prefixes.find([9] * 40) == "9"


def test_what_no_model_has_as_an_id_is_not_recognized_and_does_no_harm() -> None:
    prefixes = Prefixes()
    for wrong in (-1, 2**40):
        prefixes.note("a", [wrong] * 8, [wrong] * 24)
        assert prefixes.find([wrong] * 64) == ""
    prefixes.note("a", [2**31 - 1] * 8, [2**31 - 1] * 24)
    assert prefixes.find([2**31 - 1] * 64) == "a"
