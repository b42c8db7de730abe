"""What of a turn goes to an engine of vLLM, and what is refused because SGLang would differ."""

from __future__ import annotations

from typing import Any

import pytest

from rose_core.rollouts.requests.fields import NOT_IN_VLLM, REQUEST_FIELDS, asked_with
from rose_core.rollouts.requests.splice import SAMPLING
from rose_engines.errors import EngineRefused
from rose_engines.vllm.sampling import read_turn


def turn(sampling: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"input_ids": [1, 2], "sampling_params": sampling or {}, **fields}


def test_a_turn_is_said_in_vllms_words() -> None:
    given = {"max_new_tokens": 5, "temperature": 0.5, "top_k": -1, "top_p": 0.9, "no_stop_trim": 1}
    asked = read_turn(
        turn(given, rid="a.", extra_key="k", stream=True, return_logprob=True, logprob_start_len=0)
    )
    assert (asked.ids, asked.rid, asked.key, asked.stream) == ([1, 2], "a.", "k", True)
    assert asked.sampling == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 0.9,
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "prompt_logprobs": 0,
    }


def test_log_probs_of_other_tokens_are_given_beside_the_sampled_ones_only() -> None:
    asked = read_turn(turn(return_logprob=True, top_logprobs_num=3))
    assert asked.sampling["logprobs"] == 3
    assert "logprobs" not in read_turn(turn(top_logprobs_num=3)).sampling


def test_how_long_an_answer_is_by_default_is_what_sglang_does() -> None:
    assert read_turn(turn()).sampling == {"max_tokens": 128}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 0.1),
        # VLLM would sample at 0.01; above 2 it takes none.
        ("temperature", 0.005),
        ("temperature", 2.5),
        ("sampling_seed", 1),
        ("min_new_tokens", 3),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("regex", "a+"),
        ("logit_bias", {"3": 1.0}),
        ("n", 2),
    ],
)
def test_what_the_two_engines_sample_by_differently_is_refused_by_name(
    name: str, value: object
) -> None:
    with pytest.raises(EngineRefused, match=rf"sampling_params\.{name}: .*engineClass sglang"):
        read_turn(turn({name: value}))


def test_beside_ignore_eos_stop_ids_end_nothing_as_in_sglang() -> None:
    given = {"stop_token_ids": [7], "ignore_eos": True}
    assert "stop_token_ids" not in read_turn(turn(given)).sampling
    given["ignore_eos"] = False
    assert read_turn(turn(given)).sampling["stop_token_ids"] == [7]


# What each may be sent with, where 7 is none of its values.
VALUES: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.5,
    "stop": "x",
    "stop_token_ids": [7],
    "extra_key": "k",
}


@pytest.mark.parametrize("name", sorted((SAMPLING.keys() | REQUEST_FIELDS.keys()) - {"beam_width"}))
def test_the_router_knows_what_an_engine_refuses(name: str) -> None:
    """It places no turn here that would be refused, and keeps none away that would be taken."""
    value = VALUES.get(name, 7)
    sampling, fields = ({name: value}, {}) if name in SAMPLING else ({}, {name: value})
    asked = asked_with(sampling, fields)
    try:
        read_turn({"return_logprob": True, **turn(sampling, **fields)})
        refused = False
    except EngineRefused:
        refused = True
    # The router sends several answers as turns of their own, and what no engine reads not at all.
    never_sent = name in {"n", "custom_params"}
    assert bool(asked & NOT_IN_VLLM) is (refused and not never_sent)


@pytest.mark.parametrize("name", sorted(SAMPLING.keys() - {"beam_width"}))
def test_every_parameter_that_the_router_may_send_is_taken_or_refused_with_a_reason(
    name: str,
) -> None:
    """A parameter that is new to the router would be unknown here, and this says so."""
    try:
        read_turn(turn({name: 7}))
    except EngineRefused as refused:
        assert "knows no such parameter" not in str(refused)  # noqa: PT017  # either is right


TAKEN = {"extra_key", "return_logprob", "top_logprobs_num"}


@pytest.mark.parametrize("name", sorted(REQUEST_FIELDS.keys() - TAKEN))
def test_fields_that_change_the_answer_are_refused_by_name(name: str) -> None:
    with pytest.raises(EngineRefused, match=name):
        read_turn(turn() | {"return_logprob": True, name: 7})


@pytest.mark.parametrize("wrong", [{"input_ids": []}, {"input_ids": ["a"]}, {"text": "hello"}])
def test_a_prompt_is_token_ids(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineRefused, match="input_ids"):
        read_turn(wrong)


@pytest.mark.parametrize("most", [0, -1, "5", True])
def test_an_answer_has_at_least_one_token(most: object) -> None:
    with pytest.raises(EngineRefused, match="max_new_tokens"):
        read_turn(turn({"max_new_tokens": most}))


@pytest.mark.parametrize("name", ["rid", "extra_key"])
def test_what_names_a_turn_is_text(name: str) -> None:
    """A list is of several turns in one: an abort would find none of them by its name."""
    with pytest.raises(EngineRefused, match=name):
        read_turn(turn() | {name: ["a"]})
