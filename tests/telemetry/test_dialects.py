"""What engines publish, in their own words; garbage becomes unknown, never zero."""

from __future__ import annotations

import struct

import msgspec
import pytest

from rose_core.telemetry.dialects import (
    Figures,
    samples,
    sglang_feed,
    sglang_loads,
    sglang_metrics,
    sglang_snapshot,
    vllm_load,
    vllm_metrics,
)

SGLANG = """\
# HELP sglang:http_requests_total Total number of HTTP requests by endpoint and method.
# TYPE sglang:http_requests_total counter
sglang:http_requests_total{endpoint="/generate",method="POST"} 41.0
sglang:http_requests_total{endpoint="/v1/chat/completions",method="POST"} 2.0
sglang:http_requests_total{endpoint="/metrics",method="GET"} 900.0
sglang:http_requests_total{endpoint="/health",method="GET"} 77.0
sglang:http_requests_active{endpoint="/generate",method="POST"} 5.0
sglang:num_running_reqs{engine_type="unified",model_name="m",priority="",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",priority="1",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",priority=""} 1.0
sglang:token_usage{engine_type="unified",model_name="m"} 0.25
sglang:generation_tokens_total{model_name="m"} 1.5e3
sglang:prompt_tokens_total{model_name="m"} 7.0e3
sglang:num_requests_total{model_name="m"} 40.0
"""
VLLM = """\
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 12.0
http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 6.0
http_requests_total{handler="/metrics",method="GET",status="2xx"} 30.0
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:generation_tokens_total{engine="0",model_name="tiny"} 99.0
"""
LOAD = {
    "num_running_reqs": 1,
    "num_waiting_reqs": 2,
    "token_usage": 0.125,
    "num_used_tokens": 512,
    "total_prefill_uncached_tokens": 4096,
}


def test_sglang_counts_only_what_generates() -> None:
    figures = sglang_metrics(SGLANG)
    assert figures.requests == {"/generate": 41, "/v1/chat/completions": 2}
    assert (figures.running, figures.waiting, figures.kv_permille) == (3, 1, 250)
    assert figures.at_arrival
    assert figures.activity == (1500, 7000)
    assert (figures.input_tokens, figures.output_tokens) == (7000, 1500)


def test_an_older_sglang_counts_at_the_end() -> None:
    older = "\n".join(x for x in SGLANG.splitlines() if "http_requests" not in x)
    figures = sglang_metrics(older)
    assert (figures.requests, figures.at_arrival) == ({"/generate": 40}, False)


def test_vllm_counts_at_the_end() -> None:
    figures = vllm_metrics(VLLM)
    assert (figures.requests, figures.at_arrival) == ({"/v1/completions": 18}, False)
    assert (figures.input_tokens, figures.output_tokens) == (None, 99), "not said is not none"
    assert (figures.running, figures.waiting, figures.kv_permille) == (2, 4, 500)


@pytest.mark.parametrize(
    "text",
    ["", "<html>busy</html>", "sglang:num_running_reqs", 'a{b="c" 1', "sglang:token_usage NaN"],
)
def test_a_page_that_says_nothing_is_unknown(text: str) -> None:
    figures = sglang_metrics(text)
    assert figures.running is None
    assert figures.requests is None
    assert figures.kv_permille is None


def test_labels_with_quotes_and_commas() -> None:
    found = list(samples('x{a="1,2",b="y z"} 3 1700000000\n'))
    assert found == [("x", {"a": "1,2", "b": "y z"}, 3.0)]


def test_loads_of_several_ranks_add_up() -> None:
    body = msgspec.json.encode({"loads": [LOAD, {**LOAD, "token_usage": 0.5}]})
    figures = sglang_loads(body)
    assert (figures.running, figures.waiting, figures.kv_permille) == (2, 4, 500)
    assert figures.activity == (4096, 512, 4096, 512)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"loads": []}',
        b'{"loads": [{}]}',
        b'{"loads": 3}',
        msgspec.json.encode({"loads": [{**LOAD, "num_running_reqs": -1}]}),
        msgspec.json.encode({"loads": [{**LOAD, "num_running_reqs": "1"}]}),
    ],
)
def test_loads_that_cannot_be_read_are_unknown(body: bytes) -> None:
    assert sglang_loads(body) == Figures()


def snapshot(entry: object, *, cut: int = 0) -> bytes:
    packed = msgspec.msgpack.encode(entry)
    return bytes(12) + struct.pack("<I", len(packed)) + packed[: len(packed) - cut] + bytes(64)


def test_a_snapshot_has_requests_and_activity() -> None:
    figures = sglang_snapshot(snapshot(LOAD))
    assert (figures.running, figures.waiting, figures.activity) == (1, 2, (4096, 512))


@pytest.mark.parametrize(
    "memory", [b"", bytes(15), bytes(64), snapshot(LOAD, cut=9), snapshot([1, 2])]
)
def test_a_torn_snapshot_is_unknown(memory: bytes) -> None:
    assert sglang_snapshot(memory) == Figures()


def test_a_snapshot_leaves_out_what_is_zero() -> None:
    idle = sglang_snapshot(snapshot({"timestamp": 1.5, "max_total_num_tokens": 4096}))
    assert (idle.running, idle.waiting, idle.kv_permille, idle.activity) == (0, 0, 0, (0, 0))


@pytest.mark.parametrize("family", ["sglang:http_requests_total", "http_requests_total"])
def test_a_counter_that_has_counted_nothing_yet_is_zero(family: str) -> None:
    page = f"# HELP {family} Requests.\n# TYPE {family} counter\n"
    reader = sglang_metrics if family.startswith("sglang") else vllm_metrics
    assert reader(page).requests == {}


def feed(*values: object) -> bytes:
    return msgspec.msgpack.encode(["LoadStat", *values])


def test_a_load_feed_is_read_by_position_in_shorter_and_longer_shapes() -> None:
    figures = sglang_feed(feed(2, 1, 512, 4096, None, 0, 600, 16, 9000, 77))
    assert (figures.running, figures.waiting, figures.kv_permille) == (2, 1, 125)
    assert figures.activity == (9000, 512)
    assert sglang_feed(feed(0, 0, 0, 0, 3)).running == 0, "an older, shorter shape"
    assert sglang_feed(feed(1, 0, 5, 10, 0, 0, 5, 8, 9, 1, "later", 4)).running == 1


@pytest.mark.parametrize(
    "message",
    [b"", b"\xc1", feed(), feed(1, 0), feed(-1, 0, 0, 0), feed("1", 0, 0, 0), b"\x93\xa1x\x00\x00"],
)
def test_a_feed_that_cannot_be_read_is_unknown(message: bytes) -> None:
    assert sglang_feed(message) == Figures()


def test_vllm_load_is_a_bare_level() -> None:
    figures = vllm_load(b'{"server_load":3}')
    assert (figures.running, figures.waiting, figures.level_only) == (3, 0, True)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'{"server_load":-1}', b'{"server_load":true}', b'{"server_load":"1"}'],
)
def test_a_load_that_cannot_be_read_is_unknown(body: bytes) -> None:
    assert vllm_load(body) == Figures()
