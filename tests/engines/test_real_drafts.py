"""A stock SGLang that drafts from what it is told: the same tokens and log-probs in fewer steps."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from rose_core.identity import WeightVersion
from rose_core.wire.sync import EngineSpec
from rose_dev.engine_testing import RealEngine, start_engine, state_of, write_bundle
from rose_dev.models import RECIPES, make_named
from rose_engines.errors import CommitRefused
from rose_engines.process.client import Generation, TurnClient
from rose_engines.weights.control import ControlClient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

MODEL = "tiny"
PROMPT = list(b"drafts are guesses")
GREEDY = {"temperature": 0, "ignore_eos": True}
ROUNDS, TOKENS = 4, 200


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    spec = EngineSpec(engine_class="test", model=MODEL, kv_tokens=8192, max_running=8, drafts=True)
    make_named(MODEL)
    with start_engine(tmp_path_factory.mktemp("drafts"), MODEL, spec) as started:
        yield started


@pytest.fixture
async def control(engine: RealEngine) -> AsyncIterator[ControlClient]:
    async with await ControlClient.connect(engine.control) as client:
        yield client


async def asked(engine: RealEngine, **body: Any) -> Any:  # noqa: ANN401  # SGLang's JSON
    sent, patience = {"return_logprob": True} | body, aiohttp.ClientTimeout(total=300)
    async with (
        aiohttp.ClientSession(timeout=patience) as client,
        client.post(f"{engine.url}/generate", json=sent) as reply,
    ):
        assert reply.status == 200, await reply.text()
        return await reply.json()


def steps(reply: Any) -> int:  # noqa: ANN401  # SGLang's JSON
    return int(reply["meta_info"]["spec_verify_ct"])


def assert_same(first: Any, second: Any) -> None:  # noqa: ANN401  # SGLang's JSON
    """The same tokens, up to the first between which 16 bits do not decide."""
    tops = first["meta_info"]["output_top_logprobs"]
    pairs = zip(first["output_ids"], second["output_ids"], tops, strict=True)
    for place, (before, after, ((best, *_), (next_best, *_))) in enumerate(pairs):
        if before != after:
            assert best - next_best < 0.05
            assert place > 16
            return


async def test_an_answer_that_was_sent_comes_in_fewer_steps(
    engine: RealEngine, control: ControlClient
) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": GREEDY | {"max_new_tokens": 96},
        "top_logprobs_num": 2,
    }
    first = await asked(engine, **body)
    assert (await control.draft([[*PROMPT, *first["output_ids"]]])).tokens == len(PROMPT) + 96
    second = await asked(engine, **body)
    assert_same(first, second)
    assert steps(second) < 0.6 * steps(first)
    with pytest.raises(CommitRefused, match="token ids from 0"):
        await control.draft([[10**6]])
    assert (await control.draft([])).tokens == 0


async def test_sampled_tokens_follow_the_models_distribution(
    engine: RealEngine, control: ControlClient
) -> None:
    """Of every token the engine says how likely the likeliest three were: they come as often.

    Sums of (came - probability) over tokens are a martingale, whatever came before; so is what is
    counted of token 0, of which fillers of a tree are made.
    """
    watched = {"top_logprobs_num": 3, "token_ids_logprob": [0]}
    params = {"temperature": 0.1, "ignore_eos": True, "max_new_tokens": TOKENS, "n": 8}
    excess, variance, seen, verified = [0.0] * 4, [0.0] * 4, 0, 0
    texts: list[list[int]] = []
    for _ in range(ROUNDS):
        replies = await asked(engine, input_ids=PROMPT, sampling_params=params, **watched)
        for reply in replies:
            meta, ids = reply["meta_info"], reply["output_ids"]
            verified += steps(reply)
            tops, zeros = meta["output_top_logprobs"], meta["output_token_ids_logprobs"]
            for token, top, zero in zip(ids, tops, zeros, strict=True):
                seen += 1
                for rank, (logprob, which, _) in enumerate([*top, *zero]):
                    chance = math.exp(logprob)
                    excess[rank] += (token == which) - chance
                    variance[rank] += chance * (1 - chance)
            texts.append([*PROMPT, *ids])
        await control.draft(texts[-20:])
    assert seen == ROUNDS * 8 * TOKENS
    assert verified < 0.95 * seen  # drafts were accepted, or nothing was tried
    scores = [sum_ / math.sqrt(of) for sum_, of in zip(excess, variance, strict=True)]
    assert all(abs(score) < 4 for score in scores), scores
    await control.draft([])


async def test_logprobs_are_those_of_teacher_forcing(
    engine: RealEngine, control: ControlClient
) -> None:
    params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 200}
    first = await asked(engine, input_ids=PROMPT, sampling_params=params)
    await control.draft([[*PROMPT, *first["output_ids"]]])
    result = await asked(engine, input_ids=PROMPT, sampling_params=params)
    ids = result["output_ids"]
    forced = await asked(
        engine,
        input_ids=PROMPT + ids,
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        logprob_start_len=len(PROMPT),
        extra_key="forced",
    )
    before = [one[0] for one in result["meta_info"]["output_token_logprobs"]]
    after = [one[0] for one in forced["meta_info"]["input_token_logprobs"]]
    assert len(before) == len(ids)
    # The last id of the vocabulary is told as another in a prompt's log-probs; the first has none.
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if b is not None]
    assert len(pairs) >= len(ids) - 1
    assert max(abs(a - b) for a, b in pairs) < 0.05


async def test_stop_strings_end_where_they_end_without_drafts(
    engine: RealEngine, control: ControlClient
) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY | {"max_new_tokens": 40}}
    whole = await asked(engine, **body)
    text = whole["text"]
    stop = next(text[at : at + 2] for at in range(8, 30) if text.find(text[at : at + 2]) == at)
    await control.draft([[*PROMPT, *whole["output_ids"]]])
    params = GREEDY | {"max_new_tokens": 40, "stop": stop}
    reply = await asked(engine, input_ids=PROMPT, sampling_params=params)
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"
    assert reply["text"] == text[: text.find(stop)]
    ids = reply["output_ids"]
    assert ids == whole["output_ids"][: len(ids)]
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(ids)


async def test_spans_and_attestation_hold_across_a_commit(
    engine: RealEngine, control: ControlClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bundle")
    before = (await control.status()).version
    version = WeightVersion("run", 1, 1)
    manifest = write_bundle(folder / "one", version, state_of(RECIPES[MODEL]))
    await control.stage(folder / "one")
    count, fenced, reply = 120, 0, Generation("", ())
    async with TurnClient(engine.url) as client:
        await client.slow_down(0.05)  # so that the commit comes before the end
        params = GREEDY | {"max_new_tokens": count}
        async for reply in client.stream(PROMPT, params):  # noqa: B007
            if not fenced:
                fenced = (await control.commit(str(version))).fenced_requests
                await client.slow_down(None)
    assert fenced == 1
    first, second = reply.spans
    assert (first.version, second.version) == (before, str(version))
    assert (first.start, first.end, second.end) == (0, second.start, count)
    assert len(reply.logprobs) == count
    assert (await control.attest()).digest == str(manifest.digest)
