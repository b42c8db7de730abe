"""What of a turn goes to an engine of vLLM, and what is refused because SGLang would differ."""

from __future__ import annotations

from typing import Any

import pytest

from rose_core.rollouts.fields import REQUEST_FIELDS
from rose_core.rollouts.splice import SAMPLING
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
