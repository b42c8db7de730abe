"""What an engine drafts from: its questions' answers, bounded, and not where drafts lose."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Iterator

from rose_core.rollouts.engines.drafts import (
    CONTEXT,
    MOST_OF_QUESTION,
    MOST_QUESTIONS,
    NEW_TOKENS,
    TRIED_STEPS,
    Corpus,
    DraftQuestion,
    Gain,
    Questions,
    Text,
    decide,
    is_due,
    verified_tokens,
)

A, B, C = (array("i", [token] * 10) for token in (1, 2, 3))


def nobody(_: str) -> list[Text]:
    return []


def test_an_engine_drafts_from_the_questions_that_it_answers() -> None:
    known = {"q": DraftQuestion((A, B)), "other": DraftQuestion((C,))}
    found = decide(["q"], known, {"q": [C]}.__getitem__)
    assert found == Corpus((A, B, C), frozenset({"q"}))
    assert decide([], known, nobody) == Corpus()


def test_a_question_whose_drafts_lose_is_left_out_until_they_gain() -> None:
    lost = Gain().observe(TRIED_STEPS, TRIED_STEPS)
    assert lost.loses
    assert decide(["q"], {"q": DraftQuestion((A,), lost)}, nobody) == Corpus()
    won = lost
    for _ in range(20):
        won = won.observe(3 * TRIED_STEPS, TRIED_STEPS)
    assert decide(["q"], {"q": DraftQuestion((A,), won)}, nobody).texts == (A,)


def test_what_has_not_been_tried_is_tried() -> None:
    assert not Gain().loses
    assert not Gain().observe(10, 10).loses


def test_a_full_corpus_takes_the_questions_with_most_tokens_a_step_and_their_newest_texts() -> None:
    better = Gain().observe(4 * TRIED_STEPS, TRIED_STEPS)
    good = Gain().observe(2 * TRIED_STEPS, TRIED_STEPS)
    known = {"a": DraftQuestion((A, B), good), "b": DraftQuestion((C,), better)}
    found = decide(["a", "b"], known, nobody, most=20)
    assert found.texts == (B, C)
    assert found.questions == {"a", "b"}
    assert decide(["a", "b"], known, nobody, most=10).texts == (C,)


def test_a_corpus_is_replaced_when_its_questions_are_others_or_enough_is_new() -> None:
    has = Corpus((A,), frozenset({"q"}))
    assert not is_due(Corpus((A, B), frozenset({"q"})), has)
    assert is_due(Corpus((A, array("i", [2] * NEW_TOKENS)), frozenset({"q"})), has)
    assert is_due(Corpus((A,), frozenset({"other"})), has)
    assert is_due(Corpus(), has)


def test_memory_is_bounded_and_questions_asked_last_stay() -> None:
    kept = Questions(most=100)
    for name in range(20):
        kept.note_answer(str(name), range(50), A)
    assert kept.size <= 100
    assert list(kept.known) == ["17", "18", "19"]
    assert kept.known["19"].texts == (array("i", (*range(50 - CONTEXT, 50), *A)),)
    one = DraftQuestion()
    for _ in range(10):
        one = one.with_text(array("i", [1] * (MOST_OF_QUESTION // 4)))
    assert one.size <= MOST_OF_QUESTION
    assert len(one.texts) == 4


def test_of_a_long_text_its_end_is_kept_and_sent() -> None:
    text = array("i", range(MOST_OF_QUESTION + 7))
    assert DraftQuestion().with_text(text).texts == (text[7:],)
    kept = Questions()
    kept.note_answer("q", [5], text)
    assert kept.known["q"].texts == (text[7:],)
    found = decide(["q"], {"q": DraftQuestion((A, text))}, nobody, most=20)
    assert found.texts == (text[-20:],)
    found = decide(["q"], {"q": DraftQuestion((text[-30:], A))}, nobody, most=20)
    assert found.texts == (text[-10:], A)


def test_what_runs_is_not_asked_for_beyond_what_an_engine_takes() -> None:
    made: list[int] = []

    def running(_: str) -> Iterator[Text]:
        for number in range(100):
            made.append(number)
            yield A

    assert decide(["q", "r"], {}, running, most=25).size == 25
    assert made == [0, 1, 2]


def test_a_kept_token_takes_four_bytes() -> None:
    kept, answer = Questions(), range(100_000, 110_000)
    tracemalloc.start()
    for name in range(20):
        kept.note_answer(str(name), [], answer)
    took, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept.size == 200_000
    assert took < 5 * kept.size


def test_questions_without_answers_are_bounded_too() -> None:
    kept = Questions()
    for name in range(MOST_QUESTIONS + 10):
        kept.note_steps(str(name), 3, 2)
    assert len(kept.known) == MOST_QUESTIONS


def test_gains_of_a_question_outlive_its_texts_change() -> None:
    kept = Questions()
    kept.note_steps("q", 30, 10)
    kept.note_answer("q", [1], A)
    assert kept.known["q"].gain == Gain(30, 10)


def test_a_step_never_verifies_more_than_a_quarter_of_a_chunk() -> None:
    for running in range(1, 200):
        for chunk in range(16, 513, 16):
            nodes = verified_tokens(running, chunk)
            assert nodes != 1
            assert running * nodes <= chunk // 4
