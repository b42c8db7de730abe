"""Lines, windows, order and outcomes of batches."""

from __future__ import annotations

import json

import pytest

from rose_core.batches.lines import PRIORITY, check, turn_of
from rose_core.batches.schedule import (
    LineFate,
    WaitingBatch,
    next_batch,
    outcome,
    seconds_of,
    wait_seconds,
)

CHAT = "/v1/chat/completions"
MODELS = frozenset({"policy"})


def line(custom_id: str = "a", url: str = CHAT, **body: object) -> bytes:
    found = {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "policy", **body},
    }
    return json.dumps(found).encode() + b"\n"


@pytest.mark.parametrize(
    ("raw", "code", "text"),
    [
        (b"{nonsense\n", "invalid_json_line", "expected {"),
        (b'"text"\n', "invalid_json_line", "expected {"),
        (b"\xff\xfe\n", "invalid_json_line", "expected {"),
        (b"[" * 2000 + b"\n", "invalid_json_line", "expected {"),
        (line("a"), "duplicate_custom_id", "line 1"),
        (line("", x=1), "invalid_custom_id", "1 to 256"),
        (line("b", url="/v1/embeddings"), "mismatched_endpoint", CHAT),
        (line("b", stream=True), "stream_in_batch", "streamed"),
        (line("b", model="gpt-9"), "model_not_found", "none of policy"),
        (
            b'{"custom_id": "b", "method": "GET", "url": "/v1/chat/completions", "body": {}}\n',
            "invalid_json_line",
            "method",
        ),
        (line("b", x="y" * (8 << 20)), "line_too_long", "condense"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(raw: bytes, code: str, text: str) -> None:
    checked = check([line("a"), b"\n", raw, line("z")], CHAT, MODELS)
    assert [(one.code, one.line) for one in checked.problems] == [(code, 3)]
    assert text in checked.problems[0].message


def test_lines_are_found_again_at_their_place() -> None:
    raw = [line("a"), b"\n", line("b").rstrip(b"\n")]
    checked, whole = check(raw, CHAT, MODELS), b"".join(raw)
    assert not checked.problems
    found = [whole[one.offset : one.offset + one.length] for one in checked.places]
    assert [json.loads(one)["custom_id"] for one in found] == ["a", "b"]
    assert [one.number for one in checked.places] == [1, 3]


def test_a_file_without_lines_or_with_too_many_is_refused() -> None:
    assert [one.code for one in check([b"\n"], CHAT, MODELS).problems] == ["empty_file"]
    many = (line(str(number)) for number in range(50_001))
    assert [one.code for one in check(many, CHAT, MODELS).problems] == ["too_many_lines"]


def test_a_turn_goes_below_all_others_and_under_an_id_of_its_own() -> None:
    raw = line("a", priority=9, rid="mine", request_id="mine", rose={"job": "other", "turn": 1})
    custom_id, body = turn_of(raw, "batch_1-7")
    assert custom_id == "a"
    assert (body["rid"], body["priority"]) == ("batch_1-7", PRIORITY)
    assert "request_id" not in body
    assert body["rose"] == {"turn": 1}


@pytest.mark.parametrize(
    ("status", "errors", "becomes"),
    [
        (200, 1, LineFate.ANSWERED),
        (None, 0, LineFate.AGAIN),
        (429, 0, LineFate.AGAIN),
        (503, 4, LineFate.AGAIN),
        (401, 5, LineFate.AGAIN),
        (500, 4, LineFate.AGAIN),
        (500, 5, LineFate.FAILED),
        (400, 1, LineFate.FAILED),
        (422, 1, LineFate.FAILED),
        (302, 1, LineFate.FAILED),
    ],
)
def test_what_cannot_be_now_waits_and_what_is_wrong_fails(
    status: int | None, errors: int, becomes: LineFate
) -> None:
    assert outcome(status, errors) is becomes


def test_waits_double_and_heed_what_the_router_asks() -> None:
    assert [wait_seconds(tries, None) for tries in (1, 2, 3, 20)] == [0.5, 1.0, 2.0, 30.0]
    assert wait_seconds(1, 7.0) == 7.0
    assert wait_seconds(1, 1e9) == 30.0


def test_tenants_take_turns_and_of_one_the_nearest_deadline_goes() -> None:
    mine = WaitingBatch("x", "a", 10.0, running=3)
    theirs = WaitingBatch("y", "b", 99.0, running=1)
    sooner = WaitingBatch("z", "b", 50.0, running=1)
    assert next_batch([mine, theirs, sooner]) == "z"
    assert next_batch([mine]) == "x"
    assert next_batch([]) is None


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86_400), ("90s", 90), ("14d", 1_209_600)])
def test_a_window_is_read_as_written(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "0h", "-1h", "15d", "24 h", "1w", "h"])
def test_a_window_that_is_none_says_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="expected 24h"):
        seconds_of(text)
