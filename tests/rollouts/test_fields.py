"""Nothing reaches an engine that is not on the list, or that it is known not to bear."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rose_core.rollouts.errors import InvalidTurn, PromptTooLong, UnsafeTurn
from rose_core.rollouts.requests.fields import (
    MOST_TOP,
    NO_BOUNDS,
    Bounds,
    admitted,
    asked_with,
    check_taken,
    check_within,
    least,
)
from rose_core.rollouts.requests.splice import most_tokens

SMALL = Bounds(vocabulary=500, context=64)
ROUTED = ("return_routed_experts",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("logit_bias", {"3": 1e39}),
        ("logit_bias", {"3": 0.5, "4": -3e38}),
        ("logit_bias", {"3": float("nan")}),
        ("logit_bias", {"3": 10**50}),
        ("logit_bias", {"3": 1e-46}),
        ("top_k", 0.5),
        ("stop_token_ids", 7),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(5000))),
        ("logit_bias", {"-3": 1.0}),
        ("logit_bias", {"3": "much"}),
        ("sampling_seed", 2**63),
        ("ignore_eos", "yes"),
        ("stop", ["x"] * 100),
        ("stop_regex", "("),
        ("stop_regex", ["a+", "*"]),
        ("regex", "a" * 100_000),
        ("stream_interval", 0),
        ("is_normalized", True),
        ("stop_strs", ["x"]),
    ],
)
def test_a_sampling_parameter_of_another_kind_is_refused_by_name(field: str, value: Any) -> None:  # noqa: ANN401  # JSON
    with pytest.raises(UnsafeTurn, match=rf"sampling_params\.{field}"):
        admitted({field: value}, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", 1e-46),
        ("min_p", -0.1),
        ("min_p", 1e-46),
        ("frequency_penalty", -2.1),
        ("presence_penalty", 1e39),
        ("presence_penalty", 1e-46),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
    ],
)
def test_a_number_that_the_sampler_cannot_bear_is_refused_as_engines_do(
    field: str, value: float
) -> None:
    """With 400, and not with 422 as what no engine looks at."""
    with pytest.raises(InvalidTurn, match=rf"sampling_params\.{field}") as refused:
        admitted({field: value}, {})
    assert not isinstance(refused.value, UnsafeTurn)


def test_a_number_within_the_samplers_range_is_sent_as_it_is() -> None:
    sampling: dict[str, Any] = {
        "temperature": 2e-6,
        "top_p": 1.0,
        "min_p": 1,
        "frequency_penalty": -2.0,
        "presence_penalty": 2,
        "repetition_penalty": 0.01,
        "logit_bias": {"3": -1e9, "4": 100, "5": 0},
    }
    assert admitted(sampling, {})[0] == sampling


def test_the_ranges_leave_every_sum_and_quotient_of_the_sampler_finite_in_32_bits() -> None:
    """As SGLang does: a logit by its penalty, the others and a bias added, by temperature."""
    logit, held, greedy = np.float32(1e6), 2**20, np.float32(1e-6)
    worst = logit / np.float32(0.01) + np.float32(2) * held + np.float32(2) + np.float32(1e9)
    admitted({"repetition_penalty": 0.01, "logit_bias": {"1": 1e9}, "temperature": 1e-6}, {})
    assert np.isfinite(worst / greedy)
    with pytest.raises(UnsafeTurn):
        admitted({"logit_bias": {"1": float(np.finfo(np.float32).max)}}, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprob_start_len", -5),
        ("top_logprobs_num", MOST_TOP + 1),
        ("top_logprobs_num", "all"),
        ("token_ids_logprob", ["x"]),
        ("return_hidden_states", "first"),
        ("sampling_logprobs_mode", ["selected"]),
        ("extra_key", "x" * 1000),
        ("positional_embed_overrides", {"a": 1}),
        ("bootstrap_room", 1),
        ("routed_dp_rank", 3),
        ("kv_hints", {}),
        ("lora_id", "x"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(field: str, value: Any) -> None:  # noqa: ANN401  # JSON
    with pytest.raises(UnsafeTurn, match=field):
        admitted({}, {field: value})


@pytest.mark.parametrize("field", ["stop_token_ids", "max_new_tokens"])
def test_a_complaint_writes_no_long_value_out(field: str) -> None:
    written = 0

    class Counted:
        def __repr__(self) -> str:
            nonlocal written
            written += 1
            return "?"

    for value in ([Counted()] * 5000, dict.fromkeys(range(5000), Counted())):
        with pytest.raises(InvalidTurn, match=r"got [\[{].*\.\.\."):
            admitted({field: value}, {})
        with pytest.raises(InvalidTurn, match=r"got [\[{].*\.\.\."):
            most_tokens({"max_new_tokens": value})
    assert written < 100


def test_what_asks_for_nothing_is_not_sent() -> None:
    nothing: dict[str, Any] = {
        "image_data": None,
        "lora_path": "",
        "session_params": {},
        "novel": None,
    }
    assert admitted({"custom_params": {"a": 1}, "stop": "", "seeds": None}, nothing) == ({}, {})


def test_neutral_values_that_an_engine_knows_are_sent_as_they_are() -> None:
    sampling = {"temperature": 0.7, "top_p": 1, "top_k": -1, "stop_token_ids": [], "n": 2}
    request = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0}
    assert admitted(sampling, request)[0].keys() >= {"temperature", "top_p", "top_k"}
    assert admitted(sampling, request)[1] == request


@pytest.mark.parametrize(
    ("prompt", "sampling", "request_fields", "field"),
    [
        ([1, 500], {}, {}, "prompt"),
        ([1], {"stop_token_ids": [2, 500]}, {}, "stop_token_ids"),
        ([1], {"logit_bias": {"2": 1.0, "500": 1.0}}, {}, "logit_bias"),
        ([1], {}, {"token_ids_logprob": [500]}, "token_ids_logprob"),
        ([1], {}, {"top_logprobs_num": 501}, "top_logprobs_num"),
    ],
)
def test_what_lies_beyond_the_model_is_refused(
    prompt: list[int], sampling: dict[str, Any], request_fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsafeTurn, match=field):
        check_within(prompt, sampling, request_fields, SMALL)


def test_a_prompt_without_room_for_an_answer_is_refused_with_both_sizes() -> None:
    with pytest.raises(PromptTooLong, match=r"maximum context length is 64 tokens") as refused:
        check_within([1] * 65, {}, {}, SMALL)
    assert (refused.value.tokens, refused.value.context) == ("65", 64)


def test_the_last_token_and_the_last_place_are_within_the_model() -> None:
    sampling = {"stop_token_ids": [499], "logit_bias": {"499": 1.0}}
    check_within([499] * 63, sampling, {"top_logprobs_num": 500}, SMALL)


def test_where_nobody_has_said_the_vocabulary_only_few_alternatives_are_asked_for() -> None:
    check_within([2**30], {}, {"top_logprobs_num": 128}, NO_BOUNDS)
    with pytest.raises(UnsafeTurn, match="top_logprobs_num"):
        check_within([1], {}, {"top_logprobs_num": 129}, NO_BOUNDS)


def test_bounds_of_several_engines_are_those_that_hold_on_all() -> None:
    assert least([Bounds(0, 64), Bounds(500, 0), Bounds(400, 128)]) == Bounds(400, 64)
    assert least([]) == NO_BOUNDS


@pytest.mark.parametrize(
    ("sampling", "beside", "asked"),
    [
        ({"min_p": 0.1, "top_p": 0.9}, {}, {"min_p"}),
        ({"min_p": 0, "repetition_penalty": 1.0, "logit_bias": {}}, {}, set()),
        ({"sampling_seed": 0}, {"return_routed_experts": True}, {"sampling_seed", *ROUTED}),
        ({"temperature": 0}, {"logprob_start_len": 0, "return_routed_experts": False}, set()),
        ({"temperature": 0.001}, {"logprob_start_len": 5}, {"temperature", "logprob_start_len"}),
        ({"temperature": 2.01}, {}, {"temperature"}),
    ],
)
def test_a_turn_asks_with_what_some_engine_refuses(
    sampling: dict[str, Any], beside: dict[str, Any], asked: set[str]
) -> None:
    assert asked_with(sampling, beside) == asked


def test_a_turn_is_refused_where_each_engine_refuses_something_of_it() -> None:
    """Also if none refuses all of it; nobody knows before the first engine is there."""
    asked = frozenset({"min_p", "sampling_seed"})
    check_taken(asked, [])
    check_taken(asked, [("min_p",), ("n",)])
    check_taken(frozenset(), [("min_p",)])
    with pytest.raises(UnsafeTurn, match="min_p: no engine"):
        check_taken(asked, [("min_p",), ("sampling_seed",)])
