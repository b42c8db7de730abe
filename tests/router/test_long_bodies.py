"""Long bodies: refused unread where they cannot be needed, else read without holding the loop."""

from __future__ import annotations

import asyncio
import gzip
import io
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose_core.rollouts.errors import InvalidTurn, PromptTooLong
from rose_core.rollouts.requests.fields import NO_BOUNDS, Bounds
from rose_dev.waiting import until
from rose_router.engines.engine_client import MOST_IDS, _encoded
from rose_router.errors import TooLarge
from rose_router.http.admission import bodies
from rose_router.http.admission.bodies import (
    BODY_SECONDS,
    LARGE_BODIES,
    MOST_HISTORY,
    BodyShape,
    LargeBodies,
    _begins_with_text,
    _in_slices,
    json_object,
    read_body,
)
from rose_router.http.admission.loop_share import LoopShare
from rose_router.http.admission.memory import MemoryLimiter, MemoryReservation
from rose_router.http.dialects.common import token_ids
from rose_router.http.tokenizer.tokenization import Tokenizer
from tests.router.conftest import Stage
from tests.router.scripts import Follows, folder

pytestmark = pytest.mark.asyncio

Staging = Callable[..., AbstractAsyncContextManager[Stage]]
IDS = list(range(100_000, 180_000))
LONG = json.dumps(IDS)


def unpaced() -> LargeBodies:
    made = LargeBodies()
    made.slices = LoopShare(1.0, 60.0)
    return made


def shape_of(raw: bytes, width: int = 1 << 16, bounds: Bounds = NO_BOUNDS) -> BodyShape:
    """Of a body that comes in pieces of so many bytes."""
    shape = BodyShape(lambda: bounds)
    for place in range(0, len(raw), width):
        shape.feed(raw[place : place + width])
    return shape


async def in_slices(raw: bytes, large: LargeBodies) -> dict[str, Any] | None:
    """As ``read_body`` does; ``None`` where it decodes the body whole."""
    numbers = shape_of(raw).numbers
    return await _in_slices(raw, numbers, large) if numbers else None


@pytest.mark.parametrize(
    "body",
    [
        f'{{"input_ids": {LONG}, "stream": true, "sampling_params": {{"n": 2}}}}',
        f'{{"stream":false,"token_ids":{LONG}}}',
        f'{{"prompt":\n[ {LONG[1:]} , "x": [1]}}',
        f'{{"tokens": {LONG.replace(",", " ,")}}}',
        f'{{"a": [1], "b": [2], "input_embeds": [0.5,-1e3,{LONG[1:]}}}',
    ],
)
async def test_a_list_of_ids_is_read_in_slices(body: str) -> None:
    assert await in_slices(body.encode(), unpaced()) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        f'{{"rose": {{"input_ids": {LONG}}}}}',
        f'{{"rose": {{"input_ids": {LONG}}}, "input_ids": []}}',
        f'{{"input_ids": [], "a": {{"input_ids": {LONG}}}}}',
        f'{{"input_ids": {LONG}, "input_ids": []}}',
        json.dumps({"text": f'{{"input_ids": {LONG}}}'}),
        json.dumps({"text": f',"input_ids":{LONG}'}),
        f'{{"prompt": [{LONG}, {LONG}]}}',
        f'{{"input_ids": ["a", {LONG[1:]}}}',
        f'{{"input_ids": {LONG}',
        f'{{"input_ids": {LONG}}} x',
        f'{{"input_ids": {LONG[:-1]},]}}',
        f'{{"input_ids": {LONG.replace(", 150000,", ",, ")}}}',
        '{"input_ids": [1, 2]}',
        f'{{", ": [], "text": ["p,", ":[{LONG[1:]}"]}}',
        f'{{"text": "a\\\\\\":{LONG}"}}',
    ],
)
async def test_what_is_unusual_is_read_whole_and_never_as_something_else(body: str) -> None:
    assert await in_slices(body.encode(), unpaced()) is None


