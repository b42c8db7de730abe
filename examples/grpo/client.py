"""One turn over HTTP against the lease's URL, in SGLang's ``/generate`` dialect.

The caller sees a finished turn or an error, never an empty answer: 429 and 503 are tried again
after ``Retry-After``, an unreachable router with growing pauses, a turn that was cut is asked for
again, all until the deadline and under one id, so that nothing is sampled twice. 4xx is a mistake
of ours and ends the run with the router's words.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp

from examples.grpo.errors import MalformedReply, OutOfTime, TurnRefused
from rose_wire import flags

RETRIED = frozenset({409, 429, 500, 502, 503, 504})
_LONGEST_PAUSE_SECONDS = 5.0
_HINT_SECONDS = 5.0
_REPORTS = 3


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` .. ``end`` - 1 of a turn were sampled by ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Turn:
    """A finished turn.

    Attributes:
        tokens: output token ids.
        logprobs: behaviour log-prob of each token, natural logarithm, as the engine sampled it.
        spans: which weight version sampled which tokens, in order, without gaps.
        engines: kinds of engine that made it, as the router says; empty when it does not.
        own_keys: all tokens attended to keys and values of their own version.
        seconds: from request to reply, pauses between attempts included.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    engines: tuple[str, ...] = ()
    own_keys: bool = True
    seconds: float = 0.0


@dataclass
class Counters:
    """What happened on the way, for the progress lines.

    Attributes:
        cut, cut_tokens: replies that were cut, and what they held; asked for again from the start.
        unreported: reports of what became of trajectories that never reached the router.
    """

    turns: int = 0
    tokens: int = 0
    retries: int = 0
    unreachable: int = 0
    cut: int = 0
    cut_tokens: int = 0
    unreported: int = 0


def parse_reply(body: Mapping[str, Any]) -> Turn | None:
    """Read a reply of ``/generate``.

    Returns:
        The turn, or None when it was aborted and must be asked for again.

    Raises:
        MalformedReply: tokens, log-probs or version spans are missing or do not fit together.
    """
    meta = body.get("meta_info")
    if not isinstance(meta, Mapping):
        message = f"reply without meta_info; it has {sorted(body)}"
        raise MalformedReply(message)
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        return None
    try:
        tokens = tuple(int(token) for token in body["output_ids"])
        logprobs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"])
        spans = _spans(meta, len(tokens))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        message = f"reply lacks tokens, log-probs or versions: {type(error).__name__}: {error}"
        raise MalformedReply(message) from error
    if not tokens or len(tokens) != len(logprobs):
        message = f"reply has {len(tokens)} tokens and {len(logprobs)} log-probs"
        raise MalformedReply(message)
    rose = meta.get("rose") or {}
    engines = tuple(sorted({str(leg["kind"]) for leg in rose.get("engines", ())}))
    return Turn(tokens, logprobs, spans, engines, rose.get("kv", "own") == "own")


def _spans(meta: Mapping[str, Any], length: int) -> tuple[Span, ...]:
    """The version spans, or the one version for all tokens; checks that they cover the turn."""
    raw = meta.get("weight_versions")
    if not raw:
        return (Span(str(meta["weight_version"]), 0, length),)
    spans = tuple(Span(str(s["version"]), int(s["start"]), int(s["end"])) for s in raw)
    starts = [span.start for span in spans]
    ends = [span.end for span in spans]
    if starts[0] != 0 or ends[-1] != length or starts[1:] != ends[:-1]:
        message = f"version spans {raw} do not cover {length} tokens"
        raise ValueError(message)
    return spans


def pause_before_retry(attempt: int, retry_after: str | None) -> float:
    """Seconds to wait before attempt ``attempt`` + 1: the router's wish, else doubling."""
    try:
        wished = float(retry_after) if retry_after is not None else 0.0
    except ValueError:
        wished = 0.0
    doubling: float = min(0.1 * 2 ** min(attempt, 10), _LONGEST_PAUSE_SECONDS)
    return min(wished, _LONGEST_PAUSE_SECONDS) if wished > 0 else doubling


