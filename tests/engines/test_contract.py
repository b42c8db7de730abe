"""One contract, three engines: the fake and vLLM behave towards their callers as stock SGLang does.

What SGLang says of itself (loads, counters) is asked of the fake and of SGLang alone.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_core.telemetry.dialects import samples
from rose_dev.engine_testing import PermitHolder, RealEngine, State, write_bundle
from rose_dev.shell import ending_with_us
from rose_engines.errors import EngineRefused, EngineUnavailable
from rose_engines.process.client import Generation, TurnClient
from rose_engines.tensors.safetensors import read_file
from rose_engines.weights.control import ControlClient

GREEDY = {"temperature": 0, "ignore_eos": True}
MODEL = "tiny-peaked"


@dataclass
class Engine:
    url: str
    control: Path
    holder: PermitHolder


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from rose_dev.models import make_named  # noqa: PLC0415  # makes the model when it runs

    folder = tmp_path_factory.mktemp("fake")
    holder = PermitHolder(folder / "permit")
    holder.open()
    argv = [sys.executable, "-m", "rose_engines.fake", "--model", str(make_named(MODEL))]
    argv += ["--permit", str(folder / "permit"), "--plugin-socket", str(folder / "plugin.sock")]
    argv += ["--max-running", "4", "--stager", "process"]
    process = subprocess.Popen(
        ending_with_us(argv), stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip().removeprefix("url=")
        yield Engine(url, folder / "plugin.sock", holder)
    finally:
        process.terminate()
        process.communicate(timeout=60)
        holder.end()
    assert process.returncode == 0
    assert not (folder / "plugin.sock").exists()


FAKE_AND_SGLANG = ("fake", pytest.param("real_engine", marks=pytest.mark.engine))


def asked_for(request: pytest.FixtureRequest) -> Engine:
    found: Engine | RealEngine = request.getfixturevalue(request.param)
    return Engine(found.url, found.control, found.holder)


@pytest.fixture(params=[*FAKE_AND_SGLANG, pytest.param("vllm_engine", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest) -> Engine:
    return asked_for(request)


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[TurnClient]:
    async with TurnClient(engine.url) as client:
        yield client


@pytest.fixture(params=FAKE_AND_SGLANG)
async def turn_client(request: pytest.FixtureRequest) -> AsyncIterator[TurnClient]:
    async with TurnClient(asked_for(request).url) as client:
        yield client


async def test_a_stream_ends_with_what_a_plain_reply_says(client: TurnClient) -> None:
    sampling = {"max_new_tokens": 12, **GREEDY}
    events = [event async for event in client.stream([104, 101], sampling)]
    assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
    last = events[-1]
    for before, after in pairwise(events):
        assert after.output_ids[: len(before.output_ids)] == before.output_ids
    assert len(last.output_ids) == len(last.logprobs) == 12
    assert all(logprob <= 0 for logprob in last.logprobs)
    assert last.finish_reason is not None
    assert last.finish_reason["type"] == "length"
    for event in events:  # a stream that is cut must not lose them
        assert [(span.start, span.end) for span in event.spans] == [(0, len(event.output_ids))]
    assert (await client.generate([104, 101], sampling)).output_ids == last.output_ids


async def test_continuing_from_a_cut_gives_the_same_tokens(client: TurnClient) -> None:
    """What a splice rests on: the rest is a function of the tokens so far."""
    whole = (await client.generate([104], {"max_new_tokens": 20, **GREEDY})).output_ids
    head = whole[:7]
    rest = await client.generate([104, *head], {"max_new_tokens": 13, **GREEDY})
    assert head + rest.output_ids == whole


async def test_a_stop_token_ends_the_turn_and_is_part_of_it(client: TurnClient) -> None:
    ids = (await client.generate([104], {"max_new_tokens": 6, **GREEDY})).output_ids
    stop = ids[3]
    reply = await client.generate(
        [104], {"max_new_tokens": 6, "temperature": 0, "stop_token_ids": [stop]}
    )
    assert reply.finish_reason == {"type": "stop", "matched": stop}
    assert reply.output_ids == ids[: ids.index(stop) + 1]


async def test_abort_mid_stream_is_a_normal_end(client: TurnClient) -> None:
    events: list[Generation] = []
    async for event in client.stream([104], {"max_new_tokens": 3000, **GREEDY}, rid="cut-0001."):
        if not events:
            await client.abort("cut-0001.")
        events.append(event)
    assert events[-1].finish_reason is not None
    assert events[-1].finish_reason["type"] == "abort"
    assert 0 < len(events[-1].output_ids) < 3000


async def test_abort_while_stopped_computes_no_more(engine: Engine, client: TurnClient) -> None:
    events: list[Generation] = []
    seen = asyncio.Event()

    async def read() -> None:
        sampling = {"max_new_tokens": 3000, **GREEDY}
        async for event in client.stream([105], sampling, rid="stopped-1.", logprobs=False):
            events.append(event)
            seen.set()

    reader = asyncio.create_task(read())
    await asyncio.wait_for(seen.wait(), 60)
    engine.holder.close()
    try:
        before = 0
        while before < len(events[-1].output_ids):  # until whatever was under way has come out
            before = len(events[-1].output_ids)
            await asyncio.sleep(1.0)
        await client.abort("stopped-1.")
        await asyncio.sleep(0.2)
    finally:
        engine.holder.open()
    await asyncio.wait_for(reader, 60)
    assert events[-1].finish_reason is not None
    assert events[-1].finish_reason["type"] == "abort"
    assert len(events[-1].output_ids) <= before + 1


async def test_more_requests_than_slots_all_finish(client: TurnClient) -> None:
    replies = await asyncio.gather(
        *(client.generate([100 + n], {"max_new_tokens": 10, **GREEDY}) for n in range(9))
    )
    assert all(len(reply.output_ids) == 10 for reply in replies)


@pytest.mark.parametrize(("prompt", "most"), [([], 1), ([104], -1)])
async def test_bad_requests_are_refused(client: TurnClient, prompt: list[int], most: int) -> None:
    with pytest.raises(EngineRefused):
        await client.generate(prompt, {"max_new_tokens": most})
    assert await client.ready()


async def test_an_engine_says_its_load_and_counts_its_requests(turn_client: TurnClient) -> None:
    assert await turn_client.ready()
    await turn_client.generate([104], {"max_new_tokens": 3, **GREEDY})
    loads = await turn_client.loads()
    for name in ("num_running_reqs", "num_waiting_reqs", "max_total_num_tokens", "token_usage"):
        assert loads[name] >= 0
    metrics = await turn_client.metrics()
    for name in ("num_requests_total", "generation_tokens_total", "prompt_tokens_total"):
        assert f"sglang:{name}{{" in metrics
    assert (await turn_client.model_info())["is_generation"] is True


def _requests(page: str) -> tuple[int, int]:
    """Requests that have arrived, and that have ended."""
    found = {
        name: sum(value for one, labels, value in samples(page) if one == name and wanted(labels))
        for name, wanted in (
            ("sglang:http_requests_total", lambda labels: labels.get("endpoint") == "/generate"),
            ("sglang:num_requests_total", lambda _: True),
        )
    }
    return int(found["sglang:http_requests_total"]), int(found["sglang:num_requests_total"])


async def test_one_counter_moves_at_arrival_and_the_other_at_the_end(
    turn_client: TurnClient,
) -> None:
    """What compares an engine's count with the wire must know which is which."""
    await turn_client.generate([104], {"max_new_tokens": 1, **GREEDY})
    arrived, ended = _requests(await turn_client.metrics())
    stream = turn_client.stream([104], {"max_new_tokens": 200, **GREEDY})
    await anext(stream)
    assert _requests(await turn_client.metrics()) == (arrived + 1, ended)
    async for _ in stream:
        pass
    assert _requests(await turn_client.metrics()) == (arrived + 1, ended + 1)


async def test_a_commit_over_the_socket_changes_weights_digest_and_spans(
    engine: Engine, tmp_path: Path
) -> None:
    async with await ControlClient.connect(engine.control) as control:
        await control.export(tmp_path / "old")
        old: State = dict(read_file(tmp_path / "old"))
        new = {name: StoredTensor(d, s, bits ^ 1) for name, (d, s, bits) in old.items()}
        target = WeightVersion("contract", 1, 1)
        manifest = write_bundle(tmp_path / "b", target, new, (WeightVersion("contract", 1, 0), old))
        assert (await control.stage(tmp_path / "b")).base == (await control.attest()).digest
        assert (await control.commit(str(target))).digest == manifest.digest
        status = await control.status()
        assert (status.version, status.digest) == (str(target), manifest.digest)
        async with TurnClient(engine.url) as client:
            reply = await client.generate([104], {"max_new_tokens": 4, **GREEDY})
        assert [span.version for span in reply.spans] == [str(target)]


async def test_an_engine_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="plugin"):
        await ControlClient.connect(tmp_path / "plugin.sock")
    async with TurnClient("http://127.0.0.1:1") as client:
        assert not await client.ready()
        with pytest.raises(EngineUnavailable):
            await client.generate([1], {})