async def test_other_work_goes_on_between_slices() -> None:
    done = 0

    async def work() -> None:
        nonlocal done
        while True:
            done += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    raw = msgspec.json.encode({"input_ids": IDS * 4})
    assert await in_slices(raw, unpaced()) == json_object(raw)
    working.cancel()
    assert done >= len(raw) // (1 << 16)


async def test_askedthat_come_all_the_time_have_a_share_of_the_loop() -> None:
    """Eight of 2 MiB at once: what is beyond the burst comes no faster than the share allows."""
    share, paid = LoopShare(1 / 8, 0.01), list[float]()
    raw = msgspec.json.encode({"input_ids": IDS * 4})

    class Counted(LoopShare):
        async def pay(self, seconds: float, limit: asyncio.Timeout | None = None) -> None:
            paid.append(seconds)
            await share.pay(seconds, limit)

    large = LargeBodies()
    large.slices = Counted(1.0, 1.0)
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(in_slices(raw, large) for _ in range(8)))
    took = asyncio.get_running_loop().time() - began
    assert took >= (sum(paid) - 0.01) * 8 * 0.99
    assert took >= 2 * sum(paid)


@pytest.mark.parametrize("width", [1 << 16, 1000, 7])
async def test_a_prompt_beyond_the_context_is_refused_when_that_has_come(
    width: int,
) -> None:
    raw, bounds = json.dumps({"input_ids": IDS}).encode(), Bounds(context=70_000)
    refused = r"context length is 70000 tokens. However, your prompt has at least 7\d{4} tokens"
    enough = raw[: 8 * 70_000 + (1 << 16)]
    with pytest.raises(PromptTooLong, match=refused):
        shape_of(enough, width, bounds)
    shape_of(raw[: 8 * 69_990], width, bounds)


async def test_what_is_no_prompt_may_be_longer_than_the_context() -> None:
    raw = json.dumps({"tokens": IDS}).encode()
    assert shape_of(raw, bounds=Bounds(context=4096)).numbers is not None


@pytest.mark.parametrize(
    "raw",
    [
        *(b'{"input_ids":[1],"%b":[%b{}]}' % (n, b"{}," * 300_000) for n in (b"x", b"tools")),
        b'{"input_ids":[1],"messages":[%b{}]}' % (b"{}," * 300_000),
        b'{"input_ids":%b,"x":[%b{}]}' % (LONG.encode(), b"{}," * 300_000),
        b'{"input_ids":[1],"x":{%b"":1}}' % b",".join(b'"%d":1,' % n for n in range(300_000)),
    ],
)
async def test_more_objects_than_any_request_needs_are_refused_before_they_are_made(
    stage: Staging, raw: bytes
) -> None:
    async with (
        stage() as s,
        s.http.post(s.url + "/generate", data=io.BytesIO(raw)) as reply,
    ):
        assert reply.status == 413
        assert "more than 200,000 lists, objects and fields" in (await reply.json())["message"]


async def test_brackets_in_texts_are_no_objects() -> None:
    code = json.dumps([{"content": 'x = {"a": [1]}; ' * 150_000}, "\\", '"{'] + [[]] * 1000)
    assert code.count("{") + code.count("[") > 200_000
    shape_of(code.encode())
    with pytest.raises(TooLarge):
        shape_of(code.encode() + b"[" * 200_000)


VALUES = st.recursive(
    st.integers() | st.text(st.sampled_from('\\"{[:a'), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('\\"{:a'), max_size=5), inner, max_size=4)
    ),
)


