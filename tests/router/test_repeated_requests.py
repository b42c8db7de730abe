"""A request that differs from an earlier one in its ids alone is read as if there had been none."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.errors import InvalidTurn
from rose_router.http.admission.bodies import json_object
from rose_router.http.dialects.sglang import RepeatedRequests, read
from rose_router.http.dialects.terms import ParsedRequest

SAMPLING = {"max_new_tokens": 8, "temperature": 0.7}
NO_HEADERS = {"Host": "x", "Content-Type": "application/json"}


def anew(raw: bytes, headers: dict[str, str] = NO_HEADERS) -> ParsedRequest:
    return read(json_object(raw), headers, None, lambda: "new")


def known(*earlier: bytes) -> RepeatedRequests:
    repeated = RepeatedRequests(lambda: "new")
    for raw in earlier:
        repeated.learn(raw, NO_HEADERS, anew(raw))
    return repeated


def shown(asked: ParsedRequest) -> list[Any]:
    """All of it but how the prompt was written, which is checked by itself."""
    turns = [msgspec.structs.asdict(one) | {"written": b""} for one in asked.turns]
    return [turns, asked.stream, asked.listed]


def test_of_a_long_one_the_highest_id_is_not_taken_for_anothers() -> None:
    long = body(str(list(range(40_000))))
    assert anew(long).turns[0].highest == 39_999
    found = known(long).read(body("[50000]"), NO_HEADERS)
    assert found is not None
    assert found.turns[0].highest == -1


def body(ids: str = "[1,2]", before: str = "", after: str = "") -> bytes:
    rest = ',"sampling_params":{"max_new_tokens":8,"temperature":0.7},"return_logprob":true'
    return f'{{{before}"input_ids":{ids}{rest}{after}}}'.encode()


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    st.sampled_from(
        ["", '"stream":true,', '"stream":false,', '"rose":{"group":"g"},', '"user":"~",']
    ),
    st.sampled_from([",", ", ", " ,"]),
)
def test_it_is_read_as_any_other(ids: list[int], before: str, comma: str) -> None:
    repeated = known(body("[7]", before))
    raw = body(f"[{comma.join(map(str, ids))}]", before)
    found = repeated.read(raw, NO_HEADERS)
    assert found is not None
    assert shown(found) == shown(anew(raw))
    turn = found.turns[0]
    assert turn.prompt == tuple(ids)
    assert msgspec.json.decode(turn.written) == ids


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50), st.integers(1, 8))
def test_its_leg_says_what_any_other_would(ids: list[int], interval: int) -> None:
    repeated = known(body())
    found = repeated.read(body(msgspec.json.encode(ids).decode()), NO_HEADERS)
    assert found is not None
    turn = found.turns[0]
    for _ in range(2):  # made, and remembered
        sent = msgspec.json.decode(turn.leg_json("leg", "run@1.0", interval))
        assert sent == turn.leg_body(ids, 0, "leg", "run@1.0", interval)
    other = msgspec.json.decode(turn.leg_json('"', "run@1.1", interval))
    assert (other["rid"], other["extra_key"]) == ('"', "run@1.1")


def test_remembered_legs_are_bounded() -> None:
    found = known(body()).read(body("[5]"), NO_HEADERS)
    assert found is not None
    for number in range(100):
        found.turns[0].leg_json("leg", f"run@1.{number}", 4)
    assert len(found.turns[0].asks.legs) < 100


@pytest.mark.parametrize(
    "ids",
    ["[]", "[-1]", "[2147483648]", "[1.0]", "[true]", '["1"]', "[null]", "[[1],[2]]", "[1,]", "7"],
)
def test_ids_that_are_none_are_left_to_who_says_what_is_wrong(ids: str) -> None:
    assert known(body()).read(body(ids), NO_HEADERS) is None


@pytest.mark.parametrize(
    "other",
    [
        body(after=',"stream":true'),
        body(before='"rid":"mine",'),
        body().replace(b"0.7", b"0.8"),
        body().replace(b"true", b"1"),
        body() + b" ",
    ],
)
def test_what_differs_elsewhere_is_another_request(other: bytes) -> None:
    assert known(body()).read(other, NO_HEADERS) is None


@pytest.mark.parametrize(
    "name", ["X-Session-ID", "x-smg-routing-key", "X-Rose-Group", "session-id"]
)
def test_headers_that_tell_of_the_turn_are_heard(name: str) -> None:
    repeated = known(body())
    assert repeated.read(body(), NO_HEADERS) is not None
    assert repeated.read(body(), {**NO_HEADERS, name: "1"}) is None
    repeated = RepeatedRequests(lambda: "new")
    repeated.learn(body(), {name: "1"}, anew(body(), {name: "1"}))
    assert repeated.read(body(), NO_HEADERS) is None


@pytest.mark.parametrize(
    "raw",
    [
        body(before='"rid":"mine",'),
        body(before='"session_id":"s",'),
        body(before='"rose":{"session":"s"},'),
        body().replace(b'"temperature"', b'"stop":["x"],"temperature"'),
        body().replace(b'"temperature"', b'"n":2,"temperature"'),
        body("[[1],[2]]"),
        b'{"sampling_params":' + msgspec.json.encode(SAMPLING) + b',"input_ids" : [1]}',
        body(before='"custom_labels":"' + "x" * 2000 + '",'),
    ],
)
def test_what_is_said_of_one_turn_is_not_remembered(raw: bytes) -> None:
    repeated = known(raw)
    assert repeated.read(raw, NO_HEADERS) is None
    assert not repeated._known


@pytest.mark.parametrize(
    "text",
    [
        # A list of that name within a field, and the request's own, written as few write it.
        r'{"metadata":{"input_ids":[@]},"input\u005fids":[3],"sampling_params":{}}',
        # The last of two is the request's.
        r'{"input_ids":[@],"input\u005fids":[3]}',
        r'{"input\u005fids":[3],"input_ids":[@]}',
        r'{"input_ids":[@],"input_ids":[3]}',
        r'{"user":"\"input_ids\":[@]","input_ids":[3]}',
    ],
)
def test_only_the_requests_own_list_is_taken_for_its_prompt(text: str) -> None:
    first, second = (text.replace("@", number).encode() for number in "12")
    found = known(first).read(second, NO_HEADERS)
    assert found is None or shown(found) == shown(anew(second))


def test_what_is_remembered_is_bounded() -> None:
    repeated = RepeatedRequests(lambda: "new")
    for number in range(3000):
        raw = body(after=f',"top_logprobs_num":{number % 20},"custom_labels":"{number}"')
        repeated.learn(raw, NO_HEADERS, anew(raw))
    assert 0 < len(repeated._known) <= 1024


@pytest.mark.parametrize("cut", range(0, len(body()), 7))
def test_half_a_body_is_no_request(cut: int) -> None:
    raw = body()[:cut]
    assert known(body()).read(raw, NO_HEADERS) is None


def test_turns_of_one_request_are_told_apart() -> None:
    numbers = itertools.count()
    repeated = RepeatedRequests(lambda: f"turn-{next(numbers)}")
    repeated.learn(body(), NO_HEADERS, anew(body()))
    names = {repeated.read(body(), NO_HEADERS).turns[0].trajectory for _ in range(3)}  # type: ignore[union-attr]
    assert names == {"turn-0", "turn-1", "turn-2"}


def test_a_wrong_request_is_as_wrong_the_second_time() -> None:
    with pytest.raises(InvalidTurn, match="input_ids"):
        anew(body("[-1]"))
