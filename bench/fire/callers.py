"""Callers: in three dialects, streamed or not; some hang up, abort, or ask twice under one id."""

from __future__ import annotations

import asyncio
import random
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from bench.fire.fleet import Lease
from rose_engines.fake.model import Prefix

MANNERS = {"waits": 79, "hangs up": 7, "aborts": 6, "asks twice": 6, "asks otherwise": 2}
PATHS = {"/generate": 6, "/v1/completions": 2, "/inference/v1/generate": 2}
PROMPTS = 24
MOST_TOKENS = 40


_ENDED = re.compile(r"engines (.+?) ended while this turn ran on them")


class Suspected(Exception):
    """The router took a turn for what had ended its engines, and tried it no more.

    Args:
        message: the router's.
        failed: the turn had no token, and its answer is an error.

    Attributes:
        engines: that ended, once for each time.
    """

    def __init__(self, message: str, *, failed: bool) -> None:
        super().__init__(message)
        found = _ENDED.search(message)
        self.failed = failed
        self.engines = found[1].split(", ") if found is not None else []


def raise_if_suspected(reason: object, message: object, *, failed: bool) -> None:
    """Tell such a refusal from all others.

    Raises:
        Suspected: it is one.
    """
    if reason == "EndsEngines":
        raise Suspected(str(message), failed=failed)


def _refused(status: int, raw: bytes) -> None:
    if status == 422:
        error = msgspec.json.decode(raw)
        raise_if_suspected(error.get("type"), error.get("message"), failed=True)


@dataclass(frozen=True)
class Answer:
    """A turn as its caller got it, in whatever dialect.

    Attributes:
        spans: ``weight_versions`` of the reply.
        rose: what only the router knows of it.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: list[Mapping[str, Any]]
    finish: str
    rose: Mapping[str, Any]


def complaints(lease: Lease, prompt: Sequence[int], most: int, answer: Answer) -> list[str]:
    """What is wrong with an answer, a line each; an aborted one may be short, never wrong."""
    found = [*_whole(most, answer), *_spans(lease, answer), *_engines(lease, answer)]
    if lease.reference:
        wanted = lease.reference[tuple(prompt)][: len(answer.tokens)]
        found += [] if answer.tokens == wanted else [f"tokens {answer.tokens}, not {wanted}"]
    elif not found:
        found += _stub_tokens(prompt, answer)
    return found


def _whole(most: int, answer: Answer) -> list[str]:
    if len(answer.logprobs) != len(answer.tokens):
        return [f"{len(answer.logprobs)} log-probs for {len(answer.tokens)} tokens"]
    if answer.finish == "abort":
        return []
    if answer.finish != "length" or len(answer.tokens) != most:
        return [f"finish {answer.finish} after {len(answer.tokens)} of {most} tokens"]
    return []


def _spans(lease: Lease, answer: Answer) -> list[str]:
    position = 0
    for span in answer.spans:
        if span["start"] != position or span["end"] <= position:
            return [f"spans {answer.spans}"]
        if not span["version"].startswith(f"{lease.run}@"):
            return [f"a version of another lease: {span}"]
        position = span["end"]
    return [] if position == len(answer.tokens) else [f"spans cover {position} tokens"]


def _engines(lease: Lease, answer: Answer) -> list[str]:
    ours = {engine.name for engine in lease.engines}
    met = {leg["engine"] for leg in answer.rose["engines"]}
    return [] if met <= ours else [f"engines of another lease: {met - ours}"]


def _stub_tokens(prompt: Sequence[int], answer: Answer) -> list[str]:
    prefix = Prefix(prompt)
    for span in answer.spans:
        for index in range(span["start"], span["end"]):
            token, logprob = prefix.next_token(span["version"])
            if (token, logprob) != (answer.tokens[index], answer.logprobs[index]):
                return [f"token {index} is not what {span['version']} makes of its prefix"]
            prefix.append(token)
    return []


@dataclass
class CallerOutcome:
    """What all callers of a lease met.

    Attributes:
        begun: turns that the router must have counted, each once.
        failed: turns that were taken for what ended their engines before they had a token; a router
            cannot tell two kills from a turn that ends engines.
        ended: by manner and finish.
        wrong: complaints of the judge.
    """

    begun: int = 0
    tokens: int = 0
    moved: int = 0
    failed: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def prompt_of(number: int) -> list[int]:
    """One of a few prompts, so that real engines' answers can be known beforehand."""
    return [5 + number % PROMPTS, 17, 42, 99 - number % PROMPTS, 7]