def _made_of(value: object) -> int:
    """Lists, objects and fields."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_made_of, value.values()))
    return 1 + sum(map(_made_of, value)) if isinstance(value, list) else 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES, width=st.integers(1, 9))
async def test_objects_are_counted_across_slices(
    value: object, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, made = json.dumps(value).encode(), _made_of(value)
    monkeypatch.setattr(bodies, "_MOST_OBJECTS", made)
    shape_of(raw, width)
    monkeypatch.setattr(bodies, "_MOST_OBJECTS", made - 1)
    with pytest.raises(TooLarge):
        shape_of(raw, width)


NAMES = st.text(st.sampled_from('\\",:[ai'), max_size=4) | st.just("input_ids")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.dictionaries(NAMES, VALUES | st.lists(st.integers(), min_size=9), max_size=4),
    width=st.integers(1, 30),
)
async def test_long_numbers_are_found_where_they_are(
    value: dict[str, object], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "LONG_BODY", 2 * width)
    raw = json.dumps(value).encode()
    found = shape_of(raw, width).numbers
    if found is not None:
        assert json.loads(b"[%b]" % raw[found.begin : found.end]) == value[found.name]
    long = [
        name
        for name, one in value.items()
        if name.isalpha() or name == "input_ids"
        if isinstance(one, list) and all(isinstance(number, int) for number in one)
        if len(json.dumps(one)) - 2 >= 2 * width
    ]
    assert long[:1] == ([found.name] if found else [])


@pytest.mark.parametrize("text", [b"{" * (1 << 20), b'\\"{' * (1 << 18), b"\\\\" * (1 << 19)])
async def test_a_long_text_is_looked_at_in_slices(stage: Staging, text: bytes) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        paid, pay = list[float](), LoopShare.pay

        async def noted(share: LoopShare, seconds: float, *rest: Any) -> None:  # noqa: ANN401  # its own
            paid.append(seconds)
            await pay(share, seconds, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LoopShare, "pay", noted)
            raw = b'{"text":"%b","sampling_params":{"max_new_tokens":1}}' % text
            async with s.http.post(s.url + "/generate", data=io.BytesIO(raw)) as reply:
                assert reply.status == 200, await reply.text()
        assert len(paid) >= len(raw) // (1 << 16)


async def test_what_is_sent_after_the_answer_has_its_share_of_the_loop(
    stage: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten megabytes that are refused at their beginning, twice over one connection."""
    raw = json.dumps({"text": "word " * 2_000_000}).encode()
    paid, pay = list[float](), LoopShare.pay

    async def noted(share: LoopShare, seconds: float, *rest: Any) -> None:  # noqa: ANN401  # its own
        paid.append(seconds)
        await pay(share, seconds, *rest)

    async with stage(tokenizer=folder()) as s:
        monkeypatch.setattr(LoopShare, "pay", noted)
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        for _ in range(2):
            paid.clear()
            writer.write(head.encode() + raw)
            assert (await reader.readline()).split()[1] == b"413"
            answer = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(answer.lower().split(b"content-length:")[1].split()[0]))
            await writer.drain()
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
    assert sum(paid) >= (len(raw) - (1 << 20)) * bodies._RECEIVED_SECONDS


