"""What a reply says of its log-probs follows from what engines say and the request asks."""

from __future__ import annotations

from typing import Any

import pytest

from rose_core.rollouts.requests.logprobs import (
    NONE,
    UNKNOWN,
    LogitScale,
    LogprobTerms,
    semantics,
    terms_of,
)

SCALED, RAW = LogitScale.TEMPERATURE.value, LogitScale.ORIGINAL.value
HALF = LogprobTerms(0.5)


def test_the_temperature_stands_where_the_engine_used_it() -> None:
    assert semantics([(0, SCALED)], 9, HALF).startswith("log_softmax(logits / 0.5) before top-k")
    assert semantics([(0, RAW)], 9, HALF).startswith("log_softmax(logits) before temperature 0.5")


@pytest.mark.parametrize("temperature", [None, 0, 0.0, 1e-9, 1, 1.0])
def test_without_a_temperature_to_divide_by_both_kinds_of_engine_say_the_same(
    temperature: float | None,
) -> None:
    terms = terms_of({"temperature": temperature}, {})
    assert semantics([(0, SCALED)], 4, terms) == semantics([(0, RAW)], 4, terms)
    assert "mixed" not in semantics([(0, SCALED), (2, RAW)], 4, terms)


def test_legs_that_differ_are_told_apart_by_token() -> None:
    reported = semantics([(0, SCALED), (3, RAW), (5, RAW), (8, "")], 10, HALF)
    kind, *parts = reported.replace("mixed: ", "mixed; ").split("; ")
    assert kind == "mixed"
    assert [part.partition(": ")[0] for part in parts] == [
        "from token 0",
        "from token 3",
        "from token 8",
    ]
    assert parts[2].endswith(UNKNOWN)


def test_a_leg_that_gave_nothing_has_no_say() -> None:
    assert semantics([(0, SCALED), (4, RAW), (4, SCALED)], 9, HALF) == HALF.formula(SCALED)
    assert semantics([(0, SCALED), (9, RAW)], 9, HALF) == HALF.formula(SCALED)
    assert semantics([], 0, HALF) == NONE


@pytest.mark.parametrize("text", ["", "processed"])
def test_an_engine_that_does_not_say_is_unknown(text: str) -> None:
    assert semantics([(0, text)], 4, LogprobTerms()) == UNKNOWN


@pytest.mark.parametrize(
    ("sampling", "request_fields", "named"),
    [
        ({"logit_bias": {"5": 1.0}}, {}, "logit_bias"),
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty"),
        ({"min_new_tokens": 3, "regex": "a+"}, {}, "min_new_tokens, regex"),
        ({}, {"custom_logit_processor": "p"}, "custom_logit_processor"),
    ],
)
def test_what_changed_the_logits_is_named(
    sampling: dict[str, Any], request_fields: dict[str, Any], named: str
) -> None:
    terms = terms_of(sampling, request_fields)
    assert semantics([(0, SCALED)], 4, terms).endswith(f"; logits after {named}")


def test_with_top_k_1_it_depends_on_the_batch_so_it_is_unknown() -> None:
    terms = terms_of({"temperature": 0.5, "top_k": 1}, {})
    assert semantics([(0, SCALED)], 4, terms) == UNKNOWN
    assert semantics([(0, RAW)], 4, terms) == HALF.formula(RAW)
    assert semantics([(0, SCALED)], 4, terms_of({"top_k": 1}, {})) == LogprobTerms().formula(SCALED)


def test_parameters_that_ask_for_nothing_are_not_named() -> None:
    neutral: dict[str, Any] = {"repetition_penalty": 1, "frequency_penalty": 0.0, "logit_bias": {}}
    assert terms_of(neutral | {"min_new_tokens": 0, "json_schema": None}, {}) == LogprobTerms()


def test_a_temperature_that_is_no_number_is_left_to_the_engine_to_refuse() -> None:
    assert terms_of({"temperature": "hot"}, {}) == LogprobTerms()