@dataclass
class LeaseClient:
    """Asks the lease's URL for turns.

    Args:
        url: the lease's ``status.routerURL``.
        session: the HTTP session to use.
        deadline: ``clock()`` value after which no attempt is made.
        clock: monotonic seconds.
        token_file: the caller's token for the lease, read at each call: it is renewed; None = the
            router asks for none.
    """

    url: str
    session: aiohttp.ClientSession
    deadline: float
    clock: Callable[[], float] = time.monotonic
    token_file: Path | None = None
    counters: Counters = field(default_factory=Counters)
    leaving: bool = False

    async def turn(
        self, prompt: Sequence[int], *, session_key: str, max_tokens: int, group: str = ""
    ) -> Turn:
        """Sample one turn.

        Args:
            prompt: the whole context.
            session_key: of the trajectory.
            max_tokens: it has at most.
            group: of the trajectories that answer the same task, so that the router can tell from
                those that have ended how long the others will be.

        Raises:
            TurnRefused: the router says the request is wrong.
            OutOfTime: the deadline came first.
            MalformedReply: a 200 that is no complete turn.
        """
        if self.leaving:
            message = "the run ends: no new turn begins"
            raise OutOfTime(message)
        started, attempt = self.clock(), 0
        body = _request(prompt, max_tokens)
        keys = {"X-Session-ID": session_key} | ({"X-Rose-Group": group} if group else {})
        while True:
            turn, pause = await self._attempt(body, keys, attempt)
            if turn is not None:
                self.counters.turns += 1
                self.counters.tokens += len(turn.tokens)
                return replace(turn, seconds=self.clock() - started)
            if self.clock() + pause >= self.deadline:
                message = f"no turn from {self.url} before the time limit ({attempt + 1} attempts)"
                raise OutOfTime(message)
            await asyncio.sleep(pause)
            attempt += 1

    async def finished(self, session_key: str) -> None:
        """Say that the trajectory comes back no more; a hint, so whatever comes of it is fine."""
        url = self.url.rstrip("/") + "/finish_session"
        patience = aiohttp.ClientTimeout(total=_HINT_SECONDS)
        which = {"session_id": session_key}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self.session.post(
                url, params=which, headers=self._shown(), timeout=patience
            ):
                pass

    async def report(
        self,
        trained: Mapping[str, float] | None = None,
        dropped: Mapping[str, float] | None = None,
        withdrawn: Sequence[str] = (),
        cut: Sequence[str] = (),
        correct: Sequence[str] = (),
    ) -> None:
        """Say what became of trajectories: the router's bias meter knows by nothing else.

        Args:
            trained: session keys and rewards of those trained on.
            dropped: the same of those that were too old or of unknown version.
            withdrawn: keys of those that nobody needs any more.
            cut: keys of those that were too late for their group: dropped, with no reward known.
            correct: keys of those trained on whose answers were correct.
        """
        payload = {
            "trained": list(trained or ()),
            "dropped": [*(dropped or ()), *cut],
            "withdrawn": list(withdrawn),
            "rewards": {**(trained or {}), **(dropped or {})},
            "correct": list(correct),
        }
        if not (trained or dropped or withdrawn or cut):
            return
        patience = aiohttp.ClientTimeout(total=_HINT_SECONDS)
        for attempt in range(_REPORTS):
            try:
                async with self.session.post(
                    self.url.rstrip("/") + "/trajectories",
                    json=payload,
                    headers=self._shown(),
                    timeout=patience,
                ) as reply:
                    if reply.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # counted below when no attempt came through
            await asyncio.sleep(pause_before_retry(attempt, None))
        self.counters.unreported += 1

    def _shown(self) -> dict[str, str]:
        """Who we are, as a header."""
        token = flags.token(self.token_file)
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def _attempt(
        self, body: Mapping[str, object], keys: Mapping[str, str], attempt: int
    ) -> tuple[Turn | None, float]:
        """One request: the turn, or None and how long to wait."""
        remaining = self.deadline - self.clock()
        if remaining <= 0:
            return None, 0.0
        try:
            async with self.session.post(
                self.url.rstrip("/") + "/generate",
                json=body,
                headers={**keys, **self._shown()},
                timeout=aiohttp.ClientTimeout(total=remaining),
            ) as reply:
                if reply.status in RETRIED:
                    self.counters.retries += 1
                    return None, pause_before_retry(attempt, reply.headers.get("Retry-After"))
                if reply.status >= 300:
                    message = f"{self.url}: {reply.status}: {(await reply.text())[:500]}"
                    raise TurnRefused(message)
                answer = await reply.json()
                turn, cut = parse_reply(answer), len(answer.get("output_ids") or ())
        except (aiohttp.ClientError, TimeoutError, OSError):
            self.counters.unreachable += self.clock() < self.deadline
            return None, pause_before_retry(attempt, None)
        if turn is None:
            self.counters.cut += 1
            self.counters.cut_tokens += cut
        return turn, pause_before_retry(attempt, None)


def _request(prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    # The id makes a second attempt the same turn: what was lost was the answer, not the tokens.
    # Plain softmax sampling: the engine's log-probs are then those of the policy itself.
    return {
        "rid": uuid4().hex,
        "input_ids": list(prompt),
        "sampling_params": {
            "temperature": 1.0,
            "max_new_tokens": max_tokens,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "stream": False,
    }