async def _refused_at_its_head(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A caller of whose body not a byte has come when he has his answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.split()[1] == b"413"
    await reader.readexactly(int(answer.lower().split(b"content-length:")[1].split()[0]))
    return reader, writer


async def test_few_may_go_on_sending_after_their_answer(
    stage: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_MOST_PASSING", 1)
    monkeypatch.setattr(bodies, "_PASSING_SECONDS", 60.0)
    async with stage(tokenizer=folder()) as s:
        first, one = await _refused_at_its_head(s.router.http_port)
        second, other = await _refused_at_its_head(s.router.http_port)
        assert await second.read() == b""
        assert not first.at_eof()
        one.close()
        other.close()


async def test_who_goes_on_sending_after_his_answer_is_closed_in_the_end(
    stage: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_PASSING_SECONDS", 0.1)
    async with stage(tokenizer=folder()) as s:
        reader, writer = await _refused_at_its_head(s.router.http_port)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_askedthat_hold_the_loop_are_decoded_one_after_the_other() -> None:
    """Each waits until the one before is paid for, however many come at once."""
    share, began, clock = LoopShare(1 / 100, 0.0), list[float](), asyncio.get_running_loop().time

    def work() -> None:
        began.append(clock())
        time.sleep(0.001)

    await asyncio.gather(*(share.hold(work) for _ in range(4)))
    assert all(later - before >= 0.1 for before, later in itertools.pairwise(began))


async def test_who_gave_up_waiting_keeps_nobody_waiting() -> None:
    share = LoopShare(1 / 100, 0.0)
    await share.hold(partial(time.sleep, 0.001))
    gone = [asyncio.create_task(share.hold(lambda: "gone")) for _ in range(1000)]
    last = asyncio.create_task(share.hold(lambda: "done"))
    await asyncio.sleep(0)
    for one in gone:
        one.cancel()
    async with asyncio.timeout(30):
        assert await last == "done"


async def test_a_sender_that_the_router_holds_back_is_not_slow() -> None:
    """A mebibyte waits longer for its share of the loop than a caller may take to send it."""
    large = LargeBodies()
    large.slices = LoopShare(1 / 400, 0.0)

    async def read(request: web.Request) -> web.Response:
        began = asyncio.get_running_loop().time()
        body = await read_body(request)
        assert asyncio.get_running_loop().time() - began > request.app[BODY_SECONDS]
        return web.Response(text=str(len(body["text"])))

    app = web.Application(client_max_size=1 << 24)
    app[LARGE_BODIES], app[BODY_SECONDS] = large, 0.5
    app.router.add_post("/", read)
    body = io.BytesIO(b'{"text":"%b"}' % (b"y" * (1 << 20)))
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession() as http,
        http.post(server.make_url("/"), data=body) as reply,
    ):
        assert (reply.status, await reply.text()) == (200, str(1 << 20))


@pytest.mark.parametrize(
    ("body", "status"), [({"prompt": "hello"}, 200), ({"prompt": [[]] * 300_000}, 413)]
)
async def test_a_compressed_body_is_bounded_by_what_it_becomes(
    stage: Staging, body: dict[str, Any], status: int
) -> None:
    raw = gzip.compress(json.dumps(body).encode() + b" " * bodies.LONG_BODY)
    assert len(raw) < bodies.LONG_BODY
    packed = {"Content-Encoding": "gzip"}
    async with (
        stage(tokenizer=folder()) as s,
        s.http.post(s.url + "/tokenize", data=raw, headers=packed) as reply,
    ):
        assert reply.status == status, await reply.text()


async def test_a_body_that_is_not_compressed_as_it_says_is_refused_with_a_reason(
    stage: Staging,
) -> None:
    async with stage(tokenizer=folder()) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
        writer.write(f"{head}Content-Length: 20\r\n\r\n".encode() + b"x" * 20)
        answer = await reader.read()
        assert answer.split()[1] == b"400"
        assert b"the body is not what its headers say" in answer
        writer.close()


async def test_a_compressed_body_has_the_memory_of_the_longest(
    stage: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, room_for = list[int](), MemoryLimiter.room_for

    def noted(memory: MemoryLimiter, body_bytes: int) -> MemoryReservation:
        asked.append(body_bytes)
        return room_for(memory, body_bytes)

    monkeypatch.setattr(MemoryLimiter, "room_for", noted)
    raw = gzip.compress(b'{"prompt":"hello"}')
    async with stage(tokenizer=folder()) as s:
        for headers in ({"Content-Encoding": "gzip"}, {}):
            async with s.http.post(s.url + "/tokenize", data=raw, headers=headers) as reply:
                assert reply.status == (200 if headers else 400), await reply.text()
        assert asked == [s.router.service.settings.max_body_bytes, len(raw)]


async def test_many_ids_become_text_one_request_after_the_other(
    stage: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, hold = list[Any](), LoopShare.hold

    async def noted(share: LoopShare, work: Callable[[], Any]) -> Any:  # noqa: ANN401  # its own
        held.append(await hold(share, work))
        return held[-1]

    monkeypatch.setattr(LoopShare, "hold", noted)
    few, many = [5] * 400, [5] * 40_000
    async with stage(tokenizer=folder()) as s:
        for tokens in (few, many):
            async with s.post("/detokenize", {"tokens": tokens}) as reply:
                text = Tokenizer(folder()).decode(tokens, skip_special=False)
                assert await reply.json() == {"prompt": text}
    assert held == [text]


async def test_more_ids_than_the_context_has_become_no_text(stage: Staging) -> None:
    async with stage(tokenizer=folder(), context_tokens=400) as s:
        async with s.post("/detokenize", {"tokens": [5] * 400}) as reply:
            assert reply.status == 200
        async with s.post("/detokenize", {"tokens": [5] * 401}) as reply:
            assert reply.status == 400
            assert "tokens: 401 ids, and the context has 400" in (await reply.json())["message"]


async def test_a_body_that_held_the_loop_keeps_the_next_one_waiting() -> None:
    large = LargeBodies()
    assert large.holds.charge(0.05, now=10.0) == 0
    assert large.holds.charge(0.01, now=10.0) == pytest.approx(1.0)


async def test_a_legs_long_prompt_is_written_as_a_short_one_is() -> None:
    for body in ({"input_ids": IDS, "rid": "r", "stream": True}, {"input_ids": tuple(IDS)}):
        written = b"".join(await _encoded(body))
        assert json.loads(written) == json.loads(msgspec.json.encode(body))
    assert await _encoded({"rid": "r"}) == (b'{"rid":"r"}',)


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_with_a_long_prompts_ids_is_whole(stage: Staging, n: int) -> None:
    """They are written in slices, between which others have the loop."""
    text = "word " * 10_000
    asked = (
        ("/v1/completions", {"prompt": IDS, "max_tokens": 2, "n": n}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "n": n},
        ),
    )
    async with stage(tokenizer=folder()) as s:
        await s.engine(vocabulary=1 << 20)
        for path, body in asked:
            async with s.post(path, body) as reply:
                answer = await reply.json()
            assert reply.status == 200, answer
            prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
            assert len(prompts) == n
            assert all(len(ids) > 1 << 15 and ids == prompts[0] for ids in prompts)
            assert prompts[0] == IDS or path != "/v1/completions"
            assert answer["usage"]["prompt_tokens"] == len(prompts[0])


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_repeats_a_long_prompts_ids_in_pieces(stage: Staging, n: int) -> None:
    """No write of its first event, nor any other, is longer than a slice of ids."""
    async with stage() as s:
        await s.engine(vocabulary=1 << 20)
        body = {"prompt": IDS, "max_tokens": 2, "n": n, "stream": True}
        raw, sizes = await _read_in_chunks(s, "/v1/completions", body)
    lines = [one[len(b"data: ") :] for one in raw.split(b"\n\n") if one.startswith(b"data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    prompts = [one["prompt_token_ids"] for one in choices if "prompt_token_ids" in one]
    assert prompts == [IDS] * n
    slice_bytes = MOST_IDS * len("123456,")
    assert max(sizes) <= slice_bytes
    assert len(sizes) >= n * len(LONG.replace(" ", "")) // slice_bytes


@pytest.mark.parametrize("count", [10, 5_000, 40_000])
async def test_a_prompts_ids_are_told_once_however_many_they_are(
    stage: Staging, count: int
) -> None:
    ids = IDS[:count]
    async with stage() as s:
        await s.engine(vocabulary=1 << 20, token_seconds=0.001)
        body = {"prompt": ids, "max_tokens": 5, "stream": True, "logprobs": 1}
        raw, _ = await _read_in_chunks(s, "/v1/completions", body)
    assert raw.endswith(b"data: [DONE]\n\n")
    events = [json.loads(one[len("data: ") :]) for one in raw.decode().split("\n\n")[:-2]]
    told = [choice for event in events for choice in event["choices"]]
    assert [one.get("prompt_token_ids") for one in told] == [ids] + [None] * (len(told) - 1)
    assert sum(len(one["token_ids"]) for one in told) == 5


async def _read_in_chunks(s: Stage, path: str, body: dict[str, Any]) -> tuple[bytes, list[int]]:
    """A stream, and the sizes of HTTP's chunks in which it came."""
    raw = msgspec.json.encode(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    data, sizes = b"", list[int]()
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 OK" in answer, answer
        while size := int(await reader.readuntil(b"\r\n"), 16):
            data += await reader.readexactly(size)
            sizes.append(size)
            await reader.readexactly(2)
    writer.close()
    return data, sizes


async def test_a_long_prompt_reaches_its_engine_whole(stage: Staging) -> None:
    async with stage() as s:
        fake = await s.engine(vocabulary=1 << 20)
        async with s.post("/generate", {"input_ids": IDS}) as reply:
            assert reply.status == 200, await reply.text()
        assert fake.scheduler.counters.prompt_tokens == len(IDS)


async def test_what_a_long_prompt_holds_is_given_back_once_its_numbers_are_gone(
    stage: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, release = list[int](), LargeBodies.release

    def noted(large: LargeBodies, numbers: list[Any], then: Callable[[], None]) -> None:
        def gone() -> None:
            left.append(len(numbers))
            then()

        assert numbers == IDS
        release(large, numbers, gone)

    monkeypatch.setattr(LargeBodies, "release", noted)
    async with stage() as s:
        await s.engine(vocabulary=1 << 20)
        for path in ("/generate", "/detokenize"):  # the second one is refused
            async with s.post(path, {"input_ids": IDS}) as reply:
                await reply.read()
        await until(lambda: len(left) == 2)
        async with s.http.get(s.url + "/metrics") as reply:
            taken = [
                one
                for one in (await reply.text()).splitlines()
                if one.startswith("rose_router_request_bytes")
            ]
    assert left == [0, 0]
    assert taken[-1].endswith(" 0.0")


async def test_an_id_of_a_long_prompt_that_is_beyond_the_vocabulary_is_found(
    stage: Staging,
) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(vocabulary=IDS[-1] + 1)
        for path, field in (("/generate", "input_ids"), ("/v1/completions", "prompt")):
            for ids, status in ((IDS, 200), ([IDS[-1] + 1, *IDS], 422)):
                async with s.post(path, {field: ids}) as reply:
                    assert reply.status == status, await reply.text()
        prompts = {"prompt": [[7, 8], [IDS[-1] + 1, *IDS]]}
        async with s.post("/v1/completions", prompts) as reply:
            assert reply.status == 422, await reply.text()


async def test_each_of_many_ids_is_looked_at() -> None:
    assert token_ids(IDS, "x") == tuple(IDS)
    for wrong in (-1, 0.5, "1", 2**31, None):
        with pytest.raises(InvalidTurn, match="every token id"):
            token_ids([*IDS, wrong], "x")


SHAPES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "/v1/chat/completions": lambda e: e["code"] == 413 and e["error"]["param"] is None,
    "/v1/responses": lambda e: e["error"]["type"] == "invalid_request_error",
    "/v1/messages": lambda e: e["type"] == "error" and e["error"]["type"] == "request_too_large",
    "/v1/messages/count_tokens": lambda e: e["error"]["type"] == "request_too_large",
}


@pytest.mark.parametrize("path", SHAPES)
async def test_a_history_of_ten_megabytes_is_refused_before_it_is_read(
    stage: Staging, path: str
) -> None:
    async with stage(tokenizer=folder()) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
        writer.write(head.encode())  # and not a byte of the body
        assert (await reader.readline()).split()[1] == b"413"
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        assert SHAPES[path](json.loads(await reader.readexactly(length)))
        writer.close()


TEXTS: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"text": "word " * 2_000_000},
        {"sampling_params": {"stop": ["a", "text"]}, "text": ["word " * 2_000_000]},
    ],
    "/v1/completions": [{"model": "m", "n": 2, "prompt": ["word " * 1_000_000] * 2}],
    "/tokenize": [
        {"prompt": "word " * 2_000_000},
        {"messages": [{"role": "user", "content": "word " * 2_000_000}]},
    ],
}


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, bodies in TEXTS.items() for body in bodies]
)
async def test_a_text_of_ten_megabytes_is_read_no_further_than_its_beginning(
    stage: Staging, path: str, body: dict[str, Any]
) -> None:
    raw = json.dumps(body).encode()
    async with stage(tokenizer=folder()) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw[: 1 << 16])  # and no more
        assert (await reader.readline()).split()[1] == b"413"
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        reply = json.loads(await reader.readexactly(length))
        assert reply["error"]["type"] == "TooLarge"
        assert "8388608 are read at most" in reply["message"]
        writer.close()