class Callers:
    """All callers of one lease.

    Args:
        chance: seeded.
        at_once: how many ask at the same time.
    """

    def __init__(self, lease: Lease, chance: random.Random, at_once: int) -> None:
        self._lease = lease
        self._chance = chance
        self._at_once = at_once
        self._headers = {"Authorization": f"Bearer {lease.secret}"}
        self.outcome = CallerOutcome()

    async def run(self, numbers: range) -> None:
        """Ask for all of them."""
        left = iter(numbers)

        async def caller() -> None:
            for number in left:
                await self._turn(number)

        await asyncio.gather(*(caller() for _ in range(self._at_once)))

    async def _turn(self, number: int) -> None:
        manner = self._chance.choices(list(MANNERS), list(MANNERS.values()))[0]
        own = manner in {"aborts", "asks twice", "asks otherwise"}
        path = "/generate"
        if not own:
            path = self._chance.choices(list(PATHS), list(PATHS.values()))[0]
        most = self._chance.randint(1, MOST_TOKENS)
        stream = manner == "hangs up" or self._chance.random() < 0.4
        body = _body(path, prompt_of(number), most, stream=stream)
        if own:
            body["rid"] = f"mine-{number}-{uuid.UUID(int=self._chance.getrandbits(128)).hex}"
        if self._chance.random() < 0.6:
            body["session_id"] = f"s{number % 200}"
        self.outcome.begun += 1
        since = time.monotonic()
        try:
            await self._asked(manner, path, body, prompt_of(number), most)
        except Suspected as refusal:
            self._judge(refusal, since)
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            self.outcome.wrong.append(f"turn {number} ({manner}): {type(error).__name__}: {error}")

    def _judge(self, refusal: Suspected, since: float) -> None:
        """A refusal is right only where all that ended its engines were kills of this run's."""
        self.outcome.failed += refusal.failed
        if self._lease.killed(refusal.engines, since):
            self.outcome.ended["refused after two kills"] += 1
        else:
            self.outcome.wrong.append(f"nobody killed them: {refusal}")

    async def _asked(
        self, manner: str, path: str, body: dict[str, Any], prompt: list[int], most: int
    ) -> None:
        if manner == "hangs up":
            await self._hang_up(path, body)
            self.outcome.ended["hung up"] += 1
            return
        if manner == "asks otherwise":
            await self._ask_otherwise(path, body)
            return
        asking = [asyncio.create_task(self._ask(path, body))]
        await asyncio.sleep(self._chance.uniform(0, 0.2) if len(body.get("rid", "")) else 0)
        if manner == "aborts":
            await self._post("/abort_request", {"rid": body["rid"]})
        if manner == "asks twice":
            asking.append(asyncio.create_task(self._ask(path, body)))
        answers = await asyncio.gather(*asking)
        if len({msgspec.json.encode((one.tokens, one.finish)) for one in answers}) > 1:
            self.outcome.wrong.append(f"one id, two answers: {body['rid']}")
        for answer in answers:
            if answer.finish == "abort" and manner != "aborts":
                self.outcome.wrong.append(f"aborted, and nobody asked for it: {answer.rose}")
            self.outcome.wrong += complaints(self._lease, prompt, most, answer)
        self.outcome.tokens += len(answers[0].tokens)
        self.outcome.moved += bool(answers[0].rose["moves"])
        self.outcome.ended["aborted" if answers[0].finish == "abort" else "whole"] += 1

    async def _hang_up(self, path: str, body: Mapping[str, Any]) -> None:
        request = self._lease.http.post(self._lease.url + path, json=body, headers=self._headers)
        async with request as reply:
            _refused(reply.status, await reply.content.readany())
            reply.close()

    async def _ask_otherwise(self, path: str, body: Mapping[str, Any]) -> None:
        """The same id with another body: refused while the first is live, else another turn."""
        bodies, since = ({**body, "input_ids": [1, 2, 3]}, body), time.monotonic()
        asking = (self._post(path, one) for one in bodies)
        statuses, refusals = list[int](), list[Suspected]()
        for one in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(one, Suspected):
                refusals.append(one)
            elif isinstance(one, BaseException):
                raise one
            else:
                statuses.append(one)
        self.outcome.begun += len(refusals) + statuses.count(200) == 2
        for refusal in refusals:
            self._judge(refusal, since)
        if sorted(statuses) not in ([200, 200], [200, 400]) and not refusals:
            self.outcome.wrong.append(f"two bodies under one id: HTTP {statuses}")
        self.outcome.ended["with an id of another"] += 1

    async def _post(self, path: str, body: Mapping[str, Any]) -> int:
        request = self._lease.http.post(self._lease.url + path, json=body, headers=self._headers)
        async with request as reply:
            _refused(reply.status, await reply.read())
            return reply.status

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        request = self._lease.http.post(self._lease.url + path, json=body, headers=self._headers)
        async with request as reply:
            raw = await reply.read()
            _refused(reply.status, raw)
            if reply.status != 200:
                message = f"HTTP {reply.status}: {raw[:300]!r}"
                raise ValueError(message)
        return _read(path, raw, stream=bool(body.get("stream")))


