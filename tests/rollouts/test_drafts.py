"""What an engine drafts from: its questions' answers, bounded, and not where drafts lose."""

from __future__ import annotations

from rose_core.rollouts.drafts import (
    CONTEXT,
    MOST_OF_QUESTION,
    NEW_TOKENS,
    TRIED_STEPS,
    Corpus,
    Gain,
    Question,
    Questions,
    decide,
    is_due,
    verified_tokens,
)

A, B, C = (1,) * 10, (2,) * 10, (3,) * 10


def test_an_engine_drafts_from_the_questions_that_it_answers() -> None:
    known = {"q": Question((A, B)), "other": Question((C,))}
    found = decide(["q"], known, {"q": [C]})
    assert found == Corpus((A, B, C), frozenset({"q"}))
    assert decide([], known, {}) == Corpus()


def test_a_question_whose_drafts_lose_is_left_out_until_they_gain() -> None:
    lost = Gain().saw(TRIED_STEPS, TRIED_STEPS)
    assert lost.loses
    assert decide(["q"], {"q": Question((A,), lost)}, {}) == Corpus()
    won = lost
    for _ in range(20):
        won = won.saw(3 * TRIED_STEPS, TRIED_STEPS)
    assert decide(["q"], {"q": Question((A,), won)}, {}).texts == (A,)


def test_what_has_not_been_tried_is_tried() -> None:
    assert not Gain().loses
    assert not Gain().saw(10, 10).loses


def test_a_full_corpus_takes_the_questions_with_most_tokens_a_step_and_their_newest_texts() -> None:
    better = Gain().saw(4 * TRIED_STEPS, TRIED_STEPS)
    good = Gain().saw(2 * TRIED_STEPS, TRIED_STEPS)
    known = {"a": Question((A, B), good), "b": Question((C,), better)}
    found = decide(["a", "b"], known, {}, most=20)
    assert found.texts == (B, C)
    assert found.questions == {"a", "b"}
    assert decide(["a", "b"], known, {}, most=10).texts == (C,)


def test_a_corpus_is_replaced_when_its_questions_are_others_or_enough_is_new() -> None:
    has = Corpus((A,), frozenset({"q"}))
    assert not is_due(Corpus((A, B), frozenset({"q"})), has)
    assert is_due(Corpus((A, (2,) * NEW_TOKENS), frozenset({"q"})), has)
    assert is_due(Corpus((A,), frozenset({"other"})), has)
    assert is_due(Corpus(), has)


def test_memory_is_bounded_and_questions_asked_last_stay() -> None:
    kept = Questions(most=100)
    for name in range(20):
        kept.note_answer(str(name), range(50), A)
    assert kept.size <= 100
    assert list(kept.known) == ["17", "18", "19"]
    assert kept.known["19"].texts == ((*range(50 - CONTEXT, 50), *A),)
    one = Question()
    for _ in range(10):
        one = one.with_text((1,) * (MOST_OF_QUESTION // 4))
    assert one.size <= MOST_OF_QUESTION
    assert len(one.texts) == 4


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