@pytest.mark.parametrize(
    "beginning",
    [
        b'{"input_ids": [1, 2, 3',
        b'{"input_ids": [[1, 2], [3',
        b'{"prompt": [[1, 2], [3',
        b'{"sampling_params": {"text": "a", "prompt": "b"}, "input_ids": [3',
        b'{"rid": "text", "model": "prompt", "input_ids": [3',
        b'{"rid": "\\"text\\": \\"a", "input_ids": [3',
        b'{"stop": ["text", "prompt"], "input_ids": [3',
    ],
)
async def test_ids_are_no_text_whatever_stands_before_them(beginning: bytes) -> None:
    assert not _begins_with_text(beginning)


async def test_a_text_is_looked_for_behind_no_more_marks_than_clients_send() -> None:
    fields = ",".join(f'"f{number}":1' for number in range(bodies._MOST_MARKS))
    assert _begins_with_text(b'{"f":1,"text":"a"')
    assert not _begins_with_text(f'{{{fields},"text":"a"'.encode())


async def test_a_long_text_behind_other_fields_is_refused_before_it_is_tokenized(
    stage: Staging,
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps({"text": "word " * 2_000_000}).encode()

    late = {"sampling_params": {"stop": "x" * (1 << 17)}, "text": "word " * 2_000_000}
    async with stage(tokenizer=folder()) as s:
        for data in (pieces(), io.BytesIO(json.dumps(late).encode())):
            async with s.http.post(s.url + "/generate", data=data) as reply:
                assert reply.status == 413
                assert "read at most" in (await reply.json())["message"]


async def test_a_long_body_of_ids_is_taken_above_the_limit_of_texts(stage: Staging) -> None:
    raw = b" " * MOST_HISTORY + json.dumps({"input_ids": [1, 2], "text": None}).encode()
    async with stage() as s:
        await s.engine()
        async with s.http.post(s.url + "/generate", data=io.BytesIO(raw)) as reply:
            assert reply.status == 200, await reply.text()


@pytest.mark.parametrize("path", SHAPES)
async def test_one_whose_length_nobody_said_is_read_no_further_than_that(
    stage: Staging, path: str
) -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'{"messages": [{"role": "user", "content": "'
        for _ in range(12):
            sent += 1
            yield b"x" * (1 << 20)
        yield b'"}]}'

    async with stage(tokenizer=folder()) as s, s.http.post(s.url + path, data=pieces()) as reply:
        assert reply.status == 413
        assert SHAPES[path](await reply.json())


async def test_a_long_chat_makes_the_prompt_that_a_short_one_would(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        talk = [{"role": "user", "content": "word " * 40_000}]
        async with s.post("/tokenize", {"messages": talk}) as reply:
            assert (await reply.json())["tokens"] == Tokenizer(folder()).chat(talk, [], {})
        found = {"messages": talk, "max_tokens": 200, "rose": {"session": "s"}}
        async with s.post("/v1/chat/completions", found) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        talk += [answer["choices"][0]["message"], {"role": "user", "content": "on"}]
        async with s.post("/v1/chat/completions", found) as reply:
            again = await reply.json()
        history = again["choices"][0]["rose"]["history"]
        assert history["known_messages"] == 2
        assert history["exact_tokens"] > 200_000
        assert history["rendered_tokens"] < 100