def _body(path: str, prompt: list[int], most: int, *, stream: bool) -> dict[str, Any]:
    if path == "/generate":
        sampling = {"max_new_tokens": most, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    elif path == "/v1/completions":
        body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": 0, "return_token_ids": True, "model": "policy"}
    else:
        sampling = {"max_tokens": most, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": prompt, "sampling_params": sampling, "model": "policy"}
    return {**body, "stream": stream}


def _read(path: str, raw: bytes, *, stream: bool) -> Answer:
    """The answer of a whole reply; of a stream, the sum of its events.

    Raises:
        ValueError: the stream has no end, or more than one.
    """
    if not stream:
        events = [msgspec.json.decode(raw)]
    else:
        lines = [line[6:] for line in raw.split(b"\n\n") if line.startswith(b"data: ")]
        if not lines or lines.pop() != b"[DONE]":
            message = "a stream without its end"
            raise ValueError(message)
        events = [msgspec.json.decode(line) for line in lines]
    return _sglang(events) if path == "/generate" else _pieces(events)


def _once(ends: list[object]) -> None:
    if sum(end is not None for end in ends) != 1 or ends[-1] is None:
        message = f"a turn with the ends {ends}"
        raise ValueError(message)


def _sglang(events: list[dict[str, Any]]) -> Answer:
    _once([event["meta_info"]["finish_reason"] for event in events])
    last = events[-1]
    for event in events:
        if event["output_ids"] != last["output_ids"][: len(event["output_ids"])]:
            message = "what was shown was taken back"
            raise ValueError(message)
    meta = last["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    end = meta["finish_reason"]
    raise_if_suspected(end.get("err_type"), end.get("message"), failed=False)
    finish = end["type"]
    return Answer(last["output_ids"], logprobs, meta["weight_versions"], finish, meta["rose"])


def _pieces(events: list[dict[str, Any]]) -> Answer:
    if "error" in events[-1]:
        events.pop()  # beside the last choice, too
    choices = [event["choices"][0] for event in events]
    _once([choice["finish_reason"] for choice in choices])
    tokens = [token for choice in choices for token in choice["token_ids"]]
    logprobs: list[float] = []
    for choice in choices:
        found = choice["logprobs"] or {"content": []}
        openai = found.get("token_logprobs")
        logprobs += [one["logprob"] for one in found["content"]] if openai is None else openai
    last = choices[-1]
    abort = last["rose"].get("abort", {})
    raise_if_suspected(abort.get("err_type"), abort.get("message"), failed=False)
    return Answer(tokens, logprobs, last["weight_versions"], last["finish_reason"], last["rose"])
